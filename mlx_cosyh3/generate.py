"""`generate`, `stream_generate`, `batch_generate`: the same three functions for every model family.

They hand over to the loaded model, which brings its own options and its own kind of result (`results.py`).
An unknown option is a TypeError that names the nearest one.
"""


def generate(model, prompt, **options):
    """Continue `prompt` and return the whole result. For a language model's options see `textgen.TextOptions`."""
    return _method(model, "generate")(prompt, **options)


def stream_generate(model, prompt, **options):
    """Like `generate`, as an iterator that yields each piece as it is made; `.result` holds the result at the end."""
    return _method(model, "stream_generate")(prompt, **options)


def batch_generate(model, prompts, **options):
    """Like `generate` for a list of prompts at once; returns a list of results in the same order."""
    return _method(model, "batch_generate")(prompts, **options)


def _method(model, name):
    if not hasattr(model, name):
        raise TypeError(f"{name} takes a model that load() returned, not a {type(model).__name__}")
    return getattr(model, name)
