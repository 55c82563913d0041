"""What is CosyVoice 2's alone in a published folder: its classes, config.json from the yaml, sizes to compare."""

from mlx_cosyh3.convert import cosyvoice_qwen2 as qwen2
from mlx_cosyh3.convert.cosyvoice_check import encoder_sizes, same, unet_sizes, vocoder_sizes
from mlx_cosyh3.cosyvoice import flow_upsampled, hift_weights, llm

NUMBER = 2
CLASSES = {"llm": "Qwen2LM", "flow": "CausalMaskedDiffWithXvec", "hift": "HiFTGenerator"}
SANITIZE = {"llm": llm.sanitize, "flow": flow_upsampled.sanitize, "hift": hift_weights.sanitize}
COUNTS = ("token_mel_ratio", "chunk_size", "flow.decoder.static_chunk_size")  # whole numbers from 1 on
AMOUNTS = qwen2.AMOUNTS  # numbers from 0 on
ONLY = {}  # in the first folders num_decoding_left_chunks is 2, which upstream no longer heeds


text_rows = qwen2.text_rows


def read_text(folder, yaml, given=None):
    """The text tokenizer in `folder` -> TextTokenizer. `given`: --tokenizer, which goes with other versions."""
    return qwen2.read_text(folder, given, NUMBER)


def config_of(yaml, plain, text):
    """What config.json says of the model. yaml: as it was read; plain: without upstream's names of classes."""
    lm = llm.SpeechLMConfig.v2(text.qwen2, yaml["llm"]["speech_token_size"], yaml["llm"].get("mix_ratio", (5, 15)))
    fl, ratio = plain["flow"], yaml["token_mel_ratio"]
    decoder = fl["decoder"]
    # The first folders do not name the size of a chunk, but for the estimator.
    chunk = yaml.get("chunk_size", decoder["estimator"]["static_chunk_size"] // ratio)
    encoder = {"static_chunk_size": chunk} | fl["encoder"]
    return {
        "token_frame_rate": yaml["token_frame_rate"],
        "token_mel_ratio": ratio,
        "chunk_size": chunk,
        "llm": qwen2.lm_config(lm, yaml),
        "flow": fl | {"encoder": encoder, "decoder": decoder["estimator"], "cfm": decoder["cfm_params"]["content"]},
        "special_tokens": text.tokenizer.special,
    }


def check(config):
    """What several entries say must be the same: CheckpointError."""
    qwen2.check(config)
    fl, chunk = config["flow"], config["chunk_size"]
    same("chunk_size and flow.encoder.static_chunk_size", chunk, fl["encoder"]["static_chunk_size"])
    same(
        "chunk_size * token_mel_ratio and the estimator's static_chunk_size",
        chunk * config["token_mel_ratio"],
        fl["decoder"].get("static_chunk_size"),
    )
    same("flow.input_size and flow.encoder.input_size", fl["input_size"], fl["encoder"]["input_size"])


def sizes(config):
    """What both config and weights tell: rows (part, tensor, axis, entry, value), and numbers of layers."""
    fl = config["flow"]
    rows, layers = qwen2.sizes(config, llm.V2_SPECIALS)
    for more, numbers in (
        encoder_sizes("flow", "encoder.tokens.", "flow.encoder", fl["encoder"]),
        unet_sizes(fl),
        vocoder_sizes(config),
    ):
        rows, layers = rows + more, layers + numbers
    rows.append(
        ("flow", "encoder.look_ahead.conv1.weight", 1, "flow.pre_lookahead_len + 1", fl["pre_lookahead_len"] + 1)
    )
    return rows, layers
