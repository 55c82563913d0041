"""One device at a time: MLX's default device belongs to the whole process, not to a thread (MLX 0.32).

A thread that set it to the CPU would send the work of all others there, and two that set it in turn may leave it
wrong. So whoever computes on a device of its choice passes this gate: threads for the same device go through together,
one for another device waits until they are out, first come, first served. Between two steps of long work `hand_over`
lets those go first who wait.

On a machine without a GPU there is nothing to choose, and nobody waits.
"""

import contextlib
import threading
from collections import deque

import mlx.core as mx


class Gate:
    """set_device, get_device   what changes MLX's default device (for tests)"""

    def __init__(self, set_device=mx.set_default_device, get_device=mx.default_device, available=None):
        self._set, self._get = set_device, get_device
        self._open = (lambda: not mx.is_available(mx.gpu)) if available is None else (lambda: not available())
        self._turn = threading.Condition()
        self._device, self._inside, self._before = None, 0, None
        self._waiting = deque()  # (ticket, device) in the order of their coming
        self._mine = threading.local()

    @property
    def here(self):
        """The device that this thread is through the gate for, or None."""
        return getattr(self._mine, "device", None)

    @property
    def home(self):
        """MLX's default device as it is when nobody is through the gate."""
        with self._turn:
            return self._before if self._inside else self._get()

    @contextlib.contextmanager
    def on(self, device):
        """`with gate.on("cpu"):` MLX computes on the CPU within, in this thread."""
        outer = self.here
        if outer == device:
            yield
            return
        if outer is not None:
            self._leave()
        try:
            self._enter(device)
            try:
                yield
            finally:
                self._leave()
        finally:
            if outer is not None:
                self._enter(outer)

    @contextlib.contextmanager
    def out(self):
        """Not through the gate within: for waiting."""
        device = self.here
        if device is None:
            yield
            return
        self._leave()
        try:
            yield
        finally:
            self._enter(device)

    def hand_over(self):
        """Let those go first who wait for the other device."""
        if self._waiting and self.here is not None:
            with self.out():
                pass

    def _enter(self, device):
        if not self._open():
            with self._turn:
                ticket = object()
                self._waiting.append(ticket)
                try:
                    while self._waiting[0] is not ticket or (self._inside and self._device != device):
                        self._turn.wait()
                finally:  # also when interrupted
                    self._waiting.remove(ticket)
                    self._turn.notify_all()
                if not self._inside:
                    self._before = self._get()
                    self._device = device
                self._set(mx.gpu if device == "gpu" else mx.cpu)  # always: others may have changed it
                self._inside += 1
        self._mine.device = device

    def _leave(self):
        device, self._mine.device = self.here, None
        if device is None or self._open():
            return
        with self._turn:
            self._inside -= 1
            if not self._inside:
                self._set(self._before)
                self._turn.notify_all()


GATE = Gate()
