"""One utterance: from a text (or the speech tokens of a recording) to audio, segment by segment.

Offline, each stage runs once on a segment. Streamed, the flow and the vocoder run on every group of tokens as soon as
it is there, each carrying its state, so that a chunk costs the same however much was said before it.
"""

import contextlib
import math
import queue
import threading
import time
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlx_cosyh3 import sampling
from mlx_cosyh3.cosyvoice import audio, prompts, text as texts
from mlx_cosyh3.cosyvoice.llm import LMOptions
from mlx_cosyh3.cosyvoice.speed import change_speed, speed_stream
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.results import SpeechResult
from mlx_cosyh3.stream import Stream

FADE = 0.005  # s, at the seams of segments, so that a step in the wave is no click
LONGEST = 30.0  # s of a recording that are converted in one piece
_NOTHING = {"prompt_tokens": np.zeros(0, np.int32), "prompt_mel": np.zeros((0, 80), np.float32)}


class Segment:
    """One piece of the text: what the language model is to read for it."""

    def __init__(self, text, text_ids, prompt_ids, prompt_speech):
        self.text, self.text_ids, self.prompt_ids, self.prompt_speech = text, text_ids, prompt_ids, prompt_speech


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
        self.model, self.options, self.streamed = model, options, streamed
        self.note, self._progress = note or audio.warn, progress
        self.stopped = threading.Event()
        self.source, self.text, self.segments = source, text, None
        self.voice, self.mode = self._voice_and_mode()
        if source is None and isinstance(text, str):
            self.segments = self._segments(text)  # here, so that bad text is an error before any work
        elif source is None and not (streamed and hasattr(text, "__iter__")):
            raise CosyH3Error(
                f"text must be a string, not {type(text).__name__}; stream_generate also takes an iterator of strings"
            )
        elif source is None and self.mode in ("cross_lingual", "sft") and model.version < 3:
            raise CosyH3Error("text that arrives in pieces needs a voice with a transcript")
        self.audio, self.tokens = [], []
        self.finish_reason = self.first_audio = None
        self.seconds = {"llm" if source is None else "speech_tokenizer": 0.0, "flow": 0.0, "vocoder": 0.0}
        self.paused = 0.0  # s of silence between segments
        self.begin, self.total = None, 0.0

    # What is asked for

    def _voice_and_mode(self):
        o, model = self.options, self.model
        voice, named = o.voice, isinstance(o.voice, str) or o.voice is None
        if voice is None:
            if not model.voices:
                raise CosyH3Error(
                    "no voice: this model holds none, make one with Voice.from_audio(model, recording, text=...)"
                )
            voice = next(iter(model.voices.values()))
        elif isinstance(voice, str):
            voice = model.find_voice(voice)
        elif not isinstance(voice, Voice):
            raise CosyH3Error(f"voice must be a Voice or the name of one, not {type(voice).__name__}")
        if voice.codebook not in (0, model.codebook):
            raise CosyH3Error(
                f"the voice {voice.name!r} was made for a model with {voice.codebook} speech tokens, this one has "
                f"{model.codebook}: make it again with this model"
            )
        if self.source is not None:
            return voice, "convert"
        known = voice.transcript is not None or voice.transcript_ids is not None
        mode = o.mode
        if mode is None:
            mode = (
                "instruct"
                if o.instruct
                else "sft"
                if named or not voice.has_prompt
                else "zero_shot"
                if known
                else "cross_lingual"
            )
        if (mode == "instruct") != bool(o.instruct):
            raise CosyH3Error(
                f"mode {mode!r} and instruct={o.instruct!r} do not go together: it goes with mode 'instruct' alone"
            )
        if mode in ("zero_shot", "cross_lingual") and not voice.has_prompt:
            raise CosyH3Error(
                f"mode {mode!r} needs a voice made from a recording; {voice.name!r} is a speaker embedding alone"
            )
        if mode == "zero_shot" and not known:
            raise CosyH3Error(
                f"mode 'zero_shot' needs the transcript of the voice {voice.name!r}: make it again with its text"
            )
        return voice, mode

    def _segments(self, text):
        """The pieces of `text`, each with the ids that go to the language model."""
        o = self.options
        made = texts.segments(text, self.model.tokenizer.count, o.language, o.normalize, note=self.note)
        return [self._segment(piece) for piece in made]

    def _segment(self, piece):
        model, voice = self.model, self.voice
        prompt, said = prompts.layout(
            self.mode, model.version, piece, transcript=voice.transcript, instruct=self.options.instruct, note=self.note
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
        prompt = replace(self.voice, **_NOTHING) if self.mode == "sft" else self.voice
        self.prompt = prompt.arrays()
        try:
            for audio_of_one in self._each_segment():
                for piece in audio_of_one:
                    if len(piece) and self.first_audio is None:
                        self.first_audio = time.perf_counter() - self.begin
                    self.audio.append(piece)
                    yield piece
                mx.clear_cache()
            if not any(len(a) for a in self.audio):
                raise CosyH3Error("the model made no speech for this text: try another seed or voice")
            self.finish_reason = self.finish_reason or "stop"
        except Stopped:
            return
        finally:
            self.total = time.perf_counter() - self.begin
            mx.clear_cache()

    def _each_segment(self):
        """For each segment an iterator of its audio."""
        work = self._streamed if self.streamed else self._offline
        if self.source is not None:
            parts = self._converted()
            for part in parts:
                yield self._seams(work(self._counted(part)), len(parts) > 1, 0.0)
            return
        o = self.options
        key = sampling.row_keys(o.seed, 1)[0]
        lm = LMOptions(temperature=o.temperature, top_p=o.top_p, top_k=o.top_k, win_size=o.win_size, tau_r=o.tau_r)
        if self.segments is None:
            with contextlib.closing(self._bistream(lm, key)) as run:  # closed, it lets its cache go at once
                yield work(self._counted(run))
                self._ended(run, "the text")
            return
        for s in self.segments:
            key, now = mx.random.split(key)
            with contextlib.closing(self.model.llm.generate(s.text_ids, s.prompt_ids, s.prompt_speech, lm, now)) as run:
                yield self._seams(work(self._counted(run)), len(self.segments) > 1, o.pause)
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
            self.finish_reason = "length"
            self.note(f"the speech was cut off by max_seconds={self.options.max_seconds:g}")
        elif run.finish_reason == "length":
            self.finish_reason = "length"
            self.note(
                f"the speech of {what} was cut off: it did not end by itself within what a text of its length can need; "
                "another seed may"
            )

    def _counted(self, run):
        """The speech tokens of `run` without long silences, up to max_seconds; the language model's time is taken."""
        iterator = iter(run)

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
            self.tokens.append(token)
            yield token
            if self._full():
                return

    def _full(self):
        o = self.options
        if o.max_seconds is None:
            return False
        return len(self.tokens) >= (o.max_seconds - self.paused) * self.model.token_rate * o.speed

    def _offline(self, tokens):
        """All tokens, then the flow once, then the vocoder once."""
        tokens = list(tokens)
        if not tokens:
            return
        o, model = self.options, self.model
        begin = time.perf_counter()
        on_step = lambda done: self._tell("flow", done, o.steps)  # noqa: E731
        mel = model.flow(mx.array([tokens]), *self.prompt, streaming=o.causal, steps=o.steps, on_step=on_step)
        mx.eval(mel)
        begin = self._spent("flow", begin)
        self._tell("vocoder", 0, 1)
        wav = model.hift(mel if o.speed == 1 else change_speed(mel, o.speed))
        mx.eval(wav)
        self._spent("vocoder", begin)
        self._tell("vocoder", 1, 1)
        yield np.array(wav[0])

    def _streamed(self, tokens):
        """Groups of tokens through the flow and the vocoder as soon as they are there."""
        o, model = self.options, self.model
        flow, vocoder = model.flow.stream(*self.prompt, steps=o.steps), model.hift.stream()
        resampler = None if o.speed == 1 else speed_stream(o.speed)
        held, said, chunk = [], [], o.chunk_tokens
        # Chunks end where those of the attention mask do, so that none is computed twice. Frames look some tokens ahead.
        size = model.config["chunk_size"]
        wanted = model.flow.look_ahead + chunk + (-(self.prompt[0].shape[1] + chunk)) % size
        for token in tokens:
            held.append(token)
            said.append(token)
            if len(held) == wanted:
                yield from self._chunk(flow.add, held, vocoder, resampler, False)
                held, chunk = [], min(2 * chunk, o.max_chunk_tokens)
                wanted = -(-chunk // size) * size
        if not said:
            return
        if not o.compat:
            yield from self._chunk(flow.add, held, vocoder, resampler, True)
            return
        done = flow.frames

        def whole(_, last):
            mel = model.flow(mx.array([said]), *self.prompt, streaming=False, steps=o.steps)
            return mel[:, done:]

        yield from self._chunk(whole, held, vocoder, resampler, True)

    def _chunk(self, flow, tokens, vocoder, resampler, last):
        self._tell("flow", len(self.tokens), None)
        begin = time.perf_counter()
        mel = flow(tokens, last)
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

    def _seams(self, pieces, several, pause):
        """The audio of one of `several` segments: a pause before it, and its ends faded."""
        if not several:
            yield from pieces
            return
        rate = self.model.sample_rate
        n, tail, begun = int(FADE * rate), np.zeros(0, np.float32), False
        ramp = np.linspace(0, 1, n, dtype=np.float32)
        for piece in pieces:
            if not begun and any(len(a) for a in self.audio):
                self.paused += pause
                piece[: len(ramp)] *= ramp[: len(piece)]
                piece = np.concatenate([np.zeros(int(pause * rate), np.float32), piece])
            begun = True
            piece = np.concatenate([tail, piece])
            tail = piece[max(0, len(piece) - n) :]  # held back: it may be the end
            yield piece[: len(piece) - len(tail)]
        yield tail * ramp[::-1][n - len(tail) :]

    def _tell(self, stage, done, all):
        if self.stopped.is_set():
            raise Stopped
        if self._progress is not None:
            self._progress(stage, done, all)

    def _spent(self, stage, begin):
        now = time.perf_counter()
        self.seconds[stage] += now - begin
        return now

    def result(self):
        samples = np.concatenate(self.audio) if self.audio else np.zeros(0, np.float32)
        duration = len(samples) / self.model.sample_rate
        first = {} if self.first_audio is None else {"first_audio": self.first_audio}
        return SpeechResult(
            finish_reason=self.finish_reason or "cancelled",
            seconds=self.seconds | first,
            audio=samples,
            sample_rate=self.model.sample_rate,
            duration=duration,
            rtf=sum(self.seconds.values()) / duration if duration else math.inf,
            mode=self.mode,
            tokens=list(self.tokens),
            segments=[s.text for s in self.segments] if self.segments else [],
            total=self.total,
        )
