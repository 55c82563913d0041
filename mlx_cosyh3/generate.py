"""`generate`, `stream_generate`, `batch_generate`: the same three functions for every model family.

They hand over to the loaded model, which brings its own options and its own kind of result (`results.py`).
"""

import inspect

from mlx_cosyh3.errors import nearest


def generate(model, prompt, **options):
    """Continue `prompt` and return the whole result. For an H3 model see `TextGeneration.generate` for the options."""
    return _call(model, "generate", prompt, options)


def stream_generate(model, prompt, **options):
    """Like `generate`, as an iterator that yields each piece as it is made; `.result` holds the result at the end."""
    return _call(model, "stream_generate", prompt, options)


def batch_generate(model, prompts, **options):
    """Like `generate` for a list of prompts at once; returns a list of results in the same order."""
    return _call(model, "batch_generate", prompts, options)


def _call(model, name, prompt, options):
    method = getattr(model, name, None)
    if method is None:
        raise TypeError(f"{name} takes a model that load() returned, not {type(model).__name__}")
    known = [p.name for p in inspect.signature(method).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise TypeError(f"{name}() has no option {option!r}{nearest(option, known)}")
    return method(prompt, **options)
