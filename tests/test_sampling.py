"""Sampling against a plain numpy reference, the drawn distribution, independence of rows, stop strings.

Run: MLX_DISABLE_COMPILE=1 python -m pytest -q tests/test_sampling.py
"""

import math
import subprocess
import sys
import threading

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cosyh3 import sampling
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.sampling import StopText, candidates, check_options, next_keys, penalize, row_keys, sample

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def reference(logits, temperature, top_k, top_p, min_p):
    """(probabilities [V] in float64, smallest distance of a filter's decision from its threshold) of one row."""
    x = np.asarray(logits, dtype=np.float64)
    order = np.argsort(-x, kind="stable")
    if 0 < top_k < len(x):
        order = order[:top_k]
    z = (x[order] - x[order[0]]) / temperature
    p = np.exp(z) / np.exp(z).sum()
    keep = np.ones(len(p), dtype=bool)
    margin = math.inf
    if top_p < 1:
        before = np.cumsum(p) - p
        keep &= before < top_p
        margin = min(margin, np.abs(before[1:] - top_p).min(initial=math.inf))
    if min_p > 0:
        keep &= p >= min_p * p[0]
        margin = min(margin, np.abs(p / p[0] - min_p).min())
    out = np.zeros(len(x))
    out[order[keep]] = p[keep] / p[keep].sum()
    return out, margin


def probabilities(logits, **options):
    """What `candidates` lets `sample` draw, as probabilities [B, V]."""
    ids, scores = candidates(logits, **options)
    p = np.array(mx.softmax(scores, axis=-1))
    if ids is None:
        return p
    out = np.zeros(logits.shape)
    np.put_along_axis(out, np.array(ids).astype(np.int64), p, axis=-1)
    return out


options = st.fixed_dictionaries(
    dict(
        temperature=st.sampled_from([0.05, 0.3, 0.8, 1.0, 2.5]),
        top_k=st.sampled_from([0, 1, 2, 5, 31, 1000]),
        top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
        min_p=st.sampled_from([0.0, 1e-4, 0.05, 0.5, 1.0]),
    )
)


@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 4),
    vocab=st.integers(1, 300),
    spread=st.sampled_from([0.1, 1.0, 5.0, 30.0]),
    masked=st.sampled_from([0.0, 0.3, 0.95]),
    options=options,
)
@settings(max_examples=150, deadline=None)
def test_filters_equal_the_reference(seed, batch, vocab, spread, masked, options):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((batch, vocab)) * spread).astype(np.float32)
    x[rng.random(x.shape) < masked] = -np.inf
    x[:, rng.integers(vocab)] = 0.5  # at least one finite entry a row
    got = probabilities(mx.array(x), **options)
    for row in range(batch):
        want, margin = reference(x[row], **options)
        if margin > 1e-5:  # else fp32 may rightly decide the other way
            np.testing.assert_allclose(got[row], want, atol=2e-6 * max(1.0, spread / options["temperature"]))
    drawn = np.array(sample(mx.array(x), row_keys(seed, batch), **options))
    assert drawn.dtype == np.int32 and drawn.shape == (batch,)
    for row in range(batch):
        assert got[row, drawn[row]] > 0 and np.isfinite(x[row, drawn[row]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_precision_logits_are_widened_first(dtype):
    x = mx.random.normal((3, 97), key=mx.random.key(1)).astype(dtype)
    o = dict(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01)
    keys = row_keys(5, 3)
    assert mx.array_equal(sample(x, keys, **o), sample(x.astype(mx.float32), keys, **o))


@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_ties_never_widen_top_k(k):
    x = mx.zeros((1, 8))
    assert (probabilities(x, temperature=1.0, top_k=k, top_p=1.0, min_p=0.0) > 0).sum() == k
    keys = row_keys(0, 400)
    drawn = sample(mx.broadcast_to(x, (400, 8)), keys, temperature=1.0, top_k=k)
    assert len(set(drawn.tolist())) == k


def test_of_equals_at_the_last_place_the_lowest_ids_stay():
    x = mx.array([[1.0, 2.0, 1.0, 1.0, 3.0, 1.0], [5.0] * 6])
    ids, scores = candidates(x, temperature=0.5, top_k=4, top_p=1.0, min_p=0.0)
    assert ids.tolist() == [[4, 1, 0, 2], [0, 1, 2, 3]] and scores[0].tolist() == [0, -2, -4, -4]


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_top_k_is_the_only_look_at_the_vocabulary(monkeypatch, top_p):
    """Nothing else sorts or partitions, and what follows has k columns."""
    x = 3 * mx.random.normal((2, 5000), key=mx.random.key(6))
    o = dict(temperature=0.9, top_k=40, top_p=top_p, min_p=0.01)
    keys = row_keys(3, 2)
    want, calls = sample(x, keys, **o).tolist(), []

    def largest(logits, k):
        calls.append(k)
        ids = np.argsort(-np.array(logits), axis=-1, kind="stable")[:, :k]
        return mx.array(np.take_along_axis(np.array(logits), ids, -1)), mx.array(ids.astype(np.int32))

    monkeypatch.setattr(sampling, "largest", largest)
    for name in ("sort", "argsort", "partition", "argpartition"):
        monkeypatch.setattr(mx, name, lambda *a, **k: pytest.fail("sorted"))
    assert sample(x, keys, **o).tolist() == want and calls == [40]


def test_ties_are_cut_by_top_p_to_the_smallest_set():
    for top_p, count in [(0.2, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)]:
        p = probabilities(mx.zeros((1, 4)), temperature=1.0, top_k=0, top_p=top_p, min_p=0.0)
        assert (p > 0).sum() == count


def test_top_p_keeps_the_token_that_crosses():
    x = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))
    for top_p, count in [(0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4), (1.0, 4), (1e-30, 1)]:
        assert (probabilities(x, temperature=1.0, top_k=0, top_p=top_p, min_p=0.0) > 0).sum() == count


def test_filters_apply_in_order():
    # top_p counts probability after top_k and temperature: of 0.4 0.3 0.2 0.1 cut to two, the first has 4/7.
    x = mx.log(mx.array([[0.4, 0.3, 0.2, 0.1]]))
    count = lambda **o: (probabilities(x, **{"temperature": 1.0, "min_p": 0.0, **o}) > 0).sum()  # noqa: E731
    assert count(top_k=0, top_p=0.55) == 2 and count(top_k=2, top_p=0.55) == 1
    assert count(top_k=0, top_p=0.55, temperature=0.5) == 2 and count(top_k=0, top_p=0.5, temperature=0.5) == 1


def test_temperature_zero_is_argmax_and_takes_the_lowest_of_equals():
    x = mx.array([[1.0, 3.0, 3.0], [-mx.inf, -2.0, -mx.inf], [7.0, 7.0, 7.0]])
    assert sample(x, row_keys(0, 3), temperature=0.0, top_k=2, top_p=0.5, min_p=0.5).tolist() == [1, 1, 0]
    assert sample(x[1:2], row_keys(0, 1), temperature=1e-300).tolist() == [1]
    assert sample(x, row_keys(0, 3), temperature=9.0, top_k=1).tolist() == [1, 1, 0]


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_extreme_logits_and_temperatures_stay_finite(scale):
    x = mx.array([[1.0, 2.0, 3.0, -4.0]]) * scale
    for temperature in (2e-6, 1.0, 1e6):
        ids, scores = candidates(x, temperature=temperature, top_k=3, top_p=0.9, min_p=0.1)
        assert not mx.isnan(scores).any() and scores.max().item() == 0
    assert sample(mx.array([[1.0, 2.0]]), row_keys(1, 1), temperature=1e-5).item() == 1


def test_a_row_of_minus_infinity_gives_a_valid_id():
    x = mx.full((1, 9), -mx.inf)
    for o in (dict(), dict(top_k=3), dict(top_p=0.5), dict(min_p=0.2), dict(top_k=3, top_p=0.5, min_p=0.2)):
        assert 0 <= sample(x, row_keys(0, 1), temperature=1.0, **o).item() < 9
        scores = candidates(x, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **o})[1]
        assert mx.all(scores == -mx.inf)


@pytest.mark.parametrize(
    "o",
    [
        dict(temperature=1.0),
        dict(temperature=0.6, top_k=6),
        dict(temperature=1.7, top_p=0.8),
        dict(temperature=1.0, top_k=10, top_p=0.9, min_p=0.08),
    ],
)
def test_drawn_distribution(o):
    """Chi-square of 20,000 draws with fixed keys against the exact probabilities."""
    o = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **o}
    n, x = 20_000, np.random.default_rng(3).standard_normal(12).astype(np.float32) * 1.5
    p, _ = reference(x, **o)
    drawn = np.array(sample(mx.broadcast_to(mx.array(x), (n, 12)), row_keys(11, n), **o))
    counts = np.bincount(drawn, minlength=12)
    assert counts[p == 0].sum() == 0
    live = p > 0
    chi2 = ((counts[live] - n * p[live]) ** 2 / (n * p[live])).sum()
    df = live.sum() - 1
    assert chi2 < df + 4 * math.sqrt(2 * df), (chi2, df)


def test_distribution_along_one_key_chain():
    """The draws of one row over its steps are as good as draws over rows, and steps do not repeat each other."""
    p = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    x, keys, drawn = mx.log(mx.array(p))[None], row_keys(4, 1), []
    for _ in range(1500):
        keys, draw = next_keys(keys)
        drawn.append(sample(x, draw, temperature=1.0))
    ids = np.array(mx.concatenate(drawn))
    counts = np.bincount(ids, minlength=5)
    assert ((counts - 1500 * p) ** 2 / (1500 * p)).sum() < 4 + 4 * math.sqrt(8)
    repeats = (ids[1:] == ids[:-1]).mean()
    assert abs(repeats - (p**2).sum()) < 4 * math.sqrt(0.34 * 0.66 / 1500)


@pytest.mark.parametrize("o", [dict(), dict(top_k=9), dict(top_p=0.7), dict(top_k=40, top_p=0.9, min_p=0.02)])
def test_a_row_of_a_batch_draws_what_it_draws_alone(o):
    seed, batch, vocab = 21, 5, 1001
    x = mx.random.normal((batch, vocab), key=mx.random.key(2)) * 3
    keys, alone = row_keys(seed, batch), [row_keys(seed + r, 1) for r in range(batch)]
    for _ in range(10):
        keys, draw = next_keys(keys)
        together = sample(x, draw, temperature=0.9, **o).tolist()
        for r in range(batch):
            alone[r], draw = next_keys(alone[r])
            assert sample(x[r : r + 1], draw, temperature=0.9, **o).item() == together[r]


def test_row_keys():
    assert mx.array_equal(row_keys([7, 3], 2), mx.stack([mx.random.key(7), mx.random.key(3)]))
    assert mx.array_equal(row_keys(7, 3)[2], row_keys(9, 1)[0])
    assert not mx.array_equal(row_keys(None, 1), row_keys(None, 1))
    with pytest.raises(CosyH3Error, match="2 seeds for 3 prompts"):
        row_keys([1, 2], 3)


def test_a_key_is_used_once():
    keys, used = row_keys(3, 2), []
    for _ in range(20):
        used += keys.tolist()
        keys, draw = next_keys(keys)
        assert keys.shape == draw.shape == (2, 2) and keys.dtype == draw.dtype == mx.uint32
        used += draw.tolist()
    assert len({tuple(key) for key in used}) == 80


def test_the_implicit_random_state_is_neither_read_nor_written():
    x, o = mx.random.normal((2, 50), key=mx.random.key(0)), dict(temperature=1.0, top_k=20, top_p=0.9)
    before = [a.tolist() for a in mx.random.state]
    first = sample(x, next_keys(row_keys(1, 2))[1], **o).tolist()
    assert [a.tolist() for a in mx.random.state] == before
    mx.random.seed(12345)
    assert sample(x, next_keys(row_keys(1, 2))[1], **o).tolist() == first


def test_a_worker_thread_draws_the_same():
    x, o, out = mx.random.normal((2, 50), key=mx.random.key(0)), dict(temperature=1.0, top_p=0.9), []
    mx.eval(x)
    worker = threading.Thread(target=lambda: out.append(sample(x, row_keys(8, 2), **o).tolist()))
    worker.start()
    worker.join()
    assert out == [sample(x, row_keys(8, 2), **o).tolist()]


def test_another_process_draws_the_same_and_exits_cleanly():
    code = (
        "import threading, mlx.core as mx\n"
        "from mlx_cosyh3.sampling import row_keys, sample\n"
        "x = mx.arange(64)[None] * 0.1\n"
        "mx.eval(x)\n"
        "t = threading.Thread(target=lambda: print(sample(x, row_keys(3, 1), temperature=1.0, top_k=40).item()))\n"
        "t.start(); t.join()\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == sample(mx.arange(64)[None] * 0.1, row_keys(3, 1), temperature=1.0, top_k=40).item()


@given(seed=st.integers(0, 2**31), penalty=st.sampled_from([0.5, 1.0, 1.3, 10.0]))
@settings(max_examples=20, deadline=None)
def test_penalize(seed, penalty):
    rng = np.random.default_rng(seed)
    x, seen = rng.standard_normal((2, 40)).astype(np.float32), rng.random((2, 40)) < 0.4
    x[0, :3] = -np.inf
    want = x.copy()
    for b, v in zip(*np.nonzero(seen)):
        want[b, v] = x[b, v] / penalty if x[b, v] > 0 else x[b, v] * penalty
    np.testing.assert_allclose(np.array(penalize(mx.array(x), mx.array(seen), penalty)), want, rtol=1e-6)


GOOD = dict(max_tokens=5, temperature=0.8, top_k=50, top_p=0.9, min_p=0.0, repetition_penalty=None, seed=None)


@pytest.mark.parametrize(
    "change",
    [
        {},
        dict(temperature=0),
        dict(top_k=0, top_p=1),
        dict(min_p=1),
        dict(repetition_penalty=1.1, seed=2**63 - 1),
        dict(seed=[1, None, 3]),
        dict(top_k=np.int64(3), temperature=np.float32(0.5)),
    ],
)
def test_good_options(change):
    assert check_options(**{**GOOD, **change}) is None


@pytest.mark.parametrize(
    "name, value",
    [
        *[("max_tokens", v) for v in (0, -1, 1.5, "7", None, True, float("nan"))],
        *[("temperature", v) for v in (-0.1, float("nan"), float("inf"), "hot", None, True, 10**400)],
        *[("top_k", v) for v in (-1, 0.5, "x", None)],
        *[("top_p", v) for v in (0, -0.1, 1.01, 2, float("nan"), None)],
        *[("min_p", v) for v in (-0.01, 1.01, float("nan"))],
        *[("repetition_penalty", v) for v in (0, -1, float("inf"), "x")],
        *[("seed", v) for v in (-1, 2**63, 1.0, "x")],
    ],
)
def test_bad_options_are_named_with_value_and_range(name, value):
    with pytest.raises(CosyH3Error) as e:
        check_options(**{**GOOD, name: value})
    message = str(e.value)
    assert message.startswith(f"{name} must be ") and repr(value) in message and "\n" not in message


# ---------------------------------------------------------------- stop strings


def stop_reference(text, stops):
    """Letter by letter: the text before the stop string that is complete first (the longest, if several end)."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(
    pieces=st.lists(st.text("abc", max_size=6), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
)
@settings(max_examples=400, deadline=None)
def test_stop_text_does_not_depend_on_the_pieces(pieces, stops):
    stop = StopText(stops)
    shown = ""
    for piece in pieces:
        shown += stop.add(piece)
        if not stop.stopped:  # holds back only what may begin a stop string
            seen = "".join(pieces)[: len(shown) + len(stop._held)]
            assert seen.endswith(stop._held) and any(s.startswith(stop._held) for s in stops) or not stop._held
    shown += stop.finish()
    want, stopped = stop_reference("".join(pieces), stops)
    assert (shown, stop.stopped) == (want, stopped)


def test_stop_text_shows_what_is_safe_at_once():
    stop = StopText(["\n\n", "END"])
    assert [stop.add(t) for t in ("one", "\n", "two E", "N", "d", "\n", "\nmore", "x")] == [
        "one",
        "",
        "\ntwo ",
        "",
        "ENd",
        "",
        "",
        "",
    ]
    assert stop.stopped and stop.finish() == ""
    open_end = StopText("STOP")
    assert open_end.add("go ST") == "go " and open_end.finish() == "ST" and not open_end.stopped


@pytest.mark.parametrize("stops", [[""], "", ["a", ""], [3]])
def test_bad_stop_strings(stops):
    with pytest.raises(CosyH3Error, match="not empty"):
        StopText(stops)
