"""From text to speech with a CosyVoice model: modes, segments, the two ways of running the parts, results.

What is spoken follows from the arguments (upstream's frontend.py and cosyvoice.py have one method for each):

    a Voice with a transcript            zero-shot: the language model goes on from the recording
    a Voice without one                  cross-lingual: it sees the text alone
    any voice and `instruct`             instruct: it is told how to speak
    the name of a voice of the model     SFT: the speaker embedding alone

How it is spoken is in `utterance.py`.
"""

from dataclasses import dataclass, replace

from mlx_cosyh3 import sampling
from mlx_cosyh3.cosyvoice import audio
from mlx_cosyh3.cosyvoice.prompts import MODES
from mlx_cosyh3.cosyvoice.utterance import SpeechStream, Utterance
from mlx_cosyh3.errors import CosyH3Error, nearest, take_options

LONGEST_CHUNK = 7000  # speech tokens
CONVERTING = ("steps", "speed", "seed")  # options that go with a recording in place of a text
STREAMING = ("chunk_tokens", "max_chunk_tokens", "compat")


@dataclass(kw_only=True)
class SpeechOptions:
    """What `generate` and `stream_generate` take for a CosyVoice model.

    voice          a Voice, or the name of one that the model holds; None: the model's first
    instruct       how to speak, in words ("Please speak as loudly as possible.")
    mode           "zero_shot", "cross_lingual", "instruct" or "sft"; None: as the other arguments say
    language       "zh" or "en", for numbers and signs; None: by the text's own letters
    normalize      read numbers, units and signs as words; False: the text goes to the model as it is
    seed           the same seed gives the same audio, in any thread; None = another one each time
    temperature    0 = always the likeliest token; top_k (0 = off), top_p: of which tokens to draw
    win_size       a token drawn again within this many tokens is drawn anew from all (repetition-aware sampling) ...
    tau_r          ... when it makes up this share of the window
    speed          0.5 to 2: tempo, at the same pitch
    steps          steps of the flow; more are slower and finer
    causal         offline: use the streaming attention mask, so that the audio equals the streamed one (at a speed that
                   does not divide the number of mel frames, but for up to one frame's shift: see speed.py)
    chunk_tokens, max_chunk_tokens   streamed: speech tokens of the first and of the longest chunk; None: 25 and 100, in
                   CosyVoice 1 two seconds each
    max_seconds    stop after this much audio
    pause          seconds of silence between the segments of a long text
    compat         streamed as upstream does it: CosyVoice 2 and 3 compute the last chunk with full attention over
                   everything so far, CosyVoice 1 and 2 fade chunks into each other with weights that add up to 1.08"""

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
    chunk_tokens: int = None
    max_chunk_tokens: int = None
    max_seconds: float = None
    pause: float = 0.15
    compat: bool = False

    def __post_init__(self):
        sampling.check_options(temperature=self.temperature, top_p=self.top_p, seed=self.seed)
        sampling.whole("top_k", self.top_k, 0, None)
        sampling.whole("win_size", self.win_size, 0, 1000)
        sampling.whole("steps", self.steps, 1, 1000)
        if self.chunk_tokens is not None:
            sampling.whole("chunk_tokens", self.chunk_tokens, 1, LONGEST_CHUNK)
        if self.max_chunk_tokens is not None:
            sampling.whole("max_chunk_tokens", self.max_chunk_tokens, self.chunk_tokens or 1, LONGEST_CHUNK)
        sampling.number("tau_r", self.tau_r, lambda x: 0 <= x <= 1, "from 0 to 1")
        sampling.number("speed", self.speed, lambda x: 0.5 <= x <= 2, "from 0.5 (half as fast) to 2 (twice as fast)")
        sampling.number("pause", self.pause, lambda x: 0 <= x <= 10, "0 to 10 seconds")
        if self.max_seconds is not None:
            sampling.number("max_seconds", self.max_seconds, lambda x: x > 0, "more than 0 seconds")
        if self.mode is not None and self.mode not in MODES:
            raise CosyH3Error(
                f"mode must be one of {', '.join(MODES)}, not {self.mode!r}{nearest(str(self.mode), MODES)}"
            )
        if self.language not in (None, "zh", "en"):
            raise CosyH3Error(f"language must be zh or en, not {self.language!r}; leave it out for other languages")
        if self.instruct is not None and not str(self.instruct).strip():
            raise CosyH3Error("instruct is empty: say how to speak, or leave it out")

    def settle(self, model):
        """These options with the model's own in place of None. Raises CosyH3Error for one that it cannot follow."""
        first, longest = model.chunk_tokens
        first = self.chunk_tokens or first
        longest = self.max_chunk_tokens or max(first, longest)
        sampling.whole("max_chunk_tokens", longest, first, LONGEST_CHUNK)
        if self.causal and not model.causal:
            raise CosyH3Error(
                f"causal=True: CosyVoice {model.version} has no streaming mask, what it makes at once is not what it "
                "streams; leave it out"
            )
        return replace(self, chunk_tokens=first, max_chunk_tokens=longest)


class SpeechGeneration:
    """generate, stream_generate, batch_generate and convert_voice for a CosyVoice model (a mix-in)."""

    def generate(self, text, *, note=None, progress=None, **options):
        """Speak `text` -> SpeechResult. For the options see SpeechOptions.

        note       called with each warning (a string); None: warnings.warn
        progress   called as progress(stage, done, all) while it works; `all` may be None
        Raises CosyH3Error for text with nothing to speak, an unknown voice, an option out of range."""
        run = Utterance(self, text, take_options(SpeechOptions, options), False, note, progress)
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
        return SpeechStream(Utterance(self, text, take_options(SpeechOptions, options), streamed, note, progress))

    def batch_generate(self, texts, **options):
        """`generate` for each of `texts`, one after the other -> list of SpeechResult; text r draws with seed + r."""
        if isinstance(texts, str):
            raise CosyH3Error(f"batch_generate takes a list of texts, not the text {texts[:40]!r}")
        seed = options.pop("seed", None)
        sampling.check_options(seed=seed)
        return [self.generate(t, seed=None if seed is None else seed + r, **options) for r, t in enumerate(texts)]

    def convert_voice(self, source, voice, *, note=None, progress=None, **options):
        """Say what the recording `source` says, with `voice` -> SpeechResult.

        source    a path, an open file, or (samples, rate); of any length
        voice     a Voice, or the name of one that the model holds
        options   steps, speed, seed, causal of SpeechOptions"""
        run = self._conversion(source, voice, False, note, progress, **options)
        for _ in run.pieces():
            continue
        return run.result()

    def start_conversion(self, source, voice, streamed=False, *, note=None, progress=None, **options):
        """`convert_voice` at work in a thread of its own -> Stream. What was made before close() is in its result.

        streamed   chunk by chunk, as stream_generate does; then also chunk_tokens, max_chunk_tokens and compat"""
        return SpeechStream(self._conversion(source, voice, streamed, note, progress, **options))

    def _conversion(self, source, voice, streamed, note, progress, **options):
        note = note or audio.warn
        known = CONVERTING + (STREAMING if streamed else ("causal",))
        o = take_options(SpeechOptions, {"voice": voice} | options)
        for name in options:
            if name not in known:
                raise TypeError(f"converting a voice takes no option {name!r}, only {', '.join(known)}")
        self.need("speech_tokenizer")
        samples, rate = audio.read_audio(source)
        audio.check_clip(samples, rate, lambda text: None if "longer than" in text else note(text))
        return Utterance(self, None, o, streamed, note, progress, source=(samples, rate))
