"""A model that computes nothing: its requests end when the test lets them, and write down what they do."""

import threading
from dataclasses import dataclass

WAIT = 60  # s that a test waits for an event before it gives up: never reached when all is well


@dataclass
class FakeResult:
    text: str
    finish_reason: str


class FakeRun:
    """Yields the letters of `text`, then waits at `gate` if there is one; `begun` is set with its first step."""

    def __init__(self, model, text, gate=None, error=None, each=None):
        self.model, self.text, self.gate, self.error, self.each = model, text, gate, error, each
        self.begun, self.made, self.ended, self.closed = threading.Event(), [], False, False

    def pieces(self):
        self.model.order.append(self.text)
        self.thread = threading.get_ident()
        self.begun.set()
        ballast = Ballast(self.model)  # noqa: F841  what an error's traceback must not keep
        try:
            for letter in self.text:
                self.made.append(letter)
                yield letter
                if self.each is not None:
                    self.each()
            yield ""
            if self.gate is not None:
                assert self.gate.wait(WAIT)
                yield ""
            if self.error is not None:
                raise self.error
            self.ended = True
        finally:
            self.closed = True

    def result(self):
        return FakeResult("".join(self.made), "stop" if self.ended else "cancelled")


class Ballast:
    """Counts itself in model.ballast while it lives."""

    def __init__(self, model):
        self.model = model
        model.ballast += 1

    def __del__(self):
        self.model.ballast -= 1


class FakeModel:
    """order: the texts as their work began; runs: {text: FakeRun}"""

    def __init__(self):
        self.order, self.runs, self.ballast = [], {}, 0

    def start(self, text, streamed, **options):
        if not text:
            raise ValueError("text is empty")
        run = self.runs[text] = FakeRun(self, text, **options)
        return run
