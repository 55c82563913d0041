"""One token of one sequence through H3 in four launches a layer (kernels/h3_layer.py, norm_linear.py), where a GPU allows it.

Launches, not arithmetic, are what a token costs on a large GPU. This is `H3.step` for a batch of one, head_dim 1, and
weights of one dtype or in int8 per output row; anything else takes the general way, with the same result.
"""

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from mlx_cosyh3.compiled import in_main_thread
from mlx_cosyh3.int8 import Int8Embedding, Int8Linear
from mlx_cosyh3.kernels import _dispatch, h3_layer, norm_linear


class FusedStep:
    """Called as step(model, ids [1], cache) -> logits [1, padded vocabulary], if `usable(model)`.

    The H3 layers between two attention layers are one compiled function, with the embedding and the head in the first
    and the last. (Attention layers are not compiled: their arrays grow.)"""

    def __init__(self):
        self._usable = {}  # kernels that may run -> whether all pieces of this model do
        self._runs = None

    def usable(self, model):
        if not _dispatch.on_gpu():
            return False
        choice = _dispatch.allowed()
        if choice not in self._usable:
            self._usable[choice] = _all_usable(model)
        return self._usable[choice]

    def __call__(self, model, ids, cache):
        if self._runs is None:
            self._runs = _runs(model)
        position, x = int(cache.lengths[0]), ids
        for run, layers in self._runs:
            if run is None:
                x = _attention_layer(model.layers[layers[0]], x, cache.layers[layers[0]], position)
                continue
            states = [cache.layers[i] for i in layers]
            x, new = run(x, [s.arrays() for s in states])
            for state, (shift, ssm) in zip(states, new):
                state.shift, state.ssm = shift, ssm
        cache.lengths = cache.lengths + 1
        return x


def _runs(model):
    """(function, its layers) for each run of H3 layers, (None, [i]) for an attention layer."""
    attention = [hasattr(layer.mixer, "Wqkv") for layer in model.layers]
    groups = [[]]
    for i, is_attention in enumerate(attention):
        if is_attention:
            groups += [[i], []]
        else:
            groups[-1].append(i)
    runs = []
    for n, layers in enumerate(groups):
        if layers and attention[layers[0]]:
            runs.append((None, layers))
        elif layers or n in (0, len(groups) - 1):
            run = partial(_h3_layers, model, layers, n == 0, n == len(groups) - 1)
            runs.append((in_main_thread(run), layers))
    return runs


def _h3_layers(model, layers, first, last, x, states):
    """`layers` for one token. x is ids [1] if `first`, else the residual [D]; logits [1, V] come back if `last`."""
    r, new = model.embeddings(x)[0] if first else x, []
    for i, (shift, ssm) in zip(layers, states):
        layer = model.layers[i]
        m = layer.mixer
        y, shift, ssm = h3_layer.h3_mixer(r, _norm(layer.norm1), _projections(m), shift, ssm, m._params)
        new.append([shift, ssm])
        r = _mlp(layer, norm_linear.norm_linear(y, *_weights(m.output_linear), residual=r))
    if last:
        r = norm_linear.norm_linear(r, *_head(model), norm=_norm(model.norm_f))[None]
    return r, new


def _attention_layer(layer, r, state, position):
    m = layer.mixer
    qkv = norm_linear.norm_linear(r, *_weights(m.Wqkv), norm=_norm(layer.norm1))
    y = m.attend(qkv[None, None], state, position)[0, 0]
    return _mlp(layer, norm_linear.norm_linear(y, *_weights(m.out_proj), residual=r))


def _mlp(layer, r):
    fc1, fc2 = _weights(layer.mlp.fc1), _weights(layer.mlp.fc2)
    h = norm_linear.norm_linear(r, *fc1, norm=_norm(layer.norm2), activation="gelu_tanh")
    return norm_linear.norm_linear(h, *fc2, residual=r)


def _norm(layer_norm):
    return layer_norm.weight, layer_norm.bias, layer_norm.eps


def _weights(linear):
    """weight, bias and scale of a linear layer (or embedding); None for what it has not."""
    return linear.weight, linear.get("bias"), linear.get("scale")


def _projections(mixer):
    three = [_weights(m) for m in (mixer.q_proj, mixer.k_proj, mixer.v_proj)]
    return [a for weight, bias, _ in three for a in (weight, bias)] + [s for *_, s in three if s is not None]


def _head(model):
    return _weights(model.embeddings if model.config.tie_word_embeddings else model.lm_head)


def _all_usable(model):
    tables = nn.Embedding, Int8Embedding
    if model.config.head_dim != 1 or not isinstance(model.embeddings, tables):
        return False
    linear = [m for _, m in model.named_modules() if hasattr(m, "weight") and not isinstance(m, (*tables, nn.LayerNorm))]
    if any(type(m) not in (nn.Linear, Int8Linear) for m in linear):
        return False
    x = mx.zeros((model.config.d_model,), dtype=model.embeddings(mx.array([0])).dtype)
    wide = mx.zeros((model.config.d_inner,), dtype=x.dtype)
    usable = norm_linear.usable
    for layer in model.layers:
        m, fc1, fc2 = layer.mixer, _weights(layer.mlp.fc1), _weights(layer.mlp.fc2)
        norm1, norm2 = _norm(layer.norm1), _norm(layer.norm2)
        if hasattr(m, "Wqkv"):
            first, out = usable(x, *_weights(m.Wqkv), norm=norm1), m.out_proj
        else:
            first, out = h3_layer.mixer_usable(x, norm1, _projections(m), m._params), m.output_linear
        if not (
            first
            and usable(x, *_weights(out), residual=x)
            and usable(x, *fc1, norm=norm2, activation="gelu_tanh")
            and usable(wide, *fc2, residual=x)
        ):
            return False
    return usable(x, *_head(model), norm=_norm(model.norm_f))
