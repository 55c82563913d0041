"""What is asked for, checked at once: voice, mode, the pieces of the text, and what a deadline makes of them.

No MLX work is done here: a request may be made in any thread, and MLX keeps something for every thread that computes.
"""

import threading
from dataclasses import dataclass, replace

from mlx_cosyh3 import lighter, runtime
from mlx_cosyh3.costs import costs_of
from mlx_cosyh3.cosyvoice import audio, modes, prompts
from mlx_cosyh3.cosyvoice import text as texts
from mlx_cosyh3.deadline import Speech, SpeechController
from mlx_cosyh3.errors import CosyH3Error


@dataclass
class Segment:
    """One piece of the text: what the language model is to read for it."""

    text: str
    text_ids: list
    prompt_ids: list
    prompt_speech: list


class Asked:
    """A request for speech.

    segments   of the text; None: it is a recording, or arrives in pieces
    source     voice conversion: (samples, rate) of the recording that says what is to be said, instead of a text
    stopped    an event that ends it
    waited     seconds that it waited for its turn, if somebody had it wait"""

    def __init__(self, model, text, options, streamed, note, progress, source=None):
        self.model, self.options, self.streamed = model, options.settle(model), streamed
        self.note, self._progress = note or audio.warn, progress
        self.stopped, self.waited = threading.Event(), 0.0
        self.source, self.text, self.segments = source, text, None
        self.voice, self.mode = modes.choose(model, options, source is not None)
        if source is None and isinstance(text, str):
            self.segments = self._segments(text)  # here, so that bad text is an error before any work
        elif source is None:
            self._check_pieces(text)
        self.text_ids = sum(len(s.text_ids) for s in self.segments or [])
        policy = runtime.check(self.options.policy)
        self.request = policy.request()
        self._weights, self._as_asked = (model, lighter.of(model)), self.options
        costs = [None if m is None else costs_of(policy, m) for m in self._weights]
        self.control = SpeechController(
            costs[0], self.request, self.options.deadline, self.options.late, lighter=costs[1]
        )
        self._plan()

    # The text

    def _check_pieces(self, text):
        """Raise CosyH3Error unless `text`, which is no string, can be spoken while it arrives."""
        model = self.model
        if not (self.streamed and hasattr(text, "__iter__")):
            also = "; stream_generate also takes an iterator of strings" if model.text_in_pieces else ""
            raise CosyH3Error(f"text must be a string, not {type(text).__name__}{also}")
        if not model.text_in_pieces:
            raise CosyH3Error(
                f"CosyVoice {model.version} reads a whole text before it speaks: join the pieces to one string; "
                f"it can do {model.abilities}"
            )

    def _segments(self, text):
        """The pieces of `text`, each with the ids that go to the language model."""
        o = self.options
        model = self.model
        made = texts.segments(text, model.tokenizer.count, o.language, o.normalize, note=self.note, tags=model.tags)
        return [self._segment(piece) for piece in made]

    def _segment(self, piece):
        model, voice = self.model, self.voice
        prompt, said = prompts.layout(
            self.mode, model.version, piece, voice.transcript, self.options.instruct, note=self.note, tags=model.tags,
            normalise=self.options.normalize,
        )  # fmt: skip
        if self.mode == "zero_shot" and voice.transcript is None:
            prompt_ids = voice.transcript_ids.tolist()
        else:
            prompt_ids = model.tokenizer.encode(prompt)
        prompt_speech = voice.prompt_tokens.tolist() if self.mode == "zero_shot" else []
        return Segment(piece, model.tokenizer.encode(said), prompt_ids, prompt_speech)

    # The deadline

    def start(self):
        """The work begins: settle what the time in a queue has changed."""
        if self.request.start(self.waited):
            self._plan()

    def _plan(self):
        """Settle what a deadline changes beforehand. Raises CosyH3Error if it cannot be met."""
        o, segments, voice = self._as_asked, self.segments or [], self.model.heard(self.voice, self.mode)
        plan = self.control.begin(
            Speech(
                prefix=sum(self._prefix(s) for s in segments) // max(1, len(segments)),
                tokens=self._expected_tokens(),
                segments=max(1, len(segments)),
                prompt_frames=len(voice.prompt_mel),
                frames_per_token=self._frames(1),
                steps=o.steps,
                chunks=self._chunks(voice) if self.streamed else None,
                language_model=self.source is None,
                recording=self._recorded(),
            )
        )
        self.model = self._weights[self.control.lighter]
        steps = plan.steps if self.streamed else o.steps  # at once they are chosen when the tokens are there
        self.options = replace(o, steps=steps, chunk_tokens=plan.chunk or o.chunk_tokens)

    def _recorded(self):
        """Seconds of the recording that is to be converted."""
        return 0.0 if self.source is None else len(self.source[0]) / self.source[1]

    def _expected_tokens(self):
        """Speech tokens there may be, or None."""
        if self.source is not None:
            return self._recorded() * self.model.token_rate
        return self.control.expected_tokens(self.text_ids)

    def _chunks(self, voice):
        """[(chunk_tokens, tokens that the first chunk waits for)]: what was asked, and what may be in its place."""
        o, model = self._as_asked, self.model
        # A shorter first chunk is no loss where chunks do not show in the audio.
        sizes = {max(1, o.chunk_tokens >> k) for k in range(8)} if model.causal else {o.chunk_tokens}
        prompt = voice.prompt_tokens[None], voice.prompt_mel[None]  # not computed with: lengths are what matters
        return [(n, next(model.hops(prompt, replace(o, chunk_tokens=n)))) for n in sorted(sizes, reverse=True)]

    def _prefix(self, segment):
        return len(segment.text_ids) + len(segment.prompt_ids) + len(segment.prompt_speech) + 2

    def _frames(self, tokens):
        """Mel frames of so many speech tokens."""
        hop = self.model.config["mel"]["hop_size"]
        return tokens * self.model.sample_rate / hop / self.model.token_rate
