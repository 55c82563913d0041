"""Repetition-aware sampling against upstream's recorded cases, and against a plain Python version of the rule."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cosyh3.cosyvoice.ras import BLOCK, KeyDraws, RecordedDraws, Sampler
from mlx_cosyh3.kernels.ras import nucleus
from tests.golden_data import cosyvoice_golden


def reference(logits, said, u, keep, temperature, top_p, top_k, win_size, tau_r):
    """The rule in float64 -> (id, whether it fell back, how near a draw or a cut was to coming out otherwise)."""
    z = np.where(keep, logits.astype(np.float64) / temperature, -np.inf)
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    count = min(int((before < top_p).sum()) if top_p < 1 else len(p), top_k or len(p))
    gap = np.abs(before - top_p).min() if top_p < 1 else 1.0

    def draw(shares, u):
        below = np.cumsum(shares) / shares.sum()
        return int((below > u).argmax()), np.abs(below - u).min()

    place, near = draw(p[order[:count]], u[0])
    one = int(order[place])
    shares = p[order[: count + 1]]
    falls = -np.diff(shares) / shares[:-1].clip(1e-300)  # where it is tiny, fp32 may see equals, and order them by id
    gap = min(gap, near, *(falls[falls > 0] / 2))
    last = said[-win_size:] if win_size else []
    if not (win_size and last.count(one) >= win_size * tau_r):
        return one, False, gap
    z[one] = -np.inf
    p = np.exp(z - z.max())
    another, near = draw(p, u[1])
    return another, True, min(gap, near)


def state_after(sampler, said, draws):
    state = sampler.start(draws)
    for i in said:
        state = state.push(mx.array([i], dtype=mx.int32))
    return state


def test_golden_cases():
    io = mx.load(str(cosyvoice_golden("sampling") / "ras_unit.safetensors"))
    second = 0
    for i in range(32):
        logp, said, u, sizes = (io[f"{i}.{name}"] for name in ("logp", "decoded", "u", "draw_size"))
        sampler = Sampler(top_p=0.8, top_k=25, win_size=10, tau_r=0.1)
        ids, _, after = sampler(logp[None], state_after(sampler, said.tolist(), RecordedDraws.start(np.array(u))))
        assert ids.item() == io[f"{i}.id"].item(), i
        assert after.draws.at.item() == len(u) == len(sizes), i
        assert after.window.tolist() == [(([-1] * 10) + said.tolist() + ids.tolist())[-10:]]
        shares, _ = nucleus(mx.softmax(logp[None]), 0.8, 25)
        assert (shares > 0).sum().item() == sizes[0].item(), i
        second += len(u) - 1
    assert second == 10


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 7, 200]),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0.1, 0.8, 1.0]),
    st.sampled_from([0, 1, 5, 25, 1000]),
    st.sampled_from([0, 1, 3, 10]),
    st.sampled_from([0.0, 0.1, 0.3, 1.5]),
)
def test_equals_the_plain_rule(seed, size, temperature, top_p, top_k, win_size, tau_r):
    rng = np.random.default_rng(seed)
    logits = (3 * rng.standard_normal(size)).astype(np.float32)
    keep = rng.random(size) < 0.8
    keep[rng.integers(size)] = keep[rng.integers(size)] = True
    said = rng.choice(size, 12, p=(p := np.exp(logits - logits.max())) / p.sum()).tolist()
    u = rng.random(2).astype(np.float32)
    options = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "win_size": win_size, "tau_r": tau_r}
    if keep.sum() == 1 and win_size:  # nothing to fall back to
        return
    wanted, fell_back, gap = reference(logits, said, u, keep, **options)
    sampler = Sampler(**options)
    state = state_after(sampler, said, RecordedDraws.start(u))
    ids, lse, after = sampler(mx.array(logits)[None], state, mx.array(keep)[None])
    if gap > 1e-5:
        assert ids.item() == wanted
        assert after.draws.at.item() == 1 + fell_back
    assert keep[ids.item()]
    assert np.isfinite(lse.item())


def test_rows_are_independent():
    rng = np.random.default_rng(0)
    logits = mx.array(3 * rng.standard_normal((4, 50)).astype(np.float32))
    keys = mx.stack([mx.random.key(i) for i in range(4)])
    sampler = Sampler(win_size=3, tau_r=0.3)

    def run(logits, keys):
        state, out = sampler.start(KeyDraws.start(keys), len(logits)), []
        for _ in range(20):
            ids, _, state = sampler(logits, state)
            out.append(ids.tolist())
        return np.array(out).T

    together = run(logits, keys)
    for r in range(4):
        assert (run(logits[r : r + 1], keys[r]) == together[r]).all()
    assert len({tuple(row) for row in together}) == 4


def test_a_repeated_id_is_not_drawn_again_even_where_all_others_have_probability_0():
    sampler = Sampler(temperature=0.01)
    logits = mx.array([[0.0, 10.0, 0.0, 0.1]])  # at this temperature the others have exp(-990) = 0
    state = sampler.start(RecordedDraws.start([0.5, 0.5, 0.5]))
    first, _, state = sampler(logits, state)
    then, _, state = sampler(logits, state)
    assert (first.item(), then.item()) == (1, 3)


def test_temperature_0_is_argmax_whatever_was_said():
    sampler = Sampler(temperature=0)
    state = sampler.start(None)
    for _ in range(3):
        ids, lse, state = sampler(mx.array([[0.0, 3.0, 3.0]]), state, mx.array([[True, True, True]]))
        assert ids.item() == 1
    assert lse.item() == pytest.approx(np.log(2 * np.exp(3) + 1), abs=1e-5)


def test_nan_shows_in_the_log_sum_exp():
    for sampler in (Sampler(), Sampler(temperature=0)):
        _, lse, _ = sampler(mx.array([[0.0, mx.nan, 1.0]]), sampler.start(RecordedDraws.start([0.5])))
        assert not np.isfinite(lse.item())


def test_frequencies_follow_the_nucleus():
    """Without repetitions at work, 4,000 draws have the nucleus' shares within 4 standard deviations."""
    p = np.array([0.05, 0.4, 0.3, 0.2, 0.05])
    sampler = Sampler(win_size=0, top_p=0.8, top_k=4)
    rows = 4000
    keys = mx.random.split(mx.random.key(1), rows)
    logits = mx.broadcast_to(mx.array(np.log(p), dtype=mx.float32), (rows, 5))
    ids, _, _ = sampler(logits, sampler.start(KeyDraws.start(keys), rows))
    shares = np.bincount(np.array(ids), minlength=5) / rows
    wanted = np.array([0, 0.4, 0.3, 0.2, 0]) / 0.9  # 0.7 has gone by before the third
    assert np.abs(shares - wanted).max() < 4 * 0.5 / np.sqrt(rows)
    assert shares[0] == shares[4] == 0


def test_key_draws_repeat_across_blocks_and_threads():
    def numbers():
        draws, out = KeyDraws.start(key), []
        for _ in range(BLOCK + 3):
            out.append(draws.pair().tolist()[0])
            draws = draws.after(None)
        return out

    key = mx.random.key(5)
    mx.eval(key)
    here, there = numbers(), []
    worker = threading.Thread(target=lambda: there.extend(numbers()))
    worker.start()
    worker.join()
    assert here == there
    flat = np.array(here).ravel()
    assert len(np.unique(flat)) == flat.size and 0 <= flat.min() and flat.max() < 1


def test_recorded_draws_near_1_and_past_the_end():
    draws = RecordedDraws.start([1 - 1e-12])
    assert draws.pair()[0, 0].item() < 1
    draws = draws.after(mx.array([True])).after(mx.array([False])).after(mx.array([True]))
    assert draws.pair().tolist() == [[0.0, 0.0]]
