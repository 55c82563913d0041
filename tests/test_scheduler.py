"""Many requests for one model: order, fairness, cancellation, errors, the end. Fake models are stepped by events.

Run: python -m pytest -q tests/test_scheduler.py
"""

import contextvars
import gc
import threading
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.scheduler import Closed, QueueFull, Scheduler
from tests.fake_models import WAIT, FakeModel


@pytest.fixture
def fake():
    return FakeModel()


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
