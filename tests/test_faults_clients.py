"""Clients that die: one that stops in the middle, raises in our hands, is collected, cancelled or killed. The others
get what they asked for, and so does the next one.

Run: python -m pytest -q tests/test_faults_clients.py
"""

import gc
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_cosyh3 import generate, stream_generate
from mlx_cosyh3.scheduler import Scheduler
from tests.faults import cpu, gpu, same

LONG = "The cat sat on the mat. " * 12
QUIET = {"note": lambda text: None}
WAIT = 60


@pytest.fixture(params=["text", "speech"])
def family(request, model, speaker):
    """(model, a long text, options for it as a stream, a short request's answer as a list)"""
    if request.param == "text":
        return (
            model,
            "the cat",
            {"max_tokens": 2000, "seed": 3},
            lambda: [generate(model, "a", seed=1, max_tokens=8).text],
        )
    options = {"seed": 3, "chunk_tokens": 5, "max_chunk_tokens": 5, **QUIET}
    return speaker, LONG, options, lambda: [generate(speaker, "The cat.", seed=1, **QUIET).audio]


class Died(Exception):
    """Of a client."""


def take(pieces, count):
    """Take so many pieces, then die."""
    for n, _ in enumerate(pieces):
        if n + 1 == count:
            raise Died


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("way", ["stream", "ticket", "in a circle"])
def test_a_consumer_that_dies_in_the_middle(family, speaker, way, count):
    m, text, options, ask = family
    want = ask()
    with Scheduler(m) as scheduler:

        def consume():
            if way == "ticket":
                take(scheduler.submit(text, stream=True, **options), count)
            stream = stream_generate(m, text, **options)
            if way == "in a circle":  # only the garbage collector finds it
                stream.me = stream
            take(stream, count)

        with pytest.raises(Died) as e:
            consume()
        del e
        gc.collect()
        same(ask(), want)
        ended = scheduler.submit("the cat", seed=1, **({"max_tokens": 3} if m is not speaker else QUIET)).result(WAIT)
        assert ended.finish_reason in ("stop", "length")
        assert scheduler.stats()["running"] == 0 and scheduler.stats()["failed"] == 0


def test_cancelled_at_any_moment_while_others_go_on(family):
    """Eight clients; every other one is cancelled, before, at, or after some piece."""
    m, text, options, ask = family
    draw = random.Random(5)
    short = dict(options, max_tokens=12) if "max_tokens" in options else dict(options, max_seconds=0.8)
    with Scheduler(m, workers=3, max_queue=100) as scheduler:
        want = scheduler.submit(text, stream=True, **short).result(WAIT)
        moments = [draw.randrange(4) for _ in range(16)]

        def client(n):
            ticket = scheduler.submit(text, stream=True, client=n, **short)
            if n % 2:
                for _ in range(moments[n]):
                    next(ticket, None)
                ticket.cancel()
            return ticket.result(WAIT)

        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(client, range(16)))
    for n, result in enumerate(got):
        tokens = want.tokens if n % 2 == 0 or result.finish_reason != "cancelled" else want.tokens[: len(result.tokens)]
        assert result.tokens == tokens
        if hasattr(want, "audio"):
            same([result.audio], [want.audio if n % 2 == 0 else want.audio[: len(result.audio)]])
    same(ask(), ask())


@pytest.mark.parametrize("policy", [cpu, gpu])
@pytest.mark.parametrize("error", [Died("gone"), RuntimeError("gone\nfor good"), MemoryError("gone")], ids=repr)
def test_a_text_that_breaks_off_is_the_clients_own_error(speaker, policy, error):
    """Pieces of a text from somewhere that fails: the very exception, not one of ours, and nothing is asked again."""
    asked = []

    def text():
        asked.append(1)
        yield "The cat sat on the mat, and "
        raise error

    want = generate(speaker, "The cat.", seed=1, **QUIET).audio
    with pytest.raises(type(error), match="gone") as e:
        list(stream_generate(speaker, text(), seed=1, policy=policy(), **QUIET))
    assert e.value is error and asked == [1]
    same([generate(speaker, "The cat.", seed=1, **QUIET).audio], [want])


@pytest.mark.parametrize("policy", [cpu, gpu])
@pytest.mark.parametrize("at", [1, 5])
def test_a_callback_that_fails_is_the_clients_own_error(speaker, policy, at):
    calls = []

    def progress(*step):
        calls.append(step)
        if len(calls) == at:
            raise RuntimeError("my own bug")

    with Scheduler(speaker, policy=policy()) as scheduler:
        want = scheduler.submit("The cat.", seed=1, **QUIET).result(WAIT).audio
        with pytest.raises(RuntimeError, match="^my own bug$"):
            scheduler.submit("The cat.", seed=1, progress=progress, **QUIET).result(WAIT)
        assert len(calls) == at
        same([scheduler.submit("The cat.", seed=1, **QUIET).result(WAIT).audio], [want])


def command(*words):
    return {"args": [sys.executable, "-m", "mlx_cosyh3", *map(str, words)], "stderr": subprocess.PIPE,
            "env": os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}}  # fmt: skip


def test_the_reader_of_a_pipe_goes(voice_folder, folder):
    """`mlx_cosyh3 generate ... | head -c 100` ends as other programs do; `say` has nothing to show for it, and says so."""
    words = "generate", "the", "--model", folder, "--max-tokens", 10**6, "--seed", 1
    running = subprocess.Popen(**command(*words), stdout=subprocess.PIPE)
    assert running.stdout.read(100)
    running.stdout.close()
    assert running.wait(WAIT) == 141 and running.stderr.read() == b""
    running.stderr.close()
    words = "say", "The cat.", "--model", voice_folder, "-o", "-", "--seed", 1
    running = subprocess.Popen(**command(*words), stdout=subprocess.PIPE)
    running.stdout.close()
    told = running.stderr.read().decode().splitlines()
    assert running.wait(WAIT) == 2 and "Broken pipe" in told[-1] and not any("Traceback" in line for line in told), told
    running.stderr.close()


def test_a_process_is_killed_at_work(voice_folder, tmp_path, monkeypatch):
    """Nothing half made is left under the name, and the next process, with the same cache, does what it would have."""
    monkeypatch.setenv("MLX_COSYH3_LOG", "info")
    words = "--model", voice_folder, "--seed", 1, "-o"
    running = subprocess.Popen(**command("say", LONG * 4, *words, tmp_path / "a.wav"))
    for line in running.stderr:
        if b"decision" in line:  # it has begun
            break
    running.send_signal(signal.SIGKILL)
    assert running.wait(WAIT) == -signal.SIGKILL
    running.stderr.close()
    assert not (tmp_path / "a.wav").exists()
    for name in ("a.wav", "b.wav"):
        subprocess.run(**command("say", "The cat.", *words, tmp_path / name), check=True, timeout=120)
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes() and not list(tmp_path.glob(".*"))
