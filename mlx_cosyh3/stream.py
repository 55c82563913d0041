"""A generation that runs in a thread of its own and is consumed in any other, for every model family.

MLX's streams belong to a thread, so one thread does all the work of a generation and hands over plain Python values.
Threads are used again: MLX's CPU backend keeps an OS thread for every Python thread that ever computed with it.
"""

import atexit
import contextlib
import contextvars
import queue
import threading

import mlx.core as mx


class Stopped(BaseException):
    """Nobody waits for this work any more: what a run raises where it sees that it is `stopped`, to end in good order."""


class Stream:
    """Iterator of the pieces of a generation as they are made.

    result    the whole result, once the stream has ended or was closed (finish_reason "cancelled" if it was cut short)
    close()   stop generating, from any thread; what was made stays, in `result` and in the cache that was passed in
    run       what it was made of"""

    def __init__(self, run):
        """run   pieces(), a generator of pieces (text or arrays; empty ones are not passed on), and result(); it may
        have an event `stopped`, by which it ends sooner than at its next piece"""
        self.run = run
        self._context = contextvars.copy_context()  # `use_kernels` and the like hold in the worker, too
        self._pieces = queue.Queue(maxsize=8)
        self._closed, self._done = threading.Event(), threading.Event()
        self._started = False
        self.result = None

    def __iter__(self):
        return self

    def __next__(self):
        while self.result is None and not self._closed.is_set():
            if not self._started:
                self._started = True
                # The work must not hold the stream, or an abandoned one would never be collected and closed.
                start(self._context.run, _work, self.run, self._pieces, self._closed, self._done)
            piece = self._pieces.get()
            if isinstance(piece, BaseException):
                self.close()
                try:
                    raise piece
                finally:
                    del piece  # or the error and this frame would hold each other, and all that was computed
            if piece is None:
                self.close()
            elif len(piece):
                return piece
        raise StopIteration

    def close(self):
        self._stop()
        if self._started:
            self._done.wait()
        if self.result is None:
            self.result = self.run.result()
        with contextlib.suppress(queue.Full):  # wakes a thread that still waits for a piece
            self._pieces.put_nowait(None)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __del__(self):
        self._stop()

    def _stop(self):
        self._closed.set()
        if hasattr(self.run, "stopped"):
            self.run.stopped.set()


def _work(run, pieces, closed, done):
    """Run a generation to its end, into the queue `pieces`: at last None, or the exception that ended it."""

    def put(piece):
        while not (closed.is_set() or ending.is_set()):
            try:
                return pieces.put(piece, timeout=0.1)
            except queue.Full:  # the consumer takes its time: look again whether it has gone
                continue

    made = run.pieces()
    try:
        for piece in made:
            put(piece)
            if closed.is_set() or ending.is_set():
                break
        made.close()
        put(None)
    except BaseException as e:  # handed over to whoever consumes the stream
        put(e)
    finally:
        done.set()


class Beside:
    """A function at work in another thread, with this one's context, while this one does something else."""

    def __init__(self, function, *args):
        self._done = threading.Event()
        self._result = self._error = None
        start(contextvars.copy_context().run, self._work, function, args)

    def _work(self, function, args):
        try:
            self._result = function(*args)
        except BaseException as e:  # handed over to whoever asks for the result
            self._error = e
        finally:
            self._done.set()
            del self, function, args  # or the error would hold this frame, which holds the error

    @property
    def done(self):
        return self._done.is_set()

    def wait(self, timeout=None):
        """Wait until it is done, or for `timeout` seconds -> whether it is done."""
        return self._done.wait(timeout)

    def result(self):
        """What the function returned; raises what it raised."""
        self.wait()
        if self._error is None:
            return self._result
        try:
            raise self._error
        finally:
            del self  # as above


_lock = threading.Lock()
_workers, _idle = [], []
ending = threading.Event()  # the program ends: what runs in these threads is to stop soon


class _Worker:
    def __init__(self):
        self.tasks = queue.SimpleQueue()
        # Daemon, so that the interpreter's exit does not wait for an open stream; _finish ends it in good order.
        self.thread = threading.Thread(target=self._loop, name="mlx_cosyh3 stream", daemon=True)
        self.thread.start()

    def _loop(self):
        while (task := self.tasks.get()) is not None:
            task[0](*task[1:])
            del task
            with _lock:
                _idle.append(self)
        # Building a model draws MLX's implicit random numbers, after which the end of the thread that did it may abort
        # the program, unless its streams are gone by then.
        getattr(mx, "clear_streams", mx.clear_cache)()  # older MLX lacks it


def start(function, *args):
    """Run function(*args) in a free thread, or in a new one. Raises RuntimeError when the program is ending."""
    with _lock:
        if ending.is_set():  # the threads are told to end, none would run it
            raise RuntimeError("the program is ending")
        if _idle:
            worker = _idle.pop()
        else:
            worker = _Worker()
            _workers.append(worker)
        worker.tasks.put((function, *args))


@atexit.register
def _finish():
    with _lock:
        ending.set()
    for worker in _workers:
        worker.tasks.put(None)
    for worker in _workers:
        worker.thread.join()
