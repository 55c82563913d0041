"""Graphs that are built once where they can be: what Python does for a token may take longer than the launches."""

import threading

import mlx.core as mx


def in_main_thread(function):
    """`function`, which there runs compiled; in another thread as it is, with the same result.

    A thread that used mx.compile and ended can make the process abort at its exit (MLX 0.32.4)."""
    compiled = mx.compile(function)

    def call(*args):
        here = threading.current_thread() is threading.main_thread()
        return (compiled if here else function)(*args)

    return call
