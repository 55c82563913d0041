"""What `generate` and `repl` share: the options and how they are spelt, streaming to stdout, statistics."""

from mlx_cosyh3.errors import CosyH3Error, nearest
from mlx_cosyh3.textgen import TextOptions

# name -> (type, placeholder, help). Defaults are those of the Python function.
OPTIONS = {
    "max_tokens": (int, "N", "most tokens to generate"),
    "temperature": (float, "T", "how freely to draw; 0 = always the likeliest token"),
    "top_k": (int, "K", "draw from the K likeliest tokens only; 0 = off"),
    "top_p": (float, "P", "draw from the smallest set whose probability reaches P; 1 = off"),
    "min_p": (float, "P", "leave out tokens less likely than P times the likeliest; 0 = off"),
    "repetition_penalty": (float, "R", "above 1: make tokens that occurred less likely"),
    "seed": (int, "S", "the same seed gives the same text; without one it differs each time"),
    "stop": (
        str,
        "TEXT",
        r"end at this text, which is not shown (but is part of the state); \n, \t, \\ as in a program",
    ),
}
DEFAULTS = {name: getattr(TextOptions(), name) for name in OPTIONS}


def check(options):
    """Raise CosyH3Error unless all `options` (a dict with OPTIONS' names) can be used."""
    TextOptions(**options)


def parse_option(name, text):
    """Option `name` (dashes or underscores), value as text ("none" where that is one) -> (name, value)."""
    name = name.strip("-").replace("-", "_")
    if name not in OPTIONS:
        raise CosyH3Error(f"unknown option {name!r}{nearest(name, OPTIONS)}")
    kind = OPTIONS[name][0]
    if text.lower() == "none" and DEFAULTS[name] in (None, ()):
        return name, DEFAULTS[name]
    if kind is str:
        return name, (unescape(text),)
    try:
        return name, kind(text)
    except ValueError:
        raise CosyH3Error(f"{name} must be a {'whole ' if kind is int else ''}number, not {text!r}") from None


def unescape(text):
    r"""Turn \n, \t and \\ into what they stand for: shells pass them on as they are typed."""
    parts = [part.replace(r"\n", "\n").replace(r"\t", "\t") for part in text.split(r"\\")]
    return "\\".join(parts)


def show(stream, out):
    """Write a TextStream to `out` as it comes -> (TextResult, whether Ctrl-C cut it short).

    After Ctrl-C all that was generated is shown, so that screen, result and cache agree. A line end follows the
    text if it has none. Raises what the stream raises, and OSError from `out`.
    """
    shown, last, interrupted = 0, "", False

    def write(text):
        nonlocal shown, last
        # Counted first: Ctrl-C is raised when a call returns, so it comes after the write, never between the two.
        shown, last = shown + len(text), text[-1:] or last
        out.write(text)
        out.flush()

    try:
        try:
            for piece in stream:
                write(piece)
        except KeyboardInterrupt:
            interrupted = True
        stream.close()
        write(stream.result.text[shown:])
        return stream.result, interrupted
    finally:
        stream.close()
        if last != "\n":
            write("\n")


def stats_line(result, max_tokens, seed=None):
    """One line about a TextResult: sizes, speeds, memory, and why it ended."""
    ended = {
        "stop": "ended by itself",
        "length": f"cut off by --max-tokens {max_tokens}",
        "cancelled": "interrupted",
    }[result.finish_reason]
    seed = "" if seed is None else f"; seed {seed}"
    return (
        f"prompt {result.prompt_tokens} tokens, {result.prompt_tps:.1f} tokens/s; "
        f"generation {len(result.tokens)} tokens, {result.generation_tps:.1f} tokens/s; "
        f"peak memory {result.peak_memory:.3f} GB{seed}; {ended}"
    )
