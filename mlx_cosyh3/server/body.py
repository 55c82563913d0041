"""What a client sends, within bounds: JSON with known fields, and files of a form, all of it in memory.

Nothing a client names (a file, a part) becomes the name of anything here.
"""

import asyncio
import json
import math
import re

from mlx_cosyh3.errors import nearest
from mlx_cosyh3.server.errors import ApiError

PATIENCE = 30  # seconds in which a body must be there
PARTS = 16  # of a form
HEAD = 4096  # bytes of one part's headers


class Gone(Exception):
    """The client has closed the connection."""


async def read(request, limit):
    """The whole body. Raises ApiError 413 above `limit` bytes, 408 when it does not come."""
    too_large = ApiError(413, f"the request is larger than the limit of {limit} bytes", code="too_large")
    try:
        announced = int(request.headers.get("content-length", 0))
    except ValueError:
        raise ApiError(400, "Content-Length is not a number") from None
    if announced > limit:
        raise too_large
    body = bytearray()

    async def take():
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise Gone
            body.extend(message.get("body", b""))
            if len(body) > limit:
                raise too_large
            if not message.get("more_body"):
                return

    try:
        await asyncio.wait_for(take(), PATIENCE)
    except asyncio.TimeoutError:
        raise ApiError(
            408, f"the request did not arrive within {PATIENCE} s", headers={"Connection": "close"}
        ) from None
    return bytes(body)


# ---------------------------------------------------------------- JSON


async def read_json(request, limit):
    """A JSON object -> dict. Any other media type is refused: a web page may send those here without asking."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, not {kind[:100] or 'absent'}")
    raw = await read(request, limit)
    try:
        value = json.loads(raw.decode(), parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as e:
        raise ApiError(400, f"the body is not JSON: {str(e).splitlines()[0][:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def _no_number(word):
    raise ValueError(f"{word} is no number that can be used")


def _finite(digits):
    value = float(digits)
    return value if math.isfinite(value) else _no_number(digits[:60])


KINDS = {str: "a string", bool: "true or false", int: "a whole number", float: "a number", dict: "an object"}


def take(body, fields):
    """The fields of `body` (a dict) that are given and not null. fields: {name: type, or types of which one fits}

    Raises ApiError for a name that is not among them, and for a value of another type."""
    out = {}
    for name, value in body.items():
        if name not in fields:
            raise ApiError(
                400, f"unknown field {name[:60]!r}{nearest(name[:60], fields)}", param=name[:60], code="unknown_field"
            )
        if value is None:
            continue
        kinds = fields[name] if isinstance(fields[name], tuple) else (fields[name],)
        if not any(_is(value, kind) for kind in kinds):
            wanted = " or ".join(KINDS.get(kind, f"a {kind.__name__}") for kind in kinds)
            raise ApiError(400, f"{name} must be {wanted}, not {_shown(value)}", param=name)
        if isinstance(value, str):
            check_text(name, value)
        if kinds == (float,):
            try:
                value = float(value)
            except OverflowError:
                raise ApiError(400, f"{name} is too large a number: {_shown(value)}", param=name) from None
        out[name] = value
    return out


def _is(value, kind):
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _shown(value):
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_text(name, text):
    """Raise ApiError for a string that is no text: half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(
            400, f"{name} holds a character that is not Unicode text (half a surrogate pair)", param=name
        ) from None


# ---------------------------------------------------------------- forms


async def read_form(request, limit):
    """A multipart form -> ({name: text of a field}, {name: bytes of a file})."""
    kind = request.headers.get("content-type", "")
    match = re.match(r'multipart/form-data\s*;.*?boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', kind, re.IGNORECASE)
    if not match:
        raise ApiError(415, "Content-Type must be multipart/form-data with a boundary")
    return parse_form(await read(request, limit), (match[1] or match[2]).encode("latin-1"))


def parse_form(body, boundary):
    """The parts of `body`, bytes -> as read_form. Raises ApiError for what is not a form."""
    bad = lambda why: ApiError(400, f"the form is damaged: {why}", code="invalid_form")  # noqa: E731
    mark = b"--" + boundary
    pieces = (b"\r\n" + body).split(b"\r\n" + mark, PARTS + 2)
    if len(pieces) > PARTS + 2:
        raise bad(f"it has more than {PARTS} parts")
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise bad("its end is missing")
    fields, files = {}, {}
    for piece in pieces[1:-1]:
        head, empty, data = piece.partition(b"\r\n\r\n")
        if not empty or len(head) > HEAD or not head.startswith(b"\r\n"):
            raise bad("a part has no headers")
        about = [
            line
            for line in head.decode("utf-8", "replace").split("\r\n")
            if line.lower().startswith("content-disposition:")
        ]
        name = re.search(r'[;\s]name="([^"]{1,60})"', about[0]) if about else None
        if not name:
            raise bad("a part has no name")
        name = name[1]
        if name in fields or name in files:
            raise ApiError(400, f"the form has {name!r} twice", param=name, code="invalid_form")
        if re.search(r"[;\s]filename\*?=", about[0]):
            files[name] = data
            continue
        try:
            fields[name] = data.decode()
        except UnicodeDecodeError:
            raise ApiError(400, f"{name} is not UTF-8 text", param=name, code="invalid_form") from None
    return fields, files
