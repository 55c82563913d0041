"""Real models behind a scheduler, with asyncio, and what is left when they are gone.

Run: python -m pytest -q tests/test_scheduler_models.py
"""

import asyncio
import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3 import generate
from mlx_cosyh3.caches import StateCache
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.scheduler import Scheduler
from tests.fake_models import WAIT, FakeModel

OPTIONS = {"max_tokens": 12, "temperature": 1.0}
NO_NOTE = {"note": lambda text: None}


@pytest.fixture
def fake():
    return FakeModel()


# ---------------------------------------------------------------- asyncio


def test_asyncio_results_and_pieces(fake):
    async def pieces(ticket):
        return [p async for p in ticket.apieces()]

    async def main(s):
        tickets = [s.submit(f"text{i}", client=i) for i in range(20)]
        got = await asyncio.gather(*(t.aresult() if i % 2 else pieces(t) for i, t in enumerate(tickets)))
        assert got[::2] == [list(f"text{i}") for i in range(0, 20, 2)]
        assert [r.text for r in got[1::2]] == [f"text{i}" for i in range(1, 20, 2)]
        assert (await tickets[0].aresult()).text == "text0"
        with pytest.raises(CosyH3Error, match="no"):
            await s.submit("bad", error=CosyH3Error("no")).aresult()
        with pytest.raises(CosyH3Error, match="no"):
            await pieces(s.submit("bad", error=CosyH3Error("no")))

    with Scheduler(fake, workers=2) as s:
        asyncio.run(main(s))


@pytest.mark.parametrize("way", ["aresult", "apieces"])
def test_a_cancelled_task_cancels_its_request(fake, way):
    async def consume(ticket, begun):
        if way == "aresult":
            begun.set()
            return await ticket.aresult()
        async for _ in ticket.apieces():
            begun.set()

    async def main(s):
        begun, gate = asyncio.Event(), threading.Event()
        ticket = s.submit("abc", gate=gate)
        task = asyncio.create_task(consume(ticket, begun))
        await begun.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        return ticket

    with Scheduler(fake) as s:
        assert asyncio.run(main(s)).result().finish_reason == "cancelled"


def test_pieces_left_early_cancel_the_request(fake):
    async def main(s):
        gate = threading.Event()
        ticket = s.submit("abc", gate=gate)
        pieces = ticket.apieces()
        assert await pieces.__anext__() == "a"
        await pieces.aclose()
        gate.set()
        return ticket

    with Scheduler(fake) as s:
        assert asyncio.run(main(s)).result().finish_reason == "cancelled"


def test_a_loop_that_has_ended_does_not_matter(fake):
    with Scheduler(fake) as s:
        gate = threading.Event()
        ticket = s.submit("abc", gate=gate)
        loop = asyncio.new_event_loop()
        waiting = ticket.aresult()
        task = loop.create_task(waiting)
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()  # the task will never go on
        gate.set()
        assert ticket.result().text == "abc"
        task._log_destroy_pending = False
        del task, waiting


# ---------------------------------------------------------------- real models


def test_text_from_eight_threads_is_what_it_is_alone(model):
    prompts = [f"{'the cat ' * (n % 5 + 1)}" for n in range(12)]
    want = [generate(model, p, seed=n, **OPTIONS) for n, p in enumerate(prompts)]
    with Scheduler(model, workers=3, max_queue=1000) as s, ThreadPoolExecutor(8) as pool:

        def ask(k):
            n = k % 12
            ticket = s.submit(prompts[n], seed=n, client=k % 8, stream=k % 2 == 0, **OPTIONS)
            pieces = "".join(ticket) if k % 3 else None
            assert pieces in (None, ticket.result().text)
            return ticket.result()

        for k, got in enumerate(pool.map(ask, range(160))):
            assert (got.text, got.tokens) == (want[k % 12].text, want[k % 12].tokens)


def test_speech_from_eight_threads_is_what_it_is_alone(speaker):
    texts = ["The cat.", "A dog sat. It was warm.", "Tea for two."]
    settings = [{"voice": "anna"}, {"voice": "clara"}]
    cases = [(t, v, streamed) for t in texts for v in settings for streamed in (False, True)]
    alone = [np.concatenate(list(speaker.start(t, s, seed=4, **v, **NO_NOTE))) for t, v, s in cases]
    with Scheduler(speaker, workers=2) as s, ThreadPoolExecutor(8) as pool:

        def ask(n):
            text, voice, streamed = cases[n % len(cases)]
            return s.submit(text, stream=streamed, seed=4, client=n % 8, **voice, **NO_NOTE).result().audio

        for n, audio in enumerate(pool.map(ask, range(2 * len(cases)))):
            np.testing.assert_array_equal(audio, alone[n % len(cases)])


def test_real_requests_are_cancelled_in_the_middle(model, speaker):
    with Scheduler(model) as s:
        ticket = s.submit("the", max_tokens=100000)
        next(ticket)
        ticket.cancel()
        result = ticket.result(WAIT)
        assert result.finish_reason == "cancelled" and 0 < len(result.tokens) < 100000
    with Scheduler(speaker) as s:
        streamed = s.submit("The cat sat on the mat. " * 40, stream=True, seed=1, chunk_tokens=5, **NO_NOTE)
        next(streamed)
        streamed.cancel()
        assert streamed.result(WAIT).finish_reason == "cancelled"
        steps = threading.Event()
        offline = s.submit("The cat sat. " * 40, seed=1, progress=lambda *step: steps.set(), **NO_NOTE)
        assert steps.wait(WAIT)
        offline.cancel()
        assert offline.result(WAIT).finish_reason == "cancelled"
        assert s.submit("The cat.", seed=4, **NO_NOTE).result().finish_reason == "stop"


def test_a_voice_is_made_and_a_recording_converted(speaker):
    from mlx_cosyh3.cosyvoice.voice import Voice

    recording = (0.1 * np.random.default_rng(0).standard_normal(24000).astype(np.float32), 24000)
    with Scheduler(speaker) as s:
        voice = s.call(Voice.from_audio, speaker, recording, "the cat").result()
        got = s.convert(recording, voice, seed=1).result()
    np.testing.assert_array_equal(got.audio, speaker.convert_voice(recording, voice, seed=1).audio)


def test_states_are_used_again(model):
    """Rounding aside, a text goes on from a cached state as from none; asked again it is the very same."""
    text = "the cat sat on the mat and " * 3
    options = {"temperature": 0, "max_tokens": 8, "seed": 1}
    states = StateCache(1 << 24)
    with Scheduler(model, states=states) as s:
        first = s.submit(text, **options).result()
        plain = generate(model, text, **options)
        assert first.text == plain.text and first.prompt_tokens == plain.prompt_tokens
        before = states.stats()
        again = s.submit(text, **options).result()
        assert again.tokens == first.tokens and states.stats()["hits"] == before["hits"] + 1
        longer = text + first.text + " and"
        assert s.submit(longer, **options).result().text == generate(model, longer, **options).text
        assert s.submit("a", **options).result().text == generate(model, "a", **options).text
        penalty = dict(options, repetition_penalty=1.3)
        assert s.submit(text, **penalty).result().text == generate(model, text, **penalty).text


def os_threads():
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else threading.active_count()


def files():
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def test_memory_threads_and_files_are_flat(model, speaker):
    """Schedulers come and go; their requests end, fail, and are cancelled or dropped."""

    def turn(n):
        s = Scheduler((model, speaker)[n % 2], workers=2)
        options = OPTIONS if n % 2 == 0 else NO_NOTE | {"max_seconds": 0.6}
        tickets = [s.submit("the cat", seed=i, stream=i % 2 == 0, **options) for i in range(4)]
        tickets.append(s.call(lambda: 1 / 0))
        s.submit("the cat", seed=1, **options)  # dropped
        tickets[0].cancel()
        if n % 3:
            tickets[1].wait()
        s.close(drain=n % 4 == 0)
        del tickets
        gc.collect()
        mx.clear_cache()
        return mx.get_active_memory(), os_threads(), files()

    seen = [turn(n) for n in range(24)]
    memory, threads, fds = (np.array(column) for column in zip(*seen))
    assert np.ptp(memory[8:]) <= 0.01 * memory[8:].min(), memory
    assert threads[8:].max() <= threads[:8].max() + 2 and fds[8:].max() <= fds[:8].max(), (threads, fds)


SCRIPTS = {
    "closed": "s.submit('the', max_tokens=5).result(); s.close()",
    "never closed": "s.submit('the', max_tokens=5).result()",
    "at work": "t = s.submit('the', max_tokens=10**6); next(t); u = s.submit('a')",
    "asked from a thread that is gone":
        "t = threading.Thread(target=lambda: s.submit('the', max_tokens=5).result()); t.start(); t.join()",
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_process_exits_cleanly(folder, name):
    script = (
        "import sys, threading\nfrom mlx_cosyh3 import load\nfrom mlx_cosyh3.scheduler import Scheduler\n"
        "s = Scheduler(load(sys.argv[1]))\n" + SCRIPTS[name]
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
