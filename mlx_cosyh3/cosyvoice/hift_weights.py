"""Names and layouts of a HiFT checkpoint (`hift.pt`), of all three CosyVoice versions.

Upstream's names are kept, but for weight norm: w = g v / |v| is folded, computed in float64 and stored in fp32. That
of the pitch predictor stays as `weight_g` [O] and `weight_v`: it is folded in float64 where it is used (see `f0.py`).
"""

import re

import numpy as np

from mlx_cosyh3.errors import CheckpointError, nearest

# PyTorch's two spellings of weight norm: magnitude and direction
_NORM = re.compile(r"(.*)\.(?:parametrizations\.weight\.original([01])|weight_([gv]))$")
_UNFOLDED = "f0_predictor.condnet."
_CONVS = (
    "conv_pre", "conv_post", "ups.#", "source_downs.#", "f0_predictor.condnet.#",
    *(f"{blocks}.#.{convs}.#" for blocks in ("resblocks", "source_resblocks") for convs in ("convs1", "convs2")),
)  # fmt: skip
_LINEARS = ("m_source.l_linear", "f0_predictor.classifier")
_KNOWN = {f"{name}.{kind}" for name in (*_CONVS, *_LINEARS) for kind in ("weight", "bias")}
_KNOWN |= {f"{blocks}.#.activations{i}.#.alpha" for blocks in ("resblocks", "source_resblocks") for i in (1, 2)}


def sanitize(weights):
    """{upstream's key: numpy array} -> {our key: numpy array}; what is converted already passes unchanged.

    Convolutions become [out, K, in] (views where nothing is folded). Raises CheckpointError for an unknown key."""
    plain, halves = {}, {}
    for name, a in weights.items():
        name = name.replace("generator.", "")
        match = _NORM.match(name)
        general = re.sub(r"(?<=\.)\d+(?=\.)", "#", f"{match[1]}.weight" if match else name)
        if general not in _KNOWN:
            raise CheckpointError(f"the vocoder has no tensor {name!r}{nearest(general, _KNOWN)} (# is a number)")
        if match:
            halves.setdefault(match[1], {})["g" if match[2] == "0" or match[3] == "g" else "v"] = a
        else:
            plain[name] = a
    upstream = _upstream_layout(plain, halves)
    layout = (lambda name, a: _our_layout(name, a, plain)) if upstream else (lambda name, a: a)
    out = {name: layout(name, a) if a.ndim == 3 else a for name, a in plain.items()}
    for name, half in halves.items():
        if len(half) != 2:
            raise CheckpointError(f"the vocoder's {name} has only one half of its weight norm: the file is damaged")
        if name.startswith(_UNFOLDED):
            out[f"{name}.weight_g"], out[f"{name}.weight_v"] = half["g"].reshape(-1), layout(name, half["v"])
        else:
            out[f"{name}.weight"] = layout(name, _fold(half["g"], half["v"]))
    for name in [name for name in out if name.startswith(_UNFOLDED) and name.endswith(".weight")]:
        v = out.pop(name)  # folded by someone else: unfold it
        out[f"{name}_g"], out[f"{name}_v"] = _norm(v).reshape(-1).astype(np.float32), v
    return out


def _norm(v):
    return np.sqrt(np.sum(np.square(v, dtype=np.float64), axis=(1, 2), keepdims=True))


def _fold(g, v):
    return (v * (g.astype(np.float64).reshape(-1, 1, 1) / _norm(v))).astype(np.float32)


def _our_layout(name, a, weights):
    """[O, I, K] -> [O, K, I]; a transposed convolution, whose first axis is not the bias's, [I, O, K] -> [O, K, I]."""
    bias = weights.get(f"{name.removesuffix('.weight')}.bias")
    transposed = name.startswith("ups.") and bias is not None and bias.shape[0] != a.shape[0]
    return np.transpose(a, (1, 2, 0) if transposed else (0, 2, 1))


def _upstream_layout(plain, halves):
    """Whether the arrays are PyTorch's. The last source_downs has kernel 1, so its axes tell; else weight norm does."""
    downs = sorted(name for name in plain if re.fullmatch(r"source_downs\.\d+\.weight", name))
    if downs:
        return plain[downs[-1]].shape[2] == 1
    return any(not name.startswith(_UNFOLDED) for name in halves)
