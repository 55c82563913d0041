"""Errors of other threads, which must not keep what was computed with them.

Run: python -m pytest -q tests/test_stream.py
"""

import gc
import weakref

import pytest

from mlx_cosyh3.errors import first_line
from mlx_cosyh3.stream import Beside, Stream


class Array:
    """Something large."""


class Run:
    def __init__(self, held):
        self._held = held

    def pieces(self):
        large = Array()
        self._held.append(weakref.ref(large))
        yield "a"
        raise ValueError("no")

    def result(self):
        return "cut off"


def beside(held):
    def work():
        large = Array()
        held.append(weakref.ref(large))
        raise ValueError("no")

    Beside(work).result()


def streamed(held):
    for _ in Stream(Run(held)):
        continue


@pytest.mark.parametrize("use", [streamed, beside])
def test_a_failure_lets_go_without_the_garbage_collector(use):
    held = []
    gc.disable()
    try:
        for _ in range(20):  # of the last one the thread itself may not have let go yet
            with pytest.raises(ValueError, match="no") as e:
                use(held)
            del e
        assert sum(large() is not None for large in held) <= 1
    finally:
        gc.enable()


def test_an_error_is_raised_whenever_it_is_asked_for():
    failed = Beside(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failed.result()
    assert Beside(lambda: 3).result() == 3


@pytest.mark.parametrize(
    "error, line", [(TimeoutError(), "TimeoutError"), (ValueError(" a\nb"), "a"), (OSError("\n"), "OSError")]
)
def test_first_line(error, line):
    assert first_line(error) == line
