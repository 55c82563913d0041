"""What a generation returns, in every model family."""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np


@dataclass
class Result:
    """finish_reason "stop" (the model or a stop string ended it) or "length" (a limit did), or "cancelled"
    seconds        wall-clock seconds per stage
    peak_memory    the most memory MLX held in this process so far, GB
    decisions      where its stages ran and why, what failed and was run again, what a deadline changed: list of dicts
                   with "stage", "at" (seconds since the start), "reason", and what was decided; see runtime.py"""

    finish_reason: str
    seconds: dict = field(default_factory=dict)
    peak_memory: float = field(default_factory=lambda: mx.get_peak_memory() / 1e9)
    decisions: list = field(default_factory=list)


@dataclass
class TextResult(Result):
    """text                the continuation, without the prompt, the end-of-text token or a stop string
    tokens              the ids that were drawn, an end-of-text id included
    logprobs            log-probability of each under the model (temperature 1, no filters), if asked for
    prompt_tokens       ids of the prompt
    prompt_tps, generation_tps   tokens per second"""

    text: str = ""
    tokens: list = field(default_factory=list)
    logprobs: list = None
    prompt_tokens: int = 0
    prompt_tps: float = 0.0
    generation_tps: float = 0.0


@dataclass
class SpeechResult(Result):
    """audio       float32 [N], mono, from -1 to 1; sample_rate in Hz, duration in seconds
    rtf         seconds of computing per second of audio: below 1 is faster than it is spoken
    mode        "zero_shot", "cross_lingual", "instruct", "sft" or "convert"
    tokens      speech tokens that were spoken
    segments    the pieces in which the text was spoken, as the model read them
    total       wall-clock seconds from the first step to the result
    `seconds` has "llm", "flow", "vocoder", and "first_audio": from the start until the first audio was there. The
    stages of a long text run side by side, so that their sum may be more than `total`; then `rtf` goes by `total`"""

    audio: np.ndarray = None
    sample_rate: int = 0
    duration: float = 0.0
    rtf: float = 0.0
    mode: str = ""
    tokens: list = field(default_factory=list)
    segments: list = field(default_factory=list)
    total: float = 0.0

    def save(self, path):
        """Write a 16-bit wav (or what the name's ending says); it appears whole or not at all. Raises CosyH3Error."""
        # Imported here: results of text need no audio.
        from mlx_cosyh3.cosyvoice.audio import write_wav

        write_wav(path, self.audio, self.sample_rate)
