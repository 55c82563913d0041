"""Errors whose message is meant for the user: one line that says what was wrong, its value, and what to do.

The command line prints them as they are and exits with 2; anything else is a bug and keeps its traceback.
"""

import dataclasses
import difflib


class CosyH3Error(ValueError):
    """Bad input of any kind: a file, an option, a prompt."""


class NotFiniteError(CosyH3Error):
    """A stage of a model made a value that is not finite (inf or NaN): its weights, its precision, or its device."""


class StageError(CosyH3Error, RuntimeError):
    """A stage of a model failed, for want of memory or by an error of MLX, and no other device was left for it."""


class DeadlineError(CosyH3Error):
    """A deadline that cannot be met, said before the work starts."""


class CheckpointError(CosyH3Error):
    """A checkpoint that cannot be read, or that does not hold the model it should."""


def take_options(cls, given):
    """The options dataclass `cls` made of keyword arguments; a name it lacks is a TypeError that suggests one."""
    known = [f.name for f in dataclasses.fields(cls)]
    for name in given:
        if name not in known:
            raise TypeError(f"there is no option {name!r}{nearest(name, known)}")
    return cls(**given)


def first_line(error):
    """What an error of somebody else's says, as one line; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(name, known):
    """`, nearest known: 'x'` for error messages, or an empty string when nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f", nearest known: {close[0]!r}" if close else ""
