"""One utterance: from a text (or the speech tokens of a recording) to audio, segment by segment.

Offline, each stage runs once on a segment, and a segment becomes audio while the language model goes on to the next.
Streamed, the flow and the vocoder run on every group of tokens as soon as it is there, each carrying its state, so that
a chunk costs the same however much was said before it. What the stages are is the model's: see `model.py`.
"""

import contextlib
import math
import queue
import threading
import time
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_cosyh3 import sampling
from mlx_cosyh3.cosyvoice import audio, modes, prompts, text as texts
from mlx_cosyh3.cosyvoice.llm import LMOptions
from mlx_cosyh3.cosyvoice.speed import change_speed, speed_stream
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.results import SpeechResult
from mlx_cosyh3.stream import Beside, Stream

FADE = 0.005  # s, at the seams of segments, so that a step in the wave is no click
LONGEST = 30.0  # s of a recording that are converted in one piece


@dataclass
class Segment:
    """One piece of the text: what the language model is to read for it."""

    text: str
    text_ids: list
    prompt_ids: list
    prompt_speech: list


@dataclass
class Run:
    """The speech tokens of one segment, as they are made, and what is needed to make audio of them."""

    tokens: object  # an iterator
    key: mx.array  # of the noise in flow and vocoder
    several: bool  # whether it is one of several segments
    more: bool  # whether another will follow, whose tokens take time


class Stopped(BaseException):
    """Nobody waits for this utterance any more."""


class SpeechStream(Stream):
    """A Stream whose close() need not wait for a whole stage to end, and may come from any thread."""

    def close(self):
        self._run.stopped.set()
        super().close()
        with contextlib.suppress(queue.Full):  # wakes a thread that still waits for a piece
            self._pieces.put_nowait(None)

    def __del__(self):
        self._run.stopped.set()
        super().__del__()


class Utterance:
    """What is asked for, checked at once; then `pieces`, which does the work in the thread that iterates over it.

    source   voice conversion: (samples, rate) of the recording that says what is to be said, instead of a text"""

    def __init__(self, model, text, options, streamed, note, progress, source=None):
        self.model, self.options, self.streamed = model, options.settle(model), streamed
        self.note, self._progress = note or audio.warn, progress
        self.stopped, self._told = threading.Event(), queue.SimpleQueue()
        self.source, self.text, self.segments = source, text, None
        self.voice, self.mode = modes.choose(model, options, source is not None)
        if source is None and isinstance(text, str):
            self.segments = self._segments(text)  # here, so that bad text is an error before any work
        elif source is None:
            self._check_pieces(text)
        self.audio, self.tokens = [], []
        self.finish_reason = self.first_audio = None
        self.cut = False  # whether a limit ended a segment
        self.seconds = {"llm" if source is None else "speech_tokenizer": 0.0, "flow": 0.0, "vocoder": 0.0}
        self.pause = options.pause if source is None else 0.0
        self.paused = 0.0  # s of silence between segments
        self.begin, self.total = None, 0.0

    # What is asked for

    def _check_pieces(self, text):
        """Raise CosyH3Error unless `text`, which is no string, can be spoken while it arrives."""
        model = self.model
        if not (self.streamed and hasattr(text, "__iter__")):
            also = "; stream_generate also takes an iterator of strings" if model.text_in_pieces else ""
            raise CosyH3Error(f"text must be a string, not {type(text).__name__}{also}")
        if not model.text_in_pieces:
            raise CosyH3Error(
                f"CosyVoice {model.version} reads a whole text before it speaks: join the pieces to one string; "
                f"it can do {model.abilities}"
            )

    def _segments(self, text):
        """The pieces of `text`, each with the ids that go to the language model."""
        o = self.options
        model = self.model
        made = texts.segments(text, model.tokenizer.count, o.language, o.normalize, note=self.note, tags=model.tags)
        return [self._segment(piece) for piece in made]

    def _segment(self, piece):
        model, voice = self.model, self.voice
        prompt, said = prompts.layout(
            self.mode, model.version, piece, voice.transcript, self.options.instruct, note=self.note, tags=model.tags
        )
        if self.mode == "zero_shot" and voice.transcript is None:
            prompt_ids = voice.transcript_ids.tolist()
        else:
            prompt_ids = model.tokenizer.encode(prompt)
        prompt_speech = voice.prompt_tokens.tolist() if self.mode == "zero_shot" else []
        return Segment(piece, model.tokenizer.encode(said), prompt_ids, prompt_speech)

    # The work

    def pieces(self):
        """Yield audio, float32 numpy; what a Stream runs."""
        self.begin = time.perf_counter()
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
            mx.clear_cache()

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
                        ahead.append(Beside(self._sound, tokens, run.key, self._tell_later))
                    elif tokens:
                        yield [self._sound(tokens, run.key, self._tell)], run.several
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
        o, model = self.options, self.model
        key = sampling.row_keys(o.seed, 1)[0]
        noise = mx.random.split(key, 3)[2]  # neither of those that the language model goes on with
        if self.source is not None:
            parts = self._converted()
            for part in parts:
                noise, now = _next(noise)
                yield Run(self._counted(part), now, len(parts) > 1, False)
            return
        lm = LMOptions(temperature=o.temperature, top_p=o.top_p, top_k=o.top_k, win_size=o.win_size, tau_r=o.tau_r)
        if self.segments is None:
            with contextlib.closing(self._bistream(lm, key)) as run:  # closed, it lets its cache go at once
                yield Run(self._counted(run), noise, False, False)
                self._ended(run, "the text")
            return
        several = len(self.segments) > 1
        for i, s in enumerate(self.segments):
            (key, now), (noise, now_noise) = _next(key), _next(noise)
            with contextlib.closing(model.speak(s, self.mode, self.voice, lm, now)) as run:
                yield Run(self._counted(run), now_noise, several, i < len(self.segments) - 1)
                self._ended(run, repr(s.text if len(s.text) < 50 else s.text[:47] + "..."))
            if self._full():
                return

    def _bistream(self, lm, key):
        model, o, first = self.model, self.options, self._segment("")
        parts = texts.pieces(self.text, o.normalize, o.language, note=self.note)
        ids = (i for piece in parts for i in model.tokenizer.encode(piece))
        return model.llm.generate_from_stream(ids, first.prompt_ids + first.text_ids, first.prompt_speech, lm, key)

    def _converted(self):
        """The speech tokens of the source, in parts that end in pauses where there are some."""
        begin = time.perf_counter()
        self._tell("speech_tokenizer", 0, 1)
        tokens = self.model.speech_tokens(*self.source).tolist()
        self._spent("speech_tokenizer", begin)
        self._tell("speech_tokenizer", 1, 1)
        parts, longest = [], int(LONGEST * self.model.token_rate)
        while len(tokens) > longest:
            silent = [i for i in range(longest // 2, longest) if self.model.is_silent(tokens[i])]
            cut = silent[-1] if silent else longest
            parts, tokens = [*parts, tokens[:cut]], tokens[cut:]
        return [*parts, tokens]

    def _ended(self, run, what):
        """Say so if a limit ended the speech tokens."""
        if self._full():
            self.cut = True
            self.note(f"the speech was cut off by max_seconds={self.options.max_seconds:g}")
        elif run.finish_reason == "length":
            self.cut = True
            self.note(
                f"the speech of {what} was cut off: it did not end by itself within what a text of its length can "
                "need; another seed may"
            )

    def _counted(self, run):
        """The speech tokens of `run` without long silences, up to max_seconds; the language model's time is taken."""
        iterator, before = iter(run), len(self.tokens)

        def timed():
            while True:
                begin = time.perf_counter()
                token = next(iterator, None)
                if self.source is None:
                    self._spent("llm", begin)
                if token is None:
                    return
                self._tell("llm", len(self.tokens) + 1, None)
                yield token

        for token in timed() if self.source is not None else self.model.trim_silence(timed()):
            if 0 < before == len(self.tokens):
                self.paused += self.pause
            self.tokens.append(token)
            yield token
            if self._full():
                return

    def _full(self):
        o = self.options
        if o.max_seconds is None:
            return False
        return len(self.tokens) >= (o.max_seconds - self.paused) * self.model.token_rate * o.speed

    def _sound(self, tokens, key, tell):
        """All tokens of a segment through the flow once, then the vocoder once -> audio float32 [N] numpy."""
        o, model = self.options, self.model
        flow_key, vocoder_key = _next(key)
        begin = time.perf_counter()
        mel = model.mel(tokens, self.prompt, o, flow_key, lambda done: tell("flow", done, o.steps))
        mx.eval(mel)
        begin = self._spent("flow", begin)
        tell("vocoder", 0, 1)
        wav = model.wave(mel if o.speed == 1 else change_speed(mel, o.speed), vocoder_key)
        mx.eval(wav)
        self._spent("vocoder", begin)
        tell("vocoder", 1, 1)
        return np.array(wav[0])

    def _streamed(self, tokens, key):
        """Groups of tokens through the flow and the vocoder as soon as they are there."""
        o, model = self.options, self.model
        flow_key, vocoder_key = _next(key)
        flow, vocoder = model.mel_stream(self.prompt, o, flow_key), model.wave_stream(o, vocoder_key)
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
        begin = time.perf_counter()
        mel = flow.add(tokens, last)
        mx.eval(mel)
        begin = self._spent("flow", begin)
        self._tell("vocoder", len(self.tokens), None)
        if resampler is not None:
            mel = resampler.add(mel, last)
        wav = vocoder.add(mel, last)
        mx.eval(wav)
        self._spent("vocoder", begin)
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
            self._progress(stage, done, all)

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
        )


def _next(key):
    """An MLX random key -> (the one to go on with, one to use), computed, so that any thread may use them."""
    following, now = mx.random.split(key)
    mx.eval(following, now)
    return following, now
