"""`mlx_cosyh3 doctor`, on whatever machine this is and on a pretended GPU; and the machines that are refused.

Run: MLX_DISABLE_COMPILE=1 python -m pytest -q tests/test_doctor.py
"""

import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

import mlx_cosyh3
from mlx_cosyh3 import cli, doctor, doctor_cases
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.kernels import _dispatch, _trust, use_kernels
from mlx_cosyh3.kernels.softmax import softmax_lse
from tests.test_dispatch import FakeKernel, new_process

COMMAND = [sys.executable, "-m", "mlx_cosyh3", "doctor"]


@pytest.fixture(autouse=True)
def process(monkeypatch, tmp_path):
    """A new process with an empty cache folder and nothing in the environment."""
    monkeypatch.setenv("MLX_COSYH3_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLX_COSYH3_KERNELS", raising=False)
    new_process(monkeypatch)


def read(text):
    return json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))


@pytest.fixture
def only(monkeypatch):
    """only(operation, n): the command runs the first n cases of this operation alone."""

    def only(operation, n=3):
        chosen = [c for c in doctor_cases.cases() if c.operation == operation][:n]
        monkeypatch.setattr(doctor, "cases", lambda: chosen)

    return only


def test_this_machine(tmp_path):
    """The whole command in a process of its own: every operation in every dtype, a table, a report."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*COMMAND, "--json", tmp_path / "report.json"], capture_output=True, text=True,
                          env=environment)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    report = read((tmp_path / "report.json").read_text())
    assert report["passed"] and report["mlx_cosyh3"] == mlx_cosyh3.__version__
    tested = {(c["operation"], c["dtype"]) for c in report["cases"]}
    floats = "float32", "float16", "bfloat16"
    operations = "softmax", "argmax_lse", "top_k", "int8_matmul", "int8_linear", "h3_step", "norm_linear"
    others = {("int8_matmul", "int8"), ("ras_step", "float32")}
    assert tested == {(o, d) for o in operations for d in floats} | others
    assert all(c["verdict"] == "pass" and c["ratio"] <= 1 and c["mlx_ms"] > 0 for c in report["cases"])
    lines = done.stdout.splitlines()
    for title in doctor.TITLES:
        assert any(title in line for line in lines)
    assert sum(line.endswith("  pass") for line in lines) == len(report["cases"])
    machine = report["machine"]
    assert machine["device"] in done.stdout and mx.__version__ in done.stdout and machine["memory"] > 1e8
    assert platform.python_version() in done.stdout
    if not _dispatch.on_gpu():
        assert machine["backend"] == "CPU" and "No kernel applies on a CPU" in done.stdout
        assert "working set unknown" in done.stdout and machine["recommended_working_set"] is None
        assert all("off: MLX has no GPU here" in state for state in report["kernels"].values())
        assert report["self_tests"] == []


# ---------------------------------------------------------------- the truth, and how close it is looked at


def weaken(case):
    """The same case with the last term of its sums, or the last column, left out."""
    cells = dict(zip(case.run.__code__.co_freevars, (c.cell_contents for c in case.run.__closure__)))
    last = lambda n: mx.arange(n) < n - 1  # noqa: E731
    less = lambda x: x * last(x.shape[-1]).astype(x.dtype)  # noqa: E731
    x, given = cells.get("x"), cells.get("given")
    without = lambda: mx.where(last(x.shape[-1]), x, -mx.inf).astype(x.dtype)  # noqa: E731
    run = {
        "softmax": lambda: list(doctor_cases.softmax_lse(without(), scale=cells["scale"], mask=given)),
        "argmax_lse": lambda: list(doctor_cases.argmax_lse(without())),
        "top_k": lambda: list(doctor_cases.top_k(x[..., ::-1], cells["k"])),  # values right, columns not
        "int8_matmul": lambda: [doctor_cases.int8_matmul(less(x), *given)],
        "int8_linear": lambda: [doctor_cases.int8_linear(less(x), *given, activation="silu", times=cells["times"],
                                                         residual=cells["residual"])],
        "ras_step": lambda: list(doctor_cases.ras_step(given[0], given[1], given[2][:, ::-1], given[3], top_p=0.8, top_k=25)),
        "norm_linear": lambda: [doctor_cases.nl.reference(less(given[0]), *given[1:], **cells["options"])],
        "h3_step": lambda: list(doctor_cases.h3_step(cells["q"], cells["k"], cells["v"], *given[:2],
                                                     given[2]._replace(C=given[2].C * last(given[2].C.shape[1])[:, None]))),
    }[case.operation]  # fmt: skip
    if case.dtype == "int8":
        run = lambda: [doctor_cases.int8_matmul(less(given[0]), *given[1:4], x_scale=given[4])]  # noqa: E731
    return dataclasses.replace(case, run=run)


def test_one_missing_term_is_found_in_every_case():
    missed = set()
    for case in doctor_cases.cases():
        row = doctor._examine(weaken(case))
        assert "trouble" not in row, row
        if row["verdict"] == "pass":
            missed.add((case.operation, case.shape, case.dtype))
    # One column of many may hold less than float16 can show, or than the sum of so many is allowed to be off.
    assert all(operation in ("softmax", "argmax_lse") for operation, _, _ in missed)
    assert not [m for m in missed if int(m[1].split()[2].strip(",")) < 1000], missed


def test_the_worst_element():
    want, allowed = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[0.1, 0.1], [0.1, 1.0]])
    got = mx.array([[1.05, 2.0], [3.08, 4.5]])
    ratio, error, limit, where = doctor.worst([got], [(want, allowed)])
    assert (round(ratio, 4), round(error, 4), limit, where) == (0.8, 0.08, 0.1, "output 0, [1, 0]")
    assert doctor.worst([mx.array([mx.nan])], [(np.array([1.0]), np.array([0.1]))])[0] == np.inf
    assert doctor.worst([mx.array([1.0])], [(np.array([1.0]), np.array([0.0]))])[0] == 0
    assert doctor.worst([mx.array([1.1])], [(np.array([1.0]), np.array([0.0]))])[0] == np.inf
    good = np.array([1.0]), np.array([0.1])
    assert doctor.worst([mx.array([1.0]), mx.array([1.2])], [good, good])[3] == "output 1, [0]"
    with pytest.raises(ValueError, match=r"shape \[1, 1\], not \[1\]"):
        doctor.worst([mx.array([[1.0]])], [good])
    with pytest.raises(ValueError):
        doctor.worst([mx.array([1.0])], [good, good])


def test_what_may_round_more(monkeypatch):
    single, half, product = (SimpleNamespace(dtype=d, product=p) for d, p in
                             (("float32", False), ("float16", False), ("float16", True)))  # fmt: skip
    for case in (single, half, product):
        assert _dispatch.on_gpu() or doctor._bound(case, False) == (doctor_cases.FP32, 1)
    monkeypatch.setattr(_dispatch, "on_gpu", lambda stream=None: True)
    monkeypatch.setenv("MLX_ENABLE_TF32", "1")
    assert doctor._bound(single, True) == doctor._bound(half, True) == (doctor_cases.FP32, 1)
    assert doctor._bound(single, False) == (doctor_cases.TF32, 3)
    assert doctor._bound(half, False) == (doctor_cases.FP32, 3)
    assert doctor._bound(product, True)[0] > 2.0**-15 and doctor._bound(product, True)[1] == 3
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert doctor._bound(single, False) == (doctor_cases.FP32, 3)


# ---------------------------------------------------------------- a pretended GPU


@pytest.fixture
def fake(monkeypatch, only):
    """A GPU with a softmax kernel: `fake.error` its self-test's result, `fake.factor` what it multiplies results by."""
    fake = SimpleNamespace(kernel=FakeKernel("rowwise"), error=0.1, factor=1.0, tests=0)
    monkeypatch.setattr(_dispatch, "on_gpu", lambda stream=None: True)

    def selftest():
        fake.tests += 1
        return fake.error

    def operation(x, **kwargs):
        with use_kernels("0"):
            y, lse = softmax_lse(x, **kwargs)
        if _dispatch.usable(fake.kernel, "softmax", (x.dtype, 4), None, selftest):
            return (y * fake.factor).astype(x.dtype), lse
        time.sleep(0.001)
        return y, lse

    monkeypatch.setattr(doctor_cases, "softmax_lse", operation)
    only("softmax", 4)
    return fake


def test_a_right_kernel(fake, capsys, tmp_path):
    assert cli.main(["doctor", "--json", str(tmp_path / "r.json")]) == 0
    report, out = read((tmp_path / "r.json").read_text()), capsys.readouterr().out
    assert report["kernels"]["softmax"] == "on: 1 variants passed their self-test"
    assert "on, but no case here needed it" in report["kernels"]["h3_step"]
    assert [(t["kernel"], t["passed"], t["error"]) for t in report["self_tests"]] == [("rowwise", True, 0.1)]
    for case in report["cases"]:
        assert case["variant"] == "rowwise (float32, 4)" and 0 < case["ms"] < case["mlx_ms"]
    assert "rowwise (float32, 4)" in out and "4 of 4 cases pass" in out


def test_a_stamp_does_not_spare_the_self_test(fake):
    assert cli.main(["doctor"]) == 0 and fake.tests == 1
    fake.error = 2.0
    assert cli.main(["doctor"]) == 1 and fake.tests == 2


@pytest.mark.filterwarnings("error")
def test_a_kernel_that_fails_its_self_test(fake, capsys, tmp_path):
    fake.error, fake.factor = 40.0, 2.0
    assert cli.main(["doctor", "--json", str(tmp_path / "r.json")]) == 1
    report, out = read((tmp_path / "r.json").read_text()), capsys.readouterr().out
    state = report["kernels"]["softmax"]
    assert state.startswith("off, as its self-test failed: rowwise") and "40 times what is allowed" in state
    assert state in out and "switched off by their self-test: rowwise" in out and "Please report" in out
    assert all(c["verdict"] == "pass" and c["variant"] == "MLX's operations" for c in report["cases"])
    assert report["self_tests"][0]["passed"] is False and not report["passed"]


def test_a_kernel_that_is_wrong_later(fake, capsys, tmp_path):
    fake.factor = 1.001
    assert cli.main(["doctor", "--json", str(tmp_path / "r.json")]) == 1
    report = read((tmp_path / "r.json").read_text())
    assert [c["verdict"] for c in report["cases"]] == ["FAIL"] * 4 and not report["passed"]
    assert "0 of 4 cases pass" in capsys.readouterr().out


def test_a_kernel_that_raises_later(fake, monkeypatch, capsys):
    working = doctor_cases.softmax_lse

    def operation(x, **kwargs):
        if x.shape[-1] == 33:
            raise RuntimeError("too many threads\nsecond line")
        return working(x, **kwargs)

    monkeypatch.setattr(doctor_cases, "softmax_lse", operation)
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith("FAIL: RuntimeError: too many threads")]
    assert any("3 of 4 cases pass" in line for line in lines)


@pytest.mark.parametrize("choice", ["0", "h3_step"])
def test_kernels_that_the_user_switched_off(fake, monkeypatch, choice, capsys):
    monkeypatch.setenv("MLX_COSYH3_KERNELS", choice)
    fake.error = 9.0
    assert cli.main(["doctor"]) == 0 and fake.tests == 0
    out = capsys.readouterr().out
    assert f"softmax      off: MLX_COSYH3_KERNELS={choice}" in out and "rowwise" not in out


def test_wrong_operations_of_mlx_are_found_too(monkeypatch, only, capsys):
    monkeypatch.setattr(doctor_cases, "softmax_lse", lambda x, **kwargs: [1.001 * a for a in softmax_lse(x, **kwargs)])
    only("softmax")
    assert cli.main(["doctor"]) == 1
    assert "0 of 3 cases pass" in capsys.readouterr().out


# ---------------------------------------------------------------- the report


def test_json_to_stdout(only, capsys):
    only("softmax", 1)
    assert cli.main(["doctor", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert len(read(out)["cases"]) == 1 and err == ""


def test_the_report_does_not_name_the_home(only, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HOME", "/home/jane.doe")
    monkeypatch.setenv("MLX_METAL_PATH", "/home/jane.doe/lib")
    only("softmax", 1)
    assert cli.main(["doctor", "--json", "-"]) == 0
    out = capsys.readouterr().out
    assert "jane" not in out and read(out)["machine"]["environment"]["MLX_METAL_PATH"] == "~/lib"


@pytest.mark.parametrize("path, words", [("", "is a folder"), ("no/such/report", "there is no folder")])
def test_a_report_that_cannot_be_written(only, monkeypatch, capsys, tmp_path, path, words):
    monkeypatch.setattr(doctor, "examine", lambda **kw: pytest.fail("the tests ran first"))
    assert cli.main(["doctor", "--json", str(tmp_path / path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("mlx_cosyh3: --json: ") and words in err and err.count("\n") == 1


def test_a_read_only_folder(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert cli.main(["doctor", "--json", str(tmp_path / "report")]) == 2
    assert "cannot be written to" in capsys.readouterr().err


def test_a_disk_that_fills_up(only, monkeypatch, capsys, tmp_path):
    only("softmax", 1)
    monkeypatch.setattr(_trust, "write_file", lambda path, text: False)
    assert cli.main(["doctor", "--json", str(tmp_path / "report")]) == 2
    assert capsys.readouterr().err == f"mlx_cosyh3: --json: cannot write {tmp_path / 'report'}\n"


# ---------------------------------------------------------------- the machines that are refused


@pytest.mark.parametrize(
    "system, machine, release, version, words",
    [
        ("Darwin", "arm64", "23.0.0", "14.0", None),
        ("Darwin", "arm64", "25.1.0", "26.1", None),
        ("Darwin", "arm64", "24.6.0", "10.16", None),  # what an old build of Python is told
        ("Linux", "x86_64", "6.1.0", "", None),
        ("Darwin", "arm64", "22.6.0", "13.7", "macOS 13.7 on arm64"),
        ("Darwin", "x86_64", "23.4.0", "14.4", "macOS 14.4 on x86_64; on Apple silicon use a Python .* for arm64"),
        ("Darwin", "x86_64", "19.6.0", "10.15.7", "macOS 10.15.7 on x86_64"),
    ],
)
def test_the_oldest_machine(monkeypatch, only, capsys, system, machine, release, version, words):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(platform, "mac_ver", lambda: (version, ("", "", ""), machine))
    only("softmax", 1)
    if words is None:
        assert mlx_cosyh3.load() and cli.main(["doctor"]) == 0
        assert (f"macOS {version} ({machine})" in capsys.readouterr().out) == (system == "Darwin")
        return
    with pytest.raises(CosyH3Error, match="needs macOS 14 or newer on Apple silicon, as MLX does; this is " + words):
        mlx_cosyh3.load()
    assert cli.main(["doctor"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.search(words, err) and err.count("\n") == 1
