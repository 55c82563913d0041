"""For tests of the server: the app on a free port of this machine, small models, recordings."""

import contextlib
import io
import socket
import threading

import numpy as np
import pytest
import soundfile

pytest.importorskip("starlette", reason="needs the extra `server`")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra `server`")

from mlx_cosyh3.server.connection import Connection  # noqa: E402 isort: skip

HERE = "http://localhost"


@contextlib.contextmanager
def serving(app, connection=None, most=None):
    """The app at work in a thread -> its address.

    connection, most: a class for its connections, and how many there may be."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        config = uvicorn.Config(app, log_level="error", http=connection or Connection, ws="none",
                                limit_concurrency=most, timeout_graceful_shutdown=20)  # fmt: skip
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def recording(seconds=3.0, rate=24000, kind="WAV"):
    """The bytes of a file of noise."""
    out = io.BytesIO()
    soundfile.write(out, 0.1 * np.random.default_rng(0).standard_normal(int(seconds * rate)), rate, format=kind)
    return out.getvalue()


def samples(data, kind="wav", length=None):
    """(float64 [N], Hz) of an answer. length: of a streamed flac, whose header does not say it."""
    if kind == "pcm":
        return np.frombuffer(data, "<i2") / 32768, 24000
    if kind == "flac" and length is not None:
        assert data[21] & 15 == 0 and data[22:26] == bytes(4)  # "unknown"
        data = data[:22] + length.to_bytes(4, "big") + data[26:]
    parts = []
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        while len(block := file.read(4096)):
            parts.append(block)
        return np.concatenate(parts), file.samplerate
