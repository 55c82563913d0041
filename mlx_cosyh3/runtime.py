"""Where each stage of a request runs, GPU or CPU, and what happens when a stage fails.

    policy = Policy(max_memory=0.5, on_battery="cpu")
    generate(model, text, policy=policy).decisions

A `Policy` holds the rules, and serves any number of requests. For each of its stages ("llm", "flow", "vocoder";
"text" in H3) a request asks it once, in this order: does the user say so, is there a GPU, is there memory, is the
machine hot, is it on battery. Each decision goes to the result and to the log, with its reason.

A stage that fails on the GPU (an error of the GPU, a kernel that fails its self-test, a value that is not finite) runs
once more on the CPU, and the request stays there with it.
"""

import contextlib
import functools
import os
import threading
import time
from dataclasses import asdict, dataclass, field

import mlx.core as mx

from mlx_cosyh3 import caches, logs, sampling
from mlx_cosyh3.errors import CosyH3Error, NotFiniteError, StageError, first_line, nearest
from mlx_cosyh3.gate import GATE
from mlx_cosyh3.kernels import _trust
from mlx_cosyh3.probes import HEAT, Probes

DEVICES = ("auto", "gpu", "cpu")
SPARING = ("reduce", "cpu", "ignore")
AT_ONCE = 0.05  # s in a queue that are no waiting
UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 2**10, "m": 2**20, "g": 2**30, "b": 1, "": 1}
NOT_OURS = (CosyH3Error, RecursionError, NotImplementedError)  # RuntimeErrors that are no failure of a device
log = logs.get("runtime")


# ---------------------------------------------------------------- the knobs


def _choice(*known):
    def take(name, value):
        if value not in known:
            near = nearest(str(value), known)
            raise CosyH3Error(f"{name} must be one of {', '.join(known)}, not {value!r}{near}")
        return value

    return take


def _number(low, high, wanted):
    def take(name, value):
        with contextlib.suppress(TypeError, ValueError):
            value = float(value) if isinstance(value, str) else value
        sampling.number(name, value, lambda x: low <= x <= high, wanted)
        return value

    return take


def _switch(name, value):
    known = {"0": False, "1": True, "false": False, "true": True, False: False, True: True}
    key = value.lower() if isinstance(value, str) else value
    if not isinstance(key, (str, bool)) or key not in known:
        raise CosyH3Error(f"{name} must be 1 (on) or 0 (off), not {value!r}")
    return known[key]


def _bytes(name, value):
    """Bytes (an int), or a share of what there is (a float up to 1); from text, too: 6GB, 0.5, 50%."""
    if value is None:
        return None
    given, text = value, str(value).strip().lower()
    number = text.rstrip("kmgtb% ")
    unit = text[len(number) :].strip()
    try:
        if isinstance(value, bool):
            raise ValueError
        value = float(number)
        value = value / 100 if unit == "%" else value if 0 < value <= 1 and not unit else int(value * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        value = 0
    if not (0 < value <= 1 or value >= 2**20) or (unit == "%" and value > 1):
        raise CosyH3Error(f"{name} must be bytes from 1 MB (8000000000, 6GB) or a share of what there is (0.5, 50%), "
                          f"not {given!r}")  # fmt: skip
    return value


KNOBS = {  # name: (default, what takes a given value, what it is for)
    "device": ("auto", _choice(*DEVICES), "gpu or cpu for all stages; auto: by the rules"),
    "max_memory": (
        None,
        _bytes,
        "most memory that models and their work may take: bytes, 6GB, or a share of what there is",
    ),
    "memory_share": (0.8, _number(0.05, 1, "from 0.05 to 1"), "from which share of that new requests go to the CPU"),
    "on_battery": ("reduce", _choice(*SPARING), "on battery: reduce (use the GPU less), cpu, or ignore"),
    "at_heat": ("reduce", _choice(*SPARING), "when the machine is hot: reduce (use the GPU less), cpu, or ignore"),
    "rest": (1.0, _number(0, 20, "from 0 to 20"), "seconds of rest for each second of work, where the GPU is used less"),
    "retry_on_cpu": (True, _switch, "1 or 0: run a stage that failed on the GPU once more on the CPU"),
}


@dataclass(frozen=True)
class Decision:
    """Where a stage runs, and why; `rest`: seconds of rest for each second of work."""

    device: str
    reason: str
    rest: float = 0.0


@dataclass
class Policy:
    """The rules. A knob that is None is what the environment variable MLX_COSYH3_<NAME> says, else its default:

    device         "auto": the GPU where the rules allow it; "gpu", "cpu": that one (without a GPU: the CPU)
    max_memory     bytes that models and work may take, or a share (0 to 1) of what the GPU recommends; None: all that
    memory_share   0.8: over this share of it first caches are cleared, then new requests go to the CPU
    on_battery     "reduce": the GPU rests between its steps, "cpu": it is not used, "ignore"
    at_heat        the same at a serious thermal state; "reduce" is "cpu" at a critical one
    rest           1.0: seconds of rest for each second of work where the GPU's use is reduced
    retry_on_cpu   run a stage that failed on the GPU once more on the CPU
    probes         `probes.Probes`: what the rules ask of the machine
    release        functions that are called to free memory, besides the caches of `caches.py`, which are emptied

    Raises CosyH3Error for a value out of range."""

    device: str = None
    max_memory: object = None
    memory_share: float = None
    on_battery: str = None
    at_heat: str = None
    rest: float = None
    retry_on_cpu: bool = None
    probes: Probes = field(default_factory=Probes, repr=False)
    release: list = field(default_factory=list, repr=False)

    def __post_init__(self):
        for name, (default, take, _) in KNOBS.items():
            value, where = getattr(self, name), name
            if value is None:
                where = f"MLX_COSYH3_{name.upper()}"
                value = os.environ.get(where) or default
            setattr(self, name, take(where, value))
        self._lock = threading.Lock()
        self._limits = None  # those that MLX was told
        self._gpu_off = None  # why no request may use the GPU any more
        self.costs = {}  # of costs.Costs, by model

    # The rules

    def decide(self, stage, model=None):
        """Where `stage` of a new request would run -> Decision."""
        return self.request().decide(stage)

    def request(self, clock=time.perf_counter):
        """The rules' answers for one request -> Request."""
        return Request(self, clock)

    def rule(self):
        """The first rule that has something to say -> Decision."""
        if self.device == "cpu":
            return Decision("cpu", "device=cpu")
        missing = self._gpu_off or self.probes.gpu()
        if missing is not None:
            return Decision("cpu", missing + (", though device=gpu" if self.device == "gpu" else ""))
        over = self._memory()
        if over is not None:
            return Decision("cpu", over)
        return self._heat() or self._battery() or Decision("gpu", f"device={self.device}")

    def _memory(self):
        """None if there is room for another request on the GPU, else why not. Clears caches before it says so."""
        found = self.probes.memory()
        limit = self.limit(found)
        if limit is None:
            return None
        self._tell_mlx(found, limit)
        line = self.memory_share * limit
        if found.used + found.others <= line:
            return None
        for free in (caches.clear_all, *self.release):
            free()
        mx.clear_cache()
        before, found = found, self.probes.memory()
        held = found.used + found.others
        gb = f"{held / 1e9:.1f} of {limit / 1e9:.1f} GB in use"
        log.info("caches cleared", before=before.used, after=found.used, others=found.others, limit=limit)
        if held <= line:
            return None
        theirs = f", {found.others / 1e9:.1f} by other programs" if found.others else ""
        return f"memory: {gb}{theirs}, over {self.memory_share:g}"

    def limit(self, found):
        """Bytes that may be in use, or None: not known, not asked for."""
        if self.max_memory is None:
            return found.total
        if self.max_memory > 1:
            return self.max_memory if found.total is None else min(self.max_memory, found.total)
        return None if found.total is None else int(self.max_memory * found.total)

    def apply(self):
        """Tell MLX the limits now, before the first request (for programs that load large models) -> bytes, or None."""
        found = self.probes.memory()
        limit = self.limit(found)
        if limit is not None:
            self._tell_mlx(found, limit)
        return limit

    def _tell_mlx(self, found, limit):
        """MLX's own limits: arrays may fill `memory_share` of it, and free buffers that are kept for later the rest.

        What other programs hold cannot be had: two that each counted on all of it would not fit."""
        limit = max(limit - found.others, found.used, 2**20)
        limits = int(limit), int(limit * (1 - self.memory_share))
        with self._lock:
            if self._limits != limits:
                mx.set_memory_limit(limits[0])
                mx.set_cache_limit(limits[1])
                self._limits = limits

    def _heat(self):
        state = self.probes.heat()
        if self.at_heat == "ignore" or state is None or HEAT.index(state) < HEAT.index("serious"):
            return None
        how = "cpu" if state == "critical" else self.at_heat
        return self._sparing(how, f"heat: the thermal state is {state}")

    def _battery(self):
        found = self.probes.battery()
        if self.on_battery == "ignore" or found is None or found.plugged:
            return None
        left = "" if found.percent is None else f", {found.percent:.0f} % left"
        return self._sparing(self.on_battery, f"on battery{left}")

    def _sparing(self, how, why):
        if how == "cpu":
            return Decision("cpu", why)
        return Decision("gpu", f"{why}: the GPU rests between steps", self.rest)


@functools.lru_cache(maxsize=1)
def default_policy():
    """The policy of requests that bring none: what the environment says."""
    return Policy()


def check(policy):
    """`policy`, or the default one for None. Raises CosyH3Error for anything else."""
    if policy is None:
        return default_policy()
    if not isinstance(policy, Policy):
        raise CosyH3Error(f"policy must be a runtime.Policy, not {type(policy).__name__}")
    return policy


def add_arguments(parser):
    """The knobs as options of a command line: --device, --max-memory, ..."""
    for name, (default, _, text) in KNOBS.items():
        more = "" if default is None else f" ({default})"
        parser.add_argument("--" + name.replace("_", "-"), dest=name, metavar="X", help=text + more)


def from_arguments(args):
    """The Policy of a parsed command line."""
    return Policy(**{name: getattr(args, name) for name in KNOBS if getattr(args, name, None) is not None})


# ---------------------------------------------------------------- one request


class Request:
    """One request under a policy: what was decided for each of its stages, and the stages' work.

    decisions   list of dicts, in order: "stage", "at" (seconds since the start), "reason", and what was decided, such
                as "device" or "steps"
    waited      seconds that it waited for its turn, in a scheduler's queue
    Its threads may share it."""

    def __init__(self, policy, clock=time.perf_counter):
        self.policy, self.clock = policy, clock
        self.begin, self.waited, self.decisions = clock(), 0.0, []
        self._lock = threading.RLock()
        self._rule, self._stages = None, {}
        self._theirs = None  # an exception of the caller's own code

    def start(self, waited=0.0):
        """The work begins, `waited` seconds after it was asked for -> whether all must be decided anew, as the machine
        may be another by now."""
        with self._lock:
            self.begin, self.waited = self.clock() - waited, waited
            if waited <= AT_ONCE:
                return False
            self._rule, self._stages, self.decisions = None, {}, []
            return True

    @property
    def worked(self):
        """Seconds since the work began."""
        return self.clock() - self.begin - self.waited

    def decide(self, stage):
        """Where `stage` runs: asked once; the rules are asked once a request."""
        with self._lock:
            if stage not in self._stages:
                if self._rule is None:
                    self._rule = self.policy.rule()
                self._stages[stage] = self._rule
                self.record(stage, **_told(self._rule))
            return self._stages[stage]

    def device(self, stage):
        return self.decide(stage).device

    def may_move(self, stage):
        """Whether another device than the rules' may be chosen for `stage`: they leave it open, and nothing failed."""
        return self.policy.device == "auto" and self.device(stage) == "gpu"

    def move(self, stage, device, reason):
        """From now on `stage` runs on `device`."""
        with self._lock:
            rest = self.decide(stage).rest if device == "gpu" else 0.0
            if self._stages[stage].device != device:
                self._stages[stage] = Decision(device, reason, rest)
                self.record(stage, device=device, reason=reason)

    def record(self, stage, **told):
        """Put a decision into the result and into the log."""
        with self._lock:
            at = round(self.clock() - self.begin, 3)
            self.decisions.append({"stage": stage, "at": at} | told)
        log.info("decision", stage=stage, at=at, **told)

    @contextlib.contextmanager
    def place(self, stage):
        """`with request.place(stage):` what is computed within runs on the stage's device. Raises StageError."""
        with GATE.on(device := self.device(stage)):
            try:
                yield
            except (RuntimeError, MemoryError) as e:
                if e is self._theirs or isinstance(e, NOT_OURS):
                    raise
                raise StageError(
                    f"{stage} failed on the {device.upper()} ({first_line(e)[:120]}): try again; where memory is short, "
                    "end other programs or ask for less at once"
                ) from e

    def theirs(self, function, *args):
        """function(*args), code of the caller's: not through the gate, and what it raises is no failure of a stage."""
        try:
            with GATE.out():
                return function(*args)
        except Exception as e:
            self._theirs = e
            raise

    def breathe(self, stage, worked=0.0):
        """Between two steps of `stage`: let others have the device; where its use is reduced, rest.

        worked   seconds since the last breath"""
        rest = self.decide(stage).rest
        if rest and worked > 0:
            with GATE.out():
                time.sleep(rest * worked)
        else:
            GATE.hand_over()

    def guard(self, stage, function, *args, again=None):
        """function(*args) on the stage's device, all of it computed; after a failure on the GPU once more, on the CPU.

        again   called in place of `function` then: for work whose state must be made anew"""
        if self.device(stage) == "cpu" or not self.policy.retry_on_cpu:
            with self.place(stage):
                return function(*args)
        failed = _failed_kernels()
        try:
            with self.place(stage):
                made = function(*args)
            trouble = _failed_kernels() - failed
            if not trouble:
                return made
        except Exception as e:
            if not self.blame(stage, e):
                raise
        else:
            self.move(stage, "cpu", f"kernel {', '.join(sorted(trouble))} failed its self-test: run again on the CPU")
        with self.place(stage):
            return (again or function)(*args)

    def blame(self, stage, error):
        """Whether the GPU is to blame for `error` of `stage`, which then is on the CPU from now on, to be run again."""
        if self.device(stage) == "cpu" or not self.policy.retry_on_cpu:
            return False
        reason = self._failure(stage, error)
        if reason is not None:
            self.move(stage, "cpu", f"{reason}: run again on the CPU")
        return reason is not None

    def _failure(self, stage, error):
        """Why the GPU is to blame for `error`, in a few words, or None: it is not."""
        if error is self._theirs:
            return None
        if isinstance(error, NotFiniteError):
            logs.report("nan", error, stage=stage)
            return "a value was not finite"
        error = error.__cause__ if isinstance(error, StageError) else error
        if not isinstance(error, (RuntimeError, MemoryError)) or isinstance(error, NOT_OURS):
            return None
        logs.report("gpu", error, stage=stage, **_trust.machine())
        mx.clear_cache()
        if self.policy.probes.gpu() is None and not _trust._gpu_answers():
            self.policy._gpu_off = "the GPU does not answer this process any more"
        return f"an error of the GPU ({first_line(error)[:120]})"


def _failed_kernels():
    return {o.kernel for o in _trust.outcomes() if not o.passed}


def _told(decision):
    told = asdict(decision)
    return told if decision.rest else {name: told[name] for name in ("device", "reason")}


class Restartable:
    """A stream of a stage (an object with `add(...)`, which carries a state) that outlives a failure on the GPU.

    Its state is not to be trusted then: a new stream takes in what this one took, and goes on."""

    def __init__(self, request, stage, make):
        """make   () -> a stream, the same each time"""
        self._request, self._stage, self._make = request, stage, make
        self._stream, self._taken = None, []

    @property
    def begun(self):
        return self._stream is not None

    def add(self, *args, **options):
        """What the stream's add gives, computed."""
        keep = self._request.device(self._stage) == "gpu" and self._request.policy.retry_on_cpu
        made = self._request.guard(self._stage, self._add, args, options, again=self._again)
        if keep:
            self._taken.append(args)
        return made

    def _add(self, args, options):
        if self._stream is None:
            self._stream = self._make()
        made = self._stream.add(*args, **options)
        mx.eval(made)
        return made

    def _again(self, args, options):
        self._stream = self._make()
        for earlier in self._taken:
            mx.eval(self._stream.add(*earlier))
        self._taken = []
        return self._add(args, options)
