"""What must hold for any H3 model: both forms agree, chunks and batches change nothing, memory is flat."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cosyh3.scan import DiagonalScan, ShiftScan
from tests.golden_data import random_h3

KINDS = {
    "pure": {},
    "hybrid": {"attn_layer_idx": [1], "num_heads": 4},
    "rotary": {"attn_layer_idx": [1], "num_heads": 2, "rotary_emb_dim": 8},
    "window": {"attn_layer_idx": [1], "num_heads": 2, "rotary_emb_dim": 16},
    "headdim4": {"head_dim": 4},
    "shared A": {"n_ssm": 4},
    "zoh": {"discretization": "zoh"},
    "small state": {"d_state": 16},
}


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    model = random_h3(1, **KINDS[request.param])
    if request.param == "window":
        model.kv_window = 9
    return model


def ids_of(model, *shape, seed=0):
    return mx.array(np.random.default_rng(seed).integers(0, model.config.vocab_size, shape).astype(np.int32))


def read(model, ids, **kw):
    cache = model.make_cache(ids.shape[0])
    return model.prefill(ids, cache, **kw), cache


def state_arrays(cache, row=0, tokens=5):
    """The part of each state that says something: of keys and values, one row's last tokens."""
    out = []
    for s in cache.layers:
        if hasattr(s, "ssm"):
            out += [s.shift[row], s.ssm[row]]
        else:
            out += [a[row, :, max(s.end - tokens, s.pad[row]) : s.end] for a in (s.keys, s.values)]
    return out


def assert_same(a, b, bound=2e-4):
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape
        assert mx.abs(x - y).max().item() <= bound


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 127])
def test_prefill_and_step_equal_a_longer_prefill(model, length):
    ids = ids_of(model, 1, length + 1)
    _, cache = read(model, ids[:, :length])
    stepped = model.step(ids[:, length], cache)
    whole, other = read(model, ids)
    assert_same([stepped], [whole], 1e-3)
    assert_same(state_arrays(cache), state_arrays(other))
    assert cache.length == other.length == length + 1


@settings(max_examples=25, deadline=None)
@given(length=st.integers(1, 200), chunk=st.integers(1, 90), kind=st.sampled_from(sorted(KINDS)))
def test_any_length_any_chunk(length, chunk, kind):
    model = random_h3(2, **KINDS[kind])
    model.kv_window = 11 if kind == "window" else None
    ids = ids_of(model, 1, length + 1, seed=length)
    last, cache = read(model, ids[:, :length], chunk=chunk)
    stepped = model.step(ids[:, length], cache)
    whole, other = read(model, ids)
    assert_same([stepped], [whole], 1e-3)
    assert_same(state_arrays(cache), state_arrays(other))


@pytest.mark.parametrize("start", [0, 20])
def test_ragged_rows_equal_rows_alone(model, start):
    """Prompts of different lengths, from nothing and from a state that all share; then steps."""
    lengths = [3, 70, 1, 33, 8]
    ids, context = ids_of(model, 5, 70, seed=3), ids_of(model, 1, max(start, 1), seed=4)
    shared = model.make_cache()
    if start:
        model.prefill(context, shared)
    cache = shared.repeated(5)
    logits = model.prefill(ids, cache, lengths, chunk=32)
    follow = ids_of(model, 5, 6, seed=5)
    steps = [model.step(follow[:, t], cache) for t in range(6)]
    for row, length in enumerate(lengths):
        alone = shared.copy()
        assert_same([logits[row : row + 1]], [model.prefill(ids[row : row + 1, :length], alone, chunk=32)], 1e-3)
        for t in range(6):
            assert_same([steps[t][row : row + 1]], [model.step(follow[row : row + 1, t], alone)], 1e-3)
        assert_same(state_arrays(cache, row), state_arrays(alone))
        assert cache.lengths[row] == start + length + 6


@pytest.mark.parametrize("chunk", [1, 8])
def test_ragged_rows_whose_last_chunk_is_one_token(model, chunk):
    """There a row that has ended must not take part in the step."""
    lengths = [17, 3, 16, 9]
    ids = ids_of(model, 4, 17, seed=8)
    cache = model.make_cache(4)
    logits = model.prefill(ids, cache, lengths, chunk=chunk)
    for row, length in enumerate(lengths):
        want, alone = read(model, ids[row : row + 1, :length])
        assert_same([logits[row : row + 1]], [want], 1e-3)
        assert_same(state_arrays(cache, row), state_arrays(alone))


def test_a_second_ragged_prompt(model):
    """Rows that already differ in length read prompts that differ again."""
    first, second = [5, 40, 17], [66, 2, 9]
    ids, more = ids_of(model, 3, 40, seed=6), ids_of(model, 3, 66, seed=7)
    cache = model.make_cache(3)
    model.prefill(ids, cache, first)
    logits = model.prefill(more, cache, second, chunk=16)
    for row in range(3):
        alone = model.make_cache()
        model.prefill(ids[row : row + 1, : first[row]], alone)
        want = model.prefill(more[row : row + 1, : second[row]], alone)
        assert_same([logits[row : row + 1]], [want], 1e-3)
        assert_same(state_arrays(cache, row), state_arrays(alone))


def test_window_sees_exactly_the_last_tokens():
    """With one attention layer alone, tokens further back than the window change nothing; the last inside does."""
    model = random_h3(3, n_layer=1, attn_layer_idx=[0], num_heads=4)
    model.kv_window = 8
    ids = ids_of(model, 1, 600)
    last, _ = read(model, ids)
    for position, seen in ((600 - 9, False), (600 - 8, True)):
        changed = np.array(ids)
        changed[0, position] = (changed[0, position] + 1) % 60
        other, cache = read(model, mx.array(changed), chunk=50)
        assert (mx.abs(other - last).max().item() > 1e-6) == seen
    assert cache.layers[0].keys.shape[2] <= 8 + 50 + 2 * cache.layers[0].step  # bounded, whatever the prompt


@pytest.mark.parametrize("kind", ["pure", "window"])
def test_memory_does_not_grow_with_the_prompt(kind):
    """65,536 tokens at the peak of 8,192, give or take when the CPU's own thread lets go of a chunk."""
    model = random_h3(4, d_model=16, d_state=16, n_layer=2, **({} if kind == "pure" else
                      {"attn_layer_idx": [1], "num_heads": 2}))  # fmt: skip
    model.kv_window = None if kind == "pure" else 64
    peaks = []
    for length in (8192, 65536):
        ids = ids_of(model, 1, length)
        mx.eval(ids)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        read(model, ids)
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] <= 1.3 * peaks[0], peaks


def recurrence(dA, dB, C, D, x, S):
    """The diagonal SSM in float64, token by token: x [T, H], S [H, M]."""
    out = []
    for u in x:
        S = dA * S + dB * u[:, None]
        out.append(2 * (C * S).sum(1).real + D * u)
    return np.array(out), S


@pytest.mark.parametrize("method", ["toeplitz", "fft"])
@pytest.mark.parametrize("T", [1, 2, 7, 8, 63, 64, 65, 128, 500, 512, 513, 1100])
def test_diagonal_scan(T, method):
    """Both convolutions against the recurrence, at odd and power-of-two lengths, from a non-empty state."""
    rng = np.random.default_rng(T)
    H, M = 5, 6
    dA = np.exp(-rng.uniform(5e-4, 0.05, (H, M)) + 1j * rng.uniform(-2.7, 2.7, (H, M)))
    dB, C, S = (rng.standard_normal((H, M)) + 1j * rng.standard_normal((H, M)) for _ in range(3))
    dB *= 0.05
    D, x = rng.standard_normal(H), rng.standard_normal((T, H))
    want, state = recurrence(dA, dB, C, D, x, S)
    scan = DiagonalScan(dA, dB, C, D, method)
    S32 = mx.array(np.stack([S.real, S.imag], -1).astype(np.float32))[None, :, None, None]
    y, got = scan(mx.array(x.astype(np.float32))[None, :, :, None, None], S32, np.array([T]))
    assert np.abs(np.array(y)[0, :, :, 0, 0] - want).max() < 1e-4
    got = np.array(got)[0, :, 0, 0]
    assert np.abs(got[..., 0] + 1j * got[..., 1] - state).max() < 1e-4


@pytest.mark.parametrize("method", ["toeplitz", "fft"])
@pytest.mark.parametrize("T", [1, 2, 7, 8, 9, 63, 64, 65, 300])
def test_shift_scan(T, method):
    rng = np.random.default_rng(T)
    channels, N = 5, 8
    B, C, s = (rng.standard_normal((channels, N)) for _ in range(3))
    D, x = rng.standard_normal(channels), rng.standard_normal((T, channels))
    want, state = [], s
    for u in x:
        state = np.concatenate([np.zeros((channels, 1)), state[:, :-1]], axis=1) + B * u[:, None]
        want.append((C * state).sum(1) + D * u)
    scan = ShiftScan(B, C, D, method)
    y, got = scan(mx.array(x.astype(np.float32))[None], mx.array(s.astype(np.float32))[None], np.array([T]))
    assert np.abs(np.array(y)[0] - np.array(want)).max() < 1e-4
    assert np.abs(np.array(got)[0] - state).max() < 1e-5
