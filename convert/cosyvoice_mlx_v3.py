"""What is CosyVoice 3's alone in the layout of mlx-audio (`cosyvoice_mlx.py`)."""

from mlx_cosyh3.convert.cosyvoice_check import count
from mlx_cosyh3.convert.cosyvoice_mlx import HEAD, MEL, lm_config, qwen2_config
from mlx_cosyh3.cosyvoice import flow as flow_part
from mlx_cosyh3.cosyvoice import llm

NUMBER, VOCODER = 3, "hifigan"
FLOW_NAMES = (
    (r"time_mlp_(\d)", r"time_mlp.\1"),
    (r"conv_pos_embed\.conv(\d)\.", r"conv_pos_embed.conv\1.0."),
    (r"to_out_0", "to_out.0"),
    (r"ff\.ff_0_0", "ff.ff.0.0"),
    (r"ff\.ff_2", "ff.ff.2"),
)
flow = flow_part.sanitize


def complete(config, given, shapes, tokenizer):
    """config.json with what is not the same in all versions."""
    lm, fl, said = shapes["llm"], shapes["flow"], given["llm"]
    codes = lm["speech_embedding.weight"][0] - llm.V3_SPECIALS
    speech = llm.SpeechLMConfig.v3(
        qwen2_config(lm, said), codes, tokenizer.end_of_prompt_id, said.get("mix_ratio", (5, 15))
    )
    dim, ahead = fl["dit.proj_in.bias"][0], fl["pre_lookahead_layer.conv1.weight"]
    ratio = given["flow"]["token_mel_ratio"]
    dit = given["flow"]["dit"] | {"dim": dim, "depth": count(fl, "dit.blocks")}
    dit["dim_head"] = dit.get("dim_head", HEAD)
    dit["heads"] = fl["dit.blocks.0.to_q.bias"][0] // dit["dim_head"]
    dit["ff_mult"] = fl["dit.blocks.0.ff_in.bias"][0] // dim
    config["hift"]["conv_pre_look_right"] = shapes["hift"]["conv_pre.weight"][1] - 1
    return config | {
        "token_frame_rate": given["sample_rate"] // (MEL["hop_size"] * ratio),
        "token_mel_ratio": ratio,
        "chunk_size": dit["static_chunk_size"] // ratio,
        "llm": lm_config(speech),
        "flow": {
            "input_size": fl["input_embedding.weight"][1],
            "output_size": fl["dit.proj_out.bias"][0],
            "spk_embed_dim": fl["spk_embed_affine_layer.weight"][1],
            "vocab_size": fl["input_embedding.weight"][0],
            "token_mel_ratio": ratio,
            "pre_lookahead_len": ahead[1] - 1,
            "pre_lookahead_layer": {"channels": ahead[0], "pre_lookahead_len": ahead[1] - 1},
            "dit": dit,
            "cfm": {"inference_cfg_rate": 0.7},
        },
        "mel": MEL | {"fmax": None},
    }
