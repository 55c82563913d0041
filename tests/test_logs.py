"""The log: lines, JSON, request ids, what is kept private; and the report files of failures."""

import asyncio
import io
import json
import logging
import os
import threading

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3 import logs
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.stream import Beside

SECRET = "Meet me at the old mill"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_COSYH3_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(logs.VARIABLE, raising=False)
    monkeypatch.delenv(logs.TEXT_VARIABLE, raising=False)
    yield
    logs.setup("")


def lines(spec="json,debug"):
    """A place where the log is written, as `spec` says."""
    out = io.StringIO()
    logs.setup(spec, out)
    return out


def told(out):
    return [json.loads(line) for line in out.getvalue().splitlines()]


# ---------------------------------------------------------------- lines


def test_a_line_for_people():
    out = lines("info")
    with logs.request("r-1"):
        logs.get("scheduler").info("moved to the cpu", stage="flow", reason="memory is full", free=0.25, none=None)
    logs.get("mlx_cosyh3.server").warning("odd")
    logs.get().debug("not shown")
    first, second = out.getvalue().splitlines()
    clock, rest = first.split(" ", 1)
    assert len(clock) == len("12:34:56.789")
    assert rest == 'info scheduler [r-1] moved to the cpu stage=flow reason="memory is full" free=0.25 none=null'
    assert second.split(" ", 1)[1] == "warning server odd"


def test_json_lines():
    out = lines("json")
    with logs.request("r-2"):
        logs.get("server").error("100% wrong", status=500, event="twice")
    (line,) = told(out)
    assert line.pop("time").endswith("+00:00")
    assert line == {"level": "error", "logger": "mlx_cosyh3.server", "request": "r-2", "event": "100% wrong",
                    "status": 500, "event_": "twice"}  # fmt: skip


@pytest.mark.parametrize("evil", ["a\nb", "a\r\x1b[31mb", 'say "x"', "k=v", "", "back\\slash", "\u2028"])
@pytest.mark.parametrize("spec", ["info", "json"])
def test_one_event_is_one_line(spec, evil):
    out = lines(spec)
    logs.get("x").info("got", name=evil)
    assert len(out.getvalue().split("\n")) == 2
    assert not set(out.getvalue()[:-1]) & set("\r\x1b\n")
    if spec == "json":
        assert told(out)[0]["name"] == evil
    else:
        shown = out.getvalue().split("name=")[1]
        assert json.loads(shown) == evil  # quoted, as it would be taken for something else


def test_level_and_file(tmp_path):
    file = tmp_path / "speech.log"
    logs.setup(f"warning,json,{file}")
    logs.get("a").info("no")
    logs.get("a").warning("yes")
    logs.setup(f"json,{file}")  # appends
    logs.get("a").info("too")
    logs.setup("")
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["yes", "too"]


def test_setup_twice_prints_once():
    first, second = lines(), lines()
    logs.get("a").info("once")
    assert not first.getvalue() and len(told(second)) == 1


@pytest.mark.parametrize("spec, says", [("jsn", "nearest known: 'json'"), ("inof", "'info'"), ("loud", "is none of")])
def test_bad_spec(spec, says, monkeypatch):
    with pytest.raises(CosyH3Error, match=says):
        logs.setup(spec)
    monkeypatch.setenv(logs.VARIABLE, spec)
    with pytest.raises(CosyH3Error, match=f"{logs.VARIABLE}: .*{says}"):
        logs.setup()


def test_log_file_that_cannot_be_written(tmp_path):
    with pytest.raises(CosyH3Error, match="cannot write the log to .*nowhere"):
        logs.setup(str(tmp_path / "nowhere" / "x.log"))


def test_in_a_library_a_bad_variable_is_a_warning(monkeypatch):
    monkeypatch.setenv(logs.VARIABLE, "loud")
    monkeypatch.setattr(logs, "_ready", False)
    with pytest.warns(UserWarning, match="MLX_COSYH3_LOG: 'loud'.*nothing is logged"):
        logs.get("a").info("x")
    logs.get("a").info("the second says no more")  # a warning would be an error here:
    assert logs._ready


def test_variable_is_followed_without_setup(monkeypatch, capsys):
    monkeypatch.setenv(logs.VARIABLE, "json")
    monkeypatch.setattr(logs, "_ready", False)
    logs.get("a").info("seen")
    assert json.loads(capsys.readouterr().err)["event"] == "seen"


def test_silent_unless_asked(capfd):
    logs.setup("")
    logs.get("a").error("trouble")
    assert capfd.readouterr() == ("", "")


def test_a_program_takes_it_with_logging(caplog):
    with caplog.at_level(logging.INFO, logger="mlx_cosyh3"):
        with logs.request("mine"):
            logs.get("a").info("seen", n=1)
    (record,) = caplog.records
    assert (record.name, record.getMessage()) == ("mlx_cosyh3.a", "seen")
    assert (record.facts, record.request) == ({"n": 1}, "mine")


# ---------------------------------------------------------------- requests


def test_request_ids_nest_and_end():
    assert logs.request_id() is None
    with logs.request() as outer:
        with logs.request("inner"):
            assert logs.request_id() == "inner"
        assert logs.request_id() == outer and len(outer) == 8
    assert logs.request_id() is None


@pytest.mark.parametrize("bad", ["", "a b", "x" * 65, "a\nb", 'a"', None, 7])
def test_a_harmful_id_is_not_taken(bad):
    with logs.request(bad) as id:
        assert id != bad and id.isalnum()


def test_ids_of_threads_and_tasks_are_their_own():
    out, gate = lines(), threading.Barrier(4)

    def work(n):
        with logs.request(f"t{n}"):
            gate.wait()
            logs.get("w").info("thread", n=n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()

    async def task(n):
        with logs.request(f"a{n}"):
            await asyncio.sleep(0)
            logs.get("w").info("task", n=n)

    async def tasks():
        await asyncio.gather(*(task(n) for n in range(4)))

    asyncio.run(tasks())
    assert sorted((line["request"], line["n"]) for line in told(out)) == sorted(
        [(f"t{n}", n) for n in range(4)] + [(f"a{n}", n) for n in range(4)]
    )


def test_the_streams_of_a_request_bear_its_id():
    with logs.request("mine"):
        assert Beside(logs.request_id).result() == "mine"
    assert Beside(logs.request_id).result() is None


# ---------------------------------------------------------------- what is private


def test_facts_are_plain():
    facts = {
        "text": SECRET, "options": {"instruct": SECRET, "steps": 10}, "audio": np.zeros(5, np.float32),
        "mel": mx.zeros((1, 2, 80)), "tokens": [1, 2, 3], "count": np.int64(3), "share": float("nan"),
        "data": b"12345", "sizes": (1, 2), "long": "x" * 9000, "segments": [SECRET], "odd": object(),
        "error": KeyError(SECRET),
    }  # fmt: skip
    got = logs.plain(facts)
    json.loads(json.dumps(got, allow_nan=False))
    assert SECRET not in json.dumps(got)
    assert got["text"] == f"{len(SECRET)} characters"
    assert got["options"] == {"instruct": f"{len(SECRET)} characters", "steps": 10}
    assert (got["audio"], got["mel"], got["tokens"]) == ("float32[5]", "float32[1, 2, 80]", "3 items")
    assert (got["count"], got["share"], got["data"], got["sizes"]) == (3, "nan", "5 bytes", [1, 2])
    assert len(got["long"]) < 600 and got["odd"] == "object"


def test_texts_where_they_are_allowed(monkeypatch):
    monkeypatch.setenv(logs.TEXT_VARIABLE, "1")
    assert logs.plain({"text": SECRET}) == {"text": SECRET}
    assert logs.plain({"audio": np.zeros(3)}) == {"audio": "float64[3]"}  # never the samples


# ---------------------------------------------------------------- reports


def fail(kind="gpu", message="the command buffer failed", error=RuntimeError, **facts):
    try:
        raise error(message)
    except Exception as e:
        return logs.report(kind, e, **facts)


def test_report_holds_what_helps():
    with logs.request("r-9"):
        path = fail(stage="flow", mel=mx.zeros((1, 4, 80)), steps=10)
    got = json.loads(path.read_text())
    assert path.parent == path.parent.parent.parent / "cache" / "reports"
    assert (got["kind"], got["request"], got["count"]) == ("gpu", "r-9", 1)
    assert got["facts"] == {"stage": "flow", "mel": "float32[1, 4, 80]", "steps": 10}
    assert got["versions"]["mlx"] == mx.__version__ and got["machine"]["device"]
    (error,) = got["errors"]
    assert (error["type"], error["message"]) == ("RuntimeError", "the command buffer failed")
    assert error["at"][-1].startswith("test_logs.py:") and error["at"][-1].endswith(" fail")
    assert len(path.read_bytes()) < 8192


def test_report_names_the_source_from_its_package_on():
    try:
        logs._parse("loud", "here")
    except CosyH3Error as e:
        path = logs.report("x", e)
    assert json.loads(path.read_text())["errors"][0]["at"][-1].startswith("mlx_cosyh3/logs.py:")


def test_report_without_text_or_audio(monkeypatch):
    monkeypatch.setenv("MLX_COSYH3_TOKEN", "hunter2")
    audio = np.linspace(0, 0.123456, 50, dtype=np.float32)
    try:
        try:
            raise ValueError(f"cannot say '{SECRET}'")
        except ValueError as e:
            raise RuntimeError(f"at {SECRET}") from e
    except RuntimeError as e:
        path = logs.report("nan", e, text=SECRET, audio=audio, prompt=[SECRET], options={"steps": 1, "text": SECRET})
    written = path.read_text()
    assert "old mill" not in written and "0.123" not in written and "hunter2" not in written
    got = json.loads(written)
    assert [e["type"] for e in got["errors"]] == ["RuntimeError", "ValueError"]
    assert got["errors"][0]["message"] == "at [...]"
    assert got["errors"][1]["message"] == "cannot say [...]"


class OfALibrary(RuntimeError):
    """As soundfile's: a RuntimeError that quotes the file it was given."""


@pytest.mark.parametrize(
    "error, kept",
    [
        (OfALibrary(f"Error opening '/home/me/{SECRET}.wav': System error."), "System error."),
        (FileNotFoundError(2, "No such file or directory", f"{SECRET}.wav"), "No such file or directory"),
        (RuntimeError(f"[load_safetensors] Failed to open file /home/me/{SECRET}.safetensors"), "[load_safetensors]"),
        (RuntimeError(f"[load_safetensors] Failed to open file ~/voices of mine/{SECRET}"), "Failed to open file"),
        (CosyH3Error(f"text {SECRET!r} holds nothing"), "holds nothing"),
        (CosyH3Error("text %r holds nothing" % f"I don't say \"{SECRET}\", I can't"), "holds nothing"),
        (ValueError(f"'utf-8' codec can't encode '{SECRET}': surrogates not allowed"), "surrogates not allowed"),
        (KeyError(SECRET), ""),
    ],
)
def test_report_without_what_a_message_quotes(error, kept):
    path = logs.report("server", error, route="/v1/audio/speech", source=f"/home/me/{SECRET}.wav")
    written = path.read_text()
    assert "old mill" not in written and "/home/me" not in written
    assert kept in json.loads(written)["errors"][0]["message"]


@pytest.mark.parametrize(
    "said",
    [
        "[matmul] Last dimension of first input with shape (1,2) must match (3,4)",
        "[metal::Device] Unable to build: program_source:12:5: error: use of undeclared identifier 'foo' in a / b",
        "mlx/backend/cuda/eval.cpp:66 failed: out of memory",
    ],
)
def test_what_the_machine_says_is_kept(said):
    assert json.loads(fail(message=said).read_text())["errors"][0]["message"] == said


def test_report_shows_no_line_of_the_users_program(tmp_path):
    """A traceback would quote `generate(model, "...")`."""
    source = tmp_path / "program.py"
    source.write_text(f'def run():\n    raise RuntimeError("x")  # {SECRET}\n')
    space = {}
    exec(compile(source.read_text(), str(source), "exec"), space)
    try:
        space["run"]()
    except RuntimeError as e:
        written = logs.report("x", e).read_text()
    assert "old mill" not in written and json.loads(written)["errors"][0]["at"][-1] == "program.py:2 run"


def test_report_with_text_where_it_is_allowed():
    written = fail(message=f"at {SECRET}", text=SECRET, allow_text=True).read_text()
    assert written.count(SECRET) == 2


def test_the_same_failure_is_counted():
    paths = {fail(steps=n) for n in range(3)}
    (path,) = paths
    got = json.loads(path.read_text())
    assert (got["count"], got["facts"]) == (3, {"steps": 2})
    assert fail(error=MemoryError) != path
    path.write_text("[1]")  # damaged
    assert json.loads(fail().read_text())["count"] == 1


def test_number_and_size_are_bounded():
    for n in range(logs.KEPT + 7):
        newest = fail(kind=f"k{n}", **{f"f{i}": ["x" * 400] * 60 for i in range(9)})
        os.utime(newest, ns=(n * 10**9, n * 10**9))
    reports = list(newest.parent.iterdir())
    assert len(reports) <= logs.KEPT and newest in reports
    assert all(path.stat().st_size <= logs.MOST and json.loads(path.read_text()) for path in reports)


def test_others_files_stay(tmp_path):
    folder = tmp_path / "cache" / "reports"
    folder.mkdir(parents=True)
    (folder / "softmax-1.json").write_text("{}")
    for n in range(logs.KEPT + 2):
        fail(kind=f"k{n}")
    assert (folder / "softmax-1.json").exists()


def test_a_report_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_COSYH3_CACHE", str(tmp_path / "file"))
    assert fail() is None

    class Odd:
        @property
        def shape(self):
            raise RuntimeError("gone")

    out = lines()
    assert fail(odd=Odd()) is None
    assert told(out)[-1]["event"] == "report not written"


def test_a_report_is_logged():
    out = lines()
    path = fail()
    facts = {"level": "error", "event": "gpu", "error": "RuntimeError", "report": str(path)}
    assert facts.items() <= told(out)[-1].items()


def test_kind_never_names_another_folder(tmp_path):
    path = fail(kind="../../x")
    assert path.parent == tmp_path / "cache" / "reports" and path.name.startswith("failure-______x-")


def test_reports_from_many_threads():
    threads = [threading.Thread(target=fail) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert json.loads(fail().read_text())["count"] == 9
