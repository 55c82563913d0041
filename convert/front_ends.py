"""The two front ends out of a CosyVoice folder: speaker encoder and speech tokenizer, from their .onnx (or .pt) files.

An exported graph has lost most of its names (`onnx::MatMul_2536`), and batch norms that follow a convolution are
folded into it. So layers are found by how the graph is connected, in the order in which they run; the names of nodes,
which exporters keep (`/blocks.0/attn/query/MatMul`), are used where they are there.
"""

import dataclasses
import re

import numpy as np
from mlx.utils import tree_flatten

from mlx_cosyh3.convert.onnx_file import read_onnx
from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.cosyvoice import campplus, s3tokenizer
from mlx_cosyh3.cosyvoice.campplus import CAMPPlus, CAMPPlusConfig
from mlx_cosyh3.cosyvoice.s3tokenizer import S3Tokenizer, S3TokenizerConfig
from mlx_cosyh3.errors import CheckpointError, CosyH3Error

PASSED = ("Cast", "Identity", "Squeeze", "Unsqueeze")  # nodes that a layer may have between its parts
ATTENTION = ("query", "key", "value", "out")
MAX_STEP = 1000  # of a dilation or a pool: far above any model's, and no danger to memory


def campplus_from(path):
    """The speaker encoder in `path` -> (config as a dict, {our name: numpy array}).

    path   campplus.onnx, or a checkpoint with the names of 3D-Speaker
    Raises CheckpointError for a file that is damaged or holds something else."""
    known = {}
    if str(path).endswith(".onnx"):
        with _named(path):
            weights, known = _campplus_graph(read_onnx(path))
    else:
        tensors = open_source(path).tensors
        with _named(path):
            weights = campplus.sanitize({n: np.asarray(t.numpy()) for n, t in tensors.items()})
    with _named(path):
        return _checked(CAMPPlus, CAMPPlusConfig, weights, known)


def speech_tokenizer_from(path, rate=None):
    """The speech tokenizer in `path`, of any version -> (config as a dict, {our name: numpy array}).

    path   speech_tokenizer*.onnx, or a checkpoint with the names of S3Tokenizer
    rate   ids a second, 25 or 50: needed for a v1 checkpoint that is no .onnx, whose weights do not tell
    Raises CheckpointError for a file that is damaged or holds something else."""
    known = {}
    if str(path).endswith(".onnx"):
        with _named(path):
            weights, known = _s3_graph(read_onnx(path))
    else:
        tensors = open_source(path).tensors
        with _named(path):
            weights = s3tokenizer.sanitize({n: np.asarray(t.numpy()) for n, t in tensors.items()})
        if "positions" in weights and rate not in (25, 50):
            raise CosyH3Error(f"{path} is a v1 speech tokenizer, which exists at 25 and at 50 ids a second: say which")
        known["strides"] = (1, 2) if rate == 50 else (2, 2)
    with _named(path):
        return _checked(S3Tokenizer, S3TokenizerConfig, weights, known)


class _named:
    """Puts the file's name before the text of a CheckpointError that lacks it."""

    def __init__(self, path):
        self.path = str(path)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, CheckpointError) and self.path not in str(error):
            raise CheckpointError(f"{self.path}: {error}") from error


def _checked(model, config, weights, known):
    """(config as a dict, weights). Raises CheckpointError unless the weights are exactly what the model has."""
    for name, a in weights.items():
        if not a.size:
            raise CheckpointError(f"the tensor {name!r} is empty (shape {list(a.shape)}): the file is damaged")
    config = config.from_weights(weights, **known)
    wanted = {name: tuple(a.shape) for name, a in tree_flatten(model(config).parameters())}
    for name in wanted:
        if name not in weights:
            raise CheckpointError(f"the tensor {name!r} is missing: the file is incomplete, or holds another model")
    for name, a in weights.items():
        if wanted.get(name) != a.shape:
            fits = "there is no place for it" if name not in wanted else f"{list(wanted[name])} is needed"
            raise CheckpointError(f"the tensor {name!r} has the shape {list(a.shape)}, but {fits}: it is another model")
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}, weights


# ---------------------------------------------------------------- graphs


def _user(graph, node, *ops):
    """The only node that uses the output of `node`, if it is one of `ops`; nodes that change nothing are passed."""
    for _ in range(4):
        users = [u for o in node.outputs for u in graph.users.get(o, [])]
        if len(users) != 1:
            return None
        if users[0].op in ops:
            return users[0]
        if users[0].op not in PASSED:
            return None
        node = users[0]
    return None


def _weight(graph, node, position, ndim):
    """A constant input of a node, which must have this many axes."""
    value = graph.value(node.inputs[position]) if len(node.inputs) > position and node.inputs[position] else None
    if value is None or value.ndim not in ndim or value.dtype.kind != "f":
        raise CheckpointError(f"the layer {node.name or node.op!r} has no stored weight: it is no graph of this model")
    return value


def _optional(graph, node, position):
    return _weight(graph, node, position, (1,)) if len(node.inputs) > position and node.inputs[position] else None


def _attribute(node, name, default):
    value = node.attributes.get(name, default)
    if not isinstance(value, type(default)):
        raise CheckpointError(f"the layer {node.name or node.op!r} has a strange {name}: {str(value)[:80]}")
    return value


def _step(node, name):
    """The first number of an attribute with one for each axis, such as strides; 1 if it is not there."""
    steps = _attribute(node, name, [1])
    if not steps or not all(isinstance(n, int) and 0 < n <= MAX_STEP for n in steps):
        raise CheckpointError(f"the layer {node.name or node.op!r} has a strange {name}: {str(steps)[:80]}")
    return steps[0]


def _epsilon(value):
    """An fp32 number as it was written: 1e-05, not 9.999999747378752e-06."""
    value = float(str(np.float32(value)))
    if not 0 <= value < 1:
        raise CheckpointError(f"a norm has the epsilon {value}: the file is damaged")
    return value


def _floats(graph, node):
    """The constant inputs of a node that are floats."""
    return [v for v in graph.constants(node).values() if v.dtype.kind == "f"]


# ---------------------------------------------------------------- CAM++


def _campplus_graph(graph):
    """(weights, what the graph tells besides: dilations, segment)."""
    norms_used, items, head = set(), [], []
    for node in graph.nodes:
        if node.op == "Conv":
            after = _user(graph, node, "BatchNormalization")
            if after is not None:
                norms_used.add(id(after))
            weight = campplus.our_layout(_weight(graph, node, 1, (3, 4)))
            pair = campplus.fold(weight, _optional(graph, node, 2), after and _affine(graph, after))
            (head if len(graph.value(node.inputs[1]).shape) == 4 else items).append((node, pair))
        elif node.op == "BatchNormalization" and id(node) not in norms_used:
            items.append((node, _affine(graph, node)))
    weights = _campplus_head(head)
    if not items or items[0][0].op != "Conv":
        raise CheckpointError("it is no speaker encoder: the head is not followed by a convolution over time")
    _put(weights, "tdnn", items[0][1])
    dilations, block, layer = [], 1, 0
    groups = []  # each: a batch norm and the convolutions up to the next one
    for node, pair in items[1:]:
        if node.op == "BatchNormalization":
            groups.append((pair, []))
        elif groups:
            groups[-1][1].append((node, pair))
        else:
            raise CheckpointError("it is no speaker encoder: a dense layer does not begin with a batch norm")
    for i, (norm, convs) in enumerate(groups):
        if len(convs) == 4:
            name = f"block{block}.{layer}"
            if layer == 0:
                dilations.append(_dense_layer(graph, weights, name, convs))
            else:
                _dense_layer(graph, weights, name, convs)
            _put_norm(weights, f"{name}.norm", norm)
            layer += 1
            continue
        last = i == len(groups) - 1
        if len(convs) != 1 + last:
            raise CheckpointError(f"it is no speaker encoder: {len(convs)} convolutions follow the batch norm {i + 1}")
        _put_norm(weights, f"norm{block}", norm)
        _put(weights, f"transit{block}", convs[0][1], bias=last)
        if last:
            _put(weights, "dense", convs[1][1])
        block, layer = block + 1, 0
    pools = [_step(n, "kernel_shape") for n in graph.nodes if n.op == "AveragePool"]
    known = {"dilations": tuple(dilations)} | ({"segment": pools[0]} if pools else {})
    if len(dilations) != 3 or len(set(pools)) > 1:
        raise CheckpointError(
            f"it is no speaker encoder: it has {len(dilations)} dense blocks, not 3, or uneven pooling"
        )
    return weights, known


def _affine(graph, node):
    """(scale, shift) of a BatchNormalization node."""
    kinds = ("weight", "bias", "running_mean", "running_var")
    norm = {kind: _weight(graph, node, i, (1,)) for i, kind in enumerate(kinds, 1)}
    return campplus.affine(norm, _epsilon(_attribute(node, "epsilon", 1e-5)))


def _campplus_head(convs):
    """The 2-D convolutions: one, four residual blocks of two (and a shortcut that shares its input), one."""
    weights = {}
    plain = [c for c in convs if c[1][0].ndim == 3]
    if len(plain) != 10:
        raise CheckpointError(f"it is no speaker encoder: {len(plain)} convolutions of 3 x 3, not 10")
    _put(weights, "head.conv1.conv", plain[0][1])
    _put(weights, "head.conv2.conv", plain[9][1])
    for i in range(4):
        name = f"head.layer{i // 2 + 1}.{i % 2}"
        first, second = plain[1 + 2 * i], plain[2 + 2 * i]
        _put(weights, f"{name}.conv1.conv", first[1])
        _put(weights, f"{name}.conv2.conv", second[1])
        for node, pair in convs:
            if pair[0].ndim == 2 and node.inputs[0] == first[0].inputs[0]:
                _put(weights, f"{name}.shortcut", pair)
    return weights


def _dense_layer(graph, weights, name, convs):
    """Put the four convolutions of a dense layer; -> the dilation of its local one."""
    roles = {"linear": convs[0]}
    for node, pair in convs[1:]:
        roles["local" if pair[0].ndim == 3 else "context2" if _user(graph, node, "Sigmoid") else "context1"] = (
            node,
            pair,
        )
    if len(roles) != 4:
        raise CheckpointError(f"it is no speaker encoder: {name} is no dense layer with a gate")
    for role, (_, pair) in roles.items():
        _put(weights, f"{name}.{role}", pair, bias=role != "local")
    return _step(roles["local"][0], "dilations")


def _put(weights, name, pair, bias=True):
    weights[f"{name}.weight"] = pair[0]
    if bias:
        weights[f"{name}.bias"] = pair[1]
    elif pair[1].any():
        raise CheckpointError(f"{name} has a bias, which the speaker encoder does not have there")


def _put_norm(weights, name, norm):
    weights[f"{name}.scale"], weights[f"{name}.shift"] = (a.astype(np.float32) for a in norm)


# ---------------------------------------------------------------- S3


def _s3_graph(graph):
    """(weights, what the graph tells besides: strides and epsilons)."""
    weights, known = {}, {}
    convs = [n for n in graph.nodes if n.op == "Conv"]
    plain = [n for n in convs if _attribute(n, "group", 1) == 1]
    if len(plain) != 2:
        raise CheckpointError(f"it is no speech tokenizer: {len(plain)} plain convolutions, not 2")
    for i, node in enumerate(plain, 1):
        weights[f"conv{i}.weight"] = _weight(graph, node, 1, (3,)).transpose(0, 2, 1)
        weights[f"conv{i}.bias"] = _weight(graph, node, 2, (1,))
    known["strides"] = tuple(_step(n, "strides") for n in plain)
    if known["strides"] not in ((1, 2), (2, 2)):
        raise CheckpointError(f"it is no speech tokenizer: the strides of its convolutions are {known['strides']}")
    state = weights["conv2.bias"].shape[0]
    linears = _linears(graph)
    blocks, rest = _s3_blocks(linears, state)
    for i, block in enumerate(blocks):
        for part, (weight, bias) in block.items():
            weights[f"blocks.{i}.{part}.weight"] = weight
            if bias is not None:
                weights[f"blocks.{i}.{part}.bias"] = bias
    norms = _layer_norms(graph, state)
    if len(norms) != 2 * len(blocks):
        raise CheckpointError(f"it is no speech tokenizer: {len(norms)} layer norms in {len(blocks)} blocks")
    for i, kind in ((i, kind) for i in range(len(blocks)) for kind in ("attn", "mlp")):
        weight, bias, epsilon = norms[2 * i + (kind == "mlp")]
        weights[f"blocks.{i}.{kind}_ln.weight"], weights[f"blocks.{i}.{kind}_ln.bias"] = weight, bias
        if known.setdefault(f"{kind}_epsilon", epsilon) != epsilon:
            raise CheckpointError(
                f"its {kind} norms have different epsilons ({known[f'{kind}_epsilon']} and {epsilon})"
            )
    deep = [n for n in convs if n not in plain]
    if deep and len(deep) != len(blocks):
        raise CheckpointError(f"it is no speech tokenizer: {len(deep)} memory branches in {len(blocks)} blocks")
    for i, node in enumerate(deep):
        weights[f"blocks.{i}.attn.memory.weight"] = _weight(graph, node, 1, (3,)).transpose(0, 2, 1)
    weights |= _quantiser(graph, rest, state)
    if "codebook" in weights:
        weights["positions"] = _positions(graph, state)
    return weights, known


def _linears(graph):
    """[(node, weight [out, in], bias or None)] in the order in which they run."""
    found = []
    for node in graph.nodes:
        if node.op not in ("MatMul", "Gemm") or len(node.inputs) < 2:
            continue
        weight = graph.value(node.inputs[1])
        if weight is None or weight.ndim != 2 or weight.dtype.kind != "f":
            continue
        if node.op == "Gemm":
            if (
                _attribute(node, "alpha", 1.0) != 1
                or _attribute(node, "beta", 1.0) != 1
                or _attribute(node, "transA", 0)
            ):
                raise CheckpointError(f"the layer {node.name!r} is scaled, which is not expected")
            weight = weight if _attribute(node, "transB", 0) else weight.T
            bias = _optional(graph, node, 2)
        else:
            weight, add = weight.T, _user(graph, node, "Add")
            bias = (
                next((v for v in _floats(graph, add) if v.shape == weight.shape[:1]), None) if add else None
            )
        found.append((node, weight, bias))
    return found


def _s3_blocks(linears, state):
    """([{part: (weight, bias)}], linear layers after the last block). A block: four square ones, one up, one down."""
    blocks = []
    while len(linears) >= 6 and linears[4][1].shape == (4 * state, state):
        six, linears = linears[:6], linears[6:]
        shapes = [weight.shape for _, weight, _ in six]
        if shapes[:4] != [(state, state)] * 4 or shapes[5] != (state, 4 * state):
            raise CheckpointError(f"it is no speech tokenizer: block {len(blocks)} has layers of the shapes {shapes}")
        block = {f"attn.{role}": (weight, bias) for role, (_, weight, bias) in _attention_roles(six[:4]).items()}
        block |= {"mlp1": six[4][1:], "mlp2": six[5][1:]}
        blocks.append(block)
    if not blocks:
        raise CheckpointError("it is no speech tokenizer: it has no attention blocks")
    return blocks, linears


def _attention_roles(four):
    """{role: layer}, by the names of the nodes; without names the one with another input is the last, and of the
    others the one without a bias is the key (else they run in the order of ATTENTION)."""
    named = {m[1]: layer for layer in four if (m := re.search(r"/(query|key|value|out)/", layer[0].name))}
    if set(named) == set(ATTENTION):
        return named
    inputs = [node.inputs[0] for node, _, _ in four]
    others = [i for i in range(4) if inputs.count(inputs[i]) == 1]
    if len(others) != 1:
        raise CheckpointError("it is no speech tokenizer: query, key and value do not share their input")
    three = [layer for i, layer in enumerate(four) if i != others[0]]
    bare = [layer for layer in three if layer[2] is None]
    if len(bare) == 1:
        three.remove(bare[0])
        three.insert(1, bare[0])
    return dict(zip(ATTENTION, [*three, four[others[0]]]))


def _layer_norms(graph, state):
    """[(weight, bias, epsilon)] in the order in which they run: one node, or Sqrt, Div, Mul, Add."""
    found = []
    for node in graph.nodes:
        if node.op == "LayerNormalization":
            epsilon = _attribute(node, "epsilon", 1e-5)
            found.append((_weight(graph, node, 1, (1,)), _weight(graph, node, 2, (1,)), _epsilon(epsilon)))
        elif node.op == "Sqrt":
            parts = (
                (div := _user(graph, node, "Div")) and (mul := _user(graph, div, "Mul")) and _user(graph, mul, "Add")
            )
            inner = graph.maker.get(node.inputs[0]) if node.inputs else None
            if not parts or inner is None or inner.op != "Add":
                continue
            scalars = [v for v in _floats(graph, inner) if v.size == 1]
            pair = [next((v for v in _floats(graph, n) if v.shape == (state,)), None) for n in (mul, parts)]
            if scalars and pair[0] is not None and pair[1] is not None:
                found.append((*pair, _epsilon(scalars[0].reshape(())[()])))
    return found


def _quantiser(graph, rest, state):
    """Weights of the projection to digits, or the codebook: what is squared, else what frames are multiplied by."""
    if len(rest) == 1 and rest[0][2] is not None:
        return {"project.weight": rest[0][1], "project.bias": rest[0][2]}
    squared = (graph.value(n.inputs[0]) for n in graph.nodes if n.op == "Pow" and n.inputs)
    books = [v for v in squared if v is not None and v.dtype.kind == "f"] + [w for _, w, _ in rest]
    books = [v for v in books if v.ndim == 2 and state in v.shape]
    if not books:
        raise CheckpointError("it is no speech tokenizer: it has no quantiser")
    return {"codebook": books[0] if books[0].shape[1] == state else books[0].T}


def _positions(graph, state):
    """The table of positions, added after the convolutions (whole, or cut to the length by a Slice)."""
    tables = [t.numpy() for name, t in graph.weights.items() if name.endswith(".positional_embedding")]
    tables = [v for v in tables if v.dtype.kind == "f" and v.ndim >= 2 and v.shape[-1] == state]
    for node in graph.nodes:
        if node.op in ("Add", "Slice"):
            tables += [v for v in _floats(graph, node) if v.ndim >= 2 and v.shape[-1] == state]
    if not tables or tables[0].size // state < 2:
        raise CheckpointError("it is no speech tokenizer: it has neither a memory branch nor a table of positions")
    return tables[0].reshape(-1, state)
