"""A text of half an hour of speech: memory that does not grow, work that grows as the text does, in every version.

Run: MLX_COSYH3_GOLDENS=folder python -m pytest -q tests/test_cosyvoice_long.py
The half hour itself: -m slow
"""

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.cosyvoice import utterance
from mlx_cosyh3.cosyvoice.speech import SpeechOptions
from mlx_cosyh3.cosyvoice.utterance import Utterance
from tests.golden_voice_models import VERSIONS, Letters, model, voice
from tests.test_cosyvoice_versions import AtOnce

pytestmark = pytest.mark.slow

SENTENCE = "The cat sat on the mat, and it was warm by the fire, so they all went home in time. "
MINUTES = 28
ways = pytest.mark.parametrize("streamed", [False, True])
versions = pytest.mark.parametrize("version", VERSIONS)


class Watch:
    """What the parts do, counted, and the memory that MLX takes from one segment to the next."""

    def __init__(self, m, patch):
        self.model = m
        self.work = dict.fromkeys(("letters", "read", "flow", "vocoder"), 0)
        self.largest = dict.fromkeys(("prompt", "flow", "vocoder"), 0)
        self.peaks, self.active = [], []
        network = "network" if hasattr(m.flow, "network") else "unet"
        counted = [  # class, method, name of the count, how much a call is
            (type(m.llm), "last_logits", "read", lambda x, *rest: x.shape[0] * x.shape[1]),
            (type(getattr(m.flow, network)), "__call__", "flow", lambda x, *rest: x.shape[1]),
            (type(m.hift), "decode", "vocoder", lambda mel, *rest: mel.shape[1]),
            (Letters, "encode", "letters", lambda text: len(text)),
        ]
        for cls, method, name, size in counted:
            patch.setattr(cls, method, self._counting(getattr(cls, method), name, size))
        speak = m.speak
        patch.setattr(m, "speak", lambda segment, *rest: self._begins(segment) or speak(segment, *rest))
        patch.setattr(m, "short", True)
        # At once, a segment becomes audio beside the next one's tokens: here one after the other, so that what is
        # measured does not depend on how the two threads meet. No more than these two are ever at work together.
        patch.setattr(utterance, "Beside", AtOnce)

    def _counting(self, method, name, size):
        def counted(part, *args, **options):
            n = size(*args)
            self.work[name] += n
            if name in self.largest:
                self.largest[name] = max(self.largest[name], n)
            return method(part, *args, **options)

        return counted

    def _begins(self, segment):
        ids = len(segment.text_ids) + len(segment.prompt_ids) + len(segment.prompt_speech)
        self.largest["prompt"] = max(self.largest["prompt"], ids)
        self.peaks.append(mx.get_peak_memory())
        self.active.append(mx.get_active_memory())
        mx.reset_peak_memory()

    def run(self, sentences, streamed, seconds=None):
        """Speak so many sentences -> (samples, tokens, segments); the audio is not kept."""
        o = SpeechOptions(voice=voice(self.model.version), seed=1, steps=1, max_seconds=seconds)
        run, samples = Utterance(self.model, SENTENCE * sentences, o, streamed, lambda text: None, None), 0
        for piece in run.pieces():
            samples += len(piece)
            assert np.isfinite(piece).all()
            run.audio.clear()
            run.audio.append(piece[:1])
        return samples, len(run.tokens), len(run.segments)


def measured(version, sentences, streamed, seconds=None):
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(model(version), patch)
        return watch, *watch.run(sentences, streamed, seconds)


def check_flat(memory, slack):
    """The later half takes no more than the earlier did (the first segments, at which caches fill, left out)."""
    memory = memory[2:]
    half = len(memory) // 2
    assert max(memory[half:]) <= slack * max(memory[:half]), memory


def check_linear(version, short, long, times, tokens):
    """Two Watches, of a text and of one `times` as long, and the speech tokens of each: more work as there is more to
    say, and no more than that.

    No piece of it is larger than a segment needs, however many there are."""
    for name, count in long.work.items():
        more = times if name == "letters" else tokens[1] / tokens[0]
        assert 0 < count <= 1.15 * more * short.work[name], (name, short.work, long.work, tokens)
    m, held = model(version), voice(version)
    frames = len(held.prompt_mel) + 2 * len(SENTENCE) * m.sample_rate / m.config["mel"]["hop_size"] / m.token_rate
    assert long.largest["flow"] <= frames + 1 and long.largest["vocoder"] <= frames + 1, long.largest
    assert long.largest["prompt"] == short.largest["prompt"]


@versions
@ways
def test_work_is_linear_and_memory_is_flat(version, streamed):
    short, _, said, _ = measured(version, 3, streamed)
    long, samples, tokens, segments = measured(version, 10, streamed)
    assert segments == len(long.peaks) == 10 and tokens > 300
    assert samples / model(version).sample_rate > tokens / model(version).token_rate
    check_linear(version, short, long, 10 / 3, (said, tokens))
    check_flat(long.peaks, 1.1)
    check_flat(long.active, 1.1)


@pytest.mark.slow
@versions
@ways
def test_half_an_hour(version, streamed):
    m = model(version)
    short, made, said, _ = measured(version, 16, streamed)
    seconds = MINUTES * 60 + 20
    sentences = int(16 * seconds * m.sample_rate / made * 1.3)  # more than enough, whatever the 16 were like
    long, samples, tokens, segments = measured(version, sentences, streamed, seconds)
    assert samples / m.sample_rate > MINUTES * 60 and segments > 4 * MINUTES
    check_linear(version, short, long, sentences / 16, (said, tokens))
    check_flat(long.peaks, 1.05)
    check_flat(long.active, 1.05)
