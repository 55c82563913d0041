"""What is CosyVoice 2's alone in the layout of mlx-audio (`cosyvoice_mlx.py`). Its config.json says next to nothing."""

from mlx_cosyh3.convert.cosyvoice_check import count
from mlx_cosyh3.convert.cosyvoice_mlx import HEAD, MEL, lm_config, qwen2_config
from mlx_cosyh3.cosyvoice import flow_upsampled, llm

NUMBER, VOCODER = 2, "hift"
FLOW_NAMES = (
    (r"(up_)?encoders_(\d+)\.", r"\1encoders.\2."),
    (r"embed\.linear\.", "embed.out.0."),
    (r"embed\.norm\.", "embed.out.1."),
    (r"(down|mid|up)_blocks_(\d+)\.resnet\.", r"\1_blocks.\2.0."),
    (r"(down|mid|up)_blocks_(\d+)\.transformer_(\d+)\.", r"\1_blocks.\2.1.\3."),
    (r"(down|up)_blocks_(\d+)\.(?:down|up)sample\.conv\.", r"\1_blocks.\2.2."),
    (r"block(\d?)\.conv\.conv\.", r"block\1.block.0."),
    (r"block(\d?)\.norm\.", r"block\1.block.2."),
    (r"mlp_linear", "mlp.1"),
    (r"\.attn\.query_proj", ".attn1.to_q"),
    (r"\.attn\.key_proj", ".attn1.to_k"),
    (r"\.attn\.value_proj", ".attn1.to_v"),
    (r"\.attn\.out_proj", ".attn1.to_out.0"),
    (r"ff\.layers\.0", "ff.net.0.proj"),
    (r"ff\.layers\.1", "ff.net.2"),
)
RATE, RATIO, CHUNK = 25, 2, 25  # speech tokens a second, mel frames a token, tokens a chunk of the streaming mask
flow = flow_upsampled.sanitize


def complete(config, given, shapes, tokenizer):
    """config.json with what is not the same in all versions."""
    lm, fl, said = shapes["llm"], shapes["flow"], given.get("llm", {})
    codes = lm["speech_embedding.weight"][0] - llm.V2_SPECIALS
    speech = llm.SpeechLMConfig.v2(qwen2_config(lm, said), codes, said.get("mix_ratio", (5, 15)))
    layer, level = "encoder.tokens.layers.0.", "unet.down.0."
    width, inputs = fl["encoder.tokens.embed.linear.weight"]
    encoder = {
        "input_size": inputs,
        "output_size": width,
        "attention_heads": fl[layer + "attention.bias_u"][0],
        "linear_units": fl[layer + "ff_in.bias"][0],
        "num_blocks": count(fl, "encoder.tokens.layers"),
        "static_chunk_size": CHUNK,
    }
    decoder = {
        "in_channels": 4 * fl["encoder_proj.bias"][0],
        "out_channels": fl["unet.proj_out.bias"][0],
        "channels": [fl[level + "resnet.skip.bias"][0]],
        "attention_head_dim": HEAD,
        "num_heads": fl[level + "transformers.0.to_q.weight"][0] // HEAD,
        "n_blocks": count(fl, level + "transformers"),
        "num_mid_blocks": count(fl, "unet.mid"),
        "static_chunk_size": CHUNK * RATIO,
    }
    return config | {
        "token_frame_rate": RATE,
        "token_mel_ratio": RATIO,
        "chunk_size": CHUNK,
        "llm": lm_config(speech),
        "flow": {
            "input_size": fl["input_embedding.weight"][1],
            "output_size": fl["encoder_proj.bias"][0],
            "spk_embed_dim": fl["spk_embed_affine_layer.weight"][1],
            "vocab_size": fl["input_embedding.weight"][0],
            "token_mel_ratio": RATIO,
            "pre_lookahead_len": fl["encoder.look_ahead.conv1.weight"][1] - 1,
            "encoder": encoder,
            "decoder": decoder,
            "cfm": {"inference_cfg_rate": 0.7},
        },
        "mel": MEL | {"fmax": 8000},
    }
