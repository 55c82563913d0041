"""What a CosyVoice folder of each version holds: sizes, and the names and shapes of its weights.

    SIZES[version]["full"|"small"] -> numbers;  SHAPES[version][file](numbers) -> {upstream's name: shape}

"full" is the released model. Version 1 takes two more numbers, see `version_1`.
"""

import numpy as np

from tests.cosyvoice_yamls import YAML  # noqa: F401 - which such a folder holds, too

KERNELS, DILATIONS, SOURCE_KERNELS = (3, 7, 11), (1, 3, 5), (7, 7, 11)
SIZES = {
    1: {
        "full": {
            "text_vocab": 51866, "text_vocab_25": 60515, "codes": 4096, "text_in": 512, "dims": 1024, "heads": 16,
            "inner": 4096, "text_blocks": 6, "blocks": 14, "width": 512, "flow_heads": 8, "flow_inner": 2048,
            "flow_blocks": 6, "unet": 256, "unet_heads": 8, "n_blocks": 4, "mid": 12, "channels": 512, "f0": 512,
        },
        "small": {
            "text_vocab": 1869, "text_vocab_25": 1939, "codes": 99, "text_in": 32, "dims": 128, "heads": 2,
            "inner": 192, "text_blocks": 2, "blocks": 3, "width": 64, "flow_heads": 2, "flow_inner": 128,
            "flow_blocks": 2, "unet": 64, "unet_heads": 1, "n_blocks": 1, "mid": 2, "channels": 64, "f0": 32,
        },
    },
    2: {
        "full": {
            "hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "inner": 4864, "vocab": 151936,
            "base_vocab": 151643, "codes": 6561, "width": 512, "flow_heads": 8, "flow_inner": 2048, "flow_blocks": 6,
            "unet": 256, "unet_heads": 8, "n_blocks": 4, "mid": 12, "channels": 512, "f0": 512,
        },
        "small": {
            "hidden": 128, "layers": 2, "heads": 2, "kv_heads": 1, "inner": 192, "vocab": 640, "base_vocab": 300,
            "codes": 99, "width": 64, "flow_heads": 2, "flow_inner": 128, "flow_blocks": 2, "unet": 64,
            "unet_heads": 1, "n_blocks": 1, "mid": 2, "channels": 64, "f0": 32,
        },
    },
    3: {
        "full": {
            "hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "inner": 4864, "vocab": 151936,
            "base_vocab": 151643, "codes": 6561, "look_ahead": 1024, "dim": 1024, "depth": 22, "dit_heads": 16,
            "channels": 512, "f0": 512,
        },
        "small": {
            "hidden": 128, "layers": 2, "heads": 2, "kv_heads": 1, "inner": 192, "vocab": 640, "base_vocab": 300,
            "codes": 99, "look_ahead": 64, "dim": 128, "depth": 2, "dit_heads": 2, "channels": 64, "f0": 32,
        },
    },
}  # fmt: skip
UP_BLOCKS = 4  # of the second half of version 2's encoder, in every size


def version_1(size, rate=50):
    """The numbers of version 1, whose variants of 50 and of 25 speech tokens a second differ in the text tokenizer."""
    s = SIZES[1][size]
    kind = {50: ("whisper", s["text_vocab"]), 25: ("cosyvoice.tokenizer", s["text_vocab_25"])}[rate]
    return s | {"rate": rate, "tokenizer": kind[0], "text_vocab": kind[1]}


class Shapes(dict):
    def layer(self, name, *shape, bias=True):
        self[f"{name}.weight"] = shape
        if bias:
            self[f"{name}.bias"] = shape[:1]

    def normed(self, name, rows, *rest):
        """A convolution with weight norm; `rows`: the size of its bias."""
        shape = rest if len(rest) == 3 else (rows, *rest)
        self[f"{name}.bias"] = (rows,)
        self[f"{name}.parametrizations.weight.original0"] = (shape[0], 1, 1)
        self[f"{name}.parametrizations.weight.original1"] = shape


# Language models


def qwen2_shapes(s):
    D, out = s["hidden"], Shapes()
    kv = s["kv_heads"] * D // s["heads"]
    out["llm.model.model.embed_tokens.weight"] = (s["vocab"], D)
    for i in range(s["layers"]):
        layer = f"llm.model.model.layers.{i}."
        for name, rows in (("q", D), ("k", kv), ("v", kv)):
            out.layer(f"{layer}self_attn.{name}_proj", rows, D)
        out[f"{layer}self_attn.o_proj.weight"] = (D, D)
        out |= {f"{layer}mlp.{name}_proj.weight": (s["inner"], D) for name in ("gate", "up")}
        out[f"{layer}mlp.down_proj.weight"] = (D, s["inner"])
        out |= {f"{layer}{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    out |= {"llm.model.model.norm.weight": (D,), "llm.model.lm_head.weight": (s["vocab"], D)}
    return out


def llm_shapes_3(s):
    rows, D = s["codes"] + 200, s["hidden"]
    return Shapes(qwen2_shapes(s) | {"llm_decoder.weight": (rows, D), "speech_embedding.weight": (rows, D)})


def llm_shapes_2(s):
    rows, D = s["codes"] + 3, s["hidden"]
    own = {"llm_embedding.weight": (2, D), "llm_decoder.bias": (rows,), "llm_decoder.weight": (rows, D)}
    return Shapes(qwen2_shapes(s) | own | {"speech_embedding.weight": (rows, D)})


def encoder_shapes(out, prefix, inputs, D, heads, inner, blocks, norms=("norm_ff", "norm_mha")):
    """espnet's encoder: its embedding, its layers, its last norm."""
    out.layer(f"{prefix}embed.out.0", D, inputs)
    out.layer(f"{prefix}embed.out.1", D)
    encoder_layers(out, f"{prefix}encoders", D, heads, inner, blocks, norms)
    out.layer(f"{prefix}after_norm", D)


def encoder_layers(out, prefix, D, heads, inner, blocks, norms):
    for i in range(blocks):
        layer = f"{prefix}.{i}."
        out |= {f"{layer}self_attn.pos_bias_{n}": (heads, D // heads) for n in "uv"}
        for name in ("q", "k", "v", "out"):
            out.layer(f"{layer}self_attn.linear_{name}", D, D)
        out.layer(f"{layer}self_attn.linear_pos", D, D, bias=False)
        out.layer(f"{layer}feed_forward.w_1", inner, D)
        out.layer(f"{layer}feed_forward.w_2", D, inner)
        for norm in norms:
            out.layer(f"{layer}{norm}", D)


def llm_shapes_1(s):
    D, out = s["dims"], Shapes()
    out["text_embedding.weight"] = (s["text_vocab"], s["text_in"])
    encoder_shapes(out, "text_encoder.", s["text_in"], D, s["heads"], s["inner"], s["text_blocks"])
    out.layer("text_encoder_affine_layer", D, D)
    out["llm_embedding.weight"] = (2, D)
    encoder_shapes(out, "llm.", D, D, s["heads"], s["inner"], s["blocks"], norms=("norm1", "norm2"))
    out.layer("llm_decoder", s["codes"] + 1, D)
    out["speech_embedding.weight"] = (s["codes"], D)
    out.layer("spk_embed_affine_layer", D, 192)
    return out


# Flows


def unet_shapes(out, s, norm, down, up):
    """The estimator. `norm`: the index of a block's norm; `down`, `up`: {block: its last layer's name and kernel}."""
    C, e, time = s["unet"], "decoder.estimator.", 4 * s["unet"]
    out.layer(e + "time_mlp.linear_1", time, 320)
    out.layer(e + "time_mlp.linear_2", time, time)

    def conv_block(name, rows, columns):
        out.layer(f"{name}.block.0", rows, columns, 3)
        out.layer(f"{name}.block.{norm}", rows)

    def block(name, columns):
        out.layer(f"{name}.0.mlp.1", C, time)
        conv_block(f"{name}.0.block1", C, columns)
        conv_block(f"{name}.0.block2", C, C)
        out.layer(f"{name}.0.res_conv", C, columns, 1)
        for j in range(s["n_blocks"]):
            layer, inner = f"{name}.1.{j}.", s["unet_heads"] * 64
            for n in ("norm1", "norm3"):
                out.layer(layer + n, C)
            for n in "qkv":
                out.layer(f"{layer}attn1.to_{n}", inner, C, bias=False)
            out.layer(layer + "attn1.to_out.0", C, inner)
            out.layer(layer + "ff.net.0.proj", 4 * C, C)
            out.layer(layer + "ff.net.2", C, 4 * C)

    for i, (name, kernel) in enumerate(down):
        block(f"{e}down_blocks.{i}", C if i else 320)
        out.layer(f"{e}down_blocks.{i}.{name}", C, C, kernel)
    for i in range(s["mid"]):
        block(f"{e}mid_blocks.{i}", C)
    for i, (name, kernel) in enumerate(up):
        block(f"{e}up_blocks.{i}", 2 * C)
        out.layer(f"{e}up_blocks.{i}.{name}", C, C, kernel)
    conv_block(e + "final_block", C, C)
    out.layer(e + "final_proj", 80, C, 1)


def flow_shapes_1(s):
    out = Shapes()
    out["input_embedding.weight"] = (s["codes"], s["width"])
    out.layer("spk_embed_affine_layer", 80, 192)
    encoder_shapes(out, "encoder.", s["width"], s["width"], s["flow_heads"], s["flow_inner"], s["flow_blocks"])
    out.layer("encoder_proj", 80, s["width"])
    unet_shapes(out, s, 1, (("2.conv", 3), ("2", 3)), (("2.conv", 4), ("2", 3)))
    for i in range(4):
        out.layer(f"length_regulator.model.{3 * i}", 80, 80, 3)
        out.layer(f"length_regulator.model.{3 * i + 1}", 80)
    out.layer("length_regulator.model.12", 80, 80, 1)
    return out


def flow_shapes_2(s):
    W, sizes, out = s["width"], (s["width"], s["flow_heads"], s["flow_inner"]), Shapes()
    out["input_embedding.weight"] = (s["codes"], W)
    out.layer("spk_embed_affine_layer", 80, 192)
    encoder_shapes(out, "encoder.", W, *sizes, s["flow_blocks"])
    out.layer("encoder.pre_lookahead_layer.conv1", W, W, 4)
    out.layer("encoder.pre_lookahead_layer.conv2", W, W, 3)
    out.layer("encoder.up_layer.conv", W, W, 5)
    out.layer("encoder.up_embed.out.0", W, W)
    out.layer("encoder.up_embed.out.1", W)
    encoder_layers(out, "encoder.up_encoders", *sizes, UP_BLOCKS, ("norm_ff", "norm_mha"))
    out.layer("encoder_proj", 80, W)
    unet_shapes(out, s, 2, (("2", 3),), (("2", 3),))
    return out


def flow_shapes_3(s):
    D, inner, out = s["dim"], s["dit_heads"] * 64, Shapes()
    out["input_embedding.weight"] = (s["codes"], 80)
    out.layer("spk_embed_affine_layer", 80, 192)
    out.layer("pre_lookahead_layer.conv1", s["look_ahead"], 80, 4)
    out.layer("pre_lookahead_layer.conv2", 80, s["look_ahead"], 3)
    e = "decoder.estimator."
    out.layer(e + "time_embed.time_mlp.0", D, 256)
    out.layer(e + "time_embed.time_mlp.2", D, D)
    out.layer(e + "input_embed.proj", D, 320)
    for n in (1, 2):
        out.layer(f"{e}input_embed.conv_pos_embed.conv{n}.0", D, D // 16, 31)
    out[e + "rotary_embed.inv_freq"] = (32,)
    for i in range(s["depth"]):
        block = f"{e}transformer_blocks.{i}."
        out.layer(block + "attn_norm.linear", 6 * D, D)
        for name in ("to_q", "to_k", "to_v"):
            out.layer(f"{block}attn.{name}", inner, D)
        out.layer(block + "attn.to_out.0", D, inner)
        out.layer(block + "ff.ff.0.0", 2 * D, D)
        out.layer(block + "ff.ff.2", D, 2 * D)
    out.layer(e + "norm_out.linear", 2 * D, D)
    out.layer(e + "proj_out", 80, D)
    return out


# Vocoders


def hift_shapes(s, rates, kernels, sources, causal=False):
    C, out = s["channels"], Shapes()

    def block(name, channels, kernel):
        for i in range(len(DILATIONS)):
            for n in (1, 2):
                out.normed(f"{name}.convs{n}.{i}", channels, channels, kernel)
                out[f"{name}.activations{n}.{i}.alpha"] = (channels,)

    out.layer("m_source.l_linear", 1, 9)
    out.normed("conv_pre", C, 80, 5 if causal else 7)
    for i, kernel in enumerate(kernels):
        rows, down = C >> (i + 1), int(np.prod(rates[i + 1 :]))
        if causal:
            out.normed(f"ups.{i}", rows, C >> i, kernel)
        else:  # a transposed convolution: [in, out, kernel]
            out.normed(f"ups.{i}", rows, C >> i, rows, kernel)
        out.layer(f"source_downs.{i}", rows, 18, 2 * down if down > 1 else 1)
        block(f"source_resblocks.{i}", rows, sources[i])
        for j, k in enumerate(KERNELS):
            block(f"resblocks.{i * len(KERNELS) + j}", rows, k)
    out.normed("conv_post", 18, C >> len(rates), 7)
    for i in range(5):
        out.normed(f"f0_predictor.condnet.{2 * i}", s["f0"], s["f0"] if i else 80, 4 if causal and not i else 3)
    out.layer("f0_predictor.classifier", 1, s["f0"])
    return out


def hift_shapes_1(s):
    return hift_shapes(s, (8, 8), (16, 16), (7, 11))


def hift_shapes_2(s):
    return hift_shapes(s, (8, 5, 3), (16, 11, 7), SOURCE_KERNELS)


def hift_shapes_3(s):
    return hift_shapes(s, (8, 5, 3), (16, 11, 7), SOURCE_KERNELS, causal=True)


SHAPES = {
    1: {"llm.pt": llm_shapes_1, "flow.pt": flow_shapes_1, "hift.pt": hift_shapes_1},
    2: {"llm.pt": llm_shapes_2, "flow.pt": flow_shapes_2, "hift.pt": hift_shapes_2},
    3: {"llm.pt": llm_shapes_3, "flow.pt": flow_shapes_3, "hift.pt": hift_shapes_3},
}
