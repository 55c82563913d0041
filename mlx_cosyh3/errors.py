"""Errors whose message is meant for the user: one line that says what was wrong, its value, and what to do.

The command line prints them as they are and exits with 2; anything else is a bug and keeps its traceback.
"""

import difflib


class CosyH3Error(ValueError):
    """Bad input of any kind: a file, an option, a prompt."""


class CheckpointError(CosyH3Error):
    """A checkpoint that cannot be read, or that does not hold the model it should."""


def nearest(name, known):
    """`, nearest known: 'x'` for error messages, or an empty string when nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f", nearest known: {close[0]!r}" if close else ""
