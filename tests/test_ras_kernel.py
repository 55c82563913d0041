"""The kernel of a sampling step: its Metal text in the emulator against the rule in float64, and its choice.

Run: MLX_DISABLE_COMPILE=1 python -m pytest -q tests/test_ras_kernel.py
"""

import re
from contextlib import nullcontext
from importlib import import_module

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.cosyvoice.ras import KeyDraws, RecordedDraws, Sampler
from mlx_cosyh3.kernels import _dispatch, _trust, ras, use_kernels
from mlx_cosyh3.kernels.ras import ras_step
from mlx_cosyh3.kernels.top_k import reference as top_k_reference
from tests.golden_data import cosyvoice_golden
from tests.test_dispatch import new_process
from tests.test_ras import reference as rule
from tests.test_ras import state_after

from . import mslemu

softmax_reference = import_module("mlx_cosyh3.kernels.softmax").reference  # the package's `softmax` is the function
SIZES = [1, 31, 32, 33, 65, 257, 1000, 6761, 8192]
SPEECH = {"scale": 1.0, "top_p": 0.8, "top_k": 25, "repeated": 1}
needs_emulator = pytest.mark.skipif(bool(mslemu.missing()), reason=f"Metal emulator: {mslemu.missing()}")


class Emulated:
    """Stands in for the compiled kernel: lint, then the emulator. `calls` counts, `texts` is what would be compiled."""

    def __init__(self):
        self.kernel, self.texts, self.calls = mslemu.metal_kernel(**ras.KERNEL.metal_arguments()), set(), 0

    def __call__(self, *, inputs, output_dtypes, template, **call):
        text = self.kernel.text(inputs, output_dtypes, template).text
        if text not in self.texts:
            found = mslemu.lint(self.kernel, inputs, output_dtypes, template)
            assert not found, "\n".join(map(str, found))
        self.texts.add(text)
        self.calls += 1
        return self.kernel(inputs=inputs, output_dtypes=output_dtypes, template=template, **call)


@pytest.fixture
def emulated(monkeypatch):
    """A pretended GPU that has this kernel alone, run by the emulator."""
    kernel = Emulated()
    monkeypatch.setattr(ras.KERNEL, "_made", kernel)
    monkeypatch.setattr(_dispatch, "usable", lambda k, *_: k is ras.KERNEL)
    return kernel


def draw(rows, n, width=10, masked=False, seed=0, spread=3):
    """logits, u, window, keep; what was said is what is likely, so that about every second step draws again."""
    r = np.random.default_rng([seed, rows, n, width])
    logits = (spread * r.standard_normal((rows, n))).astype(np.float32)
    keep = r.random((rows, n)) < 0.8 if masked else np.ones((rows, n), dtype=bool)
    keep[:, r.integers(n, size=2)] = True
    p = np.exp(logits.astype(np.float64) * keep) * keep
    window = np.stack([r.choice(n, width, p=row / row.sum()) for row in p]).reshape(rows, width)
    return logits, r.random((rows, 2)).astype(np.float32), window.astype(np.int32), keep


def check(logits, u, window, keep, options=SPEECH, given=None, gap_of_draws=1e-6, schedules=({},)):
    """The kernel's step equals the rule -> (second draws, rows too near to a boundary to tell).

    given   mx.arrays with other strides in place of logits, u, window, keep"""
    masked = keep is not None and not keep.all()
    given = given or (mx.array(logits), mx.array(u), mx.array(window), mx.array(keep) if masked else None)
    results = []
    for schedule in schedules:
        with mslemu.settings(**schedule):
            results.append([np.array(a) for a in ras_step(*given, **options)])
    for other in results[1:]:
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(results[0], other))
    ids, lse, after, again = results[0]
    rows, width = window.shape
    assert ids.dtype == after.dtype == np.int32 and lse.dtype == np.float32 and again.dtype == bool
    assert ids.shape == lse.shape == again.shape == (rows,) and after.shape == window.shape
    z = np.where(keep, logits.astype(np.float64) * options["scale"], -np.inf)
    peak = z.max(-1)
    assert np.allclose(lse, peak + np.log(np.exp(z - peak[:, None]).sum(-1)), rtol=1e-6, atol=2e-6)
    assert np.array_equal(after, np.concatenate([window, ids[:, None]], 1)[:, 1:])
    near = 0
    for row in range(rows):
        wanted, second, gap = rule(
            logits[row], window[row].tolist(), u[row], keep[row], 1 / options["scale"], options["top_p"],
            options["top_k"], width, options["repeated"] / max(width, 1),
        )  # fmt: skip
        assert keep[row, ids[row]]
        if gap > gap_of_draws:
            assert (ids[row], again[row]) == (wanted, second), (row, gap)
        else:
            near += 1
    return int(again.sum()), near


@needs_emulator
@pytest.mark.parametrize("n", SIZES)
def test_sizes(emulated, n):
    """Every size in all schedules; masks, windows, rows of other strides."""
    second = 0
    for rows, masked in ((1, True), (2, False)) if n > 2000 else ((1, False), (2, True), (3, False)):
        for width in (0, 1) if n == 1 else (0, 10):
            logits, u, window, keep = draw(rows, n, width if n > 1 else 0, masked)
            second += check(logits, u, window, keep, schedules=mslemu.SCHEDULES)[0]
    assert n < 31 or second
    if n == 1:
        return
    logits, u, window, keep = draw(2, n, 7, True)
    wide = np.zeros((4, n + 3), dtype=np.float32)
    wide[::2, 1 : n + 1] = logits
    block = np.zeros((2, 9, 2), dtype=np.float32)
    block[:, 4] = u
    given = (
        mx.array(wide)[::2, 1 : n + 1],
        mx.array(block)[:, 4],
        mx.array(np.pad(window, [(0, 0), (1, 0)]))[:, 1:],
        mx.contiguous(mx.array(keep).T).T,
    )
    check(logits, u, window, keep, given=given)
    if n < 2000:
        check(logits, u, window, keep[:1].repeat(2, 0), given=(*given[:3], mx.array(keep[0])))


@needs_emulator
@pytest.mark.parametrize("schedule", mslemu.SWEEP, ids=lambda s: "-".join(map(str, s.values())))
def test_all_schedules(emulated, schedule):
    with mslemu.settings(**schedule):
        assert check(*draw(4, 300, masked=True))[0]


@needs_emulator
def test_random_cases(emulated):
    """Random options and rows: not one draw differs from the rule in float64, but where u lies within 1e-6 of a
    boundary; and hardly any lies there."""
    r = np.random.default_rng(5)
    rows, second, near = 0, 0, 0
    with mslemu.settings(check="fast"):
        for seed in range(60):
            n = int(r.choice([2, 7, 40, 100, 300]))
            options = {
                "scale": float(r.choice([0.5, 1.0, 3.0])),
                "top_p": float(r.choice([0.1, 0.5, 0.8, 0.95, 1.0])),
                "top_k": int(r.choice([1, 2, 5, 25, 33, 100, 128])),
                "repeated": int(r.choice([0, 1, 2, 5])),
            }
            case = draw(50, n, int(r.choice([1, 3, 10, 40])), bool(seed % 2) and n > 2, seed, spread=2)
            again, close = check(*case, options)
            rows, second, near = rows + 50, second + again, near + close
    assert second > rows // 4 and near <= 3


@needs_emulator
def test_against_the_operations(emulated):
    """The same in plain MLX operations, ids exactly but where u is within 1e-6 of a boundary."""
    differ = 0
    with mslemu.settings(check="fast"):
        for seed in range(10):
            logits, u, window, keep = draw(40, 500, masked=True, seed=100 + seed)
            arguments = [mx.array(a) for a in (logits, u, window, keep)]
            got, want = ras_step(*arguments, **SPEECH), ras.reference(*arguments, **SPEECH)
            assert mx.allclose(got[1], want[1], atol=1e-5).item()
            for row in np.flatnonzero(np.array(got[0]) != np.array(want[0])):
                *_, gap = rule(logits[row], window[row].tolist(), u[row], keep[row], 1.0, 0.8, 25, 10, 0.1)
                assert gap < 1e-6
                differ += 1
    assert differ <= 1


@needs_emulator
def test_equals_go_by_id(emulated):
    """Rows full of equal logits: of the nucleus the lower ids first, also at the cut of top_k and top_p."""
    for n, top_p, top_k in ((65, 1.0, 7), (65, 0.05, 64), (1000, 1.0, 128), (2048, 0.01, 100)):
        options = SPEECH | {"top_p": top_p, "top_k": top_k}
        u = np.array([[0.0, 0.0], [0.5, 0.5], [1 - 2.0**-24, 1 - 2.0**-24]], dtype=np.float32)
        logits = np.zeros((3, n), dtype=np.float32)
        ids, _, _, again = ras_step(mx.array(logits), mx.array(u), mx.full((3, 4), -1, dtype=mx.int32), **options)
        count = min(top_k, int(np.ceil(top_p * n - 1e-4)))
        middle = ids[1].item()
        assert (ids[0].item(), ids[2].item()) == (0, count - 1) and abs(middle - count / 2) <= 1
        assert not again.any().item()
        logits[:, [3, 40, 50]] = 1
        check(logits, u * 0.99 + 0.003, np.full((3, 4), -1, dtype=np.int32), logits >= 0, options)


@needs_emulator
def test_a_window_full_of_the_id(emulated):
    logits, u, _, keep = draw(3, 200)
    likely = logits.argmax(-1).astype(np.int32)
    options = SPEECH | {"top_k": 1}
    window = likely[:, None].repeat(10, 1)
    for repeated in (0, 1, 10, 11):
        second, _ = check(logits, u, window, keep, options | {"repeated": repeated})
        assert second == (0 if repeated == 11 else 3)
    window[:, :5] = -1
    assert check(logits, u, window, keep, options | {"repeated": 5})[0] == 3
    assert check(logits, u, window, keep, options | {"repeated": 6})[0] == 0


@needs_emulator
def test_the_ends_of_a_draw(emulated):
    """u = 0 and the largest below 1 stay inside of what may be drawn, in both draws."""
    last = np.float32(1) - np.float32(2.0**-24)
    for n in (33, 300, 2000):
        logits, _, _, keep = draw(8, n, masked=True, spread=8)
        keep[:, [0, -1]] = False
        for u in (0.0, last):
            given = mx.array(logits), mx.full((8, 2), u), mx.zeros((8, 1), dtype=mx.int32), mx.array(keep)
            ids, _, _, again = ras_step(*given, **SPEECH | {"repeated": 0})
            assert again.all().item() and keep[np.arange(8), np.array(ids)].all()
            if u == 0:
                z = np.where(keep, logits, -np.inf)
                z[np.arange(8), z.argmax(-1)] = -np.inf
                e = np.exp(z - z.max(-1, keepdims=True))
                assert np.array_equal(ids, (e > 0).argmax(-1))


@needs_emulator
def test_all_others_have_probability_0(emulated):
    logits = mx.array([[0.0, 10.0, 0.0, 0.1]])
    ids, _, _, again = ras_step(logits, mx.array([[0.5, 0.5]]), mx.array([[1, 1, 1]]), scale=100.0, top_p=0.8, top_k=25)
    assert (ids.item(), again.item()) == (3, True)


@needs_emulator
@pytest.mark.parametrize("schedule", mslemu.SCHEDULES, ids=lambda s: s["order"])
def test_rows_that_cannot_be_drawn_from(emulated, schedule):
    """-inf, all masked, NaN, +inf, one id left that is repeated: a valid id, and the log-sum-exp that the operations
    give."""
    logits = mx.array(draw(6, 300)[0])
    row, column = mx.arange(6)[:, None], mx.arange(300)
    keep = (row != 1) & ((row != 4) | (column == 77))
    logits = mx.where(row == 0, -mx.inf, logits)
    logits = mx.where((row == 2) & (column == 200), mx.nan, logits)
    logits = mx.where((row == 3) & (column == 100), mx.inf, logits)
    logits = mx.where((row == 5) & (column % 3 > 0), -mx.inf, logits)
    u = mx.full((6, 2), 0.7)
    for value in (-1, 77, 0):
        window = mx.full((6, 4), value, dtype=mx.int32)
        with mslemu.settings(**schedule):
            ids, lse, after, again = ras_step(logits, u, window, keep, **SPEECH)
        want = ras.reference(logits, u, window, keep, **SPEECH)
        assert np.allclose(lse, want[1], atol=1e-5, equal_nan=True)
        valid = [0, 1, 4, 5]  # with NaN or +inf an id says nothing
        for a, b in zip((ids, after, again), (want[0], want[2], want[3])):
            assert np.array_equal(np.array(a)[valid], np.array(b)[valid])
        assert (np.array(ids) >= 0).all() and (np.array(ids) < 300).all()
    assert np.isneginf(lse[:2]).all() and not np.isfinite(lse[2:4]).any() and np.isfinite(lse[4:]).all()


@needs_emulator
@pytest.mark.parametrize("schedule", mslemu.SCHEDULES, ids=lambda s: s["order"])
def test_fewer_than_eight_elements(emulated, schedule):
    """Metal passes those in another address space."""
    with mslemu.settings(**schedule):
        for rows, n, width in ((1, 3, 2), (3, 2, 1), (1, 7, 7), (1, 5, 0), (7, 2, 1), (4, 40, 1), (1, 40, 10)):
            check(*draw(rows, n, width))
            check(*draw(rows, n, width), SPEECH | {"repeated": 3, "top_k": 0})


@needs_emulator
def test_golden_cases(emulated):
    io = mx.load(str(cosyvoice_golden("sampling") / "ras_unit.safetensors"))
    for i in range(32):
        logp, said, u = (io[f"{i}.{name}"] for name in ("logp", "decoded", "u"))
        sampler = Sampler(top_p=0.8, top_k=25, win_size=10, tau_r=0.1)
        state = state_after(sampler, said.tolist(), RecordedDraws.start(np.array(u)))
        ids, _, after = sampler(logp[None], state, None if i % 2 else mx.ones(logp.shape, dtype=mx.bool_))
        assert ids.item() == io[f"{i}.id"].item(), i
        assert after.draws.at.item() == len(u), i
    assert emulated.calls == 32


@needs_emulator
@pytest.mark.parametrize("win_size", [0, 1, 10])
def test_a_sampler_is_one_launch_a_step(emulated, win_size):
    """Twenty steps as by the operations, from a state gone back to, too; and nothing but the options is compiled in."""
    logits = mx.array(draw(2, 300)[0])
    keys = mx.stack([mx.random.key(i) for i in range(2)])
    keep = mx.arange(300)[None] != 5

    def run(sampler, state, steps):
        states, out = [state], []
        for _ in range(steps):
            ids, _, state = sampler(logits, state, keep)
            states.append(state)
            out.append(ids.tolist())
        return states, out

    def sampler():
        return Sampler(win_size=win_size, tau_r=0.1)

    states, got = run(sampler(), sampler().start(KeyDraws.start(keys), 2), 20)
    assert emulated.calls == 20
    assert run(sampler(), states[7], 13)[1] == got[7:]
    with pytest.MonkeyPatch.context() as without:
        without.setattr(_dispatch, "usable", lambda *_: False)
        assert run(sampler(), sampler().start(KeyDraws.start(keys), 2), 20)[1] == got
    texts = len(emulated.texts)
    Sampler(win_size=win_size, temperature=0.5, top_p=0.3, top_k=3)(logits, states[3], keep)
    assert len(emulated.texts) == texts


@needs_emulator
@pytest.mark.parametrize("masked", [False, True])
def test_selftest(emulated, masked, monkeypatch):
    """It passes by far, no draw of its case is near to a boundary, it has second draws, and it finds wrong kernels."""
    assert ras._selftest(masked) < 0.5
    logits, u, window, keep = (None if a is None else np.array(a) for a in ras.case(masked))
    keep = np.broadcast_to(True if keep is None else keep, logits.shape)
    options = {"scale": 1.5, "top_p": 0.9, "top_k": 50, "repeated": 1}
    second, near = check(logits, u, window, keep, options, gap_of_draws=1e-4)
    assert 0 < second < len(u) and near == 0
    arguments = ras.KERNEL.metal_arguments()
    for right, wrong in (
        ("sum < top_p", "sum < 0.5f * top_p"),
        ("lanes_min(head == most ? place : uint(n))", "lanes_max(head == most ? place : 0u)"),
        ("simd_sum(lane < sg ?", "simd_sum(lane < sg - 1 ?"),
        ("int(times) >= repeated", "int(times) > repeated"),
        ("z[i] = uint(begin + i) == id ? -INFINITY : z[i]", "z[i] = z[i]"),
        ("row_lse(m, s)", "row_lse(m, s) + 0.001f"),
        ("row_lse(m, s)", "s == s ? row_lse(m, s) : 0.0f"),
        ("? said[(j + 1) * said_step]", "? said[j * said_step]"),
    ):
        assert right in arguments["source"]
        broken = mslemu.metal_kernel(**arguments | {"source": arguments["source"].replace(right, wrong)})
        with monkeypatch.context() as patch, mslemu.settings(check="fast"):
            patch.setattr(ras.KERNEL, "_made", broken)
            assert not ras._selftest(masked) < 1, right


@needs_emulator
def test_logits_are_read_once(emulated):
    logits, u, window, keep = draw(2, 1000, masked=True)
    check(logits, u, window, keep)
    buffers = emulated.kernel.report.buffers
    assert buffers["logits"].read == logits.nbytes and buffers["keep"].read == keep.nbytes
    assert buffers["last"].written == window.nbytes and buffers["ids"].written == 8
    assert all(buffers[name].written == 0 for name in ("logits", "keep", "window", "u", "options"))


# ---------------------------------------------------------------- the choice


@needs_emulator
def test_the_first_step_tests_the_kernel(monkeypatch, tmp_path):
    """On a machine that claims a GPU: one self-test a variant, and then the kernel; a wrong one is off, with a warning,
    and the operations take over."""
    monkeypatch.setenv("MLX_COSYH3_CACHE", str(tmp_path))
    monkeypatch.setattr(_dispatch, "on_gpu", lambda stream=None: True)
    monkeypatch.setattr(ras, "softmax_lse", softmax_reference)  # its kernels, and those of top_k, are not at hand
    monkeypatch.setattr(ras, "largest", top_k_reference)
    arguments = ras.KERNEL.metal_arguments()
    wrong = arguments | {"source": arguments["source"].replace("sum < top_p", "sum < 0.5f * top_p")}
    logits, u, window, keep = draw(3, 257, masked=True)
    for right, kernel in ((True, Emulated()), (False, mslemu.metal_kernel(**wrong))):
        new_process(monkeypatch)
        monkeypatch.delenv(_dispatch.VARIABLE, raising=False)
        monkeypatch.setattr(ras.KERNEL, "_made", kernel)
        if not right:
            _trust.test_anew()
        with mslemu.settings(check="fast"), _dispatch.watch() as used:
            for _ in range(2):
                first = not right and not _trust.outcomes()
                with pytest.warns(RuntimeWarning, match="ras_step is off") if first else nullcontext():
                    check(logits, u, window, keep, gap_of_draws=1e-5)
            if right:
                check(logits, u, window, keep | True, gap_of_draws=1e-5)
        assert [(o.kernel, o.passed) for o in _trust.outcomes()] == [("ras_step", right)] * (1 + right)
        assert used == ({("softmax", "ras_step", "(True,)"), ("softmax", "ras_step", "(False,)")} if right else set())
        assert not right or kernel.calls == 5


def test_what_the_kernel_leaves_to_the_operations(monkeypatch):
    """Each launch is asked for with all that its text depends on; other inputs never ask."""
    asked = []
    monkeypatch.setattr(_dispatch, "usable", lambda kernel, *what: asked.append((kernel.name, *what[:2])))
    monkeypatch.setattr(ras.KERNEL, "_made", lambda **_: pytest.fail("the kernel ran"))

    def ask(n=300, rows=2, width=10, dtype=mx.float32, keep=None, **options):
        asked.clear()
        logits = mx.array(draw(rows, n, width)[0]).astype(dtype)
        window = mx.full((rows, width), -1, dtype=mx.int32)
        ids, *_ = ras_step(logits, mx.full((rows, 2), 0.5), window, keep, **SPEECH | options)
        assert ids.shape == (rows,)
        return [a for a in asked if a[0] == "ras_step"]

    assert ask() == [("ras_step", "softmax", (False,))]
    assert ask(keep=mx.ones((1, 300), dtype=mx.bool_)) == [("ras_step", "softmax", (True,))]
    assert ask(n=ras.MAX_IDS, rows=1) and ask(n=100, top_k=0) and ask(top_k=128) and ask(width=0)
    assert not ask(n=ras.MAX_IDS + 1, rows=1)
    assert not ask(top_k=0) and not ask(top_k=129)
    assert not ask(dtype=mx.float16)
    assert not ask(keep=mx.zeros((300,)))


def test_on_a_cpu_the_operations_run(monkeypatch):
    monkeypatch.setattr(ras.KERNEL, "_made", lambda **_: pytest.fail("the kernel ran on a CPU"))
    check(*draw(3, 300, masked=True), gap_of_draws=1e-5)
    with use_kernels("0"):
        check(*draw(3, 300), gap_of_draws=1e-5)


def test_names_and_numbers():
    """No literal that is a double in CUDA; arrays of the threadgroup take MAX_K."""
    text = ras.KERNEL.header + ras.KERNEL.body + ras.KERNEL.cuda_header
    assert not re.findall(r"\b\d+\.\d*(?:e[-+]?\d+)?(?![\w.])", text)
    assert f"below[{ras.MAX_K}]" in text and "8 * t" in text and ras.VALUES == 8
