"""What is CosyVoice 1's alone in a published folder: its classes, config.json from the yaml, sizes to compare.

Both variants are read, of 50 and of 25 speech tokens a second. Neither folder holds the ranks of its text tokenizer:
they are looked for there all the same, then in the packages that ship them.
"""

from mlx_cosyh3.convert.common import TextTokenizer
from mlx_cosyh3.convert.cosyvoice_check import counts, encoder_sizes, same, unet_sizes, vocoder_sizes
from mlx_cosyh3.cosyvoice import flow_regulated, hift_weights, transformer_lm, whisper_tokenizer
from mlx_cosyh3.errors import CheckpointError

NUMBER = 1
CLASSES = {"llm": "TransformerLM", "flow": "MaskedDiffWithXvec", "hift": "HiFTGenerator"}
SANITIZE = {"llm": transformer_lm.sanitize, "flow": flow_regulated.sanitize, "hift": hift_weights.sanitize}
COUNTS = ("llm.text_token_size",)  # whole numbers from 1 on
AMOUNTS = ()  # numbers from 0 on
ONLY = {"sample_rate": flow_regulated.SAMPLE_RATE, "mel.hop_size": flow_regulated.HOP}
RANKS = tuple(kind.file for kind in whisper_tokenizer.KINDS.values())


def read_text(folder, yaml, given=None):
    """The text tokenizer -> TextTokenizer. `given`: --tokenizer, the file of its ranks."""
    made = yaml["get_tokenizer"]
    kind, languages = whisper_tokenizer.kind_of(made["__name__"]), made.get("num_languages")
    if languages is not None and not counts([languages]):
        raise CheckpointError(f"get_tokenizer.num_languages is {languages!r}, not a whole number from 1 on")
    ranks = whisper_tokenizer.find_ranks(kind, folder, given)
    tokenizer = whisper_tokenizer.WhisperTokenizer.from_file(ranks, kind, languages)
    config = {"kind": kind, "languages": languages}
    return TextTokenizer(tokenizer, {whisper_tokenizer.KINDS[kind].file: ranks}, config=config)


def text_rows(config):
    """How many text ids the language model knows."""
    return config["llm"]["text_token_size"]


def config_of(yaml, plain, text):
    """What config.json says of the model. yaml: as it was read; plain: without upstream's names of classes."""
    fl, lm = plain["flow"], plain["llm"]
    decoder = fl["decoder"]
    return {
        "token_frame_rate": fl["input_frame_rate"],
        "text_tokenizer": text.config,
        "llm": {k: v for k, v in lm.items() if k != "sampling"},
        "flow": fl | {"decoder": decoder["estimator"], "cfm": decoder["cfm_params"]["content"]},
    }


def check(config):
    """What several entries say must be the same: CheckpointError."""
    lm, fl, rate = config["llm"], config["flow"], config["token_frame_rate"]
    same("llm.llm_input_size and llm.llm.input_size", lm["llm_input_size"], lm["llm"]["input_size"])
    same("llm.llm_output_size and llm.llm.output_size", lm["llm_output_size"], lm["llm"]["output_size"])
    same("llm.spk_embed_dim and flow.spk_embed_dim", lm["spk_embed_dim"], fl["spk_embed_dim"])
    same("flow.input_size and flow.encoder.input_size", fl["input_size"], fl["encoder"]["input_size"])
    if rate not in (25, 50):
        raise CheckpointError(f"flow.input_frame_rate is {rate}; CosyVoice 1 has 50 or 25 speech tokens a second")


def sizes(config):
    """What both config and weights tell: rows (part, tensor, axis, entry, value), and numbers of layers."""
    lm, rows, layers = config["llm"], [], []
    for more, numbers in (
        encoder_sizes("llm", "text_encoder.", "llm.text_encoder", lm["text_encoder"]),
        encoder_sizes("llm", "llm.", "llm.llm", lm["llm"]),
        unet_sizes(config["flow"]),
        encoder_sizes("flow", "encoder.", "flow.encoder", config["flow"]["encoder"]),
        vocoder_sizes(config),
    ):
        rows, layers = rows + more, layers + numbers
    codes = lm["speech_token_size"]
    rows += [
        ("llm", "text_embedding.weight", 0, "llm.text_token_size", lm["text_token_size"]),
        ("llm", "text_embedding.weight", 1, "llm.text_encoder_input_size", lm["text_encoder_input_size"]),
        ("llm", "speech_embedding.weight", 0, "llm.speech_token_size", codes),
        ("llm", "llm_decoder.weight", 0, "llm.speech_token_size + 1", codes + 1),
        ("llm", "spk_embed_affine_layer.weight", 1, "llm.spk_embed_dim", lm["spk_embed_dim"]),
    ]
    return rows, layers
