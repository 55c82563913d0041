"""The server on a port of this machine: OpenAI's own client, clients that go away, SIGTERM, the command line."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import numpy as np
import pytest

from mlx_cosyh3 import cli, load
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.pool import Pool
from mlx_cosyh3.server import cli as server_cli
from tests.server_tools import recording, samples, serving  # skips where the extra is missing
from tests.small_model import write_model
from tests.small_voice_model import write_voice_model

from mlx_cosyh3.server.app import create_app  # noqa: E402 isort: skip

pytestmark = pytest.mark.slow

WAIT = 60  # seconds after which a test gives up: never the measure of anything


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"small": write_voice_model(folder / "speech"), "words": write_model(folder / "text")}


@pytest.fixture(scope="module")
def models(folders):
    return {name: load(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def app(models):
    return create_app(models, token="correct-horse")


@pytest.fixture(scope="module")
def url(app):
    with serving(app) as url:
        yield url


@pytest.fixture(scope="module")
def openai_client(url):
    openai = pytest.importorskip("openai", reason="needs the package openai")
    with openai.OpenAI(base_url=url + "/v1", api_key="correct-horse", max_retries=0, timeout=WAIT) as client:
        yield client


def until(condition):
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


# ---------------------------------------------------------------- OpenAI's client


def test_openai_speech(openai_client, models):
    expected = models["small"].generate("hello there", voice="anna", seed=1).audio
    audio = openai_client.audio.speech.create(
        model="small", input="hello there", voice="anna", response_format="wav", extra_body={"seed": 1}
    )
    np.testing.assert_allclose(samples(audio.read())[0], expected, atol=1e-4)


def test_openai_speech_streamed(openai_client, models):
    expected = np.concatenate(list(models["small"].stream_generate("hello there", voice="anna", seed=1)))
    asked = {"model": "small", "input": "hello there", "voice": "anna", "response_format": "pcm"}
    with openai_client.audio.speech.with_streaming_response.create(
        **asked, stream_format="audio", extra_body={"seed": 1}
    ) as answer:
        data = b"".join(answer.iter_bytes())
    np.testing.assert_allclose(samples(data, "pcm")[0], expected, atol=1e-4)


def test_openai_completions(openai_client, models):
    expected = models["words"].generate("the cat", seed=3, max_tokens=12)
    asked = {"model": "words", "prompt": "the cat", "seed": 3, "max_tokens": 12}
    whole = openai_client.completions.create(**asked)
    assert whole.choices[0].text == expected.text and whole.usage.completion_tokens == len(expected.tokens)
    pieces = [chunk.choices[0].text for chunk in openai_client.completions.create(**asked, stream=True)]
    assert "".join(pieces) == expected.text and len(pieces) > 1


def test_openai_usage_of_streams(openai_client, models):
    asked = {"model": "words", "prompt": "the cat", "seed": 3, "max_tokens": 12}
    whole = openai_client.completions.create(**asked).usage
    *chunks, last = openai_client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert whole.prompt_tokens == len(models["words"].tokenizer.encode("the cat")) and whole.completion_tokens > 0
    assert last.usage == whole and last.choices == [] and all(c.usage is None and c.choices for c in chunks)
    with openai_client.audio.speech.with_streaming_response.create(
        model="small", input="hello there", voice="anna", response_format="pcm", stream_format="sse"
    ) as answer:
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    usage = events[-1]["usage"]
    assert events[-1]["type"] == "speech.audio.done" and usage["input_tokens"] > 0 and usage["output_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_openai_deadlines(openai_client):
    import openai

    asked = {"model": "small", "input": "hello there", "voice": "anna", "response_format": "wav"}
    with pytest.raises(openai.UnprocessableEntityError, match="deadline") as caught:
        openai_client.audio.speech.create(**asked, extra_body={"deadline": 1e-9})
    assert caught.value.code == "deadline_cannot_be_met"
    assert openai_client.audio.speech.create(**asked, extra_body={"deadline": 600}).read()[:4] == b"RIFF"


def test_openai_models_and_errors(openai_client, url):
    import openai

    assert [m.id for m in openai_client.models.list()] == ["small", "words"]
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-5'"):
        openai_client.completions.create(model="gpt-5", prompt="x")
    with pytest.raises(openai.BadRequestError, match="no voice 'alloy'") as caught:
        openai_client.audio.speech.create(model="small", input="x", voice="alloy")
    assert caught.value.code == "voice_not_found" and caught.value.request_id.startswith("req_")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url + "/v1", api_key="wrong", max_retries=0).models.list()


# ---------------------------------------------------------------- clients that go away


def ask(url, path, body, token="correct-horse"):
    """A connection on which the request was sent."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WAIT)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    connection.request("POST", path, json.dumps(body), headers)
    return connection


@pytest.fixture
def held(models, monkeypatch):
    """The vocoder of the speaking model waits until this event is set."""
    event, cls = threading.Event(), type(models["small"])
    wave, stream = cls.wave, cls.wave_stream

    def slow_wave(*args, **keywords):
        assert event.wait(WAIT)
        return wave(*args, **keywords)

    def slow_stream(self, *args, **keywords):
        made, n = stream(self, *args, **keywords), 0

        class Slow:
            def add(self, *args):
                nonlocal n
                n += 1
                assert n < 2 or event.wait(WAIT)  # the first chunk comes through
                return made.add(*args)

        return Slow()

    monkeypatch.setattr(cls, "wave", slow_wave)
    monkeypatch.setattr(cls, "wave_stream", slow_stream)
    yield event
    event.set()


LONG = {
    "model": "small",
    "input": "one two three four five six seven",
    "voice": "anna",
    "seed": 1,
    "response_format": "wav",
}


def cancelled(app):
    return app.state.service.models.stats()["small"]["cancelled"]


def test_a_client_that_goes_cancels_what_runs_and_what_waits(url, app, held):
    before = cancelled(app)
    running, waiting = ask(url, "/v1/audio/speech", LONG), ask(url, "/v1/audio/speech", LONG)
    until(lambda: app.state.service.models.stats()["small"]["running"] == 1)
    until(lambda: app.state.service.models.stats()["small"]["queued"] == 1)
    waiting.close()
    until(lambda: cancelled(app) == before + 1)
    running.close()
    until(lambda: app.state.service.active == 0)
    held.set()
    until(lambda: cancelled(app) == before + 2)
    with ask(url, "/v1/audio/speech", LONG).getresponse() as answer:
        assert answer.status == 200


def test_a_client_that_goes_while_a_model_is_loaded(folders, models):
    loading, go_on = threading.Event(), threading.Event()

    def slow(folder):
        loading.set()
        assert go_on.wait(WAIT)
        return models["words"]

    pool = Pool(load=slow, size=lambda folder: 1)
    app = create_app({"words": folders["words"]}, pool=pool, token="correct-horse")
    with serving(app) as url:
        try:
            connection = ask(url, "/v1/completions", {"prompt": "x"})
            assert loading.wait(WAIT)
            connection.close()
            until(lambda: app.state.service.active == 0)
        finally:
            go_on.set()
        until(lambda: [m["leases"] for m in pool.stats()["models"].values()] == [0])
        with ask(url, "/v1/completions", {"prompt": "x"}).getresponse() as answer:
            assert answer.status == 200
    pool.close()


def test_a_client_that_does_not_read_a_whole_answer_is_given_up(url, app, monkeypatch):
    monkeypatch.setattr("mlx_cosyh3.server.client.STALL", 0.3)
    monkeypatch.setattr("mlx_cosyh3.server.speech.encode", lambda *a: bytes(64 << 20))
    with ask(url, "/v1/audio/speech", LONG).getresponse() as answer:
        assert answer.status == 200
        until(lambda: app.state.service.active == 0)


def test_a_large_answer_arrives_whole(url, monkeypatch):
    data = np.random.default_rng(0).bytes(3 << 20)
    monkeypatch.setattr("mlx_cosyh3.server.speech.encode", lambda *a: data)
    with ask(url, "/v1/audio/speech", LONG).getresponse() as answer:
        assert int(answer.headers["content-length"]) == len(data) and answer.read() == data


def test_a_client_that_goes_amid_a_stream_cancels_it(url, app, held):
    before = cancelled(app)
    connection = ask(url, "/v1/audio/speech", LONG | {"stream": True, "chunk_tokens": 2, "max_chunk_tokens": 2})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.read(44)[:4] == b"RIFF"
    answer.close()
    connection.close()
    until(lambda: app.state.service.active == 0)
    held.set()
    until(lambda: cancelled(app) == before + 1)


def test_an_error_amid_a_stream_shows(url, models, monkeypatch, caplog):
    stream = type(models["small"]).wave_stream

    def breaking(self, *args, **keywords):
        made, n = stream(self, *args, **keywords), 0

        class Breaking:
            def add(self, *args):
                nonlocal n
                n += 1
                if n == 3:
                    raise RuntimeError("the device is gone")
                return made.add(*args)

        return Breaking()

    monkeypatch.setattr(type(models["small"]), "wave_stream", breaking)
    fields = LONG | {"stream": True, "chunk_tokens": 2, "max_chunk_tokens": 2}
    with ask(url, "/v1/audio/speech", fields).getresponse() as answer:
        assert answer.status == 200
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
    with ask(url, "/v1/audio/speech", fields | {"stream_format": "sse"}).getresponse() as answer:
        assert answer.status == 200
        last = json.loads(answer.read().strip().split(b"\n\n")[-1].removeprefix(b"data: "))
        assert last["type"] == "error" and last["error"]["code"] == "generation_failed"
        assert "the device is gone" not in last["error"]["message"]
    assert not any("Exception in ASGI" in r.getMessage() for r in caplog.records)  # nothing was sent after the cut
    with ask(url, "/v1/audio/speech", LONG).getresponse() as answer:
        assert answer.status == 200


def test_a_body_that_never_comes_is_given_up(url, app, monkeypatch):
    monkeypatch.setattr("mlx_cosyh3.server.body.PATIENCE", 0.2)
    with socket.create_connection(urlsplit(url).netloc.split(":"), timeout=WAIT) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                     b"Authorization: Bearer correct-horse\r\nContent-Length: 100\r\n\r\n{")  # fmt: skip
        assert sock.recv(1000).startswith(b"HTTP/1.1 408")


def test_a_client_that_does_not_read_is_given_up(url, app, monkeypatch):
    monkeypatch.setattr("mlx_cosyh3.server.client.STALL", 0.3)

    async def endless(service, ticket, kind, rate, begin):
        while True:
            yield bytes(1 << 20)

    monkeypatch.setattr("mlx_cosyh3.server.speech._encoded", endless)
    with ask(url, "/v1/audio/speech", LONG | {"stream": True}).getresponse():
        until(lambda: app.state.service.active == 0)


def test_many_clients_at_once_get_their_own(url, models):
    texts = [f"number {i}" for i in range(8)]
    expected = [models["small"].generate(t, voice="anna", seed=1).audio for t in texts]
    connections = [ask(url, "/v1/audio/speech", LONG | {"input": t}) for t in texts]
    for connection, audio in zip(connections, expected):
        with connection.getresponse() as answer:
            np.testing.assert_allclose(samples(answer.read())[0], audio, atol=1e-4)


# ---------------------------------------------------------------- the command


SERVE = """
import sys
from mlx_cosyh3 import cli
from mlx_cosyh3.server import cli as serve
parser = cli.Parser()
serve.add_arguments(parser)
serve.run(parser.parse_args(sys.argv[1:]))
"""


def start(*arguments, **environment):
    """`mlx_cosyh3 serve` in a process of its own -> (process, address)."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, "--port", "0", *arguments], stderr=subprocess.PIPE, text=True,
        env=os.environ | environment,
    )  # fmt: skip
    line = process.stderr.readline()
    found = re.search(r"listening at (http://\S+)", line)
    if not found:
        process.kill()
        pytest.fail(line + process.stderr.read())
    return process, found[1]


def test_sigterm_ends_what_was_begun(folders):
    process, url = start("--model", f"small={folders['small']}", MLX_COSYH3_TOKEN="correct-horse")
    try:
        stream = {"stream": True, "max_seconds": 2}
        with ask(url, "/v1/audio/speech", LONG).getresponse() as answer:  # the model is loaded now
            alone = answer.read()
        connections = [ask(url, "/v1/audio/speech", LONG | more) for more in ({}, {}, stream)]
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        answers = [c.getresponse() for c in connections]
        assert [a.status for a in answers] == [200, 200, 200]
        assert [a.read() == alone for a in answers[:2]] == [True, True] and len(answers[2].read()) > 44
        assert process.wait(WAIT) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    with pytest.raises(ConnectionRefusedError):
        ask(url, "/v1/models", {})


def options(*words):
    parser = cli.Parser()
    server_cli.add_arguments(parser)
    return parser.parse_args(words)


def test_only_this_machine_unless_there_is_a_token(tmp_path, monkeypatch):
    monkeypatch.delenv("MLX_COSYH3_TOKEN", raising=False)
    assert options().host == "127.0.0.1"
    with pytest.raises(CosyH3Error, match="--token-file"):
        server_cli.build(options("--host", "0.0.0.0"))
    (tmp_path / "token").write_text("correct-horse\n")
    server_cli.build(options("--host", "0.0.0.0", "--token-file", str(tmp_path / "token")))
    (tmp_path / "token").write_text("short\n")
    with pytest.raises(CosyH3Error, match="8 or more"):
        server_cli.build(options("--token-file", str(tmp_path / "token")))


@pytest.mark.parametrize(
    "words, message",
    [
        (["--port", "99999"], "--port"),
        (["--max-queue", "0"], "--max-queue"),
        (["--model", "="], "--model"),
        (["--cors", "example.org"], "--cors"),
        (["--cors", "https://example.org/page"], "--cors"),
        (["--late", "best"], "--deadline"),
        (["--deadline", "-1"], "deadline"),
        (["--on-battery", "never"], "on_battery"),
        (["--max-memory", "much"], "max_memory"),
        (["--model", "a=/x", "--model", "a=/y"], "two models"),
        (["--model", "/nothing/here"], "no such model"),
    ],
)
def test_bad_options(words, message, monkeypatch):
    monkeypatch.delenv("MLX_COSYH3_TOKEN", raising=False)
    with pytest.raises(CosyH3Error, match=message):
        server_cli.build(options(*words))


def test_a_port_in_use(folders):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(CosyH3Error, match=f"port {port}"):
            server_cli.listen("127.0.0.1", port)


def test_nothing_of_the_extra_is_imported_when_unused():
    code = "import sys, mlx_cosyh3.server.cli, mlx_cosyh3.cli; print(*({'starlette', 'uvicorn'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_uploads_from_a_real_client(url):
    boundary = "xyz"
    body = b"".join([
        b"--xyz\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n", recording(1.0),
        b"\r\n--xyz\r\nContent-Disposition: form-data; name=\"name\"\r\n\r\nme\r\n--xyz--\r\n",
    ])  # fmt: skip
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WAIT)
    head = {"Authorization": "Bearer correct-horse", "Content-Type": f"multipart/form-data; boundary={boundary}"}
    connection.request("POST", "/v1/voices", body, head)
    with connection.getresponse() as answer:
        assert answer.status == 201 and json.loads(answer.read())["name"] == "me"
    connection.close()
