"""`mlx_cosyh3 bench compare a.json b.json`: the ratio of each metric, and whether it means something.

A difference counts if the runs of one side rank so far from those of the other that chance would do it in fewer than
5 of 100 cases (the exact test of Mann and Whitney, two-sided; it asks nothing of how times are distributed), and if
the medians differ by 1 % or more. With 3 runs a side no ranking is that rare: 4 are the fewest.
"""

import functools
import json
import math
from pathlib import Path

from mlx_cosyh3.errors import CosyH3Error

RARE, SMALL = 0.05, 0.01
COMPARABLE = {  # parts of a report that are to be the same
    "machine": ("device", "backend", "system"),
    "versions": ("mlx_cosyh3", "mlx"),
    "settings": ("text", "batch", "options"),
    "model": ("name", "type", "quantization", "dtype"),
}


def compare(a, b):
    """Two reports -> {"notes": what makes them less comparable, "modes": {mode: {metric: {a, b, ratio, p, verdict}}}}.

    ratio is b / a. verdict: "better" or "worse" (b than a), "same" (within the spread), "too few runs", or "-": what
    there is but once of, such as the first run, has no spread to judge by."""
    modes = {}
    for mode in a["modes"]:
        if mode in b["modes"]:
            ours, theirs = a["modes"][mode]["metrics"], b["modes"][mode]["metrics"]
            modes[mode] = {name: _verdict(ours[name], theirs[name]) for name in ours if name in theirs}
    return {"notes": _notes(a, b), "modes": modes}


def _verdict(a, b):
    x, y, better = a["median"], b["median"], a["better"]
    p = rank_test(a["values"], b["values"])
    found = {"unit": a["unit"], "a": x, "b": y, "ratio": y / x if x else None, "p": p}
    if len(a["values"]) == len(b["values"]) == 1:
        verdict = "-"
    elif rarest(len(a["values"]), len(b["values"])) >= RARE:
        verdict = "too few runs"
    elif p >= RARE or abs(y - x) < SMALL * abs(x):
        verdict = "same"
    else:
        verdict = "better" if (y < x) == (better == "lower") else "worse"
    return found | {"verdict": verdict}


def _notes(a, b):
    notes = []
    for what, keys in COMPARABLE.items():
        for key in keys:
            x, y = a[what].get(key), b[what].get(key)
            if x != y:
                notes.append(f"{what}, {key}: {x} in a, {y} in b")
    for mode in a["modes"]:
        if mode in b["modes"]:
            x, y = a["modes"][mode]["made"], b["modes"][mode]["made"]
            if x != y:
                notes.append(f"{mode}: not the same work, {x} in a, {y} in b: compare rtf and what is per second")
    only = set(a["modes"]) ^ set(b["modes"])
    if only:
        notes.append(f"only in one of them: mode {', '.join(sorted(only))}")
    for name in sorted(a["environment"].keys() | b["environment"].keys()):
        x, y = (r["environment"].get(name, "not set") for r in (a, b))
        if x != y:
            notes.append(f"environment, {name}: {x} in a, {y} in b")
    return notes


# ---------------------------------------------------------------- the test


def rank_test(a, b):
    """How likely a ranking as uneven as that of `a` and `b` is by chance alone, two-sided; ties count half."""
    n, m = len(a), len(b)
    below = sum((x < y) + 0.5 * (x == y) for x in a for y in b)
    most = max(below, n * m - below)
    # A half is rounded towards the middle, which makes the difference less sure, never more.
    return min(1.0, 2 * sum(_ways(n, m)[math.floor(most) :]) / math.comb(n + m, n))


def rarest(n, m):
    """The least that rank_test can give for n and m runs."""
    return min(1.0, 2 / math.comb(n + m, n))


@functools.lru_cache(maxsize=64)
def _ways(n, m):
    """[how many rankings of n and m runs have u pairs in order] for u from 0 to n m."""
    ways = [[1] for _ in range(m + 1)]  # of no runs and j
    for i in range(1, n + 1):
        row = [[1]]
        for j in range(1, m + 1):
            # The largest of all is one of ours, which is above all j of theirs, or one of theirs.
            one, other = [0] * j + ways[j], row[j - 1]
            size = i * j + 1
            one, other = one + [0] * (size - len(one)), other + [0] * (size - len(other))
            row.append([x + y for x, y in zip(one, other)])
        ways = row
    return tuple(ways[m])


# ---------------------------------------------------------------- files and text


def read(path):
    """A report that `bench --json` wrote. Raises CosyH3Error for anything else."""
    path = Path(path).expanduser()
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise CosyH3Error(f"cannot read {path}: {e.strerror}") from e
    except ValueError as e:  # no JSON, no UTF-8
        raise CosyH3Error(f"{path} is no report of `mlx_cosyh3 bench --json` ({type(e).__name__})") from e
    check(report, path)
    return report


def check(report, name="the report"):
    """Raise CosyH3Error unless `report` is what `bench` makes: the format, spelt out."""
    wrong = _wrong(report)
    if wrong:
        raise CosyH3Error(f"{name} is no report of `mlx_cosyh3 bench --json`: {wrong}")


def _wrong(report):
    if not isinstance(report, dict):
        return "it is no object"
    if "table" in report:
        return "it is that of --table, with several in it: write one without"
    if report.get("bench") != 1:
        return f"its format is {report.get('bench')!r}, not 1"
    for name in ("date", "model", "settings", "machine", "versions", "environment", "load", "modes"):
        kind = str if name == "date" else dict
        if not isinstance(report.get(name), kind):
            return f"{name!r} is missing or of the wrong kind"
    for mode, found in report["modes"].items():
        if not isinstance(found, dict) or not all(isinstance(found.get(k), dict) for k in ("metrics", "made")):
            return f"mode {mode!r} lacks its metrics"
        for name, m in found["metrics"].items():
            if not isinstance(m, dict) or m.get("better") not in ("lower", "higher") or "unit" not in m:
                return f"{mode}: {name!r} lacks its unit or which is better"
            numbers = [m.get(k) for k in ("median", "min", "max", "spread")]
            values = m.get("values")
            if not isinstance(values, list) or not values or not all(_is_number(x) for x in numbers + values):
                return f"{mode}: {name!r} lacks numbers"
    return None


def _is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def compare_files(paths, out=None, picture=None):
    """The command: compare two files, print, and write what was found to `out` ("-": print that alone).

    picture   a path: both side by side"""
    if len(paths) != 2:
        raise CosyH3Error(f"compare takes two files, not {len(paths)}: mlx_cosyh3 bench compare a.json b.json")
    reports = [read(p) for p in paths]
    found = compare(*reports)
    if not found["modes"]:
        raise CosyH3Error(f"{paths[0]} and {paths[1]} have no mode in common")
    if picture is not None:
        from mlx_cosyh3 import plot

        plot.bench([(Path(p).name, report) for p, report in zip(paths, reports)], picture)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    if out == "-":
        print(text)
        return 0
    print(show(found))
    if out is not None:
        Path(out).expanduser().write_text(text + "\n", encoding="utf-8")
    return 0


def number(x):
    """Three digits or so."""
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}" if abs(x) >= 1e-3 or x == 0 else f"{x:.1e}"


def show(found):
    """What `compare` found, as text for people."""
    lines = [f"note: {note}" for note in found["notes"]]
    for mode, metrics in found["modes"].items():
        lines += ["", f"{mode:19}{'a':>10}{'b':>10}{'b / a':>9}  b is"]
        for name, m in metrics.items():
            ratio = "-" if m["ratio"] is None else f"{m['ratio']:.3f}"
            lines.append(f"  {name:17}{number(m['a']):>10}{number(m['b']):>10}{ratio:>9}  {m['verdict']}")
    return "\n".join(lines).strip("\n")
