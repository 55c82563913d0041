"""Several texts, or the segments of a long one, spoken together.

    speech tokens   all rows in one batch, which a row leaves when it ends (`ragged.py`)
    flow            rows of similar length in one batch, the shorter ones padded and masked. CosyVoice 1, whose flow
                    looks both ways and normalises over time, one after the other
    vocoder         on a GPU the rows that the flow made in one batch, each up to its own end. On a CPU, where it takes
                    1.1 to 1.3 times as long, one after the other, and so those of CosyVoice 1 and 2, whose layers
                    would hear what is behind the end of a row

A row is what `generate` makes of its text with its seed: the same speech tokens, and the same audio but for what sums
in another order round differently. Memory is bounded by the rows of a batch and by the frames of one of the flow.
"""

import time
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_cosyh3 import sampling, trace
from mlx_cosyh3.cosyvoice import audio
from mlx_cosyh3.cosyvoice.asked import Segment
from mlx_cosyh3.cosyvoice.options import SpeechOptions
from mlx_cosyh3.cosyvoice.ragged import Row, decode
from mlx_cosyh3.cosyvoice.speed import change_speed
from mlx_cosyh3.cosyvoice.utterance import Utterance
from mlx_cosyh3.errors import CosyH3Error, take_options
from mlx_cosyh3.kernels import _dispatch
from mlx_cosyh3.stream import Stopped

MOST = 16  # rows
LARGEST = 256
CPU_FRAMES, GPU_FRAMES = 400, 8000  # mel frames of a batch of the flow, voices and padding included; see `buckets`
FILLED = 0.75  # the least share of a batch's longest row that a row of it may have


class BatchError(CosyH3Error):
    """Some texts of a batch failed. results: for each text its SpeechResult, or the exception that ended it."""

    def __init__(self, results):
        failed = [(r, e) for r, e in enumerate(results) if isinstance(e, Exception)]
        row, first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(results)} texts failed, first text {row + 1}: {first} (the others are in this "
            "error's results; errors='return' gives the list itself)"
        )
        self.results = results


@dataclass(eq=False)
class Job:
    """One segment of a text: `row` decodes it, `tokens` of it are spoken, `audio` is what they became."""

    talk: "Talk"
    segment: Segment
    keys: tuple  # of the speech tokens; of the noise in flow and vocoder
    row: Row = None
    tokens: list = None
    audio: np.ndarray = None


class Talk(Utterance):
    """An Utterance that may be spoken with others, by a SpeechBatch; by itself it is a plain one, offline."""

    def __init__(self, model, text, options, note, progress):
        super().__init__(model, text, options, False, note, progress)
        self.jobs = None  # of its segments, when a batch has taken it
        self.error = self.first = None  # first: when its first audio was there
        self.settled = 0  # jobs whose tokens are counted

    def take(self):
        """Make the jobs."""
        self.prompt = self.model.prompt(self.voice, self.mode)
        self.jobs = [Job(self, s, keys) for s, keys in zip(self.segments, self.keys())]

    @property
    def over(self):
        """Whether no more of it is to be made."""
        return self.stopped.is_set() or self.error is not None

    def speak(self, job):
        """The Row of a job, or None if it cannot even begin."""
        try:
            run = self.model.speak(job.segment, self.mode, self.voice, self.lm_options(), job.keys[0])
        except CosyH3Error as e:
            self.error = e
            return None
        job.row = Row(run)
        return job.row

    def settle(self):
        """Count the tokens of the segments that have ended, in order -> the jobs that are to become audio."""
        ready = []
        while not self.over and self.settled < len(self.jobs):
            job = self.jobs[self.settled]
            if job.row is None or not job.row.ended:
                break
            self.settled += 1
            self.seconds["llm"] += job.row.seconds
            if job.row.error is not None:
                self.error = job.row.error
                break
            job.tokens = list(self._counted(job.row.tokens))
            text = job.segment.text
            self._ended(job.row.run, repr(text if len(text) < 50 else text[:47] + "..."))
            ready += [job] if job.tokens else []
            if self._full():
                self.leave(self.jobs[self.settled :])
                self.jobs = self.jobs[: self.settled]
        return ready

    def leave(self, jobs):
        """These are not wanted any more."""
        for job in jobs:
            if job.row is not None:
                job.row.stopped = True

    def check(self, row):
        """Let a row of this talk go when it is not wanted, or when max_seconds is reached before its own end."""
        if self.over:
            self.leave(self.jobs)
        elif self.options.max_seconds is not None:
            wanted = (self.options.max_seconds - self.paused) * self.model.token_rate * self.options.speed
            wanted -= len(self.tokens)
            # Silences are dropped, so there may be too many without them being enough.
            if len(row.tokens) >= wanted and sum(1 for _ in self.model.trim_silence(row.tokens)) >= wanted:
                row.stopped = True

    @property
    def done(self):
        """Whether nothing is left to do."""
        heard = all(job.audio is not None for job in self.jobs if job.tokens)
        return self.over or (self.settled == len(self.jobs) and heard)

    def start_over(self):
        """Be spoken alone after all: the GPU failed, and the request goes on on the CPU."""
        self.error, self.jobs, self.tokens, self.cut, self.paused = None, None, [], False, 0.0

    def outcome(self, begin):
        """SpeechResult, or the exception that ended it. begin: when the batch began."""
        if self.error is not None and self.request.blame("llm", self.error):
            self.start_over()
        try:
            for _ in self.pieces():
                continue
        except Exception as e:
            self.error = e
        self.total = time.perf_counter() - begin
        self.first_audio = None if self.first is None else self.first - begin
        return self.result() if self.error is None else self.error

    def _pipelined(self):
        if self.jobs is None:
            yield from super()._pipelined()
            return
        if self.error is not None:
            with self.request.place("llm"):  # which puts an error of MLX, caught for this row alone, into words
                raise self.error
        for job in self.jobs:
            if job.audio is not None:
                yield [job.audio], len(self.segments) > 1
            elif self.stopped.is_set():
                raise Stopped


class SpeechBatch:
    """Texts that are spoken together.

        batch = SpeechBatch(model, ["One.", {"text": "Two.", "voice": "anna", "seed": 7}], speed=1.1)
        for row, result in batch.run():  # in the order in which they are done
            ...

    requests    each a text, or a dict of its "text" and of options of SpeechOptions that hold for it alone
    options     SpeechOptions for all. A request without a seed of its own has `seed` + its number; `seed` may be a list
    max_batch   rows that are decoded together at most; None: MOST
    errors      "raise": a request that cannot be spoken is an error before any work; "return": it is its row's result
    note        called with each warning, with the number of the text in front where there are several
    progress    called as progress(stage, done, all): "llm" tokens of all rows so far, "flow" steps of a batch of it,
                "vocoder" segments so far. What it raises ends the batch
    Raises CosyH3Error as `generate` does; TypeError for an unknown option."""

    def __init__(
        self, model, requests, *, max_batch=None, errors="raise", note=None, progress=None, seed=None, **options
    ):
        if isinstance(requests, (str, dict)):
            given = requests if isinstance(requests, str) else requests.get("text", "")
            raise CosyH3Error(f"batch_generate takes a list of texts, not the text {str(given)[:40]!r}")
        if errors not in ("raise", "return"):
            raise CosyH3Error(f"errors must be 'raise' or 'return', not {errors!r}")
        if max_batch is not None:
            sampling.whole("max_batch", max_batch, 1, LARGEST)
        self._model, self._most, self._progress = model, max_batch or MOST, progress
        requests, note = _requests(list(requests), seed, options), note or audio.warn
        self.talks = []  # for each request a Talk, or what is wrong with it
        several = len(requests) > 1
        for r, (text, own) in enumerate(requests):
            tell = (lambda said, r=r: note(f"text {r + 1}: {said}")) if several else note
            try:
                o = take_options(SpeechOptions, own)
                if o.deadline is not None:
                    raise CosyH3Error("deadline goes with one text, not with a batch: use generate or stream_generate")
                self.talks.append(Talk(model, text, o, tell, None))
            except CosyH3Error as e:
                if errors == "raise":
                    raise CosyH3Error(f"text {r + 1}: {e}") from e
                self.talks.append(e)

    @classmethod
    def of(cls, talk):
        """A batch of the segments of one Talk, whose progress it tells."""
        self = cls.__new__(cls)
        self._model, self._most, self._progress, self.talks = talk.model, MOST, talk._progress, [talk]
        return self

    def cancel(self, row=None):
        """Speak no more of that text (None: of all). From any thread; what was made stays in its result."""
        for talk in self._talks() if row is None else [self.talks[row]]:
            if isinstance(talk, Talk):
                talk.stopped.set()

    def _talks(self):
        return [talk for talk in self.talks if isinstance(talk, Talk)]

    def run(self):
        """Do the work, in the thread that iterates: yields (number of the request, SpeechResult or exception)."""
        self._begin, self._heard = time.perf_counter(), 0
        left = {talk: r for r, talk in enumerate(self.talks) if isinstance(talk, Talk)}
        yield from ((r, e) for r, e in enumerate(self.talks) if not isinstance(e, Talk))
        for talk in left:
            talk._progress = None
        try:
            try:
                for _ in self._work(list(left)):
                    for talk in [t for t in left if t.jobs is not None and t.done]:
                        yield left.pop(talk), talk.outcome(self._begin)
            except Exception as e:
                again = [talk for talk in left if talk.request.blame("llm", e)]
                if not again:
                    raise
                for talk in again:
                    talk.start_over()
                for talk in list(left):
                    talk.error = None if talk in again else talk.error or e
                    yield left.pop(talk), talk.outcome(self._begin)
        except _Broken as e:
            raise e.args[0] from None
        except Exception as e:  # of the batch itself: what is done stays, the rest has failed
            yield from ((r, talk.error or e) for talk, r in left.items())
        finally:
            mx.clear_cache()

    def results(self):
        """`run` to its end -> a list in the order of the requests."""
        made = dict(self.run())
        return [made[r] for r in range(len(self.talks))]

    def result(self):
        """That of the only request. Raises what ended it."""
        (result,) = self.results()
        if isinstance(result, Exception):
            raise result
        return result

    def _work(self, talks):
        """Yields whenever something may be done."""
        whose, ready, drawn = {}, [], 0
        for changed in self._decode(talks, whose):
            drawn += sum(not row.ended or row.run.finish_reason == "length" for row in changed)
            self._tell("llm", drawn, None)
            for row in changed:
                if not row.ended:
                    whose[row].check(row)
            ended = {whose[row]: None for row in whose if row.ended or row.stopped}
            for talk in ended:
                ready += talk.settle()
            for row in [row for row in whose if row.ended]:
                del whose[row]
            if len(ready) >= self._most:
                self._sound(ready)
                ready = []
            if ended:
                yield
        for talk in talks:
            ready += talk.settle()
        self._sound(ready)
        yield

    def _decode(self, talks, whose):
        """Steps of the language model, where the first request's policy has it run."""
        steps = decode(self._model.llm, self._rows(talks, whose), self._most, time.perf_counter)
        while talks:
            begin = time.perf_counter()
            with talks[0].request.place("llm"):
                changed = next(steps, None)
            if changed is None:
                return
            talks[0].request.breathe("llm", time.perf_counter() - begin)
            yield changed

    def _rows(self, talks, whose):
        """The rows to decode, in order; whose: {row: its Talk}, of those that have not ended."""
        for talk in talks:
            talk.take()
        for talk in talks:
            for job in list(talk.jobs):
                if not talk.over and job in talk.jobs and (row := talk.speak(job)) is not None:
                    whose[row] = talk
                    yield row

    # From speech tokens to audio

    def _sound(self, jobs):
        """All stages behind the language model, of Jobs with tokens."""
        flow = self._model.flow
        for bucket in buckets(jobs) if hasattr(flow, "together") else [[job] for job in jobs]:
            bucket = [job for job in bucket if not job.talk.over]
            mels = self._mels(bucket) if len(bucket) > 1 else None
            waves = None if mels is None else self._waves(bucket, mels)
            for i, job in enumerate(bucket):
                if not job.talk.over:
                    self._heard += 1
                    self._finish(job, mels and mels[i], waves and waves[i])
                    self._tell("vocoder", self._heard, None)

    def _mels(self, bucket):
        """The mel of each job in one batch of the flow, or None."""
        o = bucket[0].talk.options

        def on_step(done):
            _stop(bucket)
            self._tell("flow", done, o.steps)

        rows = [(mx.array([job.tokens]), *job.talk.prompt) for job in bucket]
        how = {"streaming": o.causal, "steps": o.steps, "on_step": on_step}
        return _together(bucket, "flow", lambda: self._model.flow.together(rows, **how))

    def _waves(self, bucket, mels):
        """The audio of each job in one batch of the vocoder, or None; `mels` are theirs."""
        hift = self._model.hift
        if not hasattr(hift, "together"):
            return None
        with bucket[0].talk.request.place("vocoder"):
            if not _dispatch.on_gpu():
                return None

        def work():
            heard = [_at_speed(mel, job.talk.options.speed) for job, mel in zip(bucket, mels)]
            return hift.together(heard, on_block=lambda: _stop(bucket))

        return _together(bucket, "vocoder", work)

    def _finish(self, job, mel, wave):
        """Audio of a job: `wave`, or made from its mel, or from its tokens, where that is None."""
        talk = job.talk
        try:
            if mel is None:
                tell = lambda stage, done, all: self._tell_of(talk, stage, done, all)  # noqa: E731
                job.audio = talk._sound(job.tokens, job.keys[1], tell)
            elif wave is None:
                job.audio = self._wave(talk, mel, mx.random.split(job.keys[1])[1])
            else:
                job.audio = np.array(wave[0])
        except Stopped:
            return
        except Exception as e:  # the others go on
            talk.error = e
            return
        talk.first = talk.first or time.perf_counter()

    def _wave(self, talk, mel, key):
        begin = time.perf_counter()

        def wave():
            wav = self._model.wave(_at_speed(mel, talk.options.speed), key)
            mx.eval(wav)
            return wav

        wav = talk.request.guard("vocoder", wave)
        talk._spent("vocoder", begin)
        return np.array(wav[0])

    def _tell_of(self, talk, stage, done, all):
        if talk.stopped.is_set():
            raise Stopped
        if stage == "flow":
            self._tell(stage, done, all)

    def _tell(self, stage, done, all):
        if self._progress is None:
            return
        try:
            self._progress(stage, done, all)
        except Exception as e:  # no error of a row
            raise _Broken(e) from e


class _Broken(BaseException):
    """`progress` raised."""


def _together(bucket, stage, work):
    """work(), a list with an array [1, n, ...] for each job of a bucket, computed where the first request's policy has
    it; None if nobody waits any more, or if it fails, for one row or for all (memory): alone, each has its own."""
    begin = time.perf_counter()
    try:
        with bucket[0].talk.request.place(stage):
            made = work()
            mx.eval(made)
    except (Exception, Stopped):
        return None
    took, total = time.perf_counter() - begin, sum(a.shape[1] for a in made)
    trace.record(stage, begin, begin + took, rows=len(bucket))
    for job, a in zip(bucket, made):
        job.talk.seconds[stage] += took * a.shape[1] / max(total, 1)
    return made


def _stop(bucket):
    """Raise Stopped if nobody waits for any of these jobs."""
    if all(job.talk.over for job in bucket):
        raise Stopped


def _at_speed(mel, speed):
    return mel if speed == 1 else change_speed(mel, speed)


def generate_batch(model, requests, *, errors="raise", **options):
    """`SpeechBatch` to its end -> a list of SpeechResult, in the order of the requests.

    errors    also "raise": what fails during the work is raised at its end, as a BatchError that has all results;
              "return": the exception is in its place in the list"""
    results = SpeechBatch(model, requests, errors=errors, **options).results()
    if errors == "raise" and any(isinstance(r, Exception) for r in results):
        raise BatchError(results)
    return results


def _requests(requests, seed, options):
    """[(text, options)] of each request. Raises CosyH3Error for a bad seed."""
    if isinstance(seed, (list, tuple)) and len(seed) != len(requests):
        raise CosyH3Error(f"{len(seed)} seeds for {len(requests)} texts; give one seed, or one per text")
    sampling.check_options(seed=seed)
    made = []
    for r, request in enumerate(requests):
        own = dict(request) if isinstance(request, dict) else {"text": request}
        if "text" not in own:
            raise CosyH3Error(f"text {r + 1}: a request needs a 'text', it has {', '.join(map(str, own)) or 'nothing'}")
        drawn = seed[r] if isinstance(seed, (list, tuple)) else None if seed is None else int(seed) + r
        text = own.pop("text")
        made.append((text, options | {"seed": drawn} | own))
    return made


def buckets(jobs):
    """`jobs` in lists for one batch of the flow each: of the same settings and of similar length.

    On a CPU, products of some hundred rows are as fast as they get: 4 rows of 90 frames take 0.8 of the time that they
    take alone, 4 of 160 take 1.05 (padding), which is why a batch ends early there."""
    most = GPU_FRAMES if _dispatch.on_gpu() else CPU_FRAMES
    ratio = lambda job: job.talk.model.config["token_mel_ratio"]  # noqa: E731
    frames = {job: ratio(job) * (job.talk.prompt[0].shape[1] + len(job.tokens)) for job in jobs}
    how = lambda job: (job.talk.options.steps, job.talk.options.causal)  # noqa: E731
    made = []
    for job in sorted(jobs, key=lambda job: (how(job), -frames[job])):
        bucket = made[-1] if made else None
        if bucket and how(bucket[0]) == how(job):
            longest = frames[bucket[0]]
            if frames[job] >= FILLED * longest and longest * (len(bucket) + 1) <= most:
                bucket.append(job)
                continue
        made.append([job])
    return made
