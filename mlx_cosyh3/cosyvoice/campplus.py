"""CAM++, the speaker encoder: log-mel frames of any length -> one embedding (Wang et al., 2023; 3D-Speaker's CAMPPlus).

    head       2-D convolutions over (frequency, time), frequency / 8
    tdnn       to one channel axis, time / 2
    block1..3  densely connected layers: each sees all before it, and gates its output by what the whole recording
               (and a hundred frames around) sounds like
    stats      mean and deviation over time, one linear layer

All batch norms are affine maps at run time. Those that follow a convolution are folded into it, the others are kept as
`scale` and `shift`. Frames are [B, T, C]; the head's maps [B, F, T, C].
"""

import re
from dataclasses import dataclass, fields

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_cosyh3.cosyvoice.conv import Conv1d
from mlx_cosyh3.errors import CheckpointError, CosyH3Error, nearest

EPSILON = 1e-5  # of PyTorch's batch norm
HEAD_FRAMES = 1024  # the head, which has the largest maps, works on this many frames at a time


@dataclass
class CAMPPlusConfig:
    feat_dim: int = 80
    embedding_size: int = 192
    head_channels: int = 32
    init_channels: int = 128  # after tdnn
    growth_rate: int = 32  # channels that a dense layer adds
    bottleneck: int = 128  # channels inside a dense layer
    context: int = 64  # channels of its gate
    layers: tuple = (12, 24, 16)  # dense layers of each block
    dilations: tuple = (1, 2, 2)
    segment: int = 100  # frames that the gate's local context is averaged over

    @classmethod
    def from_dict(cls, d):
        missing = [f.name for f in fields(cls) if f.name not in d]
        if missing:
            raise CheckpointError(f"the speaker encoder's config lacks {missing[0]!r}: convert the model again")
        return cls(**{f.name: d[f.name] for f in fields(cls)})

    @classmethod
    def from_weights(cls, weights, **known):
        """The sizes that the shapes of converted weights imply; `known`: what is known besides."""
        try:
            count = [len({n.split(".")[1] for n in weights if n.startswith(f"block{i}.")}) for i in (1, 2, 3)]
            head, tdnn = weights["head.conv1.conv.weight"].shape[0], weights["tdnn.weight"].shape
            bottleneck, growth = weights["block1.0.linear.weight"].shape[0], weights["block1.0.local.weight"].shape[0]
            context, embedding = weights["block1.0.context1.weight"].shape[0], weights["dense.weight"].shape[0]
            feat_dim = 8 * (tdnn[2] // head)
        except KeyError as e:
            raise CheckpointError(
                f"the speaker encoder lacks the tensor {e.args[0]!r}: it is cut short, or no CAM++"
            ) from e
        except (IndexError, ZeroDivisionError) as e:
            raise CheckpointError("the speaker encoder has weights of the wrong shape: it is no CAM++") from e
        return cls(feat_dim, embedding, head, tdnn[0], growth, bottleneck, context, tuple(count), **known)


class FrequencyConv(nn.Module):
    """A 3 x 3 convolution with `stride` in frequency, as one over time that sees three bins at once.

    weight   [out, 3 (time), 3 in]: of three neighbouring bins, low to high, all channels"""

    def __init__(self, in_dims, out_dims, stride=1):
        super().__init__()
        self.conv = Conv1d(3 * in_dims, out_dims, 3, padding=(1, 1))
        self._stride = stride

    def __call__(self, x):  # [B, F, T, C] -> [B, F / stride, T, O]
        B, F, T, _ = x.shape
        x = mx.pad(x, [(0, 0), (1, 1), (0, 0), (0, 0)])
        x = mx.concatenate([x[:, i : i + F : self._stride] for i in range(3)], axis=-1)  # [B, F', T, 3 C]
        y = self.conv(x.reshape(-1, T, x.shape[-1]))
        return y.reshape(B, -1, T, y.shape[-1])


class ResBlock(nn.Module):
    def __init__(self, dims, stride):
        super().__init__()
        self.conv1 = FrequencyConv(dims, dims, stride)
        self.conv2 = FrequencyConv(dims, dims)
        if stride > 1:
            self.shortcut = nn.Linear(dims, dims)
        self._stride = stride

    def __call__(self, x):
        y = self.conv2(_relu(self.conv1(x)))
        return _relu(y + (self.shortcut(x[:, :: self._stride]) if "shortcut" in self else x))


class Head(nn.Module):
    reach = 10  # frames that an output sees to each side: convolutions in a row

    def __init__(self, dims):
        super().__init__()
        self.conv1 = FrequencyConv(1, dims)
        self.layer1 = [ResBlock(dims, 2), ResBlock(dims, 1)]
        self.layer2 = [ResBlock(dims, 2), ResBlock(dims, 1)]
        self.conv2 = FrequencyConv(dims, dims, 2)

    def __call__(self, x):
        """[B, T, F] -> [B, T, C F / 8], in pieces, each with its surroundings: exact, and the memory stays bounded."""
        T, out = x.shape[1], []
        for start in range(0, T, HEAD_FRAMES):
            stop, first = min(start + HEAD_FRAMES, T), max(0, start - self.reach)
            y = self._maps(x[:, first : stop + self.reach])[:, start - first :][:, : stop - start]
            if T > HEAD_FRAMES:
                mx.eval(y)
            out.append(y)
        return mx.concatenate(out, axis=1)

    def _maps(self, x):
        x = x.transpose(0, 2, 1)[..., None]  # [B, F, T, 1]
        x = _relu(self.conv1(x))
        for block in (*self.layer1, *self.layer2):
            x = block(x)
        x = _relu(self.conv2(x))
        B, F, T, C = x.shape
        return x.transpose(0, 2, 3, 1).reshape(B, T, C * F)


class Norm(nn.Module):
    """Batch norm and ReLU."""

    def __init__(self, dims):
        super().__init__()
        self.scale, self.shift = mx.ones((dims,)), mx.zeros((dims,))

    def __call__(self, x):
        return _relu(x * self.scale + self.shift)


class DenseLayer(nn.Module):
    def __init__(self, dims, config, dilation):
        super().__init__()
        c = config
        self.norm = Norm(dims)
        self.linear = nn.Linear(dims, c.bottleneck)  # with the batch norm after it
        self.local = Conv1d(c.bottleneck, c.growth_rate, 3, dilation=dilation, padding=(dilation, dilation), bias=False)
        self.context1 = nn.Linear(c.bottleneck, c.context)
        self.context2 = nn.Linear(c.context, c.growth_rate)
        self._segment = c.segment

    def __call__(self, x):  # [B, T, C] -> [B, T, growth]
        x = _relu(self.linear(self.norm(x)))
        return self.local(x) * self._gate(x)

    def _gate(self, x):
        """Constant over each segment of frames, so it is computed once for each."""
        B, T, C = x.shape
        size, n = self._segment, -(-T // self._segment)
        sums = mx.pad(x, [(0, 0), (0, n * size - T), (0, 0)]).reshape(B, n, size, C).sum(axis=2)
        lengths = mx.minimum(size, T - size * mx.arange(n))[:, None]  # the last may be shorter
        context = x.mean(axis=1, keepdims=True) + sums / lengths
        gate = mx.sigmoid(self.context2(_relu(self.context1(context))))  # [B, n, growth]
        return mx.repeat(gate, size, axis=1)[:, :T]


class CAMPPlus(nn.Module):
    """The encoder; its parameters have the names that `sanitize` gives."""

    def __init__(self, config):
        super().__init__()
        c = self._config = config
        self.head = Head(c.head_channels)
        self.tdnn = Conv1d(c.head_channels * (c.feat_dim // 8), c.init_channels, 5, stride=2, padding=(2, 2))
        dims = c.init_channels
        for i, (layers, dilation) in enumerate(zip(c.layers, c.dilations, strict=True), 1):
            self[f"block{i}"] = [DenseLayer(dims + n * c.growth_rate, c, dilation) for n in range(layers)]
            dims += layers * c.growth_rate
            self[f"norm{i}"] = Norm(dims)
            self[f"transit{i}"] = nn.Linear(dims, dims // 2, bias=i == len(c.layers))  # the last with its batch norm
            dims //= 2
        self.dense = nn.Linear(2 * dims, c.embedding_size)  # with the batch norm after it

    @property
    def config(self):
        return self._config

    def __call__(self, fbank):
        """fbank [B, T, 80] (`features.kaldi_fbank`, minus its mean over time) -> embedding [B, 192], not normalised."""
        if fbank.shape[1] < 3:
            raise CosyH3Error(
                f"{fbank.shape[1]} frames are too few for a speaker embedding: at least 3 are needed (45 ms)"
            )
        x = _relu(self.tdnn(self.head(fbank)))
        for i in range(1, len(self._config.layers) + 1):
            for layer in self[f"block{i}"]:
                x = mx.concatenate([x, layer(x)], axis=-1)
            x = self[f"transit{i}"](self[f"norm{i}"](x))
        x = _relu(x)
        return self.dense(mx.concatenate([x.mean(axis=1), mx.sqrt(x.var(axis=1, ddof=1))], axis=-1))


def _relu(x):
    return mx.maximum(x, 0)


# ---------------------------------------------------------------- weights


def quantizes(path):
    return False


def affine(norm, epsilon=EPSILON):
    """(scale, shift), float64, of a batch norm's weight, bias, running_mean, running_var (the first two optional)."""
    shapes = {np.shape(a) for a in norm.values()}
    if len(shapes) != 1:
        raise CheckpointError(f"a batch norm of the speaker encoder has tensors of different shapes, {sorted(shapes)}")
    mean, var = (np.asarray(norm[k], np.float64) for k in ("running_mean", "running_var"))
    scale = np.asarray(norm.get("weight", 1.0), np.float64) / np.sqrt(var + epsilon)
    return scale, np.asarray(norm.get("bias", 0.0), np.float64) - mean * scale


def fold(weight, bias, norm):
    """(weight [O, ...], bias [O]), fp32, of a layer and the (scale, shift) after it; `bias` and `norm` may be None."""
    weight = np.asarray(weight, np.float64)
    bias = np.zeros(weight.shape[:1]) if bias is None else np.asarray(bias, np.float64)
    for a in (bias, *(norm or ())):
        if a.shape != weight.shape[:1]:
            raise CheckpointError(
                f"the speaker encoder has a weight {list(weight.shape)} with a bias or batch norm {list(a.shape)}"
            )
    if norm is not None:
        scale, shift = norm
        weight, bias = weight * scale.reshape(-1, *[1] * (weight.ndim - 1)), bias * scale + shift
    return weight.astype(np.float32), bias.astype(np.float32)


def our_layout(weight):
    """A weight in MLX's order: [O, I, 3, 3] -> [O, 3, 3 I], [O, I, 1(, 1)] -> [O, I], [O, I, K] -> [O, K, I]."""
    if weight.ndim == 4 and weight.shape[2:] == (3, 3):
        return weight.transpose(0, 3, 2, 1).reshape(weight.shape[0], 3, 3 * weight.shape[1])
    if weight.ndim > 2 and set(weight.shape[2:]) == {1}:
        return weight.reshape(weight.shape[:2])
    return weight.transpose(0, 2, 1) if weight.ndim == 3 else weight


# Upstream's layer, the batch norm after it (folded in; "" for none), and ours; upstream counts dense layers from 1.
_LAYERS = (
    (r"head\.conv([12])", r"head.bn\1", r"head.conv\1.conv"),
    (r"head\.layer([12])\.(\d+)\.conv([12])", r"head.layer\1.\2.bn\3", r"head.layer\1.\2.conv\3.conv"),
    (r"head\.layer([12])\.(\d+)\.shortcut\.0", r"head.layer\1.\2.shortcut.1", r"head.layer\1.\2.shortcut"),
    (r"xvector\.tdnn\.linear", "xvector.tdnn.nonlinear.batchnorm", "tdnn"),
    (
        r"xvector\.block(\d)\.tdnnd(\d+)\.linear1",
        r"xvector.block\1.tdnnd\2.nonlinear2.batchnorm",
        r"block\1.-\2.linear",
    ),
    (r"xvector\.block(\d)\.tdnnd(\d+)\.cam_layer\.linear_local", "", r"block\1.-\2.local"),
    (r"xvector\.block(\d)\.tdnnd(\d+)\.cam_layer\.linear([12])", "", r"block\1.-\2.context\3"),
    (r"xvector\.transit(3)\.linear", "xvector.out_nonlinear.batchnorm", r"transit\1"),
    (r"xvector\.transit([12])\.linear", "", r"transit\1"),
    (r"xvector\.dense\.linear", "xvector.dense.nonlinear.batchnorm", "dense"),
)
# Batch norms before a layer, kept as scale and shift
_NORMS = (
    (r"xvector\.block(\d)\.tdnnd(\d+)\.nonlinear1\.batchnorm", r"block\1.-\2.norm"),
    (r"xvector\.transit(\d)\.nonlinear\.batchnorm", r"norm\1"),
)
_OURS = re.compile(
    r"(head\.(layer\d\.\d+\.)?conv\d\.conv|head\.layer\d\.\d+\.shortcut|tdnn|transit\d|dense|"
    r"block\d\.\d+\.(linear|local|context\d))"
    r"\.(weight|bias)|(block\d\.\d+\.norm|norm\d)\.(scale|shift)"
)


def sanitize(weights):
    """{upstream's key: numpy array} -> {our key: numpy array}; what is converted already passes unchanged.

    Folds batch norms in float64. Raises CheckpointError for an unknown key or a layer without its batch norm."""
    groups, out = {}, {}
    for name, a in weights.items():
        if _OURS.fullmatch(name):
            out[name] = a
        elif not name.endswith(".num_batches_tracked"):
            layer, _, kind = name.rpartition(".")
            groups.setdefault(layer, {})[kind] = a
    used = set()
    for layer, group in groups.items():
        for pattern, norm, ours in _LAYERS:
            if match := re.fullmatch(pattern, layer):
                norm, ours = match.expand(norm), _count_from_0(match.expand(ours))
                used |= {layer, norm}
                if norm and norm not in groups:
                    raise CheckpointError(f"the speaker encoder lacks the batch norm {norm!r} after {layer!r}")
                try:
                    after = affine(groups[norm]) if norm else None
                    weight, bias = fold(our_layout(group["weight"]), group.get("bias"), after)
                except KeyError as e:
                    raise CheckpointError(
                        f"the speaker encoder lacks {e.args[0]!r} of {layer!r} or its batch norm"
                    ) from e
                out[f"{ours}.weight"] = weight
                if norm or "bias" in group:
                    out[f"{ours}.bias"] = bias
        for pattern, ours in _NORMS:
            if match := re.fullmatch(pattern, layer):
                used.add(layer)
                ours = _count_from_0(match.expand(ours))
                try:
                    scale, shift = affine(group)
                except KeyError as e:
                    raise CheckpointError(f"the speaker encoder lacks {e.args[0]!r} of {layer!r}") from e
                out[f"{ours}.scale"], out[f"{ours}.shift"] = scale.astype(np.float32), shift.astype(np.float32)
    for layer in groups:
        if layer not in used:
            raise CheckpointError(f"the speaker encoder has no layer {layer!r}{nearest(layer, used)}")
    return out


def _count_from_0(name):
    return re.sub(r"-(\d+)", lambda m: str(int(m[1]) - 1), name)
