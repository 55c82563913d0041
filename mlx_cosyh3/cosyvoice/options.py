"""What can be asked of speech: the options of `generate` and of its relatives."""

from dataclasses import dataclass, replace

from mlx_cosyh3 import deadline, runtime, sampling
from mlx_cosyh3.cosyvoice.prompts import MODES
from mlx_cosyh3.errors import CosyH3Error, nearest

LONGEST_CHUNK = 7000  # speech tokens


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
                   everything so far; CosyVoice 1 and 2 fade chunks into each other with weights that add up to 1.08,
                   and begin the phase of each chunk's source anew
    policy         a runtime.Policy: on which device the stages run; None: as the environment says
    deadline       seconds in which the first audio (streamed) or all of it is to be there: see deadline.py
    late           what if that cannot be: "refuse" it before the work starts, or do one's "best". At once that is what
                   could be spoken in time, with finish_reason "length\""""

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
    policy: object = None
    deadline: float = None
    late: str = "refuse"

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
        deadline.check(self.deadline, self.late)
        runtime.check(self.policy)
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
