"""One utterance: from a text (or the speech tokens of a recording) to audio, segment by segment.

Offline, each stage runs once on a segment, and a segment becomes audio while the language model goes on to the next.
Streamed, the flow and the vocoder run on every group of tokens as soon as it is there, each carrying its state, so that
a chunk costs the same however much was said before it. What the stages are is the model's: see `model.py`.
"""

import contextlib
import math
import queue
import time
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_cosyh3 import sampling, trace
from mlx_cosyh3.cosyvoice import text as texts
from mlx_cosyh3.cosyvoice.asked import Asked
from mlx_cosyh3.cosyvoice.llm import LMOptions
from mlx_cosyh3.cosyvoice.safe_tokens import SafeTokens
from mlx_cosyh3.cosyvoice.speed import change_speed, speed_stream
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.results import SpeechResult
from mlx_cosyh3.runtime import Restartable
from mlx_cosyh3.stream import Beside, Stopped

FADE = 0.005  # s, at the seams of segments, so that a step in the wave is no click
LONGEST = 30.0  # s of a recording that are converted in one piece


@dataclass
class Run:
    """The speech tokens of one segment, as they are made, and what is needed to make audio of them."""

    tokens: object  # an iterator
    key: mx.array  # of the noise in flow and vocoder
    several: bool  # whether it is one of several segments
    more: bool  # whether another will follow, whose tokens take time
    to_come: float = 0  # speech tokens that the segments after it may have


class Utterance(Asked):
    """What is asked for, then `pieces`, which does the work in the thread that iterates over it."""

    def __init__(self, model, text, options, streamed, note, progress, source=None):
        super().__init__(model, text, options, streamed, note, progress, source)
        self._told = queue.SimpleQueue()
        self.audio, self.tokens = [], []
        self.finish_reason = self.first_audio = None
        self.cut = False  # whether a limit ended a segment
        self.cut_short = False  # whether that was the deadline
        self.seconds = {"llm" if source is None else "speech_tokenizer": 0.0, "flow": 0.0, "vocoder": 0.0}
        self.pause = options.pause if source is None else 0.0
        self.paused = 0.0  # s of silence between segments
        self.begin, self.total = None, 0.0

    # The work

    def pieces(self):
        """Yield audio, float32 numpy; what a Stream runs."""
        self.begin = time.perf_counter()
        self.start()
        self.prompt = self.model.prompt(self.voice, self.mode)
        try:
            for pieces, several in self._live() if self.streamed else self._pipelined():
                for piece in self._seams(pieces) if several else pieces:
                    if len(piece) and self.first_audio is None:
                        self.first_audio = time.perf_counter() - self.begin
                    self.audio.append(piece)
                    yield piece
                mx.clear_cache()
            if not any(len(a) for a in self.audio):
                raise CosyH3Error("the model made no speech for this text: try another seed or voice")
            self.finish_reason = "length" if self.cut else "stop"
        except Stopped:
            return
        finally:
            self.total = time.perf_counter() - self.begin
            self._close_books()
            mx.clear_cache()

    def _close_books(self):
        """What later forecasts go by, and whether the deadline was met."""
        if self.finish_reason == "stop" and self.text_ids:
            self.control.text_spoken(self.text_ids, len(self.tokens))
        self.control.ended(self.first_audio if self.streamed else self.total if self.finish_reason else None)

    def _live(self):
        """Streamed: for each segment (an iterator of its audio, whether it is one of several)."""
        for run in self._runs():
            yield self._streamed(run.tokens, run.key), run.several

    def _pipelined(self):
        """Offline: the same; a segment becomes audio in a thread of its own while the next one's tokens are made."""
        ahead, failed = [], None  # ahead: at most one, the segment before
        try:
            try:
                for run in self._runs():
                    tokens = []
                    for token in run.tokens:
                        tokens.append(token)
                        if ahead and ahead[0].done:
                            yield self._due(ahead[0]), True
                            ahead.clear()
                    if ahead:
                        yield self._due(ahead[0]), True
                        ahead.clear()
                    if tokens and run.more:
                        ahead.append(Beside(self._sound, tokens, run.key, self._tell_later, run.to_come))
                    elif tokens:
                        yield [self._sound(tokens, run.key, self._tell, run.to_come)], run.several
            except Exception as e:
                failed = e  # what was said before it comes first
            if ahead:
                yield self._due(ahead[0]), True
            if failed is not None:
                raise failed
        finally:
            if ahead and not ahead[0].done:  # nobody waits for it
                self.stopped.set()
                ahead[0].wait()

    def _due(self, sound):
        """[samples]: what `sound` works on, once it is done."""
        while not sound.wait(0.05):
            self._tell_now()
        self._tell_now()
        return [sound.result()]

    def _runs(self):
        """A Run for each segment; its tokens are to be taken before the next is asked for."""
        model = self.model
        if self.source is not None:
            parts = self._converted()
            for i, (part, (_, now)) in enumerate(zip(parts, self.keys())):
                yield Run(self._counted(part), now, len(parts) > 1, False, sum(map(len, parts[i + 1 :])))
            return
        lm = self.lm_options()
        if self.segments is None:
            key, noise = self._first_keys()
            with contextlib.closing(self._bistream(lm, key)) as run:  # closed, it lets its cache go at once
                yield Run(self._counted(run), noise, False, False)
                self._ended(run, "the text")
            return
        several = len(self.segments) > 1
        for i, (s, (now, now_noise)) in enumerate(zip(self.segments, self.keys())):
            speak = lambda _, s=s, key=now: model.speak(s, self.mode, self.voice, lm, key)  # noqa: E731
            with contextlib.closing(SafeTokens(self.request, speak)) as run:
                later = self.control.expected_tokens(sum(len(t.text_ids) for t in self.segments[i + 1 :])) or 0
                yield Run(self._counted(run, self._prefix(s)), now_noise, several, i < len(self.segments) - 1, later)
                self._ended(run, repr(s.text if len(s.text) < 50 else s.text[:47] + "..."))
            if self._full() or self.cut_short:
                return

    def lm_options(self):
        o = self.options
        return LMOptions(temperature=o.temperature, top_p=o.top_p, top_k=o.top_k, win_size=o.win_size, tau_r=o.tau_r)

    def keys(self):
        """For each segment: the key of its speech tokens, and that of the noise in its flow and vocoder."""
        key, noise = self._first_keys()
        while True:
            (key, now), (noise, now_noise) = _next(key), _next(noise)
            yield now, now_noise

    def _first_keys(self):
        key = sampling.row_keys(self.options.seed, 1)[0]
        return key, mx.random.split(key, 3)[2]  # neither of those that the language model goes on with

    def _bistream(self, lm, key):
        model, o, first = self.model, self.options, self._segment("")
        parts = texts.pieces(self.text, o.normalize, o.language, note=self.note)
        ids = (i for piece in parts for i in model.tokenizer.encode(piece))
        prompt = first.prompt_ids + first.text_ids
        speak = lambda ids: model.llm.generate_from_stream(ids, prompt, first.prompt_speech, lm, key)  # noqa: E731
        return SafeTokens(self.request, speak, ids)

    def _converted(self):
        """The speech tokens of the source, in parts that end in pauses where there are some."""
        begin = time.perf_counter()
        self._tell("speech_tokenizer", 0, 1)
        tokens = self.request.guard("speech_tokenizer", self.model.speech_tokens, *self.source).tolist()
        took = self._spent("speech_tokenizer", begin) - begin
        self.control.spent("speech_tokenizer", "speech_tokenizer", len(self.source[0]) / self.source[1], took)
        self._tell("speech_tokenizer", 1, 1)
        parts, longest = [], int(LONGEST * self.model.token_rate)
        while len(tokens) > longest:
            silent = [i for i in range(longest // 2, longest) if self.model.is_silent(tokens[i])]
            cut = silent[-1] if silent else longest
            parts, tokens = [*parts, tokens[:cut]], tokens[cut:]
        return [*parts, tokens]

    def _ended(self, run, what):
        """Say so if a limit ended the speech tokens."""
        if self.cut_short:
            self.cut = True
            self.note(f"the speech was cut off, so that deadline={self.options.deadline:g} can be met")
        elif self._full():
            self.cut = True
            self.note(f"the speech was cut off by max_seconds={self.options.max_seconds:g}")
        elif run.finish_reason == "length":
            self.cut = True
            self.note(
                f"the speech of {what} was cut off: it did not end by itself within what a text of its length can "
                "need; another seed may"
            )

    def _counted(self, run, prefix=None):
        """The speech tokens of `run` without long silences, up to max_seconds; the language model's time is taken.

        prefix   ids that it reads before the first one, if that is known"""
        iterator, before = iter(run), len(self.tokens)

        def timed():
            made = seconds = 0
            try:
                while True:
                    begin = time.perf_counter()
                    token = next(iterator, None)
                    if self.source is None:
                        took = self._spent("llm", begin) - begin
                        if made or prefix is None:
                            seconds += took
                        else:
                            self.control.first_token(prefix, took)
                        self.request.breathe("llm", took)
                    if token is None:
                        return
                    made += 1
                    self._tell("llm", len(self.tokens) + 1, None)
                    yield token
            finally:
                if prefix is not None and made > 1:
                    self.control.tokens_made(made - 1, seconds)

        for token in timed() if self.source is not None else self.model.trim_silence(timed()):
            if 0 < before == len(self.tokens):
                self.paused += self.pause
            self.tokens.append(token)
            yield token
            if self._full():
                return
            if self.control.enough(len(self.tokens) - before):
                self.cut_short = True
                return

    def _full(self):
        o = self.options
        if o.max_seconds is None:
            return False
        return len(self.tokens) >= (o.max_seconds - self.paused) * self.model.token_rate * o.speed

    def _sound(self, tokens, key, tell, to_come=0):
        """All tokens of a segment through the flow once, then the vocoder once -> audio float32 [N] numpy."""
        model, request, control = self.model, self.request, self.control
        o = replace(self.options, steps=control.steps(len(tokens), to_come))
        flow_key, vocoder_key = _next(key)

        def flow():
            on_step = self._stepping("flow", lambda done: tell("flow", done, o.steps))
            return _computed(model.mel(tokens, self.prompt, o, flow_key, on_step))

        begin = time.perf_counter()
        mel = request.guard("flow", flow)
        now = self._spent("flow", begin)
        control.mel_made(self.prompt[1].shape[1] + mel.shape[1], o.steps, now - begin)
        tell("vocoder", 0, 1)

        def vocoder():
            return _computed(model.wave(mel if o.speed == 1 else change_speed(mel, o.speed), vocoder_key))

        wav = request.guard("vocoder", vocoder)
        control.audio_made(mel.shape[1], self._spent("vocoder", now) - now)
        tell("vocoder", 1, 1)
        return np.array(wav[0])

    def _stepping(self, stage, tell):
        """What a stage calls after each of its steps: it tells, and lets others have the device."""
        last = time.perf_counter()

        def on_step(done):
            nonlocal last
            tell(done)
            self.request.breathe(stage, time.perf_counter() - last)
            last = time.perf_counter()

        return on_step

    def _streamed(self, tokens, key):
        """Groups of tokens through the flow and the vocoder as soon as they are there."""
        o, model = self.options, self.model
        flow_key, vocoder_key = _next(key)
        flow = Restartable(self.request, "flow", lambda: model.mel_stream(self.prompt, self.options, flow_key))
        vocoder = Restartable(self.request, "vocoder", lambda: model.wave_stream(o, vocoder_key))
        resampler = None if o.speed == 1 else speed_stream(o.speed)
        hops, held, said = model.hops(self.prompt, o), [], 0
        wanted = next(hops)
        for token in tokens:
            held.append(token)
            said += 1
            if len(held) == wanted:
                yield from self._chunk(flow, held, vocoder, resampler, False)
                held, wanted = [], next(hops)
        if said:
            yield from self._chunk(flow, held, vocoder, resampler, True)

    def _chunk(self, flow, tokens, vocoder, resampler, last):
        self._tell("flow", len(self.tokens), None)
        if self.first_audio is None and not flow.begun:  # the last moment to choose: all its chunks take as many steps
            self.options = replace(self.options, steps=self.control.steps(len(tokens), streamed=True))
        begin, prompt = time.perf_counter(), 0 if flow.begun else self.prompt[1].shape[1]
        on_step = self._stepping("flow", lambda done: self._tell("flow", len(self.tokens), None))
        mel = flow.add(tokens, last, on_step=on_step)
        now = self._spent("flow", begin)
        if mel.shape[1]:
            self.control.mel_made(prompt + mel.shape[1], self.options.steps, now - begin, streamed=True)
        self._tell("vocoder", len(self.tokens), None)
        frames = mel.shape[1]
        if resampler is not None:
            with self.request.place("vocoder"):
                mel = _computed(resampler.add(mel, last))
        wav = vocoder.add(mel, last)
        self.control.audio_made(frames, self._spent("vocoder", now) - now)
        if wav.shape[1]:
            yield np.array(wav[0])

    def _seams(self, pieces):
        """The audio of one of several segments: a pause before it, and its ends faded."""
        rate = self.model.sample_rate
        n, tail, begun = int(FADE * rate), np.zeros(0, np.float32), False
        ramp = np.linspace(0, 1, n, dtype=np.float32)
        for piece in pieces:
            if not begun and any(len(a) for a in self.audio):
                piece[: len(ramp)] *= ramp[: len(piece)]
                piece = np.concatenate([np.zeros(int(self.pause * rate), np.float32), piece])
            begun = True
            piece = np.concatenate([tail, piece])
            tail = piece[max(0, len(piece) - n) :]  # held back: it may be the end
            yield piece[: len(piece) - len(tail)]
        yield tail * ramp[::-1][n - len(tail) :]

    # What is told about it

    def _tell(self, stage, done, all):
        if self.stopped.is_set():
            raise Stopped
        if self._progress is not None:
            self.request.theirs(self._progress, stage, done, all)

    def _tell_later(self, *progress):
        """`_tell` in a thread beside: `progress` is told where everything else is."""
        if self.stopped.is_set():
            raise Stopped
        self._told.put(progress)

    def _tell_now(self):
        while not self._told.empty():
            self._tell(*self._told.get())

    def _spent(self, stage, begin):
        now = time.perf_counter()
        self.seconds[stage] += now - begin
        trace.record(stage, begin, now)
        return now

    def result(self):
        samples = np.concatenate(self.audio) if self.audio else np.zeros(0, np.float32)
        duration, work = len(samples) / self.model.sample_rate, sum(self.seconds.values())
        first = {} if self.first_audio is None else {"first_audio": self.first_audio}
        return SpeechResult(
            finish_reason=self.finish_reason or "cancelled",
            seconds=self.seconds | first,
            audio=samples,
            sample_rate=self.model.sample_rate,
            duration=duration,
            rtf=min(work, self.total or work) / duration if duration else math.inf,  # stages may have run side by side
            mode=self.mode,
            tokens=list(self.tokens),
            segments=[s.text for s in self.segments] if self.segments else [],
            total=self.total,
            decisions=list(self.request.decisions),
        )


def _computed(a):
    mx.eval(a)
    return a


def _next(key):
    """An MLX random key -> (the one to go on with, one to use), computed, so that any thread may use them."""
    following, now = mx.random.split(key)
    mx.eval(following, now)
    return following, now
