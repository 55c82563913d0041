"""One scheduler for each loaded model: requests come from any thread or asyncio task, results never mix.

    scheduler = Scheduler(model)
    ticket = scheduler.submit("Hello there.", voice="anna", client="someone")
    result = ticket.result()                     # or: await ticket.aresult()
    for piece in ticket: ...                     # or: async for piece in ticket.apieces()

All MLX work of a request is done by one thread, from its first step to its last, since MLX's streams belong to threads.
The threads are those of `stream.py`: used again by whatever comes next, and none is held while there is nothing to do.
Knows nothing of any model but `start`, which checks a request and leaves the work for later.
"""

import atexit
import math
import threading
import time
import weakref
from collections import Counter

import mlx.core as mx

from mlx_cosyh3 import sampling
from mlx_cosyh3 import stream as streams
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.ticket import Call, Job, Ticket, at_work

MAX_QUEUE = 64  # requests


class QueueFull(CosyH3Error):
    """Too many requests wait already. `retry_after`: seconds after which another try makes sense (a whole number)."""

    def __init__(self, message, retry_after):
        super().__init__(message)
        self.retry_after = retry_after


class Closed(CosyH3Error):
    """The scheduler takes no more requests."""


class Scheduler:
    """Carries out requests for `model`.

    workers      how many requests are at work at the same time, each in a thread of its own. With 1 a long request
                 holds up the short ones behind it; with more they share the machine, and each holds memory
    max_queue    how many more may wait; then `submit` raises QueueFull
    per_client   how many one client may have waiting (None: all of max_queue)
    policy       a runtime.Policy for the requests that bring none
    states       a caches.StateCache: prompts to an H3 model go on from what was read before

    Who is next: of the waiting requests those of the highest priority; of those the clients with the fewest at work;
    of those each client in turn; a client's own requests in order."""

    def __init__(self, model, *, workers=1, max_queue=MAX_QUEUE, per_client=None, policy=None, states=None):
        sampling.whole("workers", workers, 1, 64)
        sampling.whole("max_queue", max_queue, 1, None)
        if per_client is not None:
            sampling.whole("per_client", per_client, 1, None)
        self.workers, self.max_queue, self.per_client = workers, max_queue, per_client
        self.on_idle = None  # called without arguments, in any thread, whenever nothing is left to do
        self._model, self._policy, self._states = model, policy, states
        self._changed = threading.Condition()  # guards all that follows
        self._queue, self._running = _Queue(), []
        self._threads = set()  # a token for each thread that is in `_work`
        self._closed = False
        self._ended = Counter()
        self._seconds = 0.0
        _open.add(self)

    @property
    def model(self):
        """The model; None once the scheduler is closed."""
        return self._model

    # Requests

    def submit(self, text, *, stream=False, priority=0, client=None, **options):
        """Ask for `text` to be spoken or continued -> Ticket.

        stream     make pieces as early as possible (CosyVoice: chunk by chunk, see stream_generate); a deadline is
                   for the first of them then
        priority   a whole number: higher ones go first, whoever they are from. So give it out yourself
        client     anything hashable that tells those apart between whom to be fair
        options    those of the model's `generate`; functions among them (note, progress) run in a worker's thread. A
                   `deadline` counts from now: one that can no longer be met when it is the request's turn, with what
                   it has waited, is refused then (the ticket's result raises it), or done as well as possible
        Raises CosyH3Error for a bad text or option at once, QueueFull, or Closed."""
        start = lambda model: _start(model, text, stream, self._with_policy(options), self._states)  # noqa: E731
        return self._submit(start, priority, client)

    def convert(self, source, voice, *, stream=False, priority=0, client=None, **options):
        """Ask for the recording `source` to be said with `voice` (see convert_voice) -> Ticket."""

        def start(model):
            if not hasattr(model, "start_conversion"):
                raise CosyH3Error("this model cannot convert a voice: it takes one that speaks")
            return model.start_conversion(source, voice, stream, **self._with_policy(options))

        return self._submit(start, priority, client)

    def call(self, function, *args, priority=0, client=None, **keywords):
        """Ask for function(*args, **keywords) to be called in a worker's thread -> Ticket whose result it returns.

        For other work with the model, such as Voice.from_audio; it can be cancelled only while it waits."""
        return self._submit(lambda model: Call(function, args, keywords), priority, client)

    def _with_policy(self, options):
        return options if self._policy is None else {"policy": self._policy} | options

    def _submit(self, start, priority, client):
        sampling.whole("priority", priority, -1000, 1000)
        asked = time.perf_counter()
        with self._changed:
            self._check_room(client)
            model = self._model
        # Not under the lock, as it may take long to check a long text; and in a thread that computed before, as MLX
        # keeps something for every thread that ever did.
        job = Job(self, streams.Beside(start, model).result(), priority, client, asked)
        with self._changed:
            self._check_room(client)
            self._queue.add(job)
            if len(self._threads) < self.workers:
                token = object()
                try:
                    streams.start(self._work, token)
                except RuntimeError as e:
                    self._queue.remove(job)
                    raise Closed(f"no request can be taken: {e}") from e
                self._threads.add(token)
        return Ticket(job)

    def _check_room(self, client):
        if self._closed:
            raise Closed("the scheduler is closed: it takes no more requests")
        starting = self.workers - len(self._running)  # so many do not wait: a thread is about to take them
        waiting, own = len(self._queue) - starting, self._queue.waiting(client) - starting
        if waiting >= self.max_queue:
            for job in self._queue.all():
                if job.stopping:  # its ticket was dropped
                    self.cancel(job)
            waiting = len(self._queue) - starting
        if waiting >= self.max_queue:
            what = f"the queue is full ({waiting} requests wait)"
        elif self.per_client is not None and own >= self.per_client:
            what = f"this client has {own} requests waiting, the most it may have"
        else:
            return
        ended = sum(self._ended.values())
        each = self._seconds / ended if ended else 1.0
        seconds = max(1, math.ceil(each * waiting / self.workers))
        raise QueueFull(f"{what}: try again in {seconds} s", seconds)

    # Work

    def _work(self, token):
        """What a thread does: job after job, until none waits."""
        while (job := self._next(token)) is not None:
            outcome = job.carry_out()
            with self._changed:
                self._running.remove(job)
                self._end(outcome[0], time.perf_counter() - job.begun)
                last = not len(self._queue)
            job.finish(*outcome)
            job = outcome = None
            if last:
                mx.clear_cache()

    def _next(self, token):
        """The next job, now running; None when there is none, and the thread goes."""
        with self._changed:
            job = self._queue.take(Counter(j.client for j in self._running))
            if job is not None:
                self._running.append(job)
                job.start()
                return job
            self._threads.discard(token)
            self._changed.notify_all()
            idle = None if self._running else self.on_idle
        if idle is not None:
            idle()
        return None

    def _end(self, state, seconds):
        self._ended[state] += 1
        self._seconds += seconds
        self._changed.notify_all()

    def cancel(self, job):
        """End a Job at its next step: what Ticket.cancel does."""
        with self._changed:
            job.stop()
            if not self._queue.remove(job):
                return  # its thread notices
            outcome = job.given_up()
            self._end(outcome[0], 0.0)
        job.finish(*outcome)

    # The whole

    @property
    def busy(self):
        """Whether any request waits or is at work."""
        with self._changed:
            return bool(len(self._queue) or self._running)

    def stats(self):
        """{"queued", "running", "done", "failed", "cancelled": counts, "seconds": all time spent at work}"""
        with self._changed:
            ended = {name: self._ended[name] for name in ("done", "failed", "cancelled")}
            return {"queued": len(self._queue), "running": len(self._running), **ended, "seconds": self._seconds}

    def close(self, drain=False, timeout=None):
        """Take no more requests, end those there are, and let the model go; may be called again, from any thread.

        drain     carry out what waits and what runs, for at most `timeout` seconds; what is left then is cancelled.
                  False: all are cancelled now, which shows as finish_reason "cancelled" in their results"""
        inside = at_work.get() is self  # called by a request of its own, for whose end it cannot wait
        with self._changed:
            self._closed = True
            if drain and not inside:
                self._changed.wait_for(lambda: not (len(self._queue) or self._running), timeout)
            jobs = self._queue.all() + self._running
        for job in jobs:
            self.cancel(job)
        if not inside:
            with self._changed:
                self._changed.wait_for(lambda: not self._threads)
        self._model = self._policy = self._states = None
        _open.discard(self)
        mx.clear_cache()

    def __enter__(self):
        return self

    def __exit__(self, kind, *exc):
        self.close(drain=kind is None)


def _start(model, text, streamed, options, states):
    """The request as a Stream or run that has not begun, checked."""
    if not hasattr(model, "start"):
        raise TypeError(f"a scheduler takes a model that load() returned, not a {type(model).__name__}")
    stream = model.start(text, streamed, **options)
    # A cache of the caller's own, or a penalty on all tokens of the prompt, need it to be read here and now.
    plain = options.get("cache") is None and options.get("repetition_penalty") is None
    if states is not None and hasattr(model, "make_cache") and plain:
        stream.run = states.run(stream.run)
    return stream


class _Queue:
    """The waiting jobs: {client: its jobs, those of a higher priority first}, the clients in the order of turns."""

    def __init__(self):
        self._clients = {}

    def __len__(self):
        return sum(map(len, self._clients.values()))

    def waiting(self, client):
        return len(self._clients.get(client, ()))

    def all(self):
        return [job for jobs in self._clients.values() for job in jobs]

    def add(self, job):
        jobs = self._clients.setdefault(job.client, [])
        jobs.append(job)
        jobs.sort(key=lambda j: -j.priority)  # stable

    def remove(self, job):
        """Take `job` out -> whether it was there."""
        jobs = self._clients.get(job.client, [])
        if job not in jobs:
            return False
        jobs.remove(job)
        if not jobs:
            del self._clients[job.client]
        return True

    def take(self, running):
        """The next job, or None. running: {client: number of its jobs at work}"""
        if not self._clients:
            return None
        client = min(self._clients, key=lambda c: (-self._clients[c][0].priority, running[c]))  # the first of those
        jobs = self._clients.pop(client)
        if jobs[1:]:
            self._clients[client] = jobs[1:]  # behind all others
        return jobs[0]


_open = weakref.WeakSet()  # schedulers to close at the program's end, before stream.py ends the threads


@atexit.register
def _finish():
    for scheduler in list(_open):
        scheduler.close()
