"""Linear layers of any kind (plain, int8, affine) put together: one product for several, a sum in the product's launch."""

import mlx.core as mx
import mlx.nn as nn

from mlx_cosyh3.int8 import Int8Linear


def joined(layers):
    """`layers` (of the same input) as one, their outputs one after the other: the first of them, which takes the weights
    of all. None, and nothing done, if they are not of one kind."""
    first = layers[0]
    if type(first) not in (nn.Linear, Int8Linear, nn.QuantizedLinear):
        return None
    form = lambda m: (type(m), m.keys(), *(getattr(m, n, None) for n in ("bits", "group_size", "mode")))  # noqa: E731
    if any(form(m) != form(first) for m in layers):
        return None
    for name in list(first.keys()):
        first[name] = mx.concatenate([m[name] for m in layers])
    return first


def plus(layer, x, residual):
    """layer(x) + residual, in one operation where there is one."""
    if isinstance(layer, Int8Linear):
        return layer(x, residual=residual)
    if type(layer) is nn.Linear and "bias" not in layer and residual.dtype == x.dtype == layer.weight.dtype:
        return mx.addmm(residual, x, layer.weight.T)
    return residual + layer(x)


def weights(layer):
    """weight, bias and scale (None for what it has not) of a plain or int8 layer; None for another kind."""
    if type(layer) not in (nn.Linear, Int8Linear):
        return None
    return layer.weight, layer.get("bias"), layer.get("scale")
