"""The choice between kernel and reference, and the self-test before it, with fake kernels: no GPU is needed.

Run: MLX_DISABLE_COMPILE=1 python -m pytest -q tests/test_dispatch.py
"""

import json
import os
import subprocess
import sys
import threading
import time
import warnings

import mlx.core as mx
import numpy as np
import pytest

import mlx_cosyh3
from mlx_cosyh3 import cli
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.kernels import H3StepParams, _dispatch, _trust, h3_step, int8_matmul, softmax, use_kernels
from mlx_cosyh3.stream import Stream
from tests.small_model import write_model


class FakeKernel:
    """A GpuKernel as far as the dispatcher knows one."""

    def __init__(self, name="double", text="out = 2 * in"):
        self.name, self._text = name, text

    def text(self):
        return self._text


class SelfTest:
    """A self-test with a known end that counts its runs."""

    def __init__(self, result=0.25):
        self.result, self.runs = result, 0

    def __call__(self):
        self.runs += 1
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def ask(kernel, selftest, variant="float32", name="softmax", stream=None):
    return _dispatch.usable(kernel, name, variant, stream, selftest)


def new_process(monkeypatch):
    """Forget what a process knows; what lies on the disk stays."""
    monkeypatch.setattr(_dispatch, "_environment", None)
    monkeypatch.setattr(_trust, "_passed", {})
    monkeypatch.setattr(_trust, "_outcomes", [])
    monkeypatch.setattr(_trust, "_fresh", False)


@pytest.fixture(autouse=True)
def process(monkeypatch, tmp_path):
    """A new process with an empty cache folder and nothing in the environment."""
    monkeypatch.setenv("MLX_COSYH3_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLX_COSYH3_KERNELS", raising=False)
    new_process(monkeypatch)


@pytest.fixture
def gpu(monkeypatch):
    """The machine claims to have a GPU."""
    monkeypatch.setattr(_dispatch, "on_gpu", lambda stream=None: True)


def stamps(tmp_path):
    return sorted(p.name for p in (tmp_path / "cache" / "kernels").glob("*"))


def reports(tmp_path):
    return sorted((tmp_path / "cache" / "reports").glob("*"))


# ---------------------------------------------------------------- what the user chooses


@pytest.mark.parametrize(
    "value, names",
    [("0", ()), ("1", _dispatch.NAMES), ("", _dispatch.NAMES), ("softmax", ("softmax",)),
     (" h3_step, softmax ", ("h3_step", "softmax")), ("int8_matmul", ("int8_matmul",))],
)  # fmt: skip
def test_the_environment(monkeypatch, gpu, value, names):
    monkeypatch.setenv("MLX_COSYH3_KERNELS", value)
    assert _dispatch.allowed() == names
    for name in _dispatch.NAMES:
        assert ask(FakeKernel(name), SelfTest(), name=name) == (name in names)


@pytest.mark.parametrize("value", ["2", "on", "softmaxx", "softmax,,h3_step", "softmax;h3_step", "0,softmax", ",", " "])
def test_a_bad_value_is_one_clear_line(monkeypatch, capsys, value):
    monkeypatch.setenv("MLX_COSYH3_KERNELS", value)
    valid = "use 0 .none., 1 .all., or some of softmax,int8_matmul,h3_step,norm_linear"
    with pytest.raises(CosyH3Error, match="MLX_COSYH3_KERNELS.*" + valid):
        ask(FakeKernel(), SelfTest())
    assert cli.main(["info"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("mlx_cosyh3: MLX_COSYH3_KERNELS: ") and err.count("\n") == 1
    with pytest.raises(CosyH3Error, match="use_kernels"):
        with use_kernels(value):
            raise AssertionError("not reached")


def test_a_bad_value_does_not_break_the_import():
    done = subprocess.run(
        [sys.executable, "-c", "import mlx_cosyh3.kernels, mlx_cosyh3.cli"], capture_output=True, text=True,
        env=os.environ | {"MLX_COSYH3_KERNELS": "nonsense", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_context_manager_nests_and_comes_before_the_environment(monkeypatch, gpu):
    monkeypatch.setenv("MLX_COSYH3_KERNELS", "0")
    kernel, selftest = FakeKernel(), SelfTest()
    assert not ask(kernel, selftest)
    with use_kernels("1"):
        assert ask(kernel, selftest)
        with use_kernels("h3_step"):
            assert not ask(kernel, selftest)
            with pytest.raises(CosyH3Error, match="nearest known: 'softmax'"), use_kernels("softmx"):
                raise AssertionError("not reached")
            assert _dispatch.allowed() == ("h3_step",)
        assert ask(kernel, selftest)
        with pytest.raises(CosyH3Error, match="True names no kernel"), use_kernels(True):
            raise AssertionError("not reached")
    assert not ask(kernel, selftest) and selftest.runs == 1


def test_the_context_manager_holds_for_its_own_thread(gpu):
    seen = []
    with use_kernels("0"):
        thread = threading.Thread(target=lambda: seen.append(_dispatch.allowed()))
        thread.start()
        thread.join()
        assert _dispatch.allowed() == () and seen == [_dispatch.NAMES]


class Run:
    """A generation whose pieces are what the worker thread may use."""

    def pieces(self):
        for _ in range(2):
            yield ",".join(_dispatch.allowed()) or "none"

    def result(self):
        return "done"


def test_a_stream_honours_the_context_it_was_made_in():
    with use_kernels("h3_step"):
        first = Stream(Run())
    with use_kernels("0"):
        second = Stream(Run())
        assert list(first) == ["h3_step"] * 2
    assert list(second) == ["none"] * 2
    assert list(Stream(Run())) == [",".join(_dispatch.NAMES)] * 2  # in a thread that the others had before


def test_stream_generate_honours_it(monkeypatch, tmp_path):
    model = mlx_cosyh3.load(write_model(tmp_path / "model"))
    seen = set()
    monkeypatch.setattr(_dispatch, "usable", lambda *args: seen.add((threading.get_ident(), _dispatch.allowed())))
    with use_kernels("h3_step"):
        stream = mlx_cosyh3.stream_generate(model, "the", max_tokens=3, seed=1)
    assert list(stream)
    assert {names for _, names in seen} == {("h3_step",)} and threading.get_ident() not in {i for i, _ in seen}


# ---------------------------------------------------------------- where a kernel may run


def test_no_kernel_on_a_cpu():
    selftest = SelfTest()
    for stream in (None, mx.cpu, mx.Device(mx.cpu), mx.default_stream(mx.cpu)):
        if stream is not None or mx.default_device() == mx.cpu:
            assert _dispatch.on_gpu(stream) is False and ask(FakeKernel(), selftest, stream=stream) is False
    assert selftest.runs == 0


@pytest.mark.parametrize("metal, cuda", [(True, False), (False, True), (False, False)])
def test_on_gpu(monkeypatch, metal, cuda):
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    for stream in (mx.gpu, mx.Device(mx.gpu)):
        assert _dispatch.on_gpu(stream) is (metal or cuda)
    assert _dispatch.on_gpu(mx.cpu) is False
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert _dispatch.on_gpu() is (metal or cuda)


def test_the_self_test_runs_on_the_stream_that_was_asked_for(gpu):
    other = mx.new_stream(mx.cpu)
    seen = []

    def selftest():
        seen.append(mx.default_stream(mx.default_device()))
        return float((mx.ones(3) * 0).sum())

    assert ask(FakeKernel(), selftest, stream=other)
    assert seen == [other] and mx.default_stream(mx.cpu) != other


# ---------------------------------------------------------------- the self-test


def test_a_right_kernel_is_tested_once_and_never_again(gpu, monkeypatch, tmp_path):
    first = SelfTest()
    for _ in range(3):
        assert ask(FakeKernel(), first)
    assert first.runs == 1 and len(stamps(tmp_path)) == 1
    assert ask(FakeKernel(), other := SelfTest(), variant="float16") and other.runs == 1  # each variant for itself
    new_process(monkeypatch)
    again = SelfTest()
    assert ask(FakeKernel(), again) and ask(FakeKernel(), again, variant="float16") and again.runs == 0
    assert [o.stamped for o in _trust.outcomes()] == [True, True]
    stamp = json.loads(next((tmp_path / "cache" / "kernels").iterdir()).read_text())
    assert stamp["kernel"] == "double" and stamp["error"] == 0.25 and stamp["mlx"] == mx.__version__


@pytest.mark.parametrize(
    "result, words",
    [(RuntimeError("[metal::Device] Unable to build metal library\nprogram_source:3: error"), "RuntimeError: .metal"),
     (3.5, "worst error 3.5 times what is allowed"), (1.0, "worst error 1 times"), (float("nan"), "worst error nan"),
     (float("inf"), "worst error inf"), ("nothing", "ValueError"), (ValueError(""), "ValueError")],
    ids=["does not compile", "wrong", "just wrong", "nan", "inf", "no number", "no message"],
)  # fmt: skip
def test_a_kernel_that_fails_is_off_with_one_warning(gpu, monkeypatch, tmp_path, result, words):
    selftest, kernel = SelfTest(result), FakeKernel()
    assert ask(kernel, other := SelfTest(), variant="float16")
    with pytest.warns(RuntimeWarning, match=words) as caught:
        for variant in ("float32", "float16", "bfloat16"):
            for _ in range(2):
                assert ask(kernel, selftest, variant=variant) is False  # the whole kernel, also what had passed
    assert selftest.runs == 1 and other.runs == 1 and len(caught) == 1
    text = str(caught[0].message)
    assert "kernel double is off" in text and _trust.machine()["device"] in text and "\n" not in text
    assert ask(FakeKernel("another"), SelfTest())  # the others stay
    (report,) = reports(tmp_path)
    assert str(report) in text
    record = json.loads(report.read_text(), parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    assert record["operation"] == "softmax" and record["variant"] == "float32" and record["text"] == kernel.text()
    assert record["mlx"] == mx.__version__ and record["trouble"] and record["passed"] is False
    if isinstance(result, RuntimeError):
        assert "program_source:3" in record["trouble"] and "Traceback" in record["traceback"]
    new_process(monkeypatch)
    with pytest.warns(RuntimeWarning):
        assert not ask(kernel, selftest)  # off for the process: the next one tries again, and keeps one report
    assert selftest.runs == 2 and len(reports(tmp_path)) == 1
    selftest.result = 0.0
    new_process(monkeypatch)
    assert ask(kernel, selftest)  # mended, by a driver say


def test_a_warning_made_an_error_is_raised_once(gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="kernel double is off"):
            ask(FakeKernel(), SelfTest(9.0))
        assert not ask(FakeKernel(), SelfTest(9.0))


@pytest.mark.parametrize("change", ["text", "device", "architecture", "mlx", "system", "sources", "variant", "name"])
def test_a_stamp_of_something_else_does_not_count(gpu, monkeypatch, change):
    assert ask(FakeKernel(), SelfTest())
    new_process(monkeypatch)
    machine = _trust.machine()
    if change in machine:
        monkeypatch.setattr(_trust, "machine", lambda: machine | {change: "another"})
    if change == "sources":
        monkeypatch.setattr(_trust, "_sources", lambda: "another")
    kernel = {"text": FakeKernel(text="out = in + in"), "name": FakeKernel("twice")}.get(change, FakeKernel())
    again = SelfTest()
    assert ask(kernel, again, variant="float16" if change == "variant" else "float32") and again.runs == 1


def test_the_sources_are_these_files(monkeypatch, tmp_path):
    _trust._sources.cache_clear()
    before = _trust._sources()
    (tmp_path / "_trust.py").write_text("launch = 2")
    monkeypatch.setattr(_trust, "__file__", str(tmp_path / "_trust.py"))
    _trust._sources.cache_clear()
    assert _trust._sources() != before
    _trust._sources.cache_clear()


def test_a_cache_that_cannot_be_written(gpu, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_COSYH3_CACHE", str(tmp_path / "file" / "cache"))
    selftest = SelfTest()
    assert ask(FakeKernel(), selftest) and ask(FakeKernel(), selftest) and selftest.runs == 1
    with pytest.warns(RuntimeWarning, match="report: could not be written"):
        assert not ask(FakeKernel("bad"), SelfTest(5.0))
    new_process(monkeypatch)
    assert ask(FakeKernel(), selftest) and selftest.runs == 2


@pytest.mark.filterwarnings("ignore:kernel")
@pytest.mark.parametrize("result", [0.5, 5.0])
def test_threads_run_it_once_and_wait_for_it(gpu, result):
    runs, answers, start = [], [], threading.Barrier(8)

    def selftest():
        runs.append(threading.get_ident())
        time.sleep(0.1)
        return result

    def work():
        start.wait()
        answers.append(ask(FakeKernel(), selftest))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs) == 1 and answers == [result < 1] * 8


def test_a_self_test_may_call_the_operation_and_others(gpu):
    """The variant under test counts as usable in its own self-test; another one runs its own first."""
    inner, outer, seen = FakeKernel("inner"), FakeKernel("outer"), []

    def inner_test():
        seen.append(("inner asks for outer", ask(outer, outer_test, name="h3_step")))
        return 0.0

    def outer_test():
        seen.append(("outer asks for itself", ask(outer, outer_test, name="h3_step")))
        seen.append(("outer asks for inner", ask(inner, inner_test)))
        return 0.0

    assert ask(outer, outer_test, name="h3_step") and ask(inner, inner_test)
    assert seen == [("outer asks for itself", True), ("inner asks for outer", True), ("outer asks for inner", True)]
    with _dispatch.watch() as used:
        assert ask(FakeKernel("third"), lambda: 0.0 if ask(inner, inner_test) else 9.0)
    assert used == {("softmax", "third", "float32")}  # not what its self-test used


def test_an_interrupted_self_test_is_run_again(gpu, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        ask(FakeKernel(), SelfTest(KeyboardInterrupt()))
    assert stamps(tmp_path) == []
    assert ask(FakeKernel(), again := SelfTest()) and again.runs == 1


CRASH = """
import os
from mlx_cosyh3.kernels import _dispatch
from tests.test_dispatch import FakeKernel, ask
_dispatch.on_gpu = lambda stream=None: True
ask(FakeKernel(), os.abort)
"""


def test_a_self_test_that_ended_its_process_is_not_tried_again(gpu, monkeypatch, tmp_path):
    """As a fault on the GPU does in some versions of MLX; `doctor` (test_anew) may try, and clears what was left."""
    done = subprocess.run([sys.executable, "-c", CRASH], capture_output=True,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.returncode == -6, done.stderr
    (note,) = stamps(tmp_path)
    assert note.endswith(".running")
    selftest = SelfTest()
    for _ in range(2):
        new_process(monkeypatch)
        with pytest.warns(RuntimeWarning, match="ended the whole process before .*doctor"):
            assert not ask(FakeKernel(), selftest)
    assert selftest.runs == 0 and len(reports(tmp_path)) == 1
    _trust.test_anew()
    assert ask(FakeKernel(), selftest) and selftest.runs == 1
    (stamp,) = stamps(tmp_path)
    assert not stamp.endswith(".running")
    new_process(monkeypatch)
    assert ask(FakeKernel(), selftest) and selftest.runs == 1


def test_a_self_test_under_way_in_another_process_says_nothing(gpu, tmp_path):
    script = CRASH.replace("os.abort", "lambda: print('now', flush=True) or input() or 0.0")
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    with other:
        assert other.stdout.readline() == b"now\n" and len(stamps(tmp_path)) == 1
        assert ask(FakeKernel(), selftest := SelfTest()) and selftest.runs == 1
        assert len(stamps(tmp_path)) == 2  # the other's note is its own
        other.communicate(b"\n")
    assert other.returncode == 0 and len(stamps(tmp_path)) == 1


def test_a_gpu_lost_in_the_self_test(gpu, monkeypatch, tmp_path):
    """CUDA takes no more work from a process after a fault: no later process is to run into that again."""
    monkeypatch.setattr(_trust, "_gpu_answers", lambda: False)
    with pytest.warns(RuntimeWarning, match="illegal address; the GPU does not answer this process any more"):
        assert not ask(FakeKernel(), SelfTest(RuntimeError("illegal address")))
    new_process(monkeypatch)
    with pytest.warns(RuntimeWarning, match="ended the whole process before"):
        assert not ask(FakeKernel(), again := SelfTest())
    assert again.runs == 0


def test_the_gpu_is_asked_whether_it_answers(monkeypatch):
    assert _trust._gpu_answers()
    monkeypatch.setattr(mx, "array", lambda *a: 1 / 0)
    assert not _trust._gpu_answers()


def test_anew_forgets_stamps(gpu, monkeypatch, tmp_path):
    assert ask(FakeKernel(), SelfTest())
    _trust.test_anew()
    with pytest.warns(RuntimeWarning, match="worst error 7"):
        assert not ask(FakeKernel(), SelfTest(7.0))
    assert stamps(tmp_path) == []
    new_process(monkeypatch)
    assert ask(FakeKernel(), again := SelfTest()) and again.runs == 1


@pytest.mark.parametrize("transform", ["compile", "vmap", "grad", "export"])
def test_first_use_inside_a_trace(gpu, tmp_path, transform):
    """A self-test evaluates its own arrays while MLX traces the caller; the compiled function keeps the choice."""

    def selftest():
        x = mx.random.normal((8,), key=mx.random.key(3))
        return float(mx.abs(2 * x - (x + x)).max())

    def double(x):
        return 2 * x if ask(FakeKernel(), selftest) else x + 100

    x = mx.array([1.0, 2.0])
    if transform == "compile":
        mx.enable_compile()
        try:
            compiled = mx.compile(double)
            assert compiled(x).tolist() == [2, 4]
            with use_kernels("0"):
                assert compiled(x).tolist() == [2, 4] and double(x).tolist() == [101, 102]
        finally:
            mx.disable_compile()
    elif transform == "export":
        mx.export_function(str(tmp_path / "f"), double, x)
        assert mx.import_function(str(tmp_path / "f"))(x)[0].tolist() == [2, 4]
    else:
        result = mx.vmap(double)(x) if transform == "vmap" else mx.grad(lambda x: double(x).sum())(x)
        assert result.tolist() == ([2, 4] if transform == "vmap" else [2, 2])
    assert [o.passed for o in _trust.outcomes()] == [True]


def test_the_cache_folder(monkeypatch, tmp_path):
    assert _trust.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("MLX_COSYH3_CACHE")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(_trust.platform, "system", lambda: "Darwin")
    assert str(_trust.cache_folder()) == "/home/me/Library/Caches/mlx_cosyh3"
    monkeypatch.setattr(_trust.platform, "system", lambda: "Linux")
    assert str(_trust.cache_folder()) == "/home/me/.cache/mlx_cosyh3"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert str(_trust.cache_folder()) == "/elsewhere/mlx_cosyh3"
    monkeypatch.setattr(_trust.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert _trust.cache_folder().name == f"mlx_cosyh3-{os.getuid()}"


# ---------------------------------------------------------------- the real operations


@pytest.mark.skipif(mx.metal.is_available() or mx.cuda.is_available(), reason="needs a machine without a GPU")
def test_every_operation_survives_kernels_that_cannot_compile(gpu):
    """Here no kernel compiles: each operation that has one warns and gives the reference's result."""
    r = np.random.default_rng(1)
    real = lambda *shape: mx.array(r.standard_normal(shape).astype(np.float32))  # noqa: E731
    params = H3StepParams(real(4, 64), real(4, 64), real(4), *(real(4, 32, 2) for _ in range(3)), real(4))
    weight = mx.array(r.integers(-127, 128, (896, 896)).astype(np.int8))
    calls = {
        "softmax": lambda: [softmax(x, way="kernel")],
        "int8_matmul": lambda: [int8_matmul(x, weight, scale)],
        "h3_step": lambda: h3_step(q, q, q, shift, ssm, params),
    }
    x, scale, q, shift, ssm = real(1, 896), real(896), real(1, 1, 4), real(1, 4, 64), real(1, 4, 1, 1, 32, 2)
    for name, call in calls.items():
        with use_kernels("0"):
            want = call()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = call()
            call()
        for a, b in zip(got, want):
            assert mx.array_equal(a, b), name
        tried = {o.kernel for o in _trust.outcomes() if o.operation == name}
        assert tried, f"{name} has not tried a kernel"
        assert len(caught) == len(tried) and not any(o.passed for o in _trust.outcomes())


@pytest.mark.skipif(mx.metal.is_available() or mx.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.filterwarnings("ignore:kernel")
def test_generation_goes_on_when_kernels_fail(monkeypatch):
    model = mlx_cosyh3.load()
    want = mlx_cosyh3.generate(model, "The old", max_tokens=8, seed=2).text
    monkeypatch.setattr(_dispatch, "on_gpu", lambda stream=None: True)
    assert mlx_cosyh3.generate(model, "The old", max_tokens=8, seed=2).text == want
    assert "".join(mlx_cosyh3.stream_generate(model, "The old", max_tokens=8, seed=2)) == want
    assert any(o.operation == "h3_step" and not o.passed for o in _trust.outcomes())
