"""From text to speech with a CosyVoice model: modes, segments, the two ways of running the parts, results.

What is spoken follows from the arguments (upstream's frontend.py and cosyvoice.py have one method for each):

    a Voice with a transcript            zero-shot: the language model goes on from the recording
    a Voice without one                  cross-lingual: it sees the text alone
    any voice and `instruct`             instruct: it is told how to speak
    the name of a voice of the model     SFT: the speaker embedding alone

How it is spoken is in `utterance.py`, and for several texts or segments together in `batch.py`.
"""

from mlx_cosyh3.cosyvoice import audio
from mlx_cosyh3.cosyvoice.batch import SpeechBatch, Talk, generate_batch
from mlx_cosyh3.cosyvoice.options import SpeechOptions
from mlx_cosyh3.cosyvoice.utterance import Utterance
from mlx_cosyh3.errors import take_options
from mlx_cosyh3.stream import Stream

# Options that go with a recording in place of a text.
CONVERTING = ("steps", "speed", "seed", "policy", "deadline", "late")
STREAMING = ("chunk_tokens", "max_chunk_tokens", "compat")


class SpeechGeneration:
    """generate, stream_generate, batch_generate and convert_voice for a CosyVoice model (a mix-in)."""

    def generate(self, text, *, note=None, progress=None, **options):
        """Speak `text` -> SpeechResult. For the options see SpeechOptions.

        note       called with each warning (a string); None: warnings.warn
        progress   called as progress(stage, done, all) while it works; `all` may be None
        The segments of a long text are spoken together, see `batch.py`; with a deadline one after the other.
        Raises CosyH3Error for text with nothing to speak, an unknown voice, an option out of range."""
        talk = Talk(self, text, take_options(SpeechOptions, options), note, progress)
        if len(talk.segments) > 1 and talk.options.deadline is None:
            return SpeechBatch.of(talk).result()
        for _ in talk.pieces():
            continue
        return talk.result()

    def stream_generate(self, text, *, note=None, progress=None, **options):
        """`generate` as an iterator of audio chunks (float32 numpy arrays, in order) as they are made -> Stream.

        text   a string, or an iterator of strings that arrive one by one: speech begins before the text has ended
        `stream.result` is there when the stream has ended or was closed."""
        return self.start(text, True, note=note, progress=progress, **options)

    def start(self, text, streamed, *, note=None, progress=None, **options):
        """`stream_generate`, or with streamed=False `generate`, at work in a thread of its own -> Stream."""
        return Stream(Utterance(self, text, take_options(SpeechOptions, options), streamed, note, progress))

    def batch_generate(self, texts, *, max_batch=None, errors="raise", note=None, progress=None, **options):
        """`generate` for several texts at once -> list of SpeechResult, in the order of `texts`.

        texts       strings, or dicts of a "text" and of options that hold for it alone
        max_batch   texts or segments that are decoded together at most (None: 16); it bounds the memory
        errors      what to do about a text that cannot be spoken. "raise": what is wrong with a request is raised before
                    any work; what fails later is raised at the end, as a BatchError that has the `results` of the
                    others. "return": the exception is in its place in the list
        `seed` may be a list; with one seed s, text r draws with s + r. A text sounds as `generate` makes it, but for what
        sums in another order round differently. For the other arguments see `generate` and SpeechBatch.
        Raises CosyH3Error and TypeError as `generate` does."""
        return generate_batch(
            self, texts, max_batch=max_batch, errors=errors, note=note, progress=progress, **options
        )

    def convert_voice(self, source, voice, *, note=None, progress=None, **options):
        """Say what the recording `source` says, with `voice` -> SpeechResult.

        source    a path, an open file, or (samples, rate); of any length
        voice     a Voice, or the name of one that the model holds
        options   steps, speed, seed, causal, policy, deadline, late of SpeechOptions"""
        run = self._conversion(source, voice, False, note, progress, **options)
        for _ in run.pieces():
            continue
        return run.result()

    def start_conversion(self, source, voice, streamed=False, *, note=None, progress=None, **options):
        """`convert_voice` at work in a thread of its own -> Stream. What was made before close() is in its result.

        streamed   chunk by chunk, as stream_generate does; then also chunk_tokens, max_chunk_tokens and compat"""
        return Stream(self._conversion(source, voice, streamed, note, progress, **options))

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
