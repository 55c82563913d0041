"""A model with a second, lighter set of weights: the same model, quantised or in a smaller dtype.

    model = load("my-voice-model", lighter="my-voice-model-int8")
    generate(model, text, deadline=2.0)

Both stay in memory, so that a request can change over without loading anything: an int8 form adds about a quarter of
an fp32 model's size. Only a request with a deadline that the model itself cannot meet uses the lighter weights, for
all of its stages; the result's decisions say so. By themselves they are `of(model)`.
"""

import dataclasses

from mlx_cosyh3.caches import nbytes
from mlx_cosyh3.errors import CosyH3Error

WEIGHTS = ("quantization", "dtype")  # entries of a config.json that say how weights are stored, not what they are of


def join(model, lighter):
    """Let `model` have `lighter`, a model, too -> model. Raises CosyH3Error unless that is a lighter form of it."""
    own, other = _kind(model), _kind(lighter)
    differ = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
    if differ:
        raise CosyH3Error(f"lighter: it is another model, its config.json differs in {', '.join(differ[:3])}; give a "
                          "form of the same model, as `convert -q` makes it")  # fmt: skip
    sizes = nbytes(model), nbytes(lighter)
    if sizes[1] >= sizes[0]:
        raise CosyH3Error(f"lighter: its weights take {sizes[1] / 1e6:.1f} MB, those of the model itself "
                          f"{sizes[0] / 1e6:.1f} MB; give a quantised form, as `convert -q` makes it")  # fmt: skip
    object.__setattr__(model, "_lighter", lighter)  # not one of its parts: those are what it computes with
    return model


def of(model):
    """The lighter form that `model` was loaded with, or None."""
    return vars(model).get("_lighter")


def _kind(model):
    config = model.config if isinstance(model.config, dict) else dataclasses.asdict(model.config)
    return {name: value for name, value in config.items() if name not in WEIGHTS}
