"""H3 checkpoints: upstream's tensor names (four layouts) to ours, and the model's config from the tensors' shapes.

Upstream is HazyResearch/H3; its complex tensors are stored as floats with a last axis of (re, im).

    ours                                  upstream's, under `backbone.` where not said otherwise
    embeddings.weight                     embeddings.word_embeddings.weight
    lm_head.weight                        lm_head.weight (no prefix); left out here when equal to the embedding
    norm_f.*                              ln_f.*
    layers.{i}.norm1|norm2|mlp.fc1|fc2.*  the same
    layers.{i}.mixer.shift.B|C|D          mixer.ssm_k_kernel.kernel.B|C (C with a leading 1), mixer.ssm_k_D
    layers.{i}.mixer.ssm.*                mixer.kernel.kernel.* (C with a leading 1), mixer.D
    layers.{i}.mixer.q_proj ... Wqkv ...  the same

Older files say `s4seq.encoder.` for `backbone.`, `embedding.` for the embedding, and number the norms differently:
norm after each residual add, so that the first is `backbone.norm` and the last norm2 is what is now ln_f.
"""

import re
from collections import Counter

import numpy as np

from mlx_cosyh3.convert.sources import FLOATS, as_float32
from mlx_cosyh3.errors import CheckpointError, nearest

# d_model, layers, attention layers -> name, heads, rotary dims: neither number can be read from the shapes
RELEASED = {
    (768, 12, (6,)): ("H3-125M", 12, 0),
    (1024, 24, (8, 16)): ("H3-355M", 16, 0),
    (2048, 24, (8, 16)): ("H3-1.3B", 16, 0),
    (2560, 32, (8, 16, 24)): ("H3-2.7B (3 attention layers)", 20, 0),
    (2560, 32, (10, 21)): ("H3-2.7B (2 rotary attention layers)", 20, 64),
}

RENAMED = {
    "mixer.ssm_k_kernel.kernel.B": "mixer.shift.B",
    "mixer.ssm_k_kernel.kernel.C": "mixer.shift.C",
    "mixer.ssm_k_D": "mixer.shift.D",
    **{f"mixer.kernel.kernel.{n}": f"mixer.ssm.{n}" for n in ("C", "B", "log_dt", "inv_A_real", "A_imag")},
    "mixer.D": "mixer.ssm.D",
}
LINEARS = ("q_proj", "k_proj", "v_proj", "output_linear")
ATTENTION = ("Wqkv", "out_proj")
SAME = [
    f"{name}.{part}"
    for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2", *(f"mixer.{n}" for n in LINEARS + ATTENTION))
    for part in ("weight", "bias")
]
LEAVES = {**RENAMED, **{n: n for n in SAME}, **{n: n for n in RENAMED.values()}}
INV_FREQ = "mixer.rotary_emb.inv_freq"
LAYER = re.compile(r"(?:backbone\.)?layers\.(\d+)\.(.+)")
TOP = {
    "backbone.embeddings.word_embeddings.weight": "embeddings.weight",
    "backbone.ln_f.weight": "norm_f.weight",
    "backbone.ln_f.bias": "norm_f.bias",
    **{n: n for n in ("embeddings.weight", "norm_f.weight", "norm_f.bias", "lm_head.weight")},
}

# Told apart by a key, so that a wrong file is named for what it is. Order matters: special before general.
OTHERS = (
    (
        "a CosyVoice speech language model (llm.pt)",
        r"(llm\.model\.model\.layers\.|speech_embedding\.|llm_decoder\.)",
    ),
    ("a CosyVoice flow model (flow.pt)", r"(decoder\.estimator\.|encoder_proj\.|spk_embed_affine_layer\.)"),
    ("a CosyVoice vocoder (hift.pt)", r"(m_source\.|f0_predictor\.|source_downs\.|conv_pre\.)"),
    ("Whisper", r"(model\.)?(encoder\.conv1\.|encoder\.blocks\.\d+\.attn\.|decoder\.token_embedding\.)"),
    ("Mamba", r"(backbone|model)\.layers\.\d+\.mixer\.(A_log|in_proj\.|conv1d\.|x_proj\.|dt_proj\.)"),
    ("GPT-NeoX", r"gpt_neox\."),
    ("GPT-2", r"(transformer\.)?(h\.\d+\.(attn\.c_attn|mlp\.c_fc|ln_1)|wte|wpe)\."),
    ("a Hyena model", r"backbone\.layers\.\d+\.mixer\.(filter_fn|short_filter|in_proj)\."),
    ("Qwen2", r"model\.layers\.\d+\.self_attn\.[qkv]_proj\.bias"),
    (
        "Llama or a relative",
        r"(model\.)?(layers\.\d+\.self_attn\.|layers\.\d+\.attention\.w[qkvo]\.|embed_tokens\.)",
    ),
    ("BERT", r"(bert\.)?(embeddings\.word_embeddings\.|encoder\.layer\.\d+\.)"),
)


def sanitize(tensors):
    """Upstream's keys in, MLX keys out: {name: tensor} -> {name: tensor}. Pure, and idempotent.

    Renames, brings legacy layouts to the new one, drops the leading 1 of both C tensors, drops an lm_head that
    equals the embedding, and checks and drops rotary `inv_freq`. Tensors are numpy or MLX arrays, or the lazy ones
    of a checkpoint: none is copied. Raises CheckpointError on an unknown key.
    """
    out, origin = {}, {}
    for key, tensor, name in _renamed(tensors):
        if name is None:
            _check_inv_freq(key, tensor)
            continue
        if name in out:
            raise CheckpointError(f"tensors {origin[name]!r} and {key!r} are both {name!r}: remove one of them")
        if name.endswith(("shift.C", "ssm.C")) and len(tensor.shape) == (3 if name.endswith("shift.C") else 4):
            if tensor.shape[0] != 1:
                raise CheckpointError(
                    f"tensor {key!r} has the shape {list(tensor.shape)}: its first axis must be 1"
                )
            tensor = tensor.reshape(tensor.shape[1:]) if hasattr(tensor, "reshape") else Squeezed(tensor)
        out[name], origin[name] = tensor, key
    if "lm_head.weight" in out and "embeddings.weight" in out:
        if same_bits(out["lm_head.weight"], out["embeddings.weight"]):
            del out["lm_head.weight"]
    return out


def model_weights(source):
    """`sanitize` of an opened checkpoint; errors name it."""
    try:
        return sanitize(source.tensors)
    except CheckpointError as e:
        raise CheckpointError(f"{source.name}: {e}") from e


def source_config(source, weights, **known):
    """`infer_config` of an opened checkpoint whose `model_weights` are at hand: these lack inv_freq."""
    freqs = {k: t for k, t in source.tensors.items() if k.endswith(INV_FREQ)}
    return infer_config({**weights, **freqs}, file_name=source.name, **known)


class Squeezed:
    """A lazy tensor without its leading axis of 1."""

    def __init__(self, tensor):
        self._tensor, self.shape, self.dtype, self.nbytes = tensor, tensor.shape[1:], tensor.dtype, tensor.nbytes

    def numpy(self):
        return self._tensor.numpy()[0]

    def rows(self, start, stop):
        return self.numpy()[start:stop]


def _renamed(tensors):
    """(key, tensor, our name; None for inv_freq) for every tensor, legacy layouts included."""
    keys = {}
    for key in tensors:
        new = re.sub(r"^s4seq\.encoder\.", "backbone.", key)
        new = re.sub(r"^embedding\.", "backbone.embeddings.word_embeddings.", new)
        keys[key] = re.sub(r"^backbone\.norm\.", "backbone.ln_0.", new)
    if "backbone.ln_0.weight" in keys.values():
        last = max((int(m[1]) for m in map(LAYER.match, keys.values()) if m), default=0)
        keys = {key: _new_norm(new, last) for key, new in keys.items()}
    for key, new in keys.items():
        layer = LAYER.match(new)
        if layer and layer[2] == INV_FREQ:
            yield key, tensors[key], None
        elif layer and layer[2] in LEAVES:
            yield key, tensors[key], f"layers.{layer[1]}.{LEAVES[layer[2]]}"
        elif new in TOP:
            yield key, tensors[key], TOP[new]
        else:
            _unknown(key, new, tensors)


def _new_norm(key, last):
    """The new name of a norm in the old order."""
    if key.startswith("backbone.ln_0."):
        return key.replace("ln_0", "layers.0.norm1")
    norm = re.match(r"backbone\.layers\.(\d+)\.norm([12])\.(weight|bias)$", key)
    if not norm:
        return key
    i, part = int(norm[1]), norm[3]
    if norm[2] == "1":
        return f"backbone.layers.{i}.norm2.{part}"
    return f"backbone.layers.{i + 1}.norm1.{part}" if i < last else f"backbone.ln_f.{part}"


def _unknown(key, new, tensors):
    if re.search(r"\.(scales|biases|scale)$", key):
        raise CheckpointError(
            f"the model is quantised already (tensor {key!r}): convert from the original weights"
        )
    for name, pattern in OTHERS:
        for k in tensors:
            if re.match(pattern, k):
                raise CheckpointError(f"this is {name}, not an H3 checkpoint (tensor {k!r})")
    layer = LAYER.match(new)
    known = [*TOP, *(f"backbone.layers.{layer[1] if layer else 0}.{leaf}" for leaf in LEAVES)]
    raise CheckpointError(f"unknown tensor {key!r}{nearest(new, known)}: is this an H3 checkpoint?")


def _check_inv_freq(key, tensor):
    """inv_freq must be 10000^(-2j / rot), rot = 2 x its length; half precision files hold it rounded."""
    values = _float32(tensor)
    if values.ndim != 1 or not values.size:
        raise CheckpointError(f"tensor {key!r} has the shape {list(values.shape)}, expected one axis")
    expected = 10000.0 ** (-np.arange(values.size) / values.size)
    if not np.allclose(values, expected, rtol=1e-2 if "16" in str(tensor.dtype) else 1e-5, atol=1e-7):
        raise CheckpointError(
            f"tensor {key!r} is not rotary embedding with base 10000: this model cannot be converted"
        )


def _float32(tensor):
    """A small tensor of any kind (lazy, numpy, MLX) as fp32."""
    if hasattr(tensor, "rows"):
        return as_float32(tensor.numpy(), tensor.dtype)
    return np.array(tensor, dtype=np.float32)


def same_bits(a, b, rows=4096):
    """Whether two tensors are equal bit by bit (dtype and shape included)."""
    if tuple(a.shape) != tuple(b.shape) or a.dtype != b.dtype:
        return False
    if not hasattr(a, "rows"):
        return bool((a == b).all())
    x, y = a.numpy(), b.numpy()
    if x.__array_interface__["data"][0] == y.__array_interface__["data"][0] and x.strides == y.strides:
        return True  # one storage under two names
    bits = lambda z, i: np.ascontiguousarray(z[i : i + rows]).view(np.uint8)  # noqa: E731
    return all(np.array_equal(bits(x, i), bits(y, i)) for i in range(0, x.shape[0], rows))


def rotary_dims(tensors):
    """{layer: rotated dims of an attention head} of the layers that have an `inv_freq`."""
    found = {}
    for key, tensor in tensors.items():
        layer = re.search(r"layers\.(\d+)\." + re.escape(INV_FREQ) + "$", key)
        if layer:
            found[int(layer[1])] = 2 * tensor.shape[0]
    return found


def infer_config(
    tensors, *, heads=None, vocab_size=None, eos_token_id=None, rotary_emb_dim=None, file_name="the checkpoint"
):
    """The config.json of an H3 model (a dict) from its tensors, under upstream's keys or ours.

    `heads`: attention heads; needed for models that were never released, their number is in no shape.
    `vocab_size`: the ids the tokenizer has, at most the rows of the embedding (the default).
    `rotary_emb_dim`: only for tensors whose `inv_freq` is gone already; else it is read from that.
    """
    rotary = rotary_dims(tensors)
    weights = sanitize(tensors)
    shape = {name: tuple(t.shape) for name, t in weights.items()}
    where = file_name
    if "embeddings.weight" not in shape:
        raise CheckpointError(f"{where}: the embedding is missing (backbone.embeddings.word_embeddings.weight)")
    if len(shape["embeddings.weight"]) != 2 or 0 in shape["embeddings.weight"]:
        raise CheckpointError(
            f"{where}: tensor 'embeddings.weight' has the shape {list(shape['embeddings.weight'])}, "
            "expected [vocabulary, d_model]"
        )
    rows, d_model = shape["embeddings.weight"]
    layers = {int(m[1]) for m in map(LAYER.match, shape) if m}
    if not layers:
        raise CheckpointError(f"{where} holds no layers (backbone.layers.0...)")
    if len(layers) != max(layers) + 1:
        gap = next(i for i in range(len(layers)) if i not in layers)
        raise CheckpointError(f"{where}: layer {gap} is missing, though there is a layer {max(layers)}")

    def common(leaf, axis, default):
        """The size of an axis that most layers agree on; `check_shapes` then names those that do not."""
        sizes = Counter(s[axis] for n, s in shape.items() if n.endswith(leaf) and len(s) > axis and s[axis] > 0)
        return sizes.most_common(1)[0][0] if sizes else default

    attention = tuple(i for i in sorted(layers) if f"layers.{i}.mixer.Wqkv.weight" in shape)
    H = common("mixer.ssm.D", 0, d_model)
    if d_model % H:
        raise CheckpointError(f"{where}: {H} SSM channels do not divide d_model {d_model}")
    if vocab_size is not None and not 0 < vocab_size <= rows:
        raise CheckpointError(
            f"{where}: a vocabulary of {vocab_size} ids does not fit the {rows} rows of the embedding"
        )
    released = RELEASED.get((d_model, len(layers), attention), (None, None, 0))
    if len(set(rotary.values())) > 1 or (rotary and set(rotary) != set(attention)):
        raise CheckpointError(f"{where}: attention layers {list(attention)} differ in rotary dims ({rotary})")
    if rotary:
        rotary_emb_dim = next(iter(rotary.values()))
    elif rotary_emb_dim is None:
        rotary_emb_dim = released[2]
    config = {
        "model_type": "h3",
        "d_model": d_model,
        "n_layer": len(layers),
        "d_inner": common("mlp.fc1.weight", 0, 4 * d_model),
        "vocab_size": vocab_size or rows,
        "padded_vocab_size": rows,
        "d_state": common("mixer.shift.B", 1, 64),
        "head_dim": d_model // H,
        "n_ssm": common("mixer.ssm.A_imag", 0, H),
        "attn_layer_idx": list(attention),
        "num_heads": _heads(where, d_model, attention, heads, released[1]),
        "rotary_emb_dim": rotary_emb_dim,
        "rotary_base": 10000,
        "layer_norm_epsilon": 1e-5,
        "discretization": "bilinear",
        "eos_token_id": eos_token_id,
        "tie_word_embeddings": "lm_head.weight" not in shape,
    }
    if attention and rotary_emb_dim > d_model // config["num_heads"]:
        raise CheckpointError(
            f"{where}: {rotary_emb_dim} rotary dims do not fit an attention head of "
            f"{d_model // config['num_heads']} dims ({config['num_heads']} heads): pass the right number with --heads"
        )
    if H % config["n_ssm"]:
        raise CheckpointError(f"{where}: {config['n_ssm']} SSMs do not divide {H} channels")
    check_shapes(weights, config, where)
    return config


def _heads(where, d_model, attention, heads, released):
    if not attention:
        return 0
    if heads is None and released is None:
        raise CheckpointError(
            f"{where} is none of the released models, and the number of attention heads cannot be read from its "
            "shapes: pass it with --heads"
        )
    heads = released if heads is None else heads
    if heads < 1 or d_model % heads:
        raise CheckpointError(f"{where}: {heads} attention heads do not divide d_model {d_model}: pass --heads")
    return heads


def expected_shapes(config):
    """{our name: shape} of every tensor that a model of this config has."""
    D, N, rows = config["d_model"], config["d_state"], config["padded_vocab_size"]
    H, M, S = D // config["head_dim"], N // 2, config["n_ssm"]

    def linear(path, out, width):
        return {f"{path}.weight": (out, width), f"{path}.bias": (out,)}

    shapes = {"embeddings.weight": (rows, D)}
    for i in range(config["n_layer"]):
        p = f"layers.{i}"
        shapes |= {f"{p}.{norm}.{part}": (D,) for norm in ("norm1", "norm2") for part in ("weight", "bias")}
        if i in config["attn_layer_idx"]:
            shapes |= linear(f"{p}.mixer.Wqkv", 3 * D, D) | linear(f"{p}.mixer.out_proj", D, D)
        else:
            for name in LINEARS:
                shapes |= linear(f"{p}.mixer.{name}", D, D)
            shapes |= {f"{p}.mixer.shift.B": (D, N), f"{p}.mixer.shift.C": (D, N), f"{p}.mixer.shift.D": (D,)}
            shapes |= {
                f"{p}.mixer.ssm.C": (H, M, 2), f"{p}.mixer.ssm.B": (S, M, 2), f"{p}.mixer.ssm.log_dt": (H,),
                f"{p}.mixer.ssm.inv_A_real": (S, M), f"{p}.mixer.ssm.A_imag": (S, M), f"{p}.mixer.ssm.D": (H,),
            }  # fmt: skip
        shapes |= linear(f"{p}.mlp.fc1", config["d_inner"], D) | linear(f"{p}.mlp.fc2", D, config["d_inner"])
    shapes |= {"norm_f.weight": (D,), "norm_f.bias": (D,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (rows, D)
    return shapes


def check_shapes(weights, config, where="the checkpoint"):
    """Every tensor there, none too many, each of the right shape and of a float dtype; else CheckpointError."""
    shapes = expected_shapes(config)
    missing = [n for n in shapes if n not in weights]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{where} lacks the tensor {missing[0]!r}{more}: the file is incomplete or damaged")
    for name, tensor in weights.items():
        if name not in shapes:
            raise CheckpointError(f"{where}: layer of tensor {name!r} is both an attention and an H3 layer")
        if tuple(tensor.shape) != shapes[name]:
            raise CheckpointError(
                f"{where}: tensor {name!r} has the shape {list(tensor.shape)}, expected {list(shapes[name])}"
            )
        if hasattr(tensor, "rows") and tensor.dtype not in FLOATS:
            raise CheckpointError(
                f"{where}: tensor {name!r} has the dtype {tensor.dtype}, expected floating point"
            )


def is_ssm(name):
    """SSM tensors stay fp32 in every format."""
    return ".mixer.ssm." in name or ".mixer.shift." in name


def is_matrix(name):
    """Weights of linear layers, of the embedding and of the head: what quantisation applies to."""
    return name.endswith(".weight") and ".norm" not in name and not name.startswith("norm_f.")
