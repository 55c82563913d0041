"""What a generation returns, in every model family."""

from dataclasses import dataclass, field

import mlx.core as mx


@dataclass
class Result:
    """finish_reason "stop" (the model or a stop string ended it) or "length" (a limit did), or "cancelled"
    seconds        wall-clock seconds per stage
    peak_memory    the most memory MLX held in this process so far, GB"""

    finish_reason: str
    seconds: dict = field(default_factory=dict)
    peak_memory: float = field(default_factory=lambda: mx.get_peak_memory() / 1e9)


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
