"""Many requests of all kinds from eight threads: each as alone; memory, threads and files flat.

Run: python -m pytest -q tests/test_soak.py; the slow ones, a tenth of what benchmarks/soak.py does on a GPU: -m slow
"""

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3 import load
from mlx_cosyh3.scheduler import Scheduler
from tests.small_model import write_model
from tests.soaking import GOLDEN_H3, Request, soak, speech_requests, text_requests


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    return load(write_model(tmp_path_factory.mktemp("models") / "h3", **GOLDEN_H3))


def check(model, requests, count):
    with Scheduler(model, workers=4, max_queue=1000) as scheduler:
        figures = soak(requests(model, scheduler), count, say=print)
    print(figures)
    assert figures.asked == count and figures.kinds == 7 and figures.fine, str(figures)


def test_text(writer):
    check(writer, text_requests, 60)


def test_speech(speaker):
    check(speaker, speech_requests, 40)


@pytest.mark.slow
def test_a_thousand_texts(writer):
    check(writer, text_requests, 1000)


@pytest.mark.slow
def test_a_hundred_utterances(speaker):
    check(speaker, speech_requests, 100)


def test_a_soak_sees_what_is_wrong():
    """An answer of another request, memory and files that stay, and a limit of time."""
    kept, files = [], []

    def leaks():
        kept.append(mx.zeros(1 << 16))
        mx.eval(kept[-1])
        return "text"

    leak = soak([Request("leak", leaks)], 60, threads=2)
    assert not leak.fine and leak.spread > 0.01 and not leak.wrong
    opens = Request("file", lambda: files.append(open(__file__)) or "text")
    assert soak([opens], 60, threads=2).growth[1] > 0
    [f.close() for f in files]
    answers = iter(range(1000))
    wrong = soak([Request("other", lambda: np.arange(next(answers) // 30))], 60, threads=1).wrong
    assert wrong[0] == (29, "other") and len(wrong) == 31
    times = iter([1] * 30 + [0] * 100)
    fails = soak([Request("fails", lambda: 1 // next(times))], 40, threads=1)
    assert fails.asked == 40 and len(fails.wrong) == 11 and "ZeroDivisionError" in str(fails)
    part = Request("part", lambda: "the cat", lambda: "the")
    assert soak([part], 25).fine and soak([Request("part", lambda: "the cat", lambda: "a")], 25).wrong
    short = soak([part], 10**9, seconds=0.5)
    assert 20 <= short.asked < 10**9 and short.held
