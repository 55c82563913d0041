"""From text to speech with a CosyVoice model: modes, segments, the two ways of running the parts, results.

What is spoken follows from the arguments (upstream's frontend.py and cosyvoice.py have one method for each):

    a Voice with a transcript            zero-shot: the language model goes on from the recording
    a Voice without one                  cross-lingual: it sees the text alone
    any voice and `instruct`             instruct: it is told how to speak
    the name of a voice of the model     SFT: the speaker embedding alone

Offline, each stage runs once on a segment. Streamed, the flow and the vocoder run on every group of tokens as soon as
it is there, each carrying its state, so that a chunk costs the same however much was said before it.
"""

import math
import time
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_cosyh3 import sampling
from mlx_cosyh3.cosyvoice import audio, prompts, text as texts
from mlx_cosyh3.cosyvoice.llm import LMOptions
from mlx_cosyh3.cosyvoice.speed import change_speed, speed_stream
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.errors import CosyH3Error, nearest, take_options
from mlx_cosyh3.results import SpeechResult
from mlx_cosyh3.stream import Stream

MODES = ("zero_shot", "cross_lingual", "instruct", "sft")
FADE = 0.005  # s, at the seams of segments, so that a step in the wave is no click


@dataclass(kw_only=True)
class SpeechOptions:
    """What `generate` and `stream_generate` take for a CosyVoice model.

    voice          a Voice, or the name of one that the model holds; None: the model's first
    instruct       how to speak, in words ("Please speak as loudly as possible.")
    mode           "zero_shot", "cross_lingual", "instruct" or "sft"; None: as the other arguments say
    language       "zh" or "en", for numbers and signs; None: by the text's own letters
    normalize      read numbers, units and signs as words; False: the text goes to the model as it is
    seed           the same seed gives the same audio, in any thread; None = another one each time
    temperature    0 = always the likeliest token; top_k, top_p: of which tokens to draw
    win_size       a token drawn again within this many tokens is drawn anew from all (repetition-aware sampling) ...
    tau_r          ... when it makes up this share of the window
    speed          0.5 to 2: tempo, at the same pitch
    steps          steps of the flow; more are slower and finer
    causal         offline: use the streaming attention mask, so that the audio equals the streamed one
    chunk_tokens, max_chunk_tokens   streamed: speech tokens (25 a second) of the first and of the longest chunk
    max_seconds    stop after this much audio
    pause          seconds of silence between the segments of a long text
    compat         streamed: the last chunk as upstream computes it, with full attention over everything so far"""

    voice: object = None
    instruct: str = None
    mode: str = None
    language: str = None
    normalize: bool = True
    seed: int = None
    temperature: float = 1.0
    top_k: int = 25
    top_p: float = 0.8
    win_size: int = 10
    tau_r: float = 0.1
    speed: float = 1.0
    steps: int = 10
    causal: bool = False
    chunk_tokens: int = 25
    max_chunk_tokens: int = 100
    max_seconds: float = None
    pause: float = 0.15
    compat: bool = False

    def __post_init__(self):
        sampling.check_options(temperature=self.temperature, top_p=self.top_p, seed=self.seed)
        for name, low, high in (("top_k", 1, None), ("win_size", 0, 1000), ("steps", 1, 1000), ("chunk_tokens", 1, 7000)):
            sampling._whole(name, getattr(self, name), low, high)
        sampling._whole("max_chunk_tokens", self.max_chunk_tokens, self.chunk_tokens, 7000)
        sampling._number("tau_r", self.tau_r, lambda x: 0 <= x <= 1, "from 0 to 1")
        sampling._number("speed", self.speed, lambda x: 0.5 <= x <= 2, "from 0.5 (half as fast) to 2 (twice as fast)")
        sampling._number("pause", self.pause, lambda x: 0 <= x <= 10, "0 to 10 seconds")
        if self.max_seconds is not None:
            sampling._number("max_seconds", self.max_seconds, lambda x: x > 0, "more than 0 seconds")
        if self.mode is not None and self.mode not in MODES:
            raise CosyH3Error(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}{nearest(str(self.mode), MODES)}")
        if self.language not in (None, "zh", "en"):
            raise CosyH3Error(f"language must be zh or en, not {self.language!r}; leave it out for other languages")
        if self.instruct is not None and not str(self.instruct).strip():
            raise CosyH3Error("instruct is empty: say how to speak, or leave it out")


class SpeechGeneration:
    """generate, stream_generate, batch_generate and convert_voice for a CosyVoice model (a mix-in)."""

    def generate(self, text, *, note=None, progress=None, **options):
        """Speak `text` -> SpeechResult. For the options see SpeechOptions.

        note       called with each warning (a string); None: warnings.warn
        progress   called as progress(stage, done, all) while it works; `all` may be None
        Raises CosyH3Error for text with nothing to speak, an unknown voice, an option out of range."""
        run = _Run(self, text, take_options(SpeechOptions, options), False, note, progress)
        for _ in run.pieces():
            continue
        return run.result()

    def stream_generate(self, text, *, note=None, progress=None, **options):
        """`generate` as an iterator of audio chunks (float32 numpy arrays, in order) as they are made -> Stream.

        text   a string, or an iterator of strings that arrive one by one: speech begins before the text has ended
        `stream.result` is there when the stream has ended or was closed."""
        return self.start(text, True, note=note, progress=progress, **options)

    def start(self, text, streamed, *, note=None, progress=None, **options):
        """`stream_generate`, or with streamed=False `generate`, at work in a thread of its own -> Stream."""
        return Stream(_Run(self, text, take_options(SpeechOptions, options), streamed, note, progress))

    def batch_generate(self, texts, **options):
        """`generate` for each of `texts`, one after the other -> list of SpeechResult; text r draws with seed + r."""
        if isinstance(texts, str):
            raise CosyH3Error(f"batch_generate takes a list of texts, not the text {texts[:40]!r}")
        seed = options.pop("seed", None)
        return [self.generate(t, seed=None if seed is None else seed + r, **options) for r, t in enumerate(texts)]

    def convert_voice(self, source, voice, *, note=None, progress=None, steps=10, speed=1.0, causal=False):
        """Say what the recording `source` says, with `voice` -> SpeechResult.

        source   a path, an open file, or (samples, rate); of any length
        voice    a Voice, or the name of one that the model holds"""
        note = note or audio.warn
        self.need("speech_tokenizer")
        samples, rate = audio.read_audio(source)
        audio.check_clip(samples, rate, lambda text: None if "longer than" in text else note(text))
        o = SpeechOptions(voice=voice, steps=steps, speed=speed, causal=causal)
        run = _Run(self, None, o, False, note, progress, source=(samples, rate))
        for _ in run.pieces():
            continue
        return run.result()


class _Segment:
    """What the language model is to read for one piece of the text."""

    def __init__(self, text, text_ids, prompt_ids, prompt_speech):
        self.text, self.text_ids, self.prompt_ids, self.prompt_speech = text, text_ids, prompt_ids, prompt_speech


class _Run:
    """One utterance, on the thread that iterates over `pieces`."""

    def __init__(self, model, text, options, streamed, note, progress, source=None):
        self.model, self.options, self.streamed = model, options, streamed
        self.note, self.progress = note or audio.warn, progress or (lambda stage, done, all: None)
        self.source = source
        self.voice, self.mode = self._voice_and_mode()
        self.text = text
        self.segments = None
        if source is None and isinstance(text, str):
            self.segments = self._segments(text)  # here, so that bad text is an error before any work
        elif source is None and not (streamed and hasattr(text, "__iter__")):
            raise CosyH3Error(f"text must be a string, not {type(text).__name__}; stream_generate also takes an iterator of strings")
        elif source is None and self.mode in ("cross_lingual", "sft") and model.version < 3:
            raise CosyH3Error("text that arrives in pieces needs a voice with a transcript")
        self.audio, self.tokens = [], []
        self.finish_reason = None
        self.seconds = {"llm": 0.0, "flow": 0.0, "vocoder": 0.0}
        self.first_audio = None
        self.begin = None

    # What is asked for

    def _voice_and_mode(self):
        o, model = self.options, self.model
        voice, named = o.voice, isinstance(o.voice, str) or o.voice is None
        if voice is None:
            if not model.voices:
                raise CosyH3Error("no voice: this model holds none, make one with Voice.from_audio(model, recording, text=...)")
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
        known = voice.transcript is not None or voice.transcript_ids is not None
        mode = o.mode
        if mode is None:
            mode = "instruct" if o.instruct else "sft" if named or not voice.has_prompt else "zero_shot" if known else "cross_lingual"
        if (mode == "instruct") != bool(o.instruct):
            raise CosyH3Error(f"mode {mode!r} and instruct={o.instruct!r} do not go together: instruct goes with mode 'instruct' alone")
        if mode in ("zero_shot", "cross_lingual") and not voice.has_prompt:
            raise CosyH3Error(f"mode {mode!r} needs a voice made from a recording; {voice.name!r} is a speaker embedding alone")
        if mode == "zero_shot" and not known:
            raise CosyH3Error(f"mode 'zero_shot' needs the transcript of the voice {voice.name!r}: make it again with its text")
        return voice, mode

    def _segments(self, text):
        """The pieces of `text`, each with the ids that go to the language model."""
        o = self.options
        made = texts.segments(text, self.model.tokenizer.count, o.language, o.normalize, note=self.note)
        return [self._segment(piece) for piece in made]

    def _segment(self, piece):
        model, voice = self.model, self.voice
        prompt, said = prompts.layout(self.mode, model.version, piece, transcript=voice.transcript, instruct=self.options.instruct, note=self.note)
        if self.mode == "zero_shot" and voice.transcript is None:
            prompt_ids = voice.transcript_ids.tolist()
        else:
            prompt_ids = model.tokenizer.encode(prompt)
        prompt_speech = voice.prompt_tokens.tolist() if self.mode == "zero_shot" else []
        return _Segment(piece, model.tokenizer.encode(said), prompt_ids, prompt_speech)

    # The work

    def pieces(self):
        """Yield audio, float32 numpy; what a Stream runs."""
        self.begin = time.perf_counter()
        prompt = replace(self.voice, **_NOTHING) if self.mode == "sft" else self.voice
        self.prompt = prompt.arrays()
        key = sampling.row_keys(self.options.seed, 1)[0]
        work = self._streamed if self.streamed else self._offline
        try:
            for n, (tokens, lm) in enumerate(self._speech_tokens(key)):
                for piece in self._seams(work(tokens), first=n == 0):
                    if self.first_audio is None:
                        self.first_audio = time.perf_counter() - self.begin
                    self.audio.append(piece)
                    yield piece
                if lm is not None and lm.finish_reason == "length" or self._full():
                    self.finish_reason = "length"
                mx.clear_cache()
                if self._full():
                    break
            if not any(len(a) for a in self.audio):
                raise CosyH3Error("the model made no speech for this text: try another seed or voice")
            self.finish_reason = self.finish_reason or "stop"
        finally:
            mx.clear_cache()

    def _speech_tokens(self, key):
        """For each segment: (iterator of speech tokens, the language model's run or None)."""
        model, o = self.model, self.options
        if self.source is not None:
            begin = time.perf_counter()
            tokens = model.speech_tokens(*self.source)
            self.seconds["llm"] += time.perf_counter() - begin
            yield iter(tokens.tolist()), None
            return
        lm = LMOptions(temperature=o.temperature, top_p=o.top_p, top_k=o.top_k, win_size=o.win_size, tau_r=o.tau_r)
        if self.segments is None:
            run = self._bistream(lm, key)
            yield self._counted(run), run
            return
        for s in self.segments:
            key, now = mx.random.split(key)
            run = model.llm.generate(s.text_ids, s.prompt_ids, s.prompt_speech, lm, now)
            yield self._counted(run), run

    def _bistream(self, lm, key):
        model, first = self.model, self._segment("")
        o = self.options
        parts = texts.pieces(self.text, o.normalize, o.language, note=self.note)
        ids = (i for piece in parts for i in model.tokenizer.encode(piece))
        return model.llm.generate_from_stream(ids, first.prompt_ids + first.text_ids, first.prompt_speech, lm, key)

    def _counted(self, run):
        """The tokens of a language model's run without long silences, up to max_seconds; its time is taken."""
        timed = self._timed("llm", run)
        try:
            for token in self.model.trim_silence(timed):
                self.tokens.append(token)
                self.progress("llm", len(self.tokens), None)
                yield token
                if self._full():
                    return
        finally:
            timed.close()

    def _full(self):
        limit = self.options.max_seconds
        return limit is not None and len(self.tokens) >= limit * self.model.token_rate * self.options.speed

    def _timed(self, stage, run):
        iterator = iter(run)
        while True:
            begin = time.perf_counter()
            token = next(iterator, None)
            self.seconds[stage] += time.perf_counter() - begin
            if token is None:
                return
            yield token

    def _offline(self, tokens):
        """All tokens, then the flow once, then the vocoder once."""
        tokens = list(tokens)
        if tokens:
            o, model = self.options, self.model
            begin = time.perf_counter()
            on_step = lambda done: self.progress("flow", done, o.steps)  # noqa: E731
            mel = model.flow(mx.array([tokens]), *self.prompt, streaming=o.causal, steps=o.steps, on_step=on_step)
            mx.eval(mel)
            begin = self._spent("flow", begin)
            self.progress("vocoder", 0, 1)
            wav = model.hift(mel if o.speed == 1 else change_speed(mel, o.speed))
            mx.eval(wav)
            self._spent("vocoder", begin)
            self.progress("vocoder", 1, 1)
            yield np.array(wav[0])

    def _streamed(self, tokens):
        """Groups of tokens through the flow and the vocoder as soon as they are there."""
        o, model = self.options, self.model
        flow = model.flow.stream(*self.prompt, steps=o.steps)
        vocoder = model.hift.stream()
        resampler = None if o.speed == 1 else speed_stream(o.speed)
        held, said, chunk = [], [], o.chunk_tokens
        ahead = model.flow.look_ahead  # tokens that a frame looks ahead
        # Chunks end where those of the attention mask do, so that none is computed twice.
        size = model.config["chunk_size"]
        wanted = ahead + chunk + (-(self.prompt[0].shape[1] + chunk)) % size
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
        begin = time.perf_counter()
        mel = flow(tokens, last)
        mx.eval(mel)
        begin = self._spent("flow", begin)
        if resampler is not None:
            mel = resampler.add(mel, last)
        wav = vocoder.add(mel, last)
        mx.eval(wav)
        self._spent("vocoder", begin)
        if wav.shape[1]:
            yield np.array(wav[0])

    def _spent(self, stage, begin):
        now = time.perf_counter()
        self.seconds[stage] += now - begin
        return now

    def _seams(self, pieces, first):
        """The audio of a segment; between segments a pause, and the ends faded to it."""
        more = self.segments is not None and len(self.segments) > 1
        if not more:
            yield from pieces
            return
        n = int(FADE * self.model.sample_rate)
        ramp = np.linspace(0, 1, n, dtype=np.float32)
        if not first:
            yield np.zeros(int(self.options.pause * self.model.sample_rate), np.float32)
        held = None  # the last piece, until it is known whether it ends the segment
        for piece in pieces:
            if held is None and not first and len(piece) >= n:
                piece = np.concatenate([piece[:n] * ramp, piece[n:]])
            if held is not None:
                yield held
            held = piece
        if held is not None:
            if len(held) >= n:
                held = np.concatenate([held[:-n], held[-n:] * ramp[::-1]])
            yield held

    def result(self):
        samples = np.concatenate(self.audio) if self.audio else np.zeros(0, np.float32)
        total = (time.perf_counter() - self.begin) if self.begin is not None else 0.0
        seconds = dict(self.seconds)
        if self.first_audio is not None:
            seconds["first_audio"] = self.first_audio
        duration = len(samples) / self.model.sample_rate
        return SpeechResult(
            finish_reason=self.finish_reason or "cancelled",
            seconds=seconds,
            audio=samples,
            sample_rate=self.model.sample_rate,
            duration=duration,
            rtf=sum(self.seconds.values()) / duration if duration else math.inf,
            mode="convert" if self.source is not None else self.mode,
            tokens=list(self.tokens),
            segments=[s.text for s in self.segments] if self.segments else [],
            total=total,
        )


_NOTHING = {"prompt_tokens": np.zeros(0, np.int32), "prompt_mel": np.zeros((0, 80), np.float32)}
