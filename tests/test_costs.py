"""What stages cost: lines through measurements, load, the file they are kept in.

Run: python -m pytest -q tests/test_costs.py
"""

import json

import numpy as np
import pytest

from mlx_cosyh3.costs import ENOUGH, FRESH, KEPT, MARGIN, SAVE_EVERY, Costs, Line


def test_a_line_is_found_in_spite_of_outliers():
    sizes = np.arange(10, 210, 10)
    samples = [(x, 0.1 + 0.002 * x) for x in sizes]
    samples[3] = (40, 9.0)  # the machine was asleep
    samples[11] = (120, 5.0)
    line = Line.through(samples)
    assert (line.overhead, line.rate) == (pytest.approx(0.1, rel=0.02), pytest.approx(0.002, rel=0.02))
    assert line.spread == pytest.approx(1, abs=0.02)


def test_one_size_says_nothing_of_an_overhead():
    line = Line.through([(100, 1.0), (100, 1.01), (101, 1.0)])
    assert line.overhead == 0 and line.at(50) == pytest.approx(0.5, rel=0.02)


def test_what_was_measured_while_others_ran_is_no_jitter():
    calm = [(10, 1.0)] * 4 + [(10, 1.2)] * 4
    line = Line.through(calm)
    assert (line.at(10), line.spread) == (pytest.approx(1), pytest.approx(1.2))
    busy = Line.through(calm + [(10, 4.0)] * 7)
    assert (busy.at(10), busy.spread) == (pytest.approx(1), pytest.approx(1.2))


def test_costs_need_some_measurements_and_forget_the_oldest():
    costs = Costs()
    for n in range(1, ENOUGH + 1):
        assert costs.expect("flow", "gpu", 100) is None
        costs.add("flow", "gpu", 100 * n, n)
    assert costs.expect("flow", "gpu", 100) == pytest.approx(1 * MARGIN)
    assert costs.expect("flow", "cpu", 100) is None and costs.expect("vocoder", "gpu", 100) is None
    for size, seconds in ((0, 1), (-1, 1), (5, float("nan")), (5, float("inf")), (5, -1)):
        costs.add("flow", "gpu", size, seconds)  # nothing that could be measured
    assert costs.expect("flow", "gpu", 100) == pytest.approx(1 * MARGIN)
    for n in range(KEPT):
        costs.add("flow", "gpu", 100 + n, 10 * (100 + n))
    assert costs.expect("flow", "gpu", 100) == pytest.approx(1000 * MARGIN, rel=0.01)


def test_a_stage_slower_than_its_history_tells_of_a_load():
    now = [0.0]
    costs = Costs(clock=lambda: now[0])
    for _ in range(20):
        costs.add("flow", "gpu", 100, 1.0)
    assert costs.load("gpu") == 1
    for _ in range(4):
        costs.add("flow", "gpu", 100, 4.0)
    assert costs.load("gpu") == pytest.approx(4) and costs.load("cpu") == 1
    assert costs.expect("flow", "gpu", 200) == pytest.approx(2 * 4 * MARGIN)
    now[0] += FRESH + 1  # long ago
    assert costs.load("gpu") == 1 and costs.expect("flow", "gpu", 200) < 4


def test_costs_are_kept_in_a_file(tmp_path):
    now = [0.0]
    path = tmp_path / "costs" / "a.json"
    costs = Costs(path, clock=lambda: now[0])
    costs.save(now=True)
    assert not path.exists()  # there is nothing to keep
    for n in (1, 2, 3):
        costs.add("flow", "gpu", 100 * n, n)
    costs.save()
    costs.add("flow", "gpu", 400, 4)
    costs.save()  # too soon
    assert len(json.loads(path.read_text())["stages"]["gpu/flow"]) == 3
    now[0] += SAVE_EVERY
    costs.save()
    assert Costs(path).expect("flow", "gpu", 250) == pytest.approx(2.5 * MARGIN)
    assert len(json.loads(path.read_text())["stages"]["gpu/flow"]) == 4


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99, "stages": {}}', '{"format": 1}', "\x00\xff",
                                  '{"format": 1, "stages": {"gpu/flow": [[1, 2], [3]]}}',
                                  '{"format": 1, "stages": {"gpuflow": [[1, 2]]}}',
                                  '{"format": 1, "stages": {"gpu/flow": 3}}'])  # fmt: skip
def test_a_bad_file_counts_for_nothing(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text, encoding="latin-1")
    costs = Costs(path)
    assert costs.expect("flow", "gpu", 1) is None
    for n in (1, 2, 3):
        costs.add("flow", "gpu", n, n)
    costs.save(now=True)
    assert Costs(path).expect("flow", "gpu", 2) == pytest.approx(2 * MARGIN)


def test_nowhere_to_write_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    costs = Costs(tmp_path / "file" / "costs.json")
    costs.add("flow", "gpu", 1, 1)
    costs.save(now=True)
