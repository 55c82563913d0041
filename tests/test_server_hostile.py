"""Clients that mean harm: values that break numbers, files that grow when read, connections that do nothing."""

import contextlib
import io
import json
import socket
import time
from urllib.parse import urlsplit

import numpy as np
import pytest
import soundfile

from mlx_cosyh3 import load
from mlx_cosyh3.pool import Pool
from tests.server_tools import HERE, recording, serving  # first: it skips where the extra is missing
from tests.small_model import write_model
from tests.small_voice_model import write_voice_model

from starlette.testclient import TestClient  # noqa: E402 isort: skip
from mlx_cosyh3.errors import DeadlineError  # noqa: E402 isort: skip
from mlx_cosyh3.server import completions, speech, voices  # noqa: E402 isort: skip
from mlx_cosyh3.server.app import create_app  # noqa: E402 isort: skip
from mlx_cosyh3.server.connection import Connection  # noqa: E402 isort: skip
from mlx_cosyh3.server.errors import LONGEST, ApiError  # noqa: E402 isort: skip

SPEECH, COMPLETIONS, VOICES = "/v1/audio/speech", "/v1/completions", "/v1/voices"
WAIT = 60  # seconds after which a test gives up
GOOD = {
    SPEECH: {"model": '"small"', "input": '"hello"', "voice": '"anna"', "seed": "1", "max_seconds": "0.2"},
    COMPLETIONS: {"model": '"words"', "prompt": '"the cat"', "seed": "1", "max_tokens": "2"},
}
HUGE = "1" + "0" * 400


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"small": load(write_voice_model(folder / "speech")), "words": load(write_model(folder / "text"))}


@pytest.fixture(scope="module")
def client(models):
    app = create_app(models, max_audio=2, max_text=1000)
    with TestClient(app, base_url=HERE, raise_server_exceptions=False) as client:
        yield client


def post(client, path, **fields):
    """fields: as JSON text, on top of those of a request that works."""
    body = "{" + ",".join(f'"{k}": {v}' for k, v in (GOOD[path] | fields).items()) + "}"
    return client.post(path, content=body, headers={"content-type": "application/json"})


def fields_of(kind):
    return [
        (path, name)
        for path, module in ((SPEECH, speech), (COMPLETIONS, completions))
        for name, known in module.FIELDS.items()
        if known is kind
    ]


# ---------------------------------------------------------------- JSON


@pytest.mark.parametrize("path, name", fields_of(int) + fields_of(float))
@pytest.mark.parametrize("value", ["1e999", "-1e999", "NaN", "-Infinity", HUGE, f"-{HUGE}", str(2**63), "-1"])
def test_numbers_that_break_arithmetic(client, path, name, value):
    answer = post(client, path, **{name: value})
    # A whole number may be in order where there is no upper bound: then the answer is one.
    assert answer.status_code in (400, 200) and answer.content
    assert answer.status_code == 400 or value == str(2**63) or name in ("top_k", "win_size")
    assert answer.status_code == 200 or answer.json()["error"]["message"]


@pytest.mark.parametrize("path, name", fields_of(str))
@pytest.mark.parametrize(
    "value", [r'"\u0000"', r'"\r\nX-Evil: 1"', '"../../etc/passwd"', '"' + "a" * 2000 + '"', r'"\ud800"']
)
def test_texts_that_break_out(client, path, name, value):
    answer = post(client, path, **{name: value})
    assert answer.status_code in (200, 400, 404) and answer.content and "x-evil" not in answer.headers
    assert answer.status_code == 200 or len(answer.json()["error"]["message"]) <= LONGEST + 4


@pytest.mark.parametrize("depth", [50, 500, 900, 980, 100_000])
@pytest.mark.parametrize("name", ["voice", "seed", "nobody"])
def test_deep_nesting(client, depth, name):
    answer = post(client, SPEECH, **{name: '{"a":' * min(depth, 2000) + "[" * depth})
    assert answer.status_code in (400, 413)
    answer = post(client, SPEECH, **{name: "[" * depth + "]" * depth})
    assert answer.status_code in (400, 413)


def test_long_instructions(client):
    assert post(client, SPEECH, instructions='"' + "a" * 1001 + '"').json()["error"]["param"] == "instructions"


# ---------------------------------------------------------------- recordings


@pytest.mark.parametrize("kind, subtype", [("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS")])
def test_a_small_file_that_would_grow(kind, subtype):
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", 16000, 1, subtype, format=kind) as file:
        for _ in range(75):
            file.write(np.zeros(16000, np.float32))
    assert len(out.getvalue()) < 100_000
    with pytest.raises(ApiError, match="longer than 60 s"):
        voices.read_recording(out.getvalue(), 60)


@pytest.mark.parametrize(
    "at, forged", [(22, b"\xff\xff"), (22, b"\0\0"), (24, b"\xff\xff\xff\xff"), (24, bytes(4)), (34, b"\x07\x01")]
)
def test_a_wav_whose_header_lies(at, forged):
    data = recording(2.0)
    with pytest.raises(ApiError) as caught:
        voices.read_recording(data[:at] + forged + data[at + len(forged) :], 60)
    assert caught.value.status == 400


def test_a_wav_that_promises_gigabytes():
    data = recording(2.0)
    forged = data[:4] + b"\xff\xff\xff\x7f" + data[8:40] + b"\xff\xff\xff\x7f" + data[44:]
    assert len(voices.read_recording(forged, 60)[0]) == 48000


def test_samples_that_are_no_numbers(client):
    out = io.BytesIO()
    soundfile.write(out, np.full(48000, np.nan, np.float32), 16000, format="WAV", subtype="FLOAT")
    answer = client.post(VOICES, files={"file": ("x", out.getvalue())})
    assert answer.status_code == 400 and "finite" in answer.json()["error"]["message"]


def test_few_recordings_at_a_time(models):
    app = create_app(models)
    service = app.state.service
    with TestClient(app, base_url=HERE) as client, contextlib.ExitStack() as taken:
        for _ in range(service.limits.uploads):
            taken.enter_context(service.upload())
        answer = client.post(VOICES, files={"file": ("x", recording(1.0))})
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        taken.close()
        assert client.post(VOICES, files={"file": ("x", recording(1.0))}).status_code == 201
        assert service.uploading == 0


# ---------------------------------------------------------------- deadlines


@pytest.mark.parametrize("path", [SPEECH, COMPLETIONS])
@pytest.mark.parametrize("streamed", ["false", "true"])
def test_a_deadline_that_is_over_before_the_work_begins(client, path, streamed):
    answer = post(client, path, stream=streamed, deadline="1e-9")
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("deadline_cannot_be_met", "deadline")
    assert post(client, path, stream=streamed, deadline="600").status_code == 200


@pytest.mark.parametrize("path", [SPEECH, COMPLETIONS])
@pytest.mark.parametrize("field, value", [("deadline", "0"), ("deadline", "-1"), ("late", '"never"')])
def test_deadlines_that_are_none(client, path, field, value):
    answer = post(client, path, **{field: value})
    assert answer.status_code == 400 and field in answer.json()["error"]["message"]


@pytest.mark.parametrize("path, model", [(SPEECH, "small"), (COMPLETIONS, "words")])
@pytest.mark.parametrize("streamed", ["false", "true"])
@pytest.mark.parametrize("at_work", [False, True])
def test_a_deadline_that_the_forecast_refuses(client, monkeypatch, path, model, streamed, at_work):
    """When it is asked for, and when its turn comes."""
    scheduler = client.app.state.service.models._schedulers[model]

    def refuse(*args, **keywords):
        raise DeadlineError("deadline=2 cannot be met: the whole answer takes about 9 s here; give it more time")

    class Late:
        pieces, result = staticmethod(refuse), staticmethod(refuse)

    submit = refuse if not at_work else lambda *a, client, **k: scheduler._submit(lambda model: Late(), 0, client)
    monkeypatch.setattr(scheduler, "submit", submit)
    answer = post(client, path, stream=streamed, deadline="2")
    assert answer.status_code == 422 and answer.json()["error"]["code"] == "deadline_cannot_be_met"
    assert "9 s" in answer.json()["error"]["message"]


def test_loading_a_model_counts(models, tmp_path):
    pool = Pool(load=lambda folder: time.sleep(0.05) or models["words"], size=lambda folder: 1)
    with TestClient(create_app({"words": write_model(tmp_path / "words")}, pool=pool), base_url=HERE) as client:
        answer = post(client, COMPLETIONS, deadline="0.05")
        assert answer.status_code == 422 and "loaded" in answer.json()["error"]["message"]


def test_the_servers_own_deadline(models):
    with TestClient(create_app(models, deadline=1e-9), base_url=HERE) as client:
        assert post(client, SPEECH).status_code == post(client, COMPLETIONS).status_code == 422
        assert post(client, SPEECH, deadline="600").status_code == 200


# ---------------------------------------------------------------- connections


class Impatient(Connection):
    head, stall = 0.3, 0.3
    lost = set()  # ports of clients

    def connection_lost(self, error):
        super().connection_lost(error)
        self.lost.add(self.client[1])


@contextlib.contextmanager
def served(models, connection, most=None):
    with serving(create_app(models, token="correct-horse", hosts=None, max_text=1000), connection, most) as url:
        host, _, port = urlsplit(url).netloc.partition(":")
        yield host, int(port)


@pytest.fixture(scope="module")
def address(models):
    with served(models, Impatient) as address:
        yield address


def connect(address):
    return socket.create_connection(address, timeout=WAIT)


def to_the_end(sock):
    """All that comes until the server closes; b"" if it does so at once."""
    out = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            out += data
    return out


def json_of(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("begin", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_head_that_never_comes(address, begin):
    with connect(address) as sock:
        sock.sendall(begin)
        assert to_the_end(sock) == b""


def test_a_second_head_that_never_comes(address):
    with connect(address) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT")
        answer = to_the_end(sock)
        assert answer.count(b"HTTP/1.1 200") == 1 and answer.endswith(b"}")


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x00\x00\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
             b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n"]
)  # fmt: skip
def test_what_is_no_http(address, sent):
    with connect(address) as sock, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        sock.sendall(sent)
        status, error = json_of(to_the_end(sock))
        assert status == 400 and error["code"] == "invalid_http"


HEAD = b" HTTP/1.1\r\nAuthorization: Bearer correct-horse\r\nContent-Type: application/json\r\nConnection: close\r\n"


def test_a_body_in_chunks_is_bounded_too(address):
    with connect(address) as sock:
        sock.sendall(b"POST " + SPEECH.encode() + HEAD + b"Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(10_000):  # without end, if it were let
                sock.sendall(b"4000\r\n" + b"a" * 0x4000 + b"\r\n")
            pytest.fail("160 MB were taken")


@pytest.mark.parametrize("target, host", [("/v1/models", "x/health?"), ("//health", "x"), ("/health/../v1/models", "x"),
                                          ("http://x/health", "x"), ("/%2e/v1/models", "x")])  # fmt: skip
def test_no_way_around_the_token(address, target, host):
    with connect(address) as sock:
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        status, error = json_of(to_the_end(sock))
        assert status == 401 and error["code"] == "invalid_api_key"


def test_answers_that_nobody_reads(address):
    with connect(address) as sock:
        sock.sendall(1500 * b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")  # more than the system holds for a client
        end = time.monotonic() + WAIT
        while sock.getsockname()[1] not in Impatient.lost:
            assert time.monotonic() < end, "the server still waits"
            time.sleep(0.05)


def test_a_crowd(models):
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with served(models, Connection, most=4) as address, contextlib.ExitStack() as stack:
        socks = []
        for _ in range(6):
            socks.append(stack.enter_context(connect(address)))
            socks[-1].sendall(ask[:-2])
        socks[5].sendall(ask[-2:])
        answer = to_the_end(socks[5])
        status, error = json_of(answer)
        assert status == 429 and b"retry-after" in answer.lower() and error["code"] == "queue_full"
        socks[0].sendall(ask[-2:])
        assert to_the_end(socks[0]).startswith(b"HTTP/1.1 200")
