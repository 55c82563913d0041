"""One token of one sequence through H3 in four launches a layer (kernels/h3_layer.py), where a GPU allows it.

Launches, not arithmetic, are what a token costs on a large GPU. This is `H3.step` for a batch of one, plain (not
quantised) weights of one dtype and head_dim 1; anything else takes the general way, with the same result.
"""

import mlx.core as mx
import mlx.nn as nn

from mlx_cosyh3.kernels import _dispatch, h3_layer


class FusedStep:
    """Called as step(model, ids [1], cache) -> logits [1, padded vocabulary], if `usable(model)`."""

    def __init__(self):
        self._usable = {}  # kernels that may run -> whether all pieces of this model do

    def usable(self, model):
        if not _dispatch.on_gpu():
            return False
        choice = _dispatch.allowed()
        if choice not in self._usable:
            self._usable[choice] = _all_usable(model)
        return self._usable[choice]

    def __call__(self, model, ids, cache):
        position = int(cache.lengths[0])
        r = model.embeddings(ids)[0]  # [D], the residual
        for layer, state in zip(model.layers, cache.layers):
            mixer, fc1, fc2 = layer.mixer, layer.mlp.fc1, layer.mlp.fc2
            if hasattr(mixer, "Wqkv"):
                qkv = h3_layer.norm_linear(r, mixer.Wqkv.weight, mixer.Wqkv.bias, layer_norm=_norm(layer.norm1))
                y, out = mixer.attend(qkv[None, None], state, position)[0, 0], mixer.out_proj
            else:
                y, state.shift, state.ssm = h3_layer.h3_mixer(
                    r, _norm(layer.norm1), _projections(mixer), state.shift, state.ssm, mixer._params
                )
                out = mixer.output_linear
            r = h3_layer.norm_linear(y, out.weight, out.bias, residual=r)
            h = h3_layer.norm_linear(r, fc1.weight, fc1.bias, layer_norm=_norm(layer.norm2), activation="gelu_tanh")
            r = h3_layer.norm_linear(h, fc2.weight, fc2.bias, residual=r)
        cache.lengths = cache.lengths + 1
        return h3_layer.norm_linear(r, _head(model), layer_norm=_norm(model.norm_f))[None]


def _norm(layer_norm):
    return layer_norm.weight, layer_norm.bias, layer_norm.eps


def _projections(mixer):
    return [a for m in (mixer.q_proj, mixer.k_proj, mixer.v_proj) for a in (m.weight, m.bias)]


def _head(model):
    return model.embeddings.weight if model.config.tie_word_embeddings else model.lm_head.weight


def _all_usable(model):
    if model.config.head_dim != 1 or not isinstance(model.embeddings, nn.Embedding):
        return False
    linear = [m for _, m in model.named_modules() if hasattr(m, "weight") and not isinstance(m, (nn.Embedding, nn.LayerNorm))]
    if any(type(m) is not nn.Linear for m in linear):
        return False
    x = mx.zeros((model.config.d_model,), dtype=model.embeddings.weight.dtype)
    wide = mx.zeros((model.config.d_inner,), dtype=x.dtype)
    usable = h3_layer.linear_usable
    for layer in model.layers:
        m, mlp = layer.mixer, layer.mlp
        norm1, norm2 = _norm(layer.norm1), _norm(layer.norm2)
        if hasattr(m, "Wqkv"):
            first, out = usable(x, m.Wqkv.weight, m.Wqkv.bias, norm1), m.out_proj
        else:
            first, out = h3_layer.mixer_usable(x, norm1, _projections(m), m._params), m.output_linear
        if not (
            first
            and usable(x, out.weight, out.bias, residual=x)
            and usable(x, mlp.fc1.weight, mlp.fc1.bias, norm2, activation="gelu_tanh")
            and usable(wide, mlp.fc2.weight, mlp.fc2.bias, residual=x)
        ):
            return False
    return usable(x, _head(model), layer_norm=_norm(model.norm_f))
