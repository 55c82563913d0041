"""The kernels of softmax, argmax_lse and top_k: their Metal text in the emulator against numpy in float64, and their
choice: on a CPU the reference does the same."""

import importlib
import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.kernels import _dispatch, softmax, softmax_rows, use_kernels
from mlx_cosyh3.kernels._gpu import GpuKernel

from . import mslemu

module = importlib.import_module("mlx_cosyh3.kernels.softmax")  # the package's `softmax` is the function
topk = importlib.import_module("mlx_cosyh3.kernels.top_k")
softmax_lse, argmax_lse, top_k = module.softmax_lse, module.argmax_lse, topk.top_k
KERNELS = [k for m in (softmax_rows, topk) for k in vars(m).values() if isinstance(k, GpuKernel)]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
ROUNDING = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
SMALLEST = {mx.float32: 1e-37, mx.float16: 2.0**-24, mx.bfloat16: 1e-37}
SIZES = [1, 31, 32, 33, 63, 64, 65, 255, 257, 896, 1000, 4864, 6761]
needs_emulator = pytest.mark.skipif(bool(mslemu.missing()), reason=f"Metal emulator: {mslemu.missing()}")


class Emulated:
    """Stands in for the compiled kernel: lint, then the emulator. `texts` collects what would be compiled."""

    linted = set()

    def __init__(self, kernel, texts):
        self.name, self.texts = kernel.name, texts
        self.kernel = mslemu.metal_kernel(**kernel.metal_arguments())

    def __call__(self, *, inputs, output_dtypes, template, **call):
        text = self.kernel.text(inputs, output_dtypes, template).text
        self.texts.add((self.name, text))
        if text not in self.linted:
            found = mslemu.lint(self.kernel, inputs, output_dtypes, template)
            assert not found, "\n".join(map(str, found))
            self.linted.add(text)
        return self.kernel(inputs=inputs, output_dtypes=output_dtypes, template=template, **call)


@pytest.fixture
def emulated(monkeypatch):
    """Kernels run, in the emulator. Returns the set of (kernel name, text) that the test's calls compile."""
    texts = set()
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "_made", Emulated(kernel, texts))
    monkeypatch.setattr(_dispatch, "usable", lambda *_: True)
    return texts


def names(texts):
    return {name for name, _ in texts}


def to64(a):
    return np.array(a if a.dtype == mx.bool_ else a.astype(mx.float32)).astype(np.float64)


def exact(x, axis=-1, scale=1.0, mask=None):
    """(softmax, lse) in float64."""
    z = to64(x) * scale
    if mask is not None:
        m = to64(mask)
        z = np.where(m != 0, z, -np.inf) if mask.dtype == mx.bool_ else z + m
    with np.errstate(invalid="ignore", divide="ignore"):
        peak = z.max(axis, keepdims=True)
        e = np.where(np.isneginf(z), 0, np.exp(z - np.where(np.isneginf(peak), 0, peak)))
        total = e.sum(axis, keepdims=True)
        return e / np.where(total == 0, 1, total), (peak + np.log(total)).squeeze(axis)


def check(x, axis=-1, **how):
    y, lse = softmax_lse(x, axis, **how)
    want, want_lse = exact(x, axis, **how)
    assert y.dtype == x.dtype and y.shape == x.shape and lse.dtype == mx.float32 and lse.shape == want_lse.shape
    assert np.allclose(to64(y), want, rtol=ROUNDING[x.dtype] + 3e-5, atol=SMALLEST[x.dtype], equal_nan=True)
    assert np.allclose(to64(lse), want_lse, rtol=1e-6, atol=2e-6, equal_nan=True)


def draw(shape, dtype=mx.float32, seed=0, spread=4):
    r = np.random.default_rng([seed, *shape])
    return mx.array((spread * r.standard_normal(shape)).astype(np.float32)).astype(dtype)


def layouts(rows, n, dtype):
    """The same numbers as they come, with rows further apart and not aligned, and column by column."""
    x = draw((rows, n), dtype, spread=5)
    wide = mx.zeros((2 * rows, n + 3), dtype=dtype)
    wide[::2, 1 : n + 1] = x
    yield from (x, wide[::2, 1 : n + 1], mx.contiguous(x.T).T)


def all_routes(n):
    """Every kernel that can take rows of this length, also where another one would be chosen."""
    r = softmax_rows
    yield from (r.Route(r._lanes, (), v, False, 0) for v in (1, 4, 8) if n <= 32 * v)
    yield from (r.Route(r._row, (), v, False, 0) for v in (4, 8) if n <= 1024 * v)
    yield from (r.Route(f, (), 8, f in (r._argmax, r._argmax_parts), 0) for f in (r._loop, r._parts, r._argmax, r._argmax_parts))


@needs_emulator
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_at_every_size(emulated, dtype):
    """All sizes and schedules: right, and the same bits whatever the schedule. Other layouts, too: in all schedules for
    the kernel that is used at this size, in one or another for the rest."""
    for n in SIZES:
        want = None
        for i, x in enumerate(layouts(8 if n == 1 else 2, n, dtype)):
            want = want or (*exact(x), to64(x).argmax(-1))
            used = [to(len(x), n) for to in (softmax_rows.route, softmax_rows.argmax_route)]
            for to in all_routes(n):
                results = []
                every = i == 0 or (to.launch, to.values) in [u[:3:2] for u in used]
                for schedule in mslemu.SCHEDULES if every else mslemu.SCHEDULES[(i + n) % 3 :][:1]:
                    with mslemu.settings(**schedule):
                        results.append(to.launch(softmax_rows.task_of(x, None, 1.0, None), to.values, None))
                y, lse = results[0]
                if to.best:
                    assert np.array_equal(y, want[2])
                else:
                    assert np.allclose(to64(y), want[0], rtol=ROUNDING[dtype] + 3e-5, atol=SMALLEST[dtype])
                assert np.allclose(to64(lse), want[1], rtol=1e-6, atol=2e-6)
                assert all(mx.array_equal(u, v).item() for other in results[1:] for u, v in zip(results[0], other))
    assert names(emulated) == {k.name for k in KERNELS} - {"top_k"}


@needs_emulator
@pytest.mark.parametrize("n", [1, 32, 33, 128, 129, 256, 257, 2048, 2049, 8192, 8193])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_follows_the_size(emulated, n, dtype):
    check(draw((3, n), dtype))
    kernel = {"softmax_lanes"} if n <= 256 else {"softmax_row"} if n <= 8192 else {"softmax_part", "softmax_spread"}
    assert names(emulated) == kernel


@needs_emulator
@pytest.mark.parametrize("kind", [mx.bool_, mx.float32, mx.float16, mx.bfloat16])
def test_masks(emulated, kind):
    """One for all rows, one a batch, one a row: broadcast without a copy; at every size, in all schedules."""
    for n in (*SIZES, 7, 10239):  # 10239: the last part is empty if vectors start early
        x = draw((2, 2, n), mx.float32 if kind == mx.bool_ else kind)
        shapes = [(n,), (2, 1, n), (2, 2, n)]
        for i, schedule in enumerate(mslemu.SCHEDULES):
            mask = draw(shapes[(i + n) % 3], seed=1)
            mask = mask > -2 if kind == mx.bool_ else mask.astype(kind)
            with mslemu.settings(**schedule):
                check(x, scale=0.125, mask=mx.broadcast_to(mask, x.shape))
    y = softmax(x, scale=0.125, mask=mask)
    assert mx.array_equal(y, softmax(x, scale=0.125, mask=mx.broadcast_to(mask, x.shape))).item()


@needs_emulator
@pytest.mark.parametrize("sweep", mslemu.SWEEP, ids=lambda s: f"{s['order']}-{s['contract']}")
@pytest.mark.parametrize("noise", [False, True])
def test_schedules_and_rounding(emulated, sweep, noise):
    with mslemu.settings(noise=noise, **sweep):
        for shape in ((9, 33), (2, 1000), (2, 8193)):
            check(draw(shape, spread=20))
        check(draw((3, 300)), mask=mx.broadcast_to(draw((300,), seed=1) > -2, (3, 300)))
        ids, lse = argmax_lse(draw((2, 2300)))
        assert np.array_equal(ids, to64(draw((2, 2300))).argmax(-1))
        check_top_k(draw((2, 2300)), 40)
    assert len(names(emulated)) == 6


@needs_emulator
@pytest.mark.parametrize("dtype", DTYPES)
def test_loop_for_many_long_rows(emulated, monkeypatch, dtype):
    monkeypatch.setattr(softmax_rows, "FEW_ROWS", 1)
    for schedule in mslemu.SCHEDULES:
        with mslemu.settings(**schedule):
            check(draw((2, 9001), dtype))
    assert names(emulated) == {"softmax_loop"}
    check(draw((2, 17000), dtype), mask=mx.broadcast_to(draw((17000,), seed=1), (2, 17000)))


@needs_emulator
@pytest.mark.parametrize("n", [5, 40, 200, 700, 3000, 8300])
def test_rows_without_a_number(emulated, n):
    """Nothing left: zeros and -inf. NaN and +inf: NaN throughout. The other rows are as ever."""
    x = np.array(draw((5, n)))
    x[1], x[2, n // 2], x[3, n - 1] = -np.inf, np.nan, np.inf
    x[4, 1:] = -np.inf
    check(mx.array(x))
    y, lse = softmax_lse(mx.array(x))
    assert not np.array(y[1]).any() and lse[1].item() == -np.inf
    assert np.isnan(np.array(y[2:4])).all() and np.isnan(np.array(lse[2:4])).all()
    y, lse = softmax_lse(mx.array(x), mask=mx.zeros((n,), dtype=mx.bool_))
    assert not np.array(y[0]).any() and lse[0].item() == -np.inf
    low = mx.full((2, n), -3.4028234663852886e38)  # what masks put in place of -inf: still finite
    check(low)
    assert np.array_equal(argmax_lse(mx.where(mx.arange(n) == 3, low, -mx.inf))[0], [3, 3])


@needs_emulator
@pytest.mark.parametrize("head", [1, 3])
def test_vectors_that_begin_before_the_row(emulated, monkeypatch, head):
    """As on CUDA for the sake of alignment: the same text with that word given other values."""
    word = "HELPER int row_head(P p) { return 0; }"
    for kernel in KERNELS:
        arguments = kernel.metal_arguments()
        assert word in arguments["header"]
        arguments["header"] = arguments["header"].replace(word, word.replace("0", str(head)))
        monkeypatch.setattr(kernel, "_made", mslemu.metal_kernel(**arguments))
    for n in (257, 1000, 2045, 2048, 8189, 8190, 8192, 8193, 10239, 10240):
        check(draw((2, n)))
        x = mx.round(draw((2, n)))
        assert np.array_equal(argmax_lse(x)[0], np.array(x).argmax(-1))
    check(draw((2, 1001)), mask=draw((2, 1001), seed=1) > 0)
    monkeypatch.setattr(softmax_rows, "FEW_ROWS", 0)
    for n in (8193, 12287, 12290):
        check(draw((2, n)))
        assert np.array_equal(argmax_lse(draw((2, n)))[0], np.array(draw((2, n))).argmax(-1))


@needs_emulator
@pytest.mark.parametrize("n", [6, 100, 1000, 8500])
def test_any_strides(emulated, n):
    base = draw((4, 3, n + 3))
    check(base[:, :, :n])  # rows further apart than they are long
    check(base[:, :, 3:])  # and not aligned
    check(base[:, :, 1:2:1][:, :, 0])  # columns apart, 3 of them
    check(base[::2, 1, : n - 1])
    check(mx.broadcast_to(draw((n,)), (3, n)))
    check(mx.broadcast_to(draw((3, 1)), (3, n)))
    check(draw((n, 3)).T)
    check(draw((n, 3)).T, mask=draw((n, 3), seed=1).T > 0)
    if n <= 1000:
        check(draw((2, n, 3), mx.bfloat16), 1)
        check(draw((n, 2)), axis=0, mask=draw((n, 2), seed=2))
        check(draw((n, 2)), axis=-2)


@needs_emulator
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", mslemu.SCHEDULES, ids=lambda s: s["order"])
def test_fewer_than_eight_elements(emulated, dtype, schedule):
    """Metal passes those in another address space. (Kernels for long rows meet that only in what parts hand on.)"""
    with mslemu.settings(**schedule):
        for shape in ((1,), (7,), (2, 3), (1, 1), (3, 2, 1), (1, 5)):
            x = draw(shape, dtype)
            check(x)
            check(x, mask=draw(shape, dtype, seed=1))
            check(x, mask=draw(shape, seed=1) > 0)
            ids, lse = argmax_lse(x)
            assert np.array_equal(ids, to64(x).argmax(-1))
            assert ids.dtype == mx.int32 and ids.shape == lse.shape == shape[:-1]
            check_top_k(x, 1)
            check_top_k(x, shape[-1])
        x = draw((1, 2300), dtype)  # two parts: 4 numbers and 2 places
        assert np.array_equal(argmax_lse(x)[0], to64(x).argmax(-1))


@needs_emulator
@pytest.mark.parametrize("n", [1, 33, 1000, 2049, 6761])
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax(emulated, n, dtype):
    x = mx.round(draw((4, n), dtype, spread=2))  # full of equals: the first counts
    x = mx.where(mx.arange(4)[:, None] == 1, -mx.inf, x).astype(dtype)
    x = mx.where((mx.arange(4)[:, None] == 2) & (mx.arange(n) == n // 2), mx.nan, x).astype(dtype)
    with mslemu.settings(**mslemu.SCHEDULES[n % 3]):
        ids, lse = argmax_lse(x)
    z = to64(x)
    assert np.array_equal(ids, np.where(np.isnan(z), -np.inf, z).argmax(-1))
    assert np.allclose(to64(lse), exact(x)[1], rtol=1e-6, atol=2e-6, equal_nan=True)
    mask = draw((4, n), seed=3) > 0
    ids, lse = argmax_lse(x, scale=-0.5, mask=mask)
    z = np.where(np.array(mask), -0.5 * z, -np.inf)
    assert np.array_equal(ids, np.where(np.isnan(z), -np.inf, z).argmax(-1))
    assert np.allclose(to64(lse), exact(x, scale=-0.5, mask=mask)[1], rtol=1e-6, atol=2e-6, equal_nan=True)
    assert names(emulated) == ({"softmax_argmax"} if n <= 2048 else {"softmax_part", "softmax_argmax_join"})


def check_top_k(x, k):
    """Exactly numpy's stable sort, NaN below all."""
    values, columns = top_k(x, k)
    z = to64(x)
    column = np.broadcast_to(np.arange(z.shape[-1]), z.shape)
    order = np.lexsort((column, -np.where(np.isnan(z), 0, z), np.isnan(z)))[..., :k]
    assert values.dtype == mx.float32 and columns.dtype == mx.int32
    assert np.array_equal(np.array(columns), order)
    assert np.array_equal(np.array(values), np.take_along_axis(z, order, -1).astype(np.float32), equal_nan=True)


@needs_emulator
@pytest.mark.parametrize("n, k", [*((n, min(n, 50)) for n in SIZES), (31, 5), (100, 100), (300, 64), (1000, 128), (2048, 1), (2049, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k(emulated, n, k, dtype):
    """Full of equal values; rows of -inf and of NaN, and with fewer than k numbers."""
    x = mx.round(draw((8, n), dtype, spread=3))
    row, column = mx.arange(8)[:, None], mx.arange(n)
    x = mx.where(row == 1, -mx.inf, x)
    x = mx.where((row == 2) & (column % 7 == 3), mx.nan, x)
    x = mx.where((row == 3) & (column % 211 != 2), mx.nan, x)
    x = mx.where((row == 4) & (column % 2 == 1), -0.0, mx.where(row == 4, 0.0, x)).astype(dtype)
    x = x if n == 1 else x[:5]
    wide = mx.zeros((5, n + 2), dtype=dtype)
    wide[:, 1 : n + 1] = x[:5]
    for schedule in mslemu.SCHEDULES:
        with mslemu.settings(**schedule):
            check_top_k(x, k)
            if n > 1:
                check_top_k(wide[1::2, 1 : n + 1], k)
                check_top_k(mx.contiguous(x.T).T, k)
    assert names(emulated) == {"top_k"}


@needs_emulator
def test_surplus_threads_do_nothing(emulated, monkeypatch):
    """CUDA starts whole threadgroups: 3 rows are 96 of 256 threads."""
    run = softmax_rows.LANES_KERNEL._made
    monkeypatch.setattr(softmax_rows.LANES_KERNEL, "_made", lambda *, grid, **call: run(grid=(256, 1, 1), **call))
    check(draw((3, 40)))


@needs_emulator
def test_a_row_of_many_parts(emulated):
    """More parts than lanes; equal values in parts that the same lane reads."""
    x = draw((1, 70000), mx.float16)
    check(x)
    x = mx.where(mx.arange(70000) % 2048 == 1000, 50.0, x).astype(mx.float16)
    ids, lse = argmax_lse(x)
    assert ids.item() == 1000 and abs(lse.item() - exact(x)[1].item()) < 5e-5


@needs_emulator
def test_top_k_of_a_vocabulary(emulated):
    check_top_k(draw((1, 50257), mx.bfloat16), 50)
    emulated.clear()
    check_top_k(draw((1, 2048 * 65)), 128)  # more candidates than the second launch takes
    check_top_k(draw((1, 200)), 129)
    assert not emulated


@needs_emulator
def test_a_new_length_compiles_nothing(emulated):
    for shapes in (((3, 40), (5, 77)), ((2, 300), (3, 2047)), ((2, 3000), (1, 8191)), ((2, 8193), (1, 9999))):
        emulated.clear()
        check(draw(shapes[0]))
        before = set(emulated)
        check(draw(shapes[1]))
        assert emulated == before
    top_k(draw((2, 3000)), 7)
    before = set(emulated)
    top_k(draw((1, 5000)), 50)
    assert emulated == before


@needs_emulator
@pytest.mark.parametrize("n, reads", [(200, 1), (1000, 1), (8192, 1), (9000, 2)])
def test_bytes_moved(emulated, n, reads):
    """x is read so often and no more, y written once; a row of the mask is read by each row."""
    x, mask = draw((2, n), mx.float16), mx.broadcast_to(draw((n,), mx.float16, seed=1), (2, n))
    softmax(x, mask=mask)
    reports = [k._made.kernel.report for k in KERNELS if k._made.kernel.report]
    total = lambda name, what: sum(getattr(r.buffers[name], what) for r in reports if name in r.buffers)  # noqa: E731
    assert total("x", "read") == reads * x.nbytes and total("mask", "read") == reads * 4 * n
    assert total("y", "written") == x.nbytes and total("lse", "written") == 8
    assert all(r.buffers[name].written == 0 for r in reports for name in ("x", "mask", "scale"))


@needs_emulator
@pytest.mark.parametrize("mask", [None, mx.bool_, mx.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_selftests_pass(emulated, dtype, mask):
    for route in (*(softmax_rows.route(3, n) for n in (8, 100, 200, 1000)), softmax_rows.argmax_route(3, 1000)):
        assert module._selftest(route, dtype, mask) < 1
    if mask is None:
        for rows, n in ((3, 5000), (3, 9000), (999, 9000)):
            assert module._selftest(softmax_rows.route(rows, n), dtype, None) < 1
        assert module._selftest(softmax_rows.argmax_route(3, 9000), dtype, None) < 1
        assert topk._selftest(dtype, False) == topk._selftest(dtype, True) == 0


@needs_emulator
@pytest.mark.parametrize("n, kernel, right, wrong", [
    (100, "LANES_KERNEL", "z[i] * inverse", "z[i] * inverse * 1.0001f"),
    (1000, "ROW_KERNEL", "z[i] *= inverse", "z[i] *= i == 3 ? 0.0f : inverse"),
    (9000, "SPREAD_KERNEL", "s == 0.0f ? 0.0f", "s < 0.0f ? 0.0f"),  # NaN in place of zeros
    (9000, "PART_KERNEL", "sums[lane] : 0.0f", "sums[0] : 0.0f"),
])  # fmt: skip
def test_selftest_finds_a_wrong_kernel(emulated, monkeypatch, n, kernel, right, wrong):
    arguments = getattr(softmax_rows, kernel).metal_arguments()
    assert right in arguments["source"]
    broken = mslemu.metal_kernel(**arguments | {"source": arguments["source"].replace(right, wrong)})
    monkeypatch.setattr(getattr(softmax_rows, kernel), "_made", broken)
    assert not module._selftest(softmax_rows.route(3, n), mx.float32, None) < 1


def test_every_variant_asks_first(monkeypatch):
    """Each launch is asked for with all that its text depends on, and a kernel that may not run is not run."""
    asked = []

    def usable(kernel, name, variant, stream, selftest):
        asked.append((kernel.name, name, variant))
        return False

    monkeypatch.setattr(_dispatch, "usable", usable)
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "_made", lambda **_: pytest.fail("a kernel ran"))
    check(draw((2, 20)))
    check(draw((2, 2000), mx.float16), mask=draw((2, 2000), mx.float16, seed=1))
    check(draw((2, 4000)), mask=draw((2, 4000), seed=1) > 0)
    argmax_lse(draw((200, 3)))
    top_k(draw((2, 3000)), 4)
    assert asked == [
        ("softmax_lanes", "softmax", (mx.float32, None, 1, False)),
        ("softmax_row", "softmax", (mx.float16, mx.float16, 4, False)),
        ("softmax_row", "softmax", (mx.float32, mx.bool_, 8, False)),
        ("softmax_argmax", "softmax", (mx.float32, None, 8, True)),
        ("top_k", "softmax", (mx.float32, True)),
    ]


def test_the_faster_way_is_chosen(monkeypatch):
    """On a GPU by the table of its back end, unless the call says which way or the kernels are off."""
    ran, softmax_of, builtin = [], module.softmax_lse, module.builtin
    monkeypatch.setattr(module, "softmax_lse", lambda *a, **k: ran.append("kernel") or softmax_of(*a, **k))
    monkeypatch.setattr(module, "builtin", lambda *a, **k: ran.append("builtin") or builtin(*a, **k))
    monkeypatch.setattr(_dispatch, "on_gpu", lambda stream=None: True)
    monkeypatch.setattr(_dispatch, "usable", lambda *_: False)
    monkeypatch.setattr(_dispatch, "_environment", None)
    monkeypatch.delenv(_dispatch.VARIABLE, raising=False)

    def way(*args, **how):
        ran.clear()
        softmax(*args, **how)
        return ran[0]

    x, mask = draw((2, 3)), mx.ones((3,), dtype=mx.bool_)
    tables = {"plain": [(6, "builtin")], "masked": [(3, "builtin")]}
    monkeypatch.setitem(module.CHOICE, "metal" if mx.metal.is_available() else "cuda", tables)
    assert way(x) == "builtin" and way(draw((1, 7))) == "kernel"
    assert way(x, mask=mask) == way(x, scale=2.0) == "kernel" and way(x[:1], mask=mask) == "builtin"
    assert way(x, way="kernel") == "kernel" and way(draw((1, 7)), way="builtin") == "builtin"
    with use_kernels("h3_step"):
        assert way(x) == "kernel"  # that is: the reference
    monkeypatch.setattr(_dispatch, "on_gpu", lambda stream=None: False)
    assert way(x) == "kernel"
    assert set(module.CHOICE) == {"metal", "cuda"} and all(set(c) == {"plain", "masked"} for c in module.CHOICE.values())
    with pytest.raises(ValueError, match="no way 'fast'"):
        softmax(x, way="fast")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_builtin_way_gives_the_same(dtype):
    x = np.array(draw((5, 40)))
    x[1], x[2, 20], x[3, 3:] = -np.inf, np.nan, -np.inf
    x = mx.array(x).astype(dtype)
    mask = mx.arange(40) > 3
    for how in ({}, {"mask": mask}, {"mask": draw((40,), dtype, seed=1), "scale": 0.5}, {"scale": -2.0}, {"axis": 0}):
        y, want = softmax(x, way="builtin", **how), module.reference(x, **how)[0]
        assert y.dtype == dtype
        want = mx.where(mx.isnan(want) & (y == 0), 0, want)  # columns of -inf in a row with a NaN stay 0
        assert np.allclose(to64(y), to64(want), rtol=2 * ROUNDING[dtype] + 1e-5, atol=SMALLEST[dtype], equal_nan=True)
    assert not to64(softmax(x, way="builtin", mask=mx.zeros((40,), dtype=mx.bool_))[0]).any()
    assert np.array(softmax(mx.zeros((2, 0)), way="builtin")).shape == (2, 0)


def test_on_a_cpu_the_reference_runs(monkeypatch):
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "_made", lambda **_: pytest.fail("a kernel ran on a CPU"))
    for stream in (mx.cpu, mx.default_stream(mx.cpu)):
        for x in (draw((2, 3, 40)), draw((2, 9000), mx.bfloat16)):
            y, lse = softmax_lse(x, scale=0.5, stream=stream)
            want = exact(x, scale=0.5)
            assert np.allclose(to64(y), want[0], rtol=ROUNDING[x.dtype] + 1e-5)
            assert np.allclose(to64(lse), want[1], atol=1e-5)
            assert mx.array_equal(softmax(x, scale=0.5, stream=stream), y).item()
            assert np.array_equal(argmax_lse(x, stream=stream)[0], to64(x).argmax(-1))
            got = top_k(x, 9, stream=stream)
            assert np.array_equal(got[1], np.argsort(-to64(x), -1, kind="stable")[..., :9])
    x = np.array([[np.nan, 1, -np.inf, 1, 2], [-np.inf, np.nan, -np.inf, np.nan, np.nan]], dtype=np.float32)
    for k in range(1, 6):
        check_top_k(mx.array(x), k)


def test_refusals():
    x = mx.zeros((2, 3))
    for error, words, call in (
        (TypeError, "softmax_lse|softmax takes floating", lambda: softmax(x.astype(mx.int32))),
        (TypeError, "argmax_lse takes floating", lambda: argmax_lse(x.astype(mx.int32))),
        (TypeError, "top_k takes floating", lambda: top_k(x.astype(mx.int32), 1)),
        (ValueError, r"mask \[2, 2\] does not broadcast to x \[2, 3\]", lambda: softmax(x, mask=mx.zeros((2, 2)))),
        (ValueError, r"mask \[4, 2, 3\] does not broadcast", lambda: softmax(x, mask=mx.zeros((4, 2, 3)))),
        (ValueError, "k = 0 ", lambda: top_k(x, 0)),
        (ValueError, r"k = 4 is not within 1 .. .*\[2, 3\]", lambda: top_k(x, 4)),
    ):
        with pytest.raises(error, match=words):
            call()
    y, lse = softmax_lse(mx.zeros((0, 4), dtype=mx.float16))
    assert (y.shape, y.dtype, lse.shape) == ((0, 4), mx.float16, (0,))
    y, lse = softmax_lse(mx.zeros((2, 0, 3)), 1)
    assert y.shape == (2, 0, 3) and lse.shape == (2, 3) and lse[0, 0].item() == -np.inf


def test_names_and_numbers():
    """Distinct names; no literal that is a double in CUDA."""
    assert len({k.name for k in KERNELS}) == len(KERNELS) == 8
    for kernel in KERNELS:
        assert not re.findall(r"\b\d+\.\d*(?:e[-+]?\d+)?(?![\w.])", kernel.header + kernel.body + kernel.cuda_header)
