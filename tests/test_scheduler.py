"""Many requests for one model: order, fairness, cancellation, asyncio, the end. Fake models are stepped by events.

Run: python -m pytest -q tests/test_scheduler.py
"""

import asyncio
import contextvars
import gc
import os
import subprocess
import sys
import threading
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3 import generate, load
from mlx_cosyh3.caches import StateCache
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.scheduler import Closed, QueueFull, Scheduler
from tests.fake_models import WAIT, FakeModel
from tests.small_voice_model import write_voice_model

OPTIONS = {"max_tokens": 12, "temperature": 1.0}
NO_NOTE = {"note": lambda text: None}


@pytest.fixture
def fake():
    return FakeModel()


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    return load(write_voice_model(tmp_path_factory.mktemp("models") / "voice"))


def blocked(scheduler, text="first", **options):
    """(ticket of a request that runs until the gate opens, the gate)"""
    gate = threading.Event()
    ticket = scheduler.submit(text, gate=gate, **options)
    assert scheduler.model.runs[text].begun.wait(WAIT)
    return ticket, gate


# ---------------------------------------------------------------- requests


def test_pieces_and_result(fake):
    with Scheduler(fake) as s:
        ticket = s.submit("abc", client="x")
        assert list(ticket) == ["a", "b", "c"]
        assert ticket.result().text == "abc" and ticket.result(0).finish_reason == "stop"
        assert ticket.done and ticket.state == "done" and ticket.client == "x"
        assert list(ticket) == [] and ticket.worked > 0 and ticket.waited >= 0
        assert s.submit("d").id != ticket.id


def test_a_bad_request_is_an_error_at_once_and_takes_no_place(fake):
    with Scheduler(fake) as s:
        with pytest.raises(ValueError, match="text is empty"):
            s.submit("")
        with pytest.raises(TypeError):
            s.submit("a", unknown=1)
        with pytest.raises(CosyH3Error, match="priority"):
            s.submit("a", priority="high")
        with pytest.raises(CosyH3Error, match="cannot convert"):
            s.convert("a.wav", "anna")
        assert s.stats() == {"queued": 0, "running": 0, "done": 0, "failed": 0, "cancelled": 0, "seconds": 0.0}
    with pytest.raises(TypeError, match="load"):
        Scheduler(object()).submit("a")
    for bad in ({"workers": 0}, {"max_queue": 0}, {"per_client": 0}):
        with pytest.raises(CosyH3Error):
            Scheduler(fake, **bad)


def test_one_thread_does_all_work_of_a_request(fake):
    threads = set()
    with Scheduler(fake) as s:
        ticket = s.submit("abcd", each=lambda: threads.add(threading.get_ident()))
        ticket.result()
        assert threads == {fake.runs["abcd"].thread} and threading.get_ident() not in threads


def test_the_context_of_the_caller_holds_in_the_work(fake):
    request = contextvars.ContextVar("request", default="none")
    seen = []
    with Scheduler(fake) as s:
        request.set("seven")
        ticket = s.submit("ab", each=lambda: seen.append(request.get()))
        request.set("eight")
        ticket.result()
    assert seen == ["seven", "seven"]


def test_a_call_runs_in_a_worker_and_may_fail(fake):
    with Scheduler(fake) as s:
        assert s.call(lambda a, b: (a + b, threading.get_ident()), 1, b=2).result()[0] == 3
        assert s.call(threading.get_ident).result() != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            s.call(lambda: 1 / 0).result()
        with pytest.raises(TimeoutError):
            gate = threading.Event()
            waiting = s.call(gate.wait, WAIT)
            waiting.result(timeout=0)
        gate.set()
        assert waiting.result() is True


# ---------------------------------------------------------------- who is next


def test_clients_take_turns(fake):
    with Scheduler(fake) as s:
        first, gate = blocked(s, client="z")
        tickets = [s.submit(t, client=t[0]) for t in ("a1", "a2", "a3", "b1", "b2", "c1")]
        gate.set()
        [t.result() for t in tickets]
    assert fake.order == ["first", "a1", "b1", "c1", "a2", "b2", "a3"]


def test_one_who_comes_back_is_behind_those_who_wait(fake):
    with Scheduler(fake) as s:
        first, gate = blocked(s, client="a")
        tickets = [s.submit(t, client=t[0]) for t in ("b1", "a1", "b2", "a2")]
        gate.set()
        [t.result() for t in tickets]
    assert fake.order == ["first", "b1", "a1", "b2", "a2"]


def test_priority_goes_first_and_is_stable(fake):
    with Scheduler(fake) as s:
        first, gate = blocked(s)
        asked = [("low", -1), ("x1", 0), ("x2", 0), ("high", 5), ("x3", 0)]
        tickets = [s.submit(t, priority=p, client="one") for t, p in asked]
        tickets.append(s.submit("other", priority=5, client="two"))
        gate.set()
        [t.result() for t in tickets]
    assert fake.order == ["first", "high", "other", "x1", "x2", "x3", "low"]


def test_a_client_at_work_lets_others_have_the_next_worker(fake):
    with Scheduler(fake, workers=2) as s:
        one, gate = blocked(s, "long", client="a")
        two, other = blocked(s, "short", client="b")
        tickets = [s.submit(t, client=t[0]) for t in ("a1", "a2", "c1")]
        other.set()  # the worker of b is free; a has one at work
        tickets[2].result()
        tickets[1].result()
        gate.set()
    assert fake.order == ["long", "short", "c1", "a1", "a2"]


def test_workers_work_at_the_same_time(fake):
    both = threading.Barrier(3)
    with Scheduler(fake, workers=3) as s:
        tickets = [s.submit(t, each=lambda: both.wait(WAIT)) for t in "abc"]  # each waits for the others
        assert [t.result().text for t in tickets] == ["a", "b", "c"]


# ---------------------------------------------------------------- a full queue


def test_a_full_queue_refuses_and_recovers(fake):
    with Scheduler(fake, max_queue=2) as s:
        first, gate = blocked(s)
        waiting = [s.submit("a"), s.submit("b")]
        with pytest.raises(QueueFull, match=r"2 requests wait\): try again in \d+ s") as e:
            s.submit("c")
        assert isinstance(e.value.retry_after, int) and e.value.retry_after >= 1
        waiting[0].cancel()
        waiting.append(s.submit("d"))
        gate.set()
        assert waiting[1].result().text == "b" and waiting[2].result().text == "d"
    assert fake.order == ["first", "b", "d"]


def test_what_a_free_worker_will_take_does_not_wait(fake):
    gate = threading.Event()
    s = Scheduler(fake, workers=2, max_queue=1)
    tickets = [s.submit(t, gate=gate) for t in "abc"]
    with pytest.raises(QueueFull):
        s.submit("d")
    gate.set()
    assert [t.result().text for t in tickets] == ["a", "b", "c"]
    s.close()


def test_one_client_may_have_so_many_waiting(fake):
    with Scheduler(fake, per_client=1) as s:
        first, gate = blocked(s, client="a")
        a = s.submit("a1", client="a")
        with pytest.raises(QueueFull, match="this client has 1"):
            s.submit("a2", client="a")
        b = s.submit("b1", client="b")
        gate.set()
        assert a.result().text + b.result().text == "a1b1"


def test_requests_that_nobody_holds_make_room(fake):
    with Scheduler(fake, max_queue=2) as s:
        first, gate = blocked(s)
        s.submit("a")
        s.submit("b")  # both tickets are dropped
        gc.collect()
        ticket = s.submit("c")
        gate.set()
        ticket.result()
        assert s.stats()["cancelled"] == 2
    assert fake.order == ["first", "c"]


# ---------------------------------------------------------------- cancellation


def test_cancel_while_queued(fake):
    with Scheduler(fake) as s:
        first, gate = blocked(s)
        ticket = s.submit("abc")
        ticket.cancel()
        assert ticket.done and ticket.state == "cancelled" and ticket.result(0).finish_reason == "cancelled"
        assert list(ticket) == []
        gate.set()
        assert first.result().text == "first"
        ticket.cancel()  # again: nothing happens
        assert s.stats()["cancelled"] == 1 and s.stats()["done"] == 1
    assert fake.order == ["first"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_cancel_while_running(fake, elsewhere):
    with Scheduler(fake) as s:
        stepped, go = threading.Event(), threading.Event()

        def each():
            stepped.set()
            assert go.wait(WAIT)

        ticket = s.submit("abc", each=each)
        assert stepped.wait(WAIT)
        if elsewhere:
            thread = threading.Thread(target=ticket.cancel)
            thread.start()
            thread.join()
        else:
            ticket.cancel()
        go.set()
        assert ticket.result().text in ("a", "ab") and ticket.state == "cancelled"
        assert fake.runs["abc"].closed
        assert s.submit("next").result().text == "next"


def test_a_run_hears_of_it_between_its_pieces(fake):
    """As an utterance does, which may compute for long before it has a piece."""
    with Scheduler(fake) as s:
        gate = threading.Event()
        ticket = s.submit("a", gate=gate)
        run = fake.runs["a"]
        run.stopped = gate
        ticket.cancel()
        assert ticket.result().finish_reason == "cancelled" and gate.is_set()


def test_a_dropped_ticket_is_cancelled(fake):
    with Scheduler(fake) as s:
        ticket, gate = blocked(s)
        run = fake.runs["first"]
        del ticket
        gc.collect()
        gate.set()
        assert s.submit("next").result().text == "next"
        assert not run.ended and run.closed and s.stats()["cancelled"] == 1


# ---------------------------------------------------------------- errors


def test_an_error_is_its_own_and_the_next_request_works(fake):
    with Scheduler(fake) as s:
        bad = s.submit("bad", error=CosyH3Error("no such thing"))
        good = s.submit("good")
        got = []
        with pytest.raises(CosyH3Error, match="no such thing"):
            for piece in bad:
                got.append(piece)
        assert got == ["b", "a", "d"] and bad.state == "failed" and good.result().text == "good"
        lengths = set()
        for _ in range(3):
            with pytest.raises(CosyH3Error) as e:
                bad.result()
            lengths.add(len(traceback.extract_tb(e.value.__traceback__)))
        assert len(lengths) == 1
        assert s.stats()["failed"] == 1


def test_an_error_keeps_nothing_of_its_work(fake):
    with Scheduler(fake) as s:
        ticket = s.submit("bad", error=CosyH3Error("no"))
        with pytest.raises(CosyH3Error) as e:
            ticket.result()
        s.call(int).result()  # its worker has left the request
        assert "pieces" in "".join(traceback.format_tb(e.value.__traceback__)) and fake.ballast == 0


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


# ---------------------------------------------------------------- the end


def test_close_with_drain_does_all(fake):
    s = Scheduler(fake)
    first, gate = blocked(s)
    tickets = [s.submit(t) for t in "abc"]
    with ThreadPoolExecutor(1) as other:
        closing = other.submit(s.close, drain=True)
        while True:
            try:
                s.submit("more").cancel()
            except Closed as e:
                assert "takes no more requests" in str(e)
                break
        assert not closing.done()
        gate.set()
        closing.result()
    assert [t.result(0).text for t in [first, *tickets]] == ["first", "a", "b", "c"]


def test_close_without_drain_cancels_all(fake):
    s = Scheduler(fake)
    first, gate = blocked(s)
    fake.runs["first"].stopped = gate
    tickets = [s.submit(t) for t in "abc"]
    s.close()
    assert {t.result(0).finish_reason for t in [first, *tickets]} == {"cancelled"} and fake.order == ["first"]
    s.close(drain=True)  # again: nothing happens
    with pytest.raises(Closed):
        s.submit("d")


def test_drain_gives_up_at_its_timeout(fake):
    s = Scheduler(fake)
    first, gate = blocked(s)
    fake.runs["first"].stopped = gate
    last = s.submit("a")
    s.close(drain=True, timeout=0)
    assert first.result(0).finish_reason == last.result(0).finish_reason == "cancelled"


def test_with_drains_unless_it_fails(fake):
    with Scheduler(fake) as s:
        ticket = s.submit("abc")
    assert ticket.result(0).text == "abc"
    with pytest.raises(KeyError), Scheduler(fake) as s:
        first, gate = blocked(s)
        fake.runs["first"].stopped = gate
        raise KeyError
    assert first.result(0).finish_reason == "cancelled"


def test_a_request_may_close_its_own_scheduler(fake):
    s = Scheduler(fake)
    ticket = s.submit("abc", each=lambda: s.close(drain=True))
    assert ticket.result(WAIT).finish_reason == "cancelled"


def test_closed_it_lets_the_model_go():
    model = FakeModel()
    s, gone = Scheduler(model), weakref.ref(model)
    tickets = [s.submit("abc"), s.submit("bad", error=CosyH3Error("no")), s.submit("d")]
    tickets[2].cancel()
    [t.wait() for t in tickets]
    s.close()
    del model
    gc.collect()
    assert gone() is None and s.model is None and tickets[0].result().text == "abc"


def test_a_scheduler_that_nobody_holds_is_no_leak():
    s = Scheduler(FakeModel())
    s.submit("abc").result()
    s.call(int).result()
    gone = weakref.ref(s)
    del s
    for _ in range(1000):  # its worker is about to let go of it
        if gone() is None:
            break
        threading.Event().wait(0.01)
    assert gone() is None


def test_idle_is_told(fake):
    s = Scheduler(fake)
    idle = threading.Event()
    s.on_idle = idle.set
    first, gate = blocked(s)
    assert s.busy and not idle.is_set()
    gate.set()
    assert idle.wait(WAIT) and not s.busy
    s.close()


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
