"""What the program tells of its work: a structured log with request ids, and a small report file of each failure.

    log = logs.get("scheduler")
    with logs.request() as id:                   # holds in this thread or task, and in the streams made within
        log.info("queued", waiting=3)            # ... info scheduler [4f1c09ab] queued waiting=3

Everything goes to the logger `mlx_cosyh3` of Python's logging, where a program may take it. Nothing is printed, unless
MLX_COSYH3_LOG asks for it: a level (debug, info, warning, error), `json` for one JSON object a line, a file to append
to, joined by commas: `MLX_COSYH3_LOG=info`, `json`, `debug,json,/var/log/speech.log`.

Texts and audio are private: a text is told by its length, an array by its shape. MLX_COSYH3_LOG_TEXT=1 allows texts.
"""

import contextlib
import contextvars
import hashlib
import json
import logging
import os
import re
import secrets
import threading
import traceback
import warnings
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from mlx_cosyh3.errors import CosyH3Error, NotFiniteError, nearest

VARIABLE, TEXT_VARIABLE = "MLX_COSYH3_LOG", "MLX_COSYH3_LOG_TEXT"
ROOT = "mlx_cosyh3"
LEVELS = ("debug", "info", "warning", "error")
# Facts under these names are what a user says or hears.
PRIVATE = frozenset("text texts prompt prompts transcript instruct instructions input piece segment segments tokens "
                    "ids audio samples wav mel recording message".split())  # fmt: skip
LONGEST = 500  # characters of one fact
KEPT = 20  # report files
MOST = 64 * 1024  # bytes of a report

_request = contextvars.ContextVar("mlx_cosyh3_request", default=None)
_lock = threading.Lock()
_ready = False  # whether VARIABLE has been looked at
logging.getLogger(ROOT).addHandler(logging.NullHandler())  # without a program's own handlers: be silent


# ---------------------------------------------------------------- requests


@contextlib.contextmanager
def request(id=None):
    """`with request() as id:` all that is logged within bears this id; a client's own is taken where it is harmless."""
    id = id if isinstance(id, str) and re.fullmatch(r"[A-Za-z0-9._-]{1,64}", id) else new_id()
    token = _request.set(id)
    try:
        yield id
    finally:
        _request.reset(token)


def request_id():
    """The id of the request that is at work here, or None."""
    return _request.get()


def new_id():
    return secrets.token_hex(4)


# ---------------------------------------------------------------- the log


class Log:
    """info(event, **facts) and the like: `event` is a word or two that never change, facts are what differs."""

    def __init__(self, name):
        self.name = name
        self._logger = logging.getLogger(f"{ROOT}.{name}" if name else ROOT)

    def debug(self, event, /, **facts):
        self._log(logging.DEBUG, event, facts)

    def info(self, event, /, **facts):
        self._log(logging.INFO, event, facts)

    def warning(self, event, /, **facts):
        self._log(logging.WARNING, event, facts)

    def error(self, event, /, **facts):
        self._log(logging.ERROR, event, facts)

    def _log(self, level, event, facts):
        if not _ready:
            _from_environment()
        if self._logger.isEnabledFor(level):
            more = {"facts": plain(facts), "request": _request.get()}
            # Past the methods of Logger, which would take a "%" in the event for a place to fill in.
            record = self._logger.makeRecord(self._logger.name, level, "", 0, event, (), None, extra=more)
            self._logger.handle(record)


def get(name=None):
    """The log of a part of the program, such as "scheduler"; a module's __name__ will do."""
    return Log((name or "").removeprefix(ROOT).strip("."))


class Lines(logging.Formatter):
    """One line for people: time, level, part, [request], event, facts."""

    def format(self, record):
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        part, request = record.name.removeprefix(ROOT).strip(".") or "-", getattr(record, "request", None)
        facts = [f"{name}={_shown(value)}" for name, value in getattr(record, "facts", {}).items()]
        event = _shown(record.getMessage(), spaces=True)
        return " ".join([clock, record.levelname.lower(), part, *([f"[{request}]"] if request else []), event, *facts])


class Json(logging.Formatter):
    """One JSON object: time (UTC, ISO 8601), level, logger, request, event, then the facts."""

    def format(self, record):
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        told = {"time": when, "level": record.levelname.lower(), "logger": record.name}
        told |= {"request": getattr(record, "request", None), "event": record.getMessage()}
        facts = getattr(record, "facts", {})
        return _json(told | {k if k not in told else f"{k}_": v for k, v in facts.items()})


def _json(value):
    """JSON on one line, in the letters of any language, but with nothing that a terminal or a reader of lines obeys."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def _shown(value, spaces=False):
    """A value on a line: as JSON where it would break the line or run into the next one."""
    if isinstance(value, str):
        harmless = value.isprintable() and value and not set(value) & set('"=\\')
        return value if harmless and (spaces or " " not in value) else _json(value)
    return _json(value)


def setup(spec=None, stream=None):
    """Print the log as `spec` says (None: what MLX_COSYH3_LOG says) -> the handler, or None where nothing is asked for.

    stream   where to, in place of stderr. An earlier setup's handler goes.
    Raises CosyH3Error for a spec that cannot be followed; the program calls this first, so that it is told at once."""
    global _ready
    given, spec = spec is not None, os.environ.get(VARIABLE, "") if spec is None else spec
    where = "logs.setup" if given else VARIABLE
    level, form, path = _parse(spec, where)
    with _lock:
        logger = logging.getLogger(ROOT)
        for old in [h for h in logger.handlers if getattr(h, "of_mlx_cosyh3", False)]:
            logger.removeHandler(old)
            old.close()
        _ready = True
        logger.setLevel(level.upper() if spec.strip() else logging.NOTSET)
        if not spec.strip():
            return None
        if path is None:
            handler = logging.StreamHandler(stream)
        else:
            try:
                handler = logging.FileHandler(path, encoding="utf-8")
            except OSError as e:
                raise CosyH3Error(f"{where}: cannot write the log to {path}: {e.strerror}") from e
        handler.of_mlx_cosyh3 = True
        handler.setFormatter(form())
        logger.addHandler(handler)
        return handler


def _parse(spec, where):
    """(level, class of the formatter, file or None) of "debug,json,/a/file"."""
    level, form, path = "info", Lines, None
    for word in filter(None, (word.strip() for word in spec.split(","))):
        if word.lower() in LEVELS:
            level = word.lower()
        elif word.lower() in ("json", "text"):
            form = Json if word.lower() == "json" else Lines
        elif "/" in word or "." in word:
            path = os.path.expanduser(word)
        else:
            known = (*LEVELS, "json", "text")
            raise CosyH3Error(
                f"{where}: {word!r} is none of {', '.join(known)}, and no file (whose name has a dot or a slash)"
                f"{nearest(word, known)}"
            )
    return level, form, path


def _from_environment():
    """Follow MLX_COSYH3_LOG at the first line; for who uses the library a bad value is a warning, work goes on."""
    global _ready
    try:
        setup()
    except CosyH3Error as e:
        _ready = True
        warnings.warn(f"{e}; nothing is logged", UserWarning, stacklevel=4)


# ---------------------------------------------------------------- what may be told


def text_allowed():
    """Whether texts may be written down."""
    return os.environ.get(TEXT_VARIABLE, "0") not in ("", "0")


def plain(value, name=None, allow=None, depth=0):
    """`value` as JSON takes it, short and without what is private: arrays are their shapes, texts their lengths.

    name    of the fact, which tells whether it is private
    allow   whether texts may be told; None: as MLX_COSYH3_LOG_TEXT says"""
    allow = text_allowed() if allow is None else allow
    hidden = name in PRIVATE and not allow
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return round(value, 6) if abs(value) < float("inf") else str(value)  # also of what is not a number
    if isinstance(value, (str, os.PathLike)):
        value = os.fspath(value) if not isinstance(value, str) else value
        if hidden:
            return f"{len(value)} characters"
        return value if len(value) <= LONGEST else f"{value[:LONGEST]}... ({len(value)} characters)"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{len(value)} bytes"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('mlx.core.')}{list(value.shape)}"
    if isinstance(value, dict) and depth < 4:
        keys = list(value)[:50]
        return {str(k)[:LONGEST]: plain(value[k], name if hidden else str(k), allow, depth + 1) for k in keys}
    if isinstance(value, (list, tuple, set, frozenset)) and depth < 4:
        if hidden:
            return f"{len(value)} items"
        items = [plain(v, name, allow, depth + 1) for v in list(value)[:50]]
        return items if len(value) <= 50 else [*items, f"... ({len(value)} items)"]
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {_message(value, allow)}"
    return type(value).__name__  # its repr might tell anything


def _message(error, allow, secrets=()):
    """What an error says, without what it may say of the user's: what is quoted, paths, and `secrets`.

    Who knows only that much of a message still has its type and its place."""
    if allow:
        return str(error)[: 4 * LONGEST]
    if isinstance(error, OSError) and error.strerror:
        return f"[Errno {error.errno}] {error.strerror}"  # without the file
    said = str(error)
    for text in sorted(secrets, key=len, reverse=True):
        said = said.replace(text, "[...]")
    if type(error) not in (RuntimeError, MemoryError, NotFiniteError):
        # From the first quote to the last: a text may hold quotes itself, and "can't" is none.
        said = re.sub(r"(?s)['\"`].*['\"`]", "[...]", said)
    return _without_paths(said)[: 4 * LONGEST]  # what the machine says quotes names of functions


def _without_paths(text):
    """`text` with [path] for what looks like one, up to a quote, a mark or the line's end: a name may hold spaces."""
    return re.sub(r"(?<![\w.~/])(?:~|\.{1,2}|[A-Za-z]:)?[/\\][^\s/][^'\":;,()\n]*", "[path]", text)


# ---------------------------------------------------------------- reports of failures


def report(kind, /, error=None, *, allow_text=None, **facts):
    """Write down a failure, for a person to attach to a bug -> the file's path, or None where none can be written.

    kind    a word: "kernel", "gpu", "nan" ...
    error   the exception; where it was raised is told by file and line, without the lines themselves
    facts   what else is known: stage, sizes, options. Arrays are told by shape, texts by length, unless `allow_text`
            (None: as MLX_COSYH3_LOG_TEXT says)
    The same failure at the same place is one file, which counts; the newest 20 files are kept. Never raises: what
    failed is worth more than its report."""
    allow = text_allowed() if allow_text is None else allow_text
    kind = re.sub(r"[^A-Za-z0-9_-]", "_", str(kind))[:40] or "failure"
    try:
        path = _write_report(kind, error, facts, allow)
    except Exception as e:  # of any kind: see above
        get("report").warning("report not written", kind=kind, why=type(e).__name__)
        return None
    get("report").error(kind, error=type(error).__name__ if error is not None else None, report=path and str(path))
    return path


def _write_report(kind, error, facts, allow):
    from mlx_cosyh3.kernels._trust import cache_folder, write_file

    known = {name: plain(value, name, allow) for name, value in facts.items()}
    if not allow:
        known = {name: _without_paths(v) if isinstance(v, str) else v for name, v in known.items()}
    words = [v for n, v in facts.items() if n in PRIVATE and isinstance(v, str) and v.strip()]
    told = _errors(error, allow, words)
    where = json.dumps([kind, [(e["type"], e["at"]) for e in told]])
    path = cache_folder() / "reports" / f"failure-{kind}-{hashlib.sha256(where.encode()).hexdigest()[:12]}.json"
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with _lock:
        before = _earlier(path)
        record = {
            "report": 1, "kind": kind, "first": before.get("first", now), "last": now,
            "count": before.get("count", 0) + 1, "request": _request.get(), "errors": told, "facts": known,
        } | machine()  # fmt: skip
        text = _anonymous(json.dumps(record, indent=1, ensure_ascii=False))
        if len(text.encode()) > MOST:
            text = _anonymous(json.dumps(record | {"facts": "left out: too long", "environment": {}}, indent=1))
        if not write_file(path, text + "\n"):
            return None
        for old in _newest(path.parent)[KEPT:]:
            with contextlib.suppress(OSError):  # another process was faster
                old.unlink()
    return path


def _errors(error, allow, secrets):
    """The exception and what caused it: type, message, and file:line of each frame."""
    told = []
    while error is not None and len(told) < 5:
        frames = traceback.extract_tb(error.__traceback__)[-20:]
        at = [f"{_short(f.filename)}:{f.lineno} {f.name}" for f in frames]
        told.append({"type": type(error).__name__, "message": _message(error, allow, secrets), "at": at})
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return told


def _short(path):
    """A source file from its package on: where it is installed is nobody's business."""
    parts = Path(path).parts
    for i in range(len(parts) - 1, 0, -1):
        if parts[i - 1] == "site-packages" or parts[i] in (ROOT, "kernels"):
            return "/".join(parts[i:])
    return parts[-1] if parts else path


def _earlier(path):
    """The report of the same failure before, or {}."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        return before if isinstance(before.get("count"), int) else {}
    except (OSError, ValueError, AttributeError):  # none, or damaged: it is written anew
        return {}


def _newest(folder):
    """Failure reports, newest first."""
    dated = []
    for path in folder.glob("failure-*.json"):
        with contextlib.suppress(OSError):
            dated.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(dated, reverse=True)]


def _anonymous(text):
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text


def machine():
    """{"machine", "versions", "memory", "environment"}: what failures and times may depend on. Secrets are left out."""
    import platform

    import mlx.core as mx

    import mlx_cosyh3

    info = mx.device_info(mx.default_device())
    gpu = mx.default_device().type == mx.gpu
    backend = ("Metal" if mx.metal.is_available() else "CUDA") if gpu else "CPU"
    mac = platform.mac_ver()[0]
    return {
        "machine": {
            "device": str(info.get("device_name", "unknown")), "architecture": str(info.get("architecture", "unknown")),
            "backend": backend, "system": f"macOS {mac} ({platform.machine()})" if mac else platform.platform(),
            "cores": os.cpu_count(),
        },
        "versions": {
            "mlx_cosyh3": mlx_cosyh3.__version__, "mlx": mx.__version__, "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "memory": {  # bytes
            "active": mx.get_active_memory(), "peak": mx.get_peak_memory(), "cached": mx.get_cache_memory(),
            "of_machine": info.get("memory_size") or info.get("total_memory"),
        },
        "environment": {
            name: value[:LONGEST] for name, value in sorted(os.environ.items())
            if name.startswith("MLX_") and not re.search("TOKEN|KEY|SECRET|PASS", name)
        },
    }  # fmt: skip
