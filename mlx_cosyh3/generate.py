"""`generate`, `stream_generate`, `batch_generate`: the same three functions for every model family.

They hand over to the loaded model, which brings its own options and its own kind of result (`results.py`).
An unknown option is a TypeError that names the nearest one. Two things are the same for all models: prompts of token
ids may be PyTorch tensors, and `output="torch"` returns such (`integrations/torch.py`).
"""

import sys

from mlx_cosyh3.errors import CosyH3Error


def generate(model, prompt, *, output="numpy", **options):
    """Continue `prompt` and return the whole result. For a language model's options see `textgen.TextOptions`.

    output   "torch": audio, ids and log-probabilities of the result are PyTorch tensors; "numpy": arrays and lists"""
    convert = _converter(output)
    return convert(_method(model, "generate")(_prompt(prompt), **options))


def stream_generate(model, prompt, *, output="numpy", **options):
    """Like `generate`, as an iterator that yields each piece as it is made; `.result` holds the result at the end."""
    _converter(output)
    stream = _method(model, "stream_generate")(_prompt(prompt), **options)
    if output == "numpy":
        return stream
    from mlx_cosyh3.integrations.torch import TorchStream

    return TorchStream(stream)


def batch_generate(model, prompts, *, output="numpy", **options):
    """Like `generate` for a list of prompts at once; returns a list of results in the same order."""
    convert = _converter(output)
    if not isinstance(prompts, (str, dict)):
        prompts = [_prompt(p) for p in prompts]
    return [convert(result) for result in _method(model, "batch_generate")(prompts, **options)]


def _method(model, name):
    if not hasattr(model, name):
        raise TypeError(f"{name} takes a model that load() returned, not a {type(model).__name__}")
    return getattr(model, name)


def _converter(output):
    """What makes the asked-for kind of a result. Raises CosyH3Error, before any work, where that is not possible."""
    if output == "numpy":
        return lambda result: result
    if output != "torch":
        raise CosyH3Error(f"output must be 'numpy' or 'torch', not {output!r}")
    from mlx_cosyh3.integrations.torch import result_to_torch

    return result_to_torch


def _prompt(prompt):
    """A prompt of ids given as a tensor, as a list. Only who has imported PyTorch can have a tensor."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    if not isinstance(prompt, tensor):
        return prompt
    from mlx_cosyh3.integrations.torch import token_ids

    return token_ids(prompt)
