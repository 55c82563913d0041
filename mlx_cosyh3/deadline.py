"""In time, or a word beforehand: `deadline=2.0` and what is done so that a request keeps it.

A controller forecasts with the `costs` that stages have on this machine and chooses, before and during the work, in
this order: the device of each stage, smaller chunks, lighter weights where the model was loaded with some
(`lighter.py`), fewer steps of the flow. So quality is given up last. If nothing is enough, the caller is told before
the work starts (late="refuse"), or gets what is possible (late="best"). What a request waits in a scheduler's queue is
part of its time: when its turn comes it is planned anew, with what is left.

What has never been measured cannot be forecast: the first requests of a model run as asked, and are measured.
"""

import itertools
import math
from dataclasses import dataclass

from mlx_cosyh3 import sampling
from mlx_cosyh3.costs import LOADED, measure
from mlx_cosyh3.errors import CosyH3Error, DeadlineError, nearest

LATE = ("refuse", "best")
PROBES = 4  # small pieces of work on a device before a request with a deadline, at most
PROBING = 0.05  # of the time that is left, which they may take together, unless one alone takes longer
LEAST_STEPS = 4  # of the flow, unless fewer are asked for: below that speech turns hoarse
UNKNOWN = "no times of this model on this machine are known yet: as asked"


def check(seconds, late):
    """Raise CosyH3Error for a deadline or a `late` that cannot be."""
    if seconds is not None:
        sampling.number("deadline", seconds, lambda x: x > 0, "more than 0 seconds")
    if late not in LATE:
        raise CosyH3Error(f"late must be one of {', '.join(LATE)}, not {late!r}{nearest(str(late), LATE)}")


# ---------------------------------------------------------------- who chooses


class Controller:
    """What all kinds of requests share: the time that is left, who may run where, and the words for it.

    costs     of the weights that the request runs with;  lighter   Costs of others that it may change over to, or None
    request   a runtime.Request;  seconds   the deadline, from the request's `begin`; None: none, all stays as asked"""

    def __init__(self, costs, request, seconds=None, late="refuse", probe=None, lighter=None):
        """probe   (device) -> seconds that a small piece of work takes there; None: `measure`"""
        self.costs, self.request, self.seconds, self.late = costs, request, seconds, late
        self._probe, self._weights = probe or measure, [costs] if lighter is None else [costs, lighter]

    @property
    def left(self):
        """Seconds until the deadline."""
        if self.seconds is None:
            return math.inf
        return self.seconds - (self.request.clock() - self.request.begin)

    def spent(self, stage, name, size, seconds):
        """Measured: the request's `stage` took so long for `size` units of what Costs know as `name`."""
        self.costs.add(name, self.request.device(stage), size, seconds)

    def look(self, stages):
        """See how busy the devices are on which `stages` may run: what was measured last may be long ago.

        Not those where no stage was ever measured: without its cost, a stage is not sent there anyway."""
        devices = sorted({d for way in self.placements(stages) for d in way.values()})
        devices = [d for d in devices if any(costs.used(d) for costs in self._weights)]
        for device in devices:
            most, spent = PROBING * self.left / len(devices), 0.0
            for n in range(PROBES):  # one of them is history: or a busy quarter of an hour would be all there is of it
                seconds = self._probe(device)
                for costs in self._weights:
                    costs.add("probe", device, 1, seconds, keep=n == 0)
                spent += seconds
                if spent + seconds > most:
                    break

    def placements(self, stages):
        """Each way to place `stages` ({stage: name in Costs}) -> dicts {stage: device}, the rules' own way first."""
        ways = []
        for stage in stages:
            own = self.request.device(stage)
            ways.append((own, "cpu") if own == "gpu" and self.request.may_move(stage) else (own,))
        return [dict(zip(stages, way)) for way in itertools.product(*ways)]

    def _cost(self, name, device, size, costs=None):
        """Seconds, inf where nothing is known: what cannot be forecast is not chosen."""
        seconds = (costs or self.costs).expect(name, device, size)
        return math.inf if seconds is None else seconds

    def choose(self, options, what, advice):
        """The first of `options`, (plan, forecast in seconds) by falling quality, that is in time, with its forecast.

        None if there is nothing to go by. Raises DeadlineError if none is in time and the caller wants to be told."""
        best, lighter = (None, math.inf), False
        for plan, forecast in options:
            if forecast <= self.left:
                return plan, forecast
            if plan.costs is not self.costs and not lighter:  # as the rules place them, all else as asked
                lighter = True
                if forecast == math.inf and best[1] < math.inf and self.left > 0:
                    return plan, forecast  # never measured: nobody knows that these are late, too
            if forecast < best[1]:
                best = plan, forecast
        known = best[1] < math.inf
        if self.late == "refuse" and (known or self.left <= 0):
            raise DeadlineError(self._refusal(what, best[1] if known else None, advice))
        return best if known else (None, None)

    def _refusal(self, what, forecast, advice):
        takes = "" if forecast is None else f"{what} takes about {forecast:.2g} s here"
        loads = {d: self.costs.load(d) for d in ("gpu", "cpu")}
        busy = ", ".join(f"{d} {load:.1f} times slower than usual" for d, load in loads.items() if load > LOADED)
        if takes and busy:
            takes += f" (now: {busy})"
        waited = f"the request has waited {self.request.waited:.1f} s for its turn" if self.request.waited else ""
        why = ", and ".join(w for w in (takes, waited) if w) or "the time is over"
        return f"deadline={self.seconds:g} cannot be met: {why}; {advice}, or pass late='best'"

    def follow(self, plan, reason):
        """Run as `plan` says."""
        for stage, device in plan.devices.items():
            self.request.move(stage, device, reason)
        if plan.costs is not self.costs:
            self.costs = plan.costs
            self.request.record("weights", weights="lighter", reason=reason)

    def told(self, forecast):
        """The words for a forecast."""
        if forecast == math.inf:
            return "the model's own weights are late, the lighter ones have not been measured yet: tried"
        return f"{forecast:.2f} s to be expected, {self.left:.2f} s left"

    @property
    def lighter(self):
        """Whether the request runs with the lighter weights."""
        return self.costs is not self._weights[0]

    def ended(self, in_time_at):
        """The work is done; `in_time_at`: seconds of work after which what was due was there, or None."""
        for costs in self._weights:
            costs.save(now=self.seconds is not None)
        if self.seconds is None or in_time_at is None:
            return
        in_time_at += self.request.waited
        verdict = "met" if in_time_at <= self.seconds else "late"
        self.request.record(
            "deadline", reason=f"{verdict}: {in_time_at:.2f} of {self.seconds:g} s", met=verdict == "met"
        )


@dataclass
class Speech:
    """A request for speech, in the numbers that its time follows from.

    prefix          ids that the language model reads before the first token, on average of the segments
    tokens          speech tokens to be expected in all (None: no idea)
    segments        of the text
    prompt_frames   of the voice's recording;  frames_per_token   of mel
    steps           of the flow, as asked
    chunks          streamed: [(chunk_tokens, tokens that the first chunk then waits for)], as asked first; else None
    recording       seconds of a recording to be converted; then there is no `language_model`"""

    prefix: int
    tokens: float
    segments: int
    prompt_frames: int
    frames_per_token: float
    steps: int
    chunks: list = None
    language_model: bool = True
    recording: float = 0.0


@dataclass
class Plan:
    """devices: {stage: device};  costs: those of the weights to run with;  None: as asked"""

    steps: int = None
    chunk: int = None
    devices: dict = None
    costs: object = None


class SpeechController(Controller):
    """Chooses devices, first chunk and steps so that the first audio (streamed) or all of it is there in time."""

    def begin(self, job):
        """Before the work -> Plan. Raises DeadlineError if it cannot be in time, and the caller wants to be told."""
        self.job, self.costs = job, self._weights[0]
        asked = Plan(job.steps, job.chunks[0][0] if job.chunks else None)
        if self.seconds is None:
            return asked
        self.look(self._stages())
        plan, forecast = self.choose(
            self._plans(), "the first audio" if job.chunks else "the whole answer",
            "give it more time" if job.chunks else "give it more time or less text",
        )  # fmt: skip
        if plan is None:
            self.request.record("deadline", reason=UNKNOWN)
            return asked
        words = self.told(forecast)
        self.follow(plan, f"deadline: {words}")
        if forecast == math.inf:
            return plan
        told = {"steps": plan.steps} | ({"chunk_tokens": plan.chunk} if job.chunks else {})
        fits = "in time" if forecast <= self.left else "late even so"
        self.request.record("deadline", reason=f"{forecast:.2f} of {self.seconds:g} s to be expected: {fits}", **told)
        return plan

    def _plans(self):
        """(Plan, forecast), by falling quality; of the same quality those as asked and as the rules say first."""
        job, ways = self.job, self.placements(self._stages())
        for steps in self._steps():
            for costs in self._weights:
                for chunk, wait in job.chunks or [(None, None)]:
                    for devices in ways:
                        plan = Plan(steps, chunk, devices, costs)
                        yield plan, self._forecast(plan, wait)

    def _stages(self):
        return ["llm" if self.job.language_model else "speech_tokenizer", "flow", "vocoder"]

    def _steps(self):
        return range(self.job.steps, min(self.job.steps, LEAST_STEPS) - 1, -1)

    def _forecast(self, plan, wait):
        """Seconds until all is there; wait: until the first chunk is, which needs so many tokens."""
        job, devices, costs = self.job, plan.devices, plan.costs
        tokens = job.tokens if wait is None else wait if job.tokens is None else min(wait, max(1, job.tokens))
        if tokens is None:
            return math.inf
        segments = job.segments if wait is None else 1
        seconds = self._to_sound(tokens / segments, plan.steps, devices, wait is not None, costs) * segments
        if job.language_model:
            seconds += segments * self._cost("prefill", devices["llm"], max(1, job.prefix), costs)
            seconds += self._cost("llm", devices["llm"], max(1, tokens), costs)
        if job.recording:
            seconds += self._cost("speech_tokenizer", devices["speech_tokenizer"], job.recording, costs)
        return seconds

    def _to_sound(self, tokens, steps, devices, streamed, costs=None):
        """Seconds from speech tokens to audio."""
        frames = tokens * self.job.frames_per_token
        flow = self._cost(_flow(streamed), devices["flow"], max(1, self.job.prompt_frames + frames), costs)
        return steps * flow + self._cost("vocoder", devices["vocoder"], max(1, frames), costs)

    # During the work

    def steps(self, tokens, to_come=0, streamed=False):
        """Steps of the flow for so many speech tokens that are there now; `to_come`: tokens of later segments.

        As many as fit in what is left, whatever was planned: the language model may have been quicker, or slower."""
        job = self.job
        if self.seconds is None or not self.costs.known(_flow(streamed), self.request.device("flow")):
            return job.steps
        placements = self.placements(["flow", "vocoder"])
        for steps in self._steps():
            for devices in placements:
                seconds = self._to_sound(tokens, steps, devices, streamed)
                if to_come:
                    seconds += self._to_sound(to_come, steps, devices, streamed)
                    if job.language_model:
                        seconds += self._cost("llm", self.request.device("llm"), to_come)
                if seconds <= self.left:
                    return self._settle(steps, devices, f"{seconds:.2f} s to be expected, {self.left:.2f} s left")
        fastest = min(placements, key=lambda d: self._to_sound(tokens, self._steps()[-1], d, streamed))
        return self._settle(self._steps()[-1], fastest, f"late: {self.left:.2f} s left")

    def _settle(self, steps, devices, reason):
        self.follow(Plan(devices=devices, costs=self.costs), f"deadline: {reason}")
        if steps != self.job.steps:
            self.request.record("flow", steps=steps, reason=f"deadline: {reason}")
        return steps

    def enough(self, tokens):
        """Whether the speech tokens so far must do (late="best", at once): more would not become audio in time."""
        if self.seconds is None or self.late != "best" or self.job.chunks:
            return False
        devices = {stage: self.request.device(stage) for stage in ("flow", "vocoder")}
        seconds = self._to_sound(tokens, self._steps()[-1], devices, False)
        return tokens > 0 and self.left <= (seconds if seconds < math.inf else 0)

    # Measured

    def first_token(self, prefix, seconds):
        self.spent("llm", "prefill", max(1, prefix), seconds)

    def tokens_made(self, count, seconds):
        self.spent("llm", "llm", count, seconds)

    def mel_made(self, frames, steps, seconds, streamed=False):
        self.spent("flow", _flow(streamed), frames, seconds / steps)

    def audio_made(self, frames, seconds):
        self.spent("vocoder", "vocoder", frames, seconds)

    def text_spoken(self, text_ids, tokens):
        """How much speech a text gave: for the next forecast."""
        self._weights[0].add("tokens", "text", max(1, text_ids), tokens)

    def expected_tokens(self, text_ids):
        """Speech tokens of a text, or None."""
        return self._weights[0].expect("tokens", "text", text_ids) if text_ids else None


def _flow(streamed):
    return "flow_chunk" if streamed else "flow"


class TextController(Controller):
    """Chooses the device, or lighter weights, so that the first token (streamed) or all `max_tokens` are in time."""

    def begin(self, prompt, max_tokens, streamed, rows=1):
        """Before the work: prompt tokens in all, tokens to draw at most. Raises DeadlineError as told above.

        rows   texts that are continued at once, whose steps take longer"""
        self.streamed, self.costs = streamed, self._weights[0]
        self._prompt, self._text = ("prompt", "text") if rows == 1 else (f"prompt x{rows}", f"text x{rows}")
        if self.seconds is None:
            return
        self.look(["text"])
        plans = [Plan(devices=d, costs=costs) for costs in self._weights for d in self.placements(["text"])]
        forecasts = [(plan, self._forecast(plan, prompt, 1 if streamed else max_tokens)) for plan in plans]
        what = "the first token" if streamed else f"a text of max_tokens={max_tokens}"
        plan, forecast = self.choose(
            forecasts, what, "give it more time" if streamed else "give it more time or less to say"
        )
        if plan is None:
            self.request.record("deadline", reason=UNKNOWN)
            return
        words = self.told(forecast)
        self.follow(plan, f"deadline: {words}")
        self.request.record("deadline", reason=words)

    def _forecast(self, plan, prompt, tokens):
        device = plan.devices["text"]
        seconds = self._cost(self._prompt, device, prompt, plan.costs)
        return seconds + (self._cost(self._text, device, tokens - 1, plan.costs) if tokens > 1 else 0.0)

    def enough(self, seconds):
        """Whether the text so far must do (late="best", at once): another token takes `seconds`."""
        return self.seconds is not None and self.late == "best" and not self.streamed and self.left <= seconds

    # Measured

    def prompt_read(self, tokens, seconds):
        self.spent("text", self._prompt, tokens, seconds)

    def tokens_made(self, count, seconds):
        self.spent("text", self._text, count, seconds)
