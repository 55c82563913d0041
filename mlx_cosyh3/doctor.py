"""`mlx_cosyh3 doctor`: what this machine is, which kernels run on it and why, and whether all of them compute right.

Every case runs as the user's own calls do. Where a kernel takes it, the kernel's self-test runs first, anew, and MLX's
own operations run beside it for the time; where none does, as on a CPU, those are what is compared with float64.
"""

import json
import os
import platform
import statistics
import sys
import time
import warnings
from datetime import datetime, timezone
from pathlib import Path

import mlx.core as mx
import numpy as np
from tqdm import tqdm

import mlx_cosyh3
from mlx_cosyh3.doctor_cases import FP32, TF32, UNIT, cases
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.floor import check_machine
from mlx_cosyh3.kernels import _dispatch, _trust, use_kernels

TITLES = "operation", "variant", "shape", "dtype", "worst error", "allowed", "ms", "MLX ms", "verdict"


def run(path=None):
    """Test, print, and write the report to `path` ("-": to stdout, in place of the table) -> 0 if all is right, else 1.

    Raises CosyH3Error for a path that cannot be written, before the tests where that can be told."""
    check_machine()
    if path not in (None, "-"):
        _check_writable(Path(path))
    report = examine(progress=sys.stderr.isatty())
    if path == "-":
        print(_as_json(report))
    else:
        show(report)
        if path is not None and not _trust.write_file(Path(path), _as_json(report) + "\n"):
            raise CosyH3Error(f"--json: cannot write {path}")
    return 0 if report["passed"] else 1


def _check_writable(path):
    if path.is_dir():
        raise CosyH3Error(f"--json: {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise CosyH3Error(f"--json: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise CosyH3Error(f"--json: the folder {path.parent} cannot be written to")


def examine(progress=False, chosen=None):
    """Run all cases (or those of the list `chosen`) -> the report, a dict that JSON takes."""
    allowed = _dispatch.allowed()
    _trust.test_anew()
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a kernel that is switched off: the report says so
        for case in tqdm(list(cases()) if chosen is None else chosen, leave=False, disable=not progress):
            rows.append(_examine(case))
    outcomes = _trust.outcomes()
    return {
        "mlx_cosyh3": mlx_cosyh3.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(),
        "kernels": {name: _state(name, allowed, outcomes) for name in _dispatch.NAMES},
        "self_tests": [o.record() for o in outcomes],
        "cases": rows,
        "passed": all(r["verdict"] == "pass" for r in rows) and all(o.passed for o in outcomes),
    }


# ---------------------------------------------------------------- one case


def _examine(case):
    """One row of the table: what ran, how far off it is, and how long it takes."""
    row = {"operation": case.operation, "variant": "MLX's operations", "shape": case.shape, "dtype": case.dtype}
    row |= {"worst_error": None, "allowed": None, "ratio": None, "where": None, "ms": None, "mlx_ms": None}
    try:
        with _dispatch.watch() as used:
            got = case.run()
            mx.eval(got)
        if used:
            names = sorted(f"{kernel} {variant}" for _, kernel, variant in used)
            row["variant"] = ", ".join(names).replace("mlx.core.", "")
        ratio, error, allowed, where = worst(got, case.truth(*_bound(case, bool(used))))
        row |= {"worst_error": _plain(error), "allowed": _plain(allowed), "ratio": _plain(ratio), "where": where}
        row["verdict"] = "pass" if ratio <= 1 else "FAIL"
        row["ms"] = _milliseconds(case.run) if used else None
        with use_kernels("0"):
            row["mlx_ms"] = _milliseconds(case.run)
    except Exception as e:  # of whatever kind: it is a finding, and the other cases are worth knowing
        row |= {"verdict": "FAIL", "trouble": f"{type(e).__name__}: {e}"}
    return row


def _bound(case, by_kernel):
    """(c, n) for `Case.truth`: a kernel adds in float32 and rounds once, and so does what runs on a CPU.

    MLX's own operations on a GPU may round products to TF32, weights to float16, and a result at each of three steps.
    """
    if not _dispatch.on_gpu() or (by_kernel and not case.product):
        return FP32, 1
    if case.dtype == "float32":
        return (FP32 if os.environ.get("MLX_ENABLE_TF32") == "0" else TF32), 3
    return FP32 + (UNIT[case.dtype] / 8 if case.product else 0), 3


def worst(got, truth):
    """The element furthest off, by what is allowed there -> (error / allowed, error, allowed, "output, index")."""
    worst = 0.0, 0.0, 0.0, None
    for n, (a, (want, allowed)) in enumerate(zip(got, truth, strict=True)):
        if a.shape != want.shape:
            raise ValueError(f"output {n} has shape {list(a.shape)}, not {list(want.shape)}")
        a = np.array(a.astype(mx.float32)).astype(np.float64)
        allowed = np.broadcast_to(allowed, want.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            error = np.where(a == want, 0, np.abs(a - want))  # infinities, too
            ratio = np.where(error == 0, 0, error / allowed)
        ratio = np.where(np.isnan(ratio), np.inf, ratio)
        at = np.unravel_index(np.argmax(ratio), ratio.shape)
        if worst[3] is None or ratio[at] > worst[0]:
            worst = float(ratio[at]), float(error[at]), float(allowed[at]), f"output {n}, {[int(i) for i in at]}"
    return worst


def _milliseconds(run):
    """Time of one call among several that are computed together; the median of five such times on a GPU."""
    together, times = (10, 5) if _dispatch.on_gpu() else (1, 1)
    measured = []
    mx.eval(run())
    for _ in range(times):
        begin = time.perf_counter()
        mx.eval([run() for _ in range(together)])
        measured.append((time.perf_counter() - begin) / together * 1e3)
    return statistics.median(measured)


# ---------------------------------------------------------------- the machine


def _machine():
    gpu = _dispatch.on_gpu()
    info = mx.device_info(mx.default_device())
    mac = platform.mac_ver()[0]
    return {
        "device": str(info.get("device_name", "unknown")),
        "backend": ("Metal" if mx.metal.is_available() else "CUDA") if gpu else "CPU",
        "architecture": str(info.get("architecture", "unknown")),
        "memory": info.get("memory_size") or info.get("total_memory") or _host_memory(),  # bytes
        "recommended_working_set": info.get("max_recommended_working_set_size"),  # bytes; None: MLX does not say
        "system": f"macOS {mac} ({platform.machine()})" if mac else platform.platform(),
        "python": platform.python_version(),
        "mlx": mx.__version__,
        "environment": {n: v for n, v in sorted(os.environ.items()) if n.startswith("MLX_") and "TOKEN" not in n},
    }


def _host_memory():
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # a system without these names
        return None


def _state(name, allowed, outcomes):
    """Whether the kernel `name` is on, and why."""
    if name not in allowed:
        return f"off: {_dispatch.VARIABLE}={os.environ.get(_dispatch.VARIABLE)}"
    if not _dispatch.on_gpu():
        return "off: MLX has no GPU here, its own operations run"
    tested = [o for o in outcomes if o.operation == name]
    failed = [f"{o.kernel} {o.variant}: {(o.trouble.splitlines() or ['?'])[0]}" for o in tested if not o.passed]
    if failed:
        return f"off, as its self-test failed: {'; '.join(failed)}"
    return f"on: {len(tested)} variants passed their self-test" if tested else "on, but no case here needed it"


# ---------------------------------------------------------------- what is printed


def show(report):
    """Print the report for people."""
    machine = report["machine"]
    gb = lambda n: "unknown" if n is None else f"{n / 1e9:.1f} GB"  # noqa: E731
    print(f"device       {machine['device']} ({machine['backend']}, {machine['architecture']})")
    print(f"memory       {gb(machine['memory'])}; recommended working set {gb(machine['recommended_working_set'])}")
    print(f"system       {machine['system']}")
    print(f"versions     mlx_cosyh3 {report['mlx_cosyh3']}, MLX {machine['mlx']}, Python {machine['python']}")
    for name, state in report["kernels"].items():
        print(f"{name:<12} {state}")
    if machine["backend"] == "CPU":
        print("No kernel applies on a CPU: the table compares MLX's own operations with float64.")
    print()
    table = [TITLES] + [_cells(row) for row in report["cases"]]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(TITLES))]
    for cells in table:
        line = [c.ljust(w) if i < 4 or i == 8 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths))]
        print("  ".join(line).rstrip())
    failed = sum(row["verdict"] != "pass" for row in report["cases"])
    broken = [t["kernel"] for t in report["self_tests"] if not t["passed"]]
    print()
    print(f"{len(report['cases']) - failed} of {len(report['cases'])} cases pass"
          + (f"; switched off by their self-test: {', '.join(broken)}" if broken else ""))  # fmt: skip
    if not report["passed"]:
        print("Please report this, with the file that `mlx_cosyh3 doctor --json FILE` writes.")


def _cells(row):
    number = lambda x, form: "-" if x is None else x if isinstance(x, str) else format(x, form)  # noqa: E731
    verdict = row["verdict"] + (f": {row['trouble'].splitlines()[0]}" if row.get("trouble") else "")
    return (row["operation"], row["variant"], row["shape"], row["dtype"], number(row["worst_error"], ".2g"),
            number(row["allowed"], ".2g"), number(row["ms"], ".3f"), number(row["mlx_ms"], ".3f"), verdict)  # fmt: skip


def _plain(x):
    """JSON has no infinity and no not-a-number."""
    return x if np.isfinite(x) else str(x)


def _as_json(report):
    """The report as text, without the name of the user's home."""
    text, home = json.dumps(report, indent=1), os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text
