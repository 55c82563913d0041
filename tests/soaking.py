"""Requests of all kinds, again and again, from many threads: each answer as alone, nothing held that was not before.

Used by tests/test_soak.py and benchmarks/soak.py.
"""

import gc
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_cosyh3 import generate, stream_generate
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.stream import Beside
from mlx_cosyh3.stream import _idle as idle
from mlx_cosyh3.stream import _workers as workers
from tests.small_voice_model import small_voice

GOLDEN_H3 = {"d_model": 64, "n_layer": 4, "d_inner": 256, "d_state": 64, "num_heads": 4}  # sizes of the "hybrid" golden
SETTLED = 20  # requests, after which all is to be flat
FLAT = 0.01  # of the active memory
WORDS = "the cat sat on a mat and it was warm so they went home in good time for tea".split()


@dataclass
class Request:
    """whole() -> the answer (text, or audio as an array); part() -> the beginning of it, given up then"""

    kind: str
    whole: object
    part: object = None


@dataclass
class Figures:
    """What `soak` found. held: (active bytes, resident bytes, threads, open files) whenever nothing was at work, the
    first time after SETTLED requests."""

    count: int = 0
    asked: int = 0
    seconds: float = 0.0
    kinds: int = 0
    wrong: list = field(default_factory=list)
    held: list = field(default_factory=list)

    @property
    def spread(self):
        """(most - least active memory) / least"""
        active = [h[0] for h in self.held]
        return (max(active) - min(active)) / min(active)

    @property
    def growth(self):
        """(threads, open files) more than at first."""
        return tuple(max(h[i] for h in self.held) - self.held[0][i] for i in (2, 3))

    @property
    def fine(self):
        return self.asked > 0 and not self.wrong and self.spread <= FLAT and self.growth == (0, 0)

    def __str__(self):
        first, last = self.held[0], self.held[-1]
        mb = "{:.2f} MB active ({:.0f} resident)"
        return (
            f"{self.asked} of {self.count} requests of {self.kinds} kinds in {self.seconds:.0f} s, {len(self.wrong)} not as alone "
            f"{self.wrong[:3]}; {mb.format(first[0] / 1e6, first[1] / 1e6)} at first, "
            f"{mb.format(last[0] / 1e6, last[1] / 1e6)} at last, within {100 * self.spread:.2f} %; threads "
            f"{first[2]} -> {last[2]}, files {first[3]} -> {last[3]}"
        )


def soak(requests, count, threads=8, seconds=None, say=None):
    """Ask for `requests` in turn, `count` in all, from so many threads -> Figures.

    Each is made alone first: that is what it must be among others, too.
    seconds   stop after so much time, with what is known then
    say       called with a line every ten seconds"""
    begin, told = time.monotonic(), [time.monotonic()]
    over = lambda: seconds is not None and time.monotonic() - begin > seconds  # noqa: E731

    def tell(text):
        if say is not None and time.monotonic() - told[0] >= 10:
            told[0] = time.monotonic()
            say(f"  {time.monotonic() - begin:.0f} s: {text()}")

    with ThreadPoolExecutor(threads) as pool:
        warm(pool.submit, threads)
        warm(Beside, 3 * threads)  # as many as streams, their helpers and a scheduler may need
        twins = []
        for request in requests:
            twins.append(request.whole())
            tell(lambda: f"{len(twins)} of {len(requests)} alone")
            if over():
                break
        figures = Figures(count, kinds=len({r.kind for r in requests[: len(twins)]}))
        lock = threading.Lock()

        def ask(n):
            if over():
                return
            request, twin = requests[n % len(twins)], twins[n % len(twins)]
            try:
                got = (request.part or request.whole)()
                right = np.array_equal(got, twin if request.part is None else twin[: len(got)])
                wrong = None if right else (n, request.kind)
            except Exception as e:  # of any kind: it is counted, and the others go on
                wrong = (n, request.kind, f"{type(e).__name__}: {e}")
            with lock:
                figures.asked += 1
                figures.wrong += [wrong] if wrong else []
                tell(lambda: f"{figures.asked} of {count}, {mx.get_active_memory() / 1e6:.1f} MB active now")

        round, done = min(max(SETTLED, count // 50), 200) if threads > 1 else 5, 0
        while done < count and not over():
            stop = min(count, SETTLED if done < SETTLED else done + round)
            list(pool.map(ask, range(done, stop)))
            done = stop
            if not over():
                figures.held.append(settle())
        if not figures.held:
            figures.held.append(settle())
    figures.seconds = time.monotonic() - begin
    return figures


def warm(start, count):
    """Have start(function) begin `count` threads that compute, so that any more later are one too many."""
    gate = threading.Barrier(count)

    def work():
        gate.wait(60)
        mx.eval(mx.array(1.0) + 1)

    for begun in [start(work) for _ in range(count)]:
        begun.result()


def settle():
    """Wait until nothing is at work -> what is held then."""
    for _ in range(200):  # streams that were given up end soon
        if len(idle) == len(workers):
            break
        time.sleep(0.05)
    gc.collect()
    mx.clear_cache()
    if sys.platform != "linux":
        return mx.get_active_memory(), 0, threading.active_count(), 0
    with open("/proc/self/statm") as f:
        resident = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return mx.get_active_memory(), resident, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


# ---------------------------------------------------------------- what is asked for


def ticket_parts(ticket):
    """The first piece of a Ticket, and what else was there when it was cancelled."""
    first = next(ticket)
    ticket.cancel()
    rest = list(ticket)
    return "".join([first, *rest]) if isinstance(first, str) else np.concatenate([first, *rest])


def stream_part(stream):
    """The first piece of a stream that is closed then."""
    with stream:
        return next(stream)


def text_requests(model, scheduler):
    """Twenty requests to an H3 model, of all kinds; the answers are texts."""
    prompts = [" ".join(WORDS[n : n + 1 + n % 4]) for n in range(4)]

    def conversation(n):
        cache = model.make_cache()
        first = generate(model, prompts[n], cache=cache, seed=n, max_tokens=6).text
        return first + generate(model, " and", cache=cache, seed=n + 1, max_tokens=6).text

    def requests(n):
        o = {"seed": n, "max_tokens": 8}
        yield Request("generate", lambda: generate(model, prompts[n], repetition_penalty=1.2, logprobs=True, **o).text)
        yield Request("stream", lambda: "".join(stream_generate(model, prompts[n], stop="z", **o)))
        yield Request("ticket", lambda: scheduler.submit(prompts[n], client=n, **o).result().text)
        longer = o | {"max_tokens": 40}
        if n % 2:
            yield Request(
                "batch", lambda: "|".join(r.text for r in model.batch_generate(prompts, seed=n, max_tokens=6))
            )
            yield Request("given up", lambda: generate(model, prompts[n], **longer).text,
                          lambda: ticket_parts(scheduler.submit(prompts[n], stream=True, **longer)))  # fmt: skip
        else:
            yield Request("conversation", lambda: conversation(n))
            yield Request("dropped", lambda: generate(model, prompts[n], **longer).text,
                          lambda: next(stream_generate(model, prompts[n], **longer)))  # fmt: skip

    return [request for n in range(4) for request in requests(n)]


def tone(seconds, rate=16000):
    """(samples, rate) that sound a little like a voice."""
    t = np.arange(int(seconds * rate)) / rate
    return (0.3 * np.sin(2 * np.pi * 220 * t) * (1 + np.sin(9 * t))).astype(np.float32), rate


def spoken(audio):
    """audio(), or nothing where a random model ends its speech at once, which is an error."""
    try:
        return audio()
    except CosyH3Error as e:
        if "made no speech" not in str(e):
            raise
        return np.zeros(0, np.float32)


def speech_requests(model, scheduler):
    """Twenty requests to a CosyVoice model, of all kinds; the answers are audio."""
    voices = [small_voice(seed=n) for n in range(2)]
    untold = small_voice(tokens=10, seed=7, transcript=None)
    recording = tone(1.0)
    some = {"max_seconds": 1.0, "note": lambda text: None}
    live = some | {"stream": True, "chunk_tokens": 5, "max_chunk_tokens": 10}

    def requests(n):
        text, o = f"{WORDS[n]} {WORDS[3 * n]}.", some | {"seed": n}
        yield Request("zero-shot", lambda: generate(model, text, voice=voices[n % 2], **o).audio)
        yield Request("cross-lingual", lambda: scheduler.submit(text, voice=untold, client=n, **o).result().audio)
        yield Request("instruct", lambda: generate(model, text, instruct="Speak fast.", voice=voices[0], **o).audio)
        if n % 2:
            streamed = live | {"seed": n, "voice": "bert"}
            yield Request("streamed, SFT", lambda: np.concatenate(list(scheduler.submit(text, **streamed))))
            yield Request("conversion", lambda: scheduler.convert(recording, voices[n // 2], seed=n).result().audio)
        else:
            ask = lambda: scheduler.submit("The cat sat on the mat.", voice="anna", **live | {"seed": n})  # noqa: E731
            yield Request("given up", lambda: ask().result().audio, lambda: ticket_parts(ask()))
            longer = "The cat sat on the mat. " * 9
            yield Request("segments, SFT", lambda: generate(model, longer, voice="anna", **o).audio)

    made = [request for n in range(4) for request in requests(n)]
    return [Request(r.kind, lambda r=r: spoken(r.whole), r.part) for r in made]
