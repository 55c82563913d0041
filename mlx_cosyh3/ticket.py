"""A request to a scheduler: what its user holds of it (Ticket), and its inside, which the scheduler's thread works on.

A run is what a `stream.Stream` holds: pieces(), a generator that does the work, and result(). It may also have an event
`stopped`, by which it ends between two pieces, and a number `waited`, which it is told before it begins: the seconds
since it was asked for.
"""

import asyncio
import contextlib
import contextvars
import secrets
import threading
import time
import traceback
from collections import deque

from mlx_cosyh3 import stream as streams

at_work = contextvars.ContextVar("mlx_cosyh3_scheduler", default=None)  # whose request this thread carries out


class Ticket:
    """A request that was taken. One that nobody holds any more is cancelled.

    id        a short text that no other request has
    client    as it was given
    state     "queued", "running", then "done", "failed" or "cancelled"
    waited, worked   seconds in the queue and at work, so far"""

    def __init__(self, job):
        self._job = job
        self.id, self.client = secrets.token_hex(8), job.client

    @property
    def state(self):
        return self._job.state

    @property
    def done(self):
        """Whether it has ended, in whatever way."""
        return self._job.done

    @property
    def waited(self):
        job = self._job
        return (job.begun or job.ended or time.perf_counter()) - job.asked

    @property
    def worked(self):
        job = self._job
        return (job.ended or time.perf_counter()) - job.begun if job.begun else 0.0

    def cancel(self):
        """End it at its next step, without waiting for that; its result is what was made so far."""
        self._job.cancel()

    def wait(self, timeout=None):
        """Wait until it has ended, or for `timeout` seconds -> whether it has."""
        return self._job.wait(timeout)

    def result(self, timeout=None):
        """The result, once it is there; finish_reason "cancelled" after cancel(). Raises what the request failed of,
        or TimeoutError when it has not ended after `timeout` seconds (it goes on)."""
        if not self.wait(timeout):
            raise TimeoutError(f"the request {self.id} has not ended after {timeout:g} s")
        return self._job.outcome()

    def __iter__(self):
        return self

    def __next__(self):
        """The next piece (text, or audio float32 [n] numpy); each is given once, so one consumer takes them all."""
        piece = self._job.take(wait=True)
        if piece is None:
            self._job.outcome()  # raises what it failed of
            raise StopIteration
        return piece

    async def aresult(self):
        """`result` for asyncio. When the task that waits here is cancelled, the request is, too."""
        with self._job.news() as news:
            while not self.done:
                news.clear()
                if not self.done:  # it may have ended before the flag was taken down
                    await news.wait()
        return self._job.outcome()

    async def apieces(self):
        """The pieces for asyncio: `async for piece in ticket.apieces()`. Left early, the request is cancelled."""
        with self._job.news() as news:
            while True:
                news.clear()
                ended = self.done  # asked first: what came before the end is in the queue then
                while (piece := self._job.take()) is not None:
                    yield piece
                if ended:
                    break
                if not self.done:
                    await news.wait()
        self._job.outcome()

    def __del__(self):
        self._job.stop()  # not more: a ticket may be collected anywhere, also in a thread that holds our locks


class Job:
    """A request inside: what is to be done, and what has come of it. Lets go of the model as soon as it has ended."""

    def __init__(self, scheduler, stream, priority, client, asked):
        self.priority, self.client = priority, client
        self.state, self.done, self.stopping = "queued", False, False
        self.asked, self.begun, self.ended = asked, None, None
        self._scheduler = scheduler
        # The stream is kept because one that is dropped stops its run.
        self._stream, self._run = stream, stream.run if isinstance(stream, streams.Stream) else stream
        self._context = contextvars.copy_context()  # `use_kernels`, a request's id and the like hold in the worker, too
        self._changed = threading.Condition()
        # Not bounded: a consumer that takes its time must not hold up others, and the result holds all pieces anyway.
        self._pieces = deque()
        self._listeners = []
        self._result = self._error = self._traceback = None

    # For its worker

    def start(self):
        self.begun, self.state = time.perf_counter(), "running"
        if hasattr(self._run, "waited"):
            self._run.waited = self.begun - self.asked

    def carry_out(self):
        """Do the work -> (state, result, error)."""
        if self.stopping:
            return self.given_up()
        try:
            result, whole = self._context.run(self._pass_on)
        except BaseException as e:  # handed over to whoever asks for the result
            return "failed", None, e
        return "done" if whole else "cancelled", result, None

    def _pass_on(self):
        at_work.set(self._scheduler)
        whole = True
        with contextlib.closing(self._run.pieces()) as pieces:
            for piece in pieces:
                if len(piece):
                    with self._changed:
                        self._pieces.append(piece)
                    self._tell()
                if self.stopping or streams.ending.is_set():
                    whole = False
                    break
        result = self._run.result()
        # A run may stop by itself, between two pieces, or have ended before it noticed.
        return result, getattr(result, "finish_reason", "stop" if whole else "cancelled") != "cancelled"

    def given_up(self):
        """The outcome of one that has not begun: an empty result."""
        try:
            return "cancelled", self._run.result(), None
        except Exception as e:
            return "failed", None, e

    def stop(self):
        """Let it end at its next step. Takes no lock of ours."""
        self.stopping = True
        run = self._run
        if hasattr(run, "stopped"):
            run.stopped.set()

    def finish(self, state, result, error):
        """Hand over the outcome."""
        forget_frames(error)
        with self._changed:
            self._result, self._error = result, error
            self._traceback = error.__traceback__ if error is not None else None
            self._run = self._stream = self._context = self._scheduler = None
            self.ended, self.state, self.done = time.perf_counter(), state, True
        self._tell()

    # For its ticket

    def cancel(self):
        scheduler = self._scheduler
        if scheduler is not None:
            scheduler.cancel(self)

    def wait(self, timeout):
        with self._changed:
            return self._changed.wait_for(lambda: self.done, timeout)

    def take(self, wait=False):
        """The next piece, or None: there is none (wait=True: and none will come)."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._pieces or self.done)
            return self._pieces.popleft() if self._pieces else None

    def outcome(self):
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)  # else it would grow with each one who asks
        return self._result

    @contextlib.contextmanager
    def news(self):
        """An asyncio.Event that is set whenever something has come. Left before the end, the request is cancelled."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def listener():
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody listens
                loop.call_soon_threadsafe(event.set)

        with self._changed:
            self._listeners.append(listener)
        try:
            yield event
        finally:
            with self._changed:
                self._listeners.remove(listener)
            self.cancel()

    def _tell(self):
        with self._changed:
            self._changed.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()


class Call:
    """A function as a run without pieces."""

    def __init__(self, function, args, keywords):
        self._call, self._result = (function, args, keywords), None

    def pieces(self):
        function, args, keywords = self._call
        self._result = function(*args, **keywords)
        yield from ()

    def result(self):
        return self._result


def forget_frames(error):
    """Empty the frames that an error's traceback holds: they would keep the model's arrays as long as the error."""
    seen, errors = set(), [error]
    while errors:
        error = errors.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            errors += [error.__cause__, error.__context__]
