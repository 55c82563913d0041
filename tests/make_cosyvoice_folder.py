"""Writes a CosyVoice 3 folder with random weights, in upstream's layout and key names, without PyTorch.

    python tests/make_cosyvoice_folder.py FOLDER [--size full|small] [--campplus FILE] [--speech-tokenizer FILE]

"full" has the sizes of the released model (3.4 GB), "small" takes about 2 MB. The weights say nothing; the folder is
for conversion, memory and speed.
"""

import argparse
import json
import shutil
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

SIZES = {
    "full": {
        "hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "inner": 4864, "vocab": 151936, "base_vocab": 151643,
        "codes": 6561, "look_ahead": 1024, "dim": 1024, "depth": 22, "dit_heads": 16, "channels": 512, "f0": 512,
    },
    "small": {
        "hidden": 128, "layers": 2, "heads": 2, "kv_heads": 1, "inner": 192, "vocab": 640, "base_vocab": 300,
        "codes": 99, "look_ahead": 64, "dim": 128, "depth": 2, "dit_heads": 2, "channels": 64, "f0": 32,
    },
}  # fmt: skip
KERNELS, DILATIONS, RATES, UP_KERNELS, SOURCE_KERNELS = (3, 7, 11), (1, 3, 5), (8, 5, 3), (16, 11, 7), (7, 7, 11)


def llm_shapes(s):
    D, out = s["hidden"], {}
    kv = s["kv_heads"] * D // s["heads"]
    out["llm.model.model.embed_tokens.weight"] = (s["vocab"], D)
    for i in range(s["layers"]):
        layer = f"llm.model.model.layers.{i}."
        for name, rows in (("q", D), ("k", kv), ("v", kv)):
            out[f"{layer}self_attn.{name}_proj.weight"], out[f"{layer}self_attn.{name}_proj.bias"] = (rows, D), (rows,)
        out[f"{layer}self_attn.o_proj.weight"] = (D, D)
        out |= {f"{layer}mlp.{name}_proj.weight": (s["inner"], D) for name in ("gate", "up")}
        out[f"{layer}mlp.down_proj.weight"] = (D, s["inner"])
        out |= {f"{layer}{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    out |= {"llm.model.model.norm.weight": (D,), "llm.model.lm_head.weight": (s["vocab"], D)}
    return out | {"llm_decoder.weight": (s["codes"] + 200, D), "speech_embedding.weight": (s["codes"] + 200, D)}


def flow_shapes(s):
    D, inner, out = s["dim"], s["dit_heads"] * 64, {}

    def layer(name, *shape):
        out[f"{name}.weight"], out[f"{name}.bias"] = shape, shape[:1]

    out["input_embedding.weight"] = (s["codes"], 80)
    layer("spk_embed_affine_layer", 80, 192)
    layer("pre_lookahead_layer.conv1", s["look_ahead"], 80, 4)
    layer("pre_lookahead_layer.conv2", 80, s["look_ahead"], 3)
    e = "decoder.estimator."
    layer(e + "time_embed.time_mlp.0", D, 256)
    layer(e + "time_embed.time_mlp.2", D, D)
    layer(e + "input_embed.proj", D, 320)
    for n in (1, 2):
        layer(f"{e}input_embed.conv_pos_embed.conv{n}.0", D, D // 16, 31)
    out[e + "rotary_embed.inv_freq"] = (32,)
    for i in range(s["depth"]):
        block = f"{e}transformer_blocks.{i}."
        layer(block + "attn_norm.linear", 6 * D, D)
        for name in ("to_q", "to_k", "to_v"):
            layer(f"{block}attn.{name}", inner, D)
        layer(block + "attn.to_out.0", D, inner)
        layer(block + "ff.ff.0.0", 2 * D, D)
        layer(block + "ff.ff.2", D, 2 * D)
    layer(e + "norm_out.linear", 2 * D, D)
    layer(e + "proj_out", 80, D)
    return out


def hift_shapes(s):
    C, out = s["channels"], {}

    def conv(name, rows, columns, kernel, normed=True):
        out[f"{name}.bias"] = (rows,)
        if normed:
            out[f"{name}.parametrizations.weight.original0"] = (rows, 1, 1)
            out[f"{name}.parametrizations.weight.original1"] = (rows, columns, kernel)
        else:
            out[f"{name}.weight"] = (rows, columns, kernel)

    def block(name, channels, kernel):
        for i in range(len(DILATIONS)):
            for n in (1, 2):
                conv(f"{name}.convs{n}.{i}", channels, channels, kernel)
                out[f"{name}.activations{n}.{i}.alpha"] = (channels,)

    out |= {"m_source.l_linear.weight": (1, 9), "m_source.l_linear.bias": (1,)}
    conv("conv_pre", C, 80, 5)
    for i, kernel in enumerate(UP_KERNELS):
        rows, down = C >> (i + 1), int(np.prod(RATES[i + 1 :]))
        conv(f"ups.{i}", rows, C >> i, kernel)
        conv(f"source_downs.{i}", rows, 18, 2 * down if down > 1 else 1, normed=False)
        block(f"source_resblocks.{i}", rows, SOURCE_KERNELS[i])
        for j, k in enumerate(KERNELS):
            block(f"resblocks.{i * len(KERNELS) + j}", rows, k)
    conv("conv_post", 18, C >> len(RATES), 7)
    for i in range(5):
        conv(f"f0_predictor.condnet.{2 * i}", s["f0"], s["f0"] if i else 80, 3 if i else 4)
    return out | {"f0_predictor.classifier.weight": (1, s["f0"]), "f0_predictor.classifier.bias": (1,)}


SHAPES = {"llm.pt": llm_shapes, "flow.pt": flow_shapes, "hift.pt": hift_shapes}


def numbers(name, shape):
    """Random float32 weights, the same for the same name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    n = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("inv_freq"):
        return (10000 ** -(np.arange(0, 64, 2) / 64)).astype(np.float32)
    if name.endswith(("alpha", "original0", "norm.weight")):
        return 1 + 0.1 * n
    return 0.1 * n if len(shape) == 1 else n / np.sqrt(np.float32(np.prod(shape[1:])))


def write_torch(path, tensors):
    """A zip as of torch.save: {key: tensor}, or dicts of them. A tensor is an array, or (name, shape) for `numbers`."""
    storages = []

    def text(value):
        raw = value.encode()
        return b"X" + struct.pack("<I", len(raw)) + raw

    def number(n):
        return b"\x8a" + bytes([8]) + struct.pack("<q", n)

    def pickle(value):
        if isinstance(value, str):
            return text(value)
        if isinstance(value, dict):
            return b"}(" + b"".join(text(k) + pickle(v) for k, v in value.items()) + b"u"
        shape = value[1] if isinstance(value, tuple) else value.shape
        kind = b"IntStorage" if not isinstance(value, tuple) and value.dtype == np.int32 else b"FloatStorage"
        strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        storages.append(value)
        storage = b"(" + text("storage") + b"ctorch\n" + kind + b"\n" + text(str(len(storages) - 1)) + text("cpu")
        storage += number(int(np.prod(shape))) + b"tQ"
        sizes = b"".join(b"(" + b"".join(map(number, x)) + b"t" for x in (shape, strides))
        return (
            b"ctorch._utils\n_rebuild_tensor_v2\n("
            + storage
            + number(0)
            + sizes
            + b"\x89ccollections\nOrderedDict\n)RtR"
        )

    stream = b"\x80\x02" + pickle(tensors) + b"."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as out:
        out.writestr("archive/data.pkl", stream)
        out.writestr("archive/byteorder", "little")
        for i, value in enumerate(storages):
            array = numbers(*value) if isinstance(value, tuple) else np.ascontiguousarray(value)
            info = zipfile.ZipInfo(f"archive/data/{i}")
            # As torch.save does, with a field that means nothing: data begins at a multiple of 64. The header is 30
            # bytes, and zip64's own field 20.
            gap = -(out.fp.tell() + 30 + len(info.filename) + 20 + 4) % 64
            info.extra = b"FB" + struct.pack("<H", gap) + bytes(gap)
            with out.open(info, "w", force_zip64=True) as f:
                f.write(memoryview(array.reshape(-1)).cast("B"))
        out.writestr("archive/version", "3\n")


def write_tokenizer(folder, base):
    """vocab.json of `base` tokens (bytes, then pairs, then threes), merges.txt, and Qwen2's three special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    vocab, merges = letters[:], []
    pairs = [(a, b) for a in letters for b in letters]
    for a, b in pairs + [(a + b, c) for a, b in pairs[: 1 << 14] for c in letters[:8]]:
        if len(vocab) == base:
            break
        vocab.append(a + b)
        merges.append(f"{a} {b}")
    assert len(vocab) == base
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    added = {str(base + i): {"content": t, "special": True, "normalized": False} for i, t in enumerate(special)}
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(vocab)}), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))


def qwen2_config(s):
    return {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": s["hidden"], "intermediate_size": s["inner"],
        "num_attention_heads": s["heads"], "num_hidden_layers": s["layers"], "num_key_value_heads": s["kv_heads"],
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True, "vocab_size": s["vocab"],
    }  # fmt: skip


YAML = """# sizes as {size}
__set_seed1: !apply:random.seed [1986]
sample_rate: 24000
llm_input_size: {hidden}
llm_output_size: {hidden}
spk_embed_dim: 192
qwen_pretrain_path: ''
token_frame_rate: 25
token_mel_ratio: 2
chunk_size: 25
num_decoding_left_chunks: -1
llm: !new:cosyvoice.llm.llm.CosyVoice3LM
    llm_input_size: !ref <llm_input_size>
    llm_output_size: !ref <llm_output_size>
    speech_token_size: {codes}
    mix_ratio: [5, 15]
    llm: !new:cosyvoice.llm.llm.Qwen2Encoder
        pretrain_path: !ref <qwen_pretrain_path>
    sampling: !name:cosyvoice.utils.common.ras_sampling
        top_p: 0.8
flow: !new:cosyvoice.flow.flow.CausalMaskedDiffWithDiT
    input_size: 80
    output_size: 80
    spk_embed_dim: !ref <spk_embed_dim>
    vocab_size: {codes}
    input_frame_rate: !ref <token_frame_rate>
    token_mel_ratio: !ref <token_mel_ratio>
    pre_lookahead_len: 3
    pre_lookahead_layer: !new:cosyvoice.transformer.upsample_encoder.PreLookaheadLayer
        in_channels: 80
        channels: {look_ahead}
        pre_lookahead_len: 3
    decoder: !new:cosyvoice.flow.flow_matching.CausalConditionalCFM
        in_channels: 240
        cfm_params: !new:omegaconf.DictConfig
            content:
                sigma_min: 1e-06
                t_scheduler: 'cosine'
                inference_cfg_rate: 0.7
        estimator: !new:cosyvoice.flow.DiT.dit.DiT
            dim: {dim}
            depth: {depth}
            heads: {dit_heads}
            dim_head: 64
            ff_mult: 2
            mel_dim: 80
            static_chunk_size: !ref <chunk_size> * <token_mel_ratio>
            num_decoding_left_chunks: !ref <num_decoding_left_chunks>
hift: !new:cosyvoice.hifigan.generator.CausalHiFTGenerator
    in_channels: 80
    base_channels: {channels}
    nb_harmonics: 8
    sampling_rate: !ref <sample_rate>
    nsf_alpha: 0.1
    nsf_sigma: 0.003
    nsf_voiced_threshold: 10
    upsample_rates: [8, 5, 3]
    upsample_kernel_sizes: [16, 11, 7]
    istft_params:
        n_fft: 16
        hop_len: 4
    resblock_kernel_sizes: [3, 7, 11]
    resblock_dilation_sizes: [[1, 3, 5], [1, 3, 5], [1, 3, 5]]
    source_resblock_kernel_sizes: [7, 7, 11]
    source_resblock_dilation_sizes: [[1, 3, 5], [1, 3, 5], [1, 3, 5]]
    lrelu_slope: 0.1
    audio_limit: 0.99
    conv_pre_look_right: 4
    f0_predictor: !new:cosyvoice.hifigan.f0_predictor.CausalConvRNNF0Predictor
        num_class: 1
        in_channels: 80
        cond_channels: {f0}
feat_extractor: !name:matcha.utils.audio.mel_spectrogram
    n_fft: 1920
    num_mels: 80
    sampling_rate: !ref <sample_rate>
    hop_size: 480
    win_size: 1920
    fmin: 0
    fmax: null
    center: False
"""


def voice(s, prompt=30, seed=0):
    """An entry of spk2info.pt; `prompt` speech tokens, 0 for a voice that is an embedding alone."""
    rng = np.random.default_rng(seed)
    entry = {"embedding": rng.standard_normal((1, 192), dtype=np.float32)}
    if prompt:
        tokens = rng.integers(0, s["codes"], (1, prompt), dtype=np.int32)
        entry |= {"prompt_text": rng.integers(0, s["base_vocab"], (1, 8), dtype=np.int32)}
        entry |= {"llm_prompt_speech_token": tokens, "flow_prompt_speech_token": tokens}
        entry |= {"prompt_speech_feat": rng.standard_normal((1, 2 * prompt, 80), dtype=np.float32)}
        entry |= {"llm_embedding": entry["embedding"], "flow_embedding": entry["embedding"]}
    return entry


def make_folder(folder, size="small", campplus=None, speech_tokenizer=None):
    """Write the model folder; the ONNX files are copied from the given paths."""
    folder, s = Path(folder), SIZES[size]
    text = folder / "CosyVoice-BlankEN"
    text.mkdir(parents=True)
    for file, shapes in SHAPES.items():
        write_torch(folder / file, {name: (name, shape) for name, shape in shapes(s).items()})
    write_torch(folder / "spk2info.pt", {"anna": voice(s), "晓": voice(s, 0, 1)})
    (folder / "cosyvoice3.yaml").write_text(YAML.format(size=size, **s))
    (text / "config.json").write_text(json.dumps(qwen2_config(s)))
    write_tokenizer(text, s["base_vocab"])
    for path, name in ((campplus, "campplus.onnx"), (speech_tokenizer, "speech_tokenizer_v3.onnx")):
        if path is not None:
            shutil.copy(path, folder / name)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--campplus")
    parser.add_argument("--speech-tokenizer")
    args = parser.parse_args()
    make_folder(args.folder, args.size, args.campplus, args.speech_tokenizer)
