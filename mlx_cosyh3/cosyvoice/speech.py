"""From text to speech with a CosyVoice model: modes, segments, the two ways of running the parts, results.

What is spoken follows from the arguments (upstream's frontend.py and cosyvoice.py have one method for each):

    a Voice with a transcript            zero-shot: the language model goes on from the recording
    a Voice without one                  cross-lingual: it sees the text alone
    any voice and `instruct`             instruct: it is told how to speak
    the name of a voice of the model     SFT: the speaker embedding alone

How it is spoken is in `utterance.py`.
"""

from dataclasses import dataclass

from mlx_cosyh3 import sampling
from mlx_cosyh3.cosyvoice import audio
from mlx_cosyh3.cosyvoice.prompts import MODES
from mlx_cosyh3.cosyvoice.utterance import SpeechStream, Utterance
from mlx_cosyh3.errors import CosyH3Error, nearest, take_options


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
        for name, low, high in (
            ("top_k", 0, None),
            ("win_size", 0, 1000),
            ("steps", 1, 1000),
            ("chunk_tokens", 1, 7000),
        ):
            sampling._whole(name, getattr(self, name), low, high)
        sampling._whole("max_chunk_tokens", self.max_chunk_tokens, self.chunk_tokens, 7000)
        sampling._number("tau_r", self.tau_r, lambda x: 0 <= x <= 1, "from 0 to 1")
        sampling._number("speed", self.speed, lambda x: 0.5 <= x <= 2, "from 0.5 (half as fast) to 2 (twice as fast)")
        sampling._number("pause", self.pause, lambda x: 0 <= x <= 10, "0 to 10 seconds")
        if self.max_seconds is not None:
            sampling._number("max_seconds", self.max_seconds, lambda x: x > 0, "more than 0 seconds")
        if self.mode is not None and self.mode not in MODES:
            raise CosyH3Error(
                f"mode must be one of {', '.join(MODES)}, not {self.mode!r}{nearest(str(self.mode), MODES)}"
            )
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

    def convert_voice(self, source, voice, *, note=None, progress=None, steps=10, speed=1.0, causal=False):
        """Say what the recording `source` says, with `voice` -> SpeechResult.

        source   a path, an open file, or (samples, rate); of any length
        voice    a Voice, or the name of one that the model holds"""
        note = note or audio.warn
        self.need("speech_tokenizer")
        samples, rate = audio.read_audio(source)
        audio.check_clip(samples, rate, lambda text: None if "longer than" in text else note(text))
        o = SpeechOptions(voice=voice, steps=steps, speed=speed, causal=causal)
        run = Utterance(self, None, o, False, note, progress, source=(samples, rate))
        for _ in run.pieces():
            continue
        return run.result()
