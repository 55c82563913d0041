"""What is CosyVoice 3's alone in a published folder: its classes, config.json from the yaml, sizes to compare."""

from mlx_cosyh3.convert import cosyvoice_qwen2 as qwen2
from mlx_cosyh3.convert.cosyvoice_check import same, vocoder_sizes
from mlx_cosyh3.cosyvoice import flow, hift_weights, llm

NUMBER = 3
CLASSES = {"llm": "CosyVoice3LM", "flow": "CausalMaskedDiffWithDiT", "hift": "CausalHiFTGenerator"}
SANITIZE = {"llm": llm.sanitize, "flow": flow.sanitize, "hift": hift_weights.sanitize}
ESTIMATOR = "flow.decoder.estimator"
COUNTS = ("token_mel_ratio", "chunk_size", "flow.dit.static_chunk_size")  # whole numbers from 1 on
AMOUNTS = qwen2.AMOUNTS  # numbers from 0 on
ONLY = {"flow.dit.num_decoding_left_chunks": -1}


text_rows = qwen2.text_rows


def read_text(folder, yaml, given=None):
    """The text tokenizer in `folder` -> TextTokenizer. `given`: --tokenizer, which goes with other versions."""
    return qwen2.read_text(folder, given, NUMBER)


def config_of(yaml, plain, text):
    """What config.json says of the model. yaml: as it was read; plain: without upstream's names of classes."""
    codes, mix_ratio = yaml["llm"]["speech_token_size"], yaml["llm"].get("mix_ratio", (5, 15))
    lm = llm.SpeechLMConfig.v3(text.qwen2, codes, text.tokenizer.end_of_prompt_id, mix_ratio)
    decoder = plain["flow"]["decoder"]
    own = {k: v for k, v in plain["flow"].items() if k != "decoder"}
    return {
        **{k: yaml[k] for k in ("token_frame_rate", "token_mel_ratio", "chunk_size")},
        "llm": qwen2.lm_config(lm, yaml),
        "flow": own | {"dit": decoder["estimator"], "cfm": decoder["cfm_params"]["content"]},
        "special_tokens": text.tokenizer.special,
    }


def check(config):
    """What several entries say must be the same: CheckpointError."""
    qwen2.check(config)
    same(
        "chunk_size * token_mel_ratio and the estimator's static_chunk_size",
        config["chunk_size"] * config["token_mel_ratio"],
        config["flow"]["dit"].get("static_chunk_size"),
    )


def sizes(config):
    """What both config and weights tell: rows (part, tensor, axis, entry, value), and numbers of layers."""
    fl = config["flow"]
    dit, block = fl["dit"], "dit.blocks.0."
    rows, layers = qwen2.sizes(config, llm.V3_SPECIALS)
    more, vocoder = vocoder_sizes(config)
    rows += [
        ("flow", "input_embedding.weight", 0, "flow.vocab_size", fl["vocab_size"]),
        ("flow", "spk_embed_affine_layer.weight", 1, "flow.spk_embed_dim", fl.get("spk_embed_dim", 192)),
        ("flow", "pre_lookahead_layer.conv1.bias", 0, "flow.pre_lookahead_layer.channels",
         fl["pre_lookahead_layer"]["channels"]),
        ("flow", "pre_lookahead_layer.conv1.weight", 1, "flow.pre_lookahead_len + 1", fl["pre_lookahead_len"] + 1),
        ("flow", "dit.proj_in.bias", 0, f"{ESTIMATOR}.dim", dit["dim"]),
        ("flow", block + "to_q.bias", 0, f"{ESTIMATOR}.heads * dim_head", dit["heads"] * dit.get("dim_head", 64)),
        ("flow", block + "ff_in.bias", 0, f"{ESTIMATOR}.dim * ff_mult", dit["dim"] * dit.get("ff_mult", 2)),
        *more,
        ("hift", "conv_pre.weight", 1, "hift.conv_pre_look_right + 1", config["hift"]["conv_pre_look_right"] + 1),
    ]  # fmt: skip
    return rows, [*layers, ("flow", "dit.blocks", f"{ESTIMATOR}.depth", dit["depth"]), *vocoder]
