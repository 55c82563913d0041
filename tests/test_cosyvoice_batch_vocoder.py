"""Batches of speech whose rows the vocoder takes together, as on a GPU: each row is what it is alone.

Run: pytest tests/test_cosyvoice_batch_vocoder.py"""

import types

import pytest

from mlx_cosyh3 import batch_generate, generate, load
from mlx_cosyh3.cosyvoice import batch, hift
from mlx_cosyh3.cosyvoice.batch import SpeechBatch
from mlx_cosyh3.cosyvoice.hift import HiFT, HiFTStream
from mlx_cosyh3.errors import CosyH3Error
from tests.small_voice_model import write_voice_model
from tests.test_cosyvoice_batch import TEXTS, assert_same, quiet


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(write_voice_model(tmp_path_factory.mktemp("voice")))


def on_gpu(monkeypatch, answer):
    """Let a batch believe that it runs on a GPU, or not."""
    monkeypatch.setattr(batch, "_dispatch", types.SimpleNamespace(on_gpu=lambda: answer))


def vocoded(monkeypatch):
    """The rows of each batch of the vocoder from now on, as on a GPU."""
    seen, plain = [], HiFT.together

    def together(self, mels, on_block=None):
        seen.append(len(mels))
        return plain(self, mels, on_block)

    monkeypatch.setattr(HiFT, "together", together)
    on_gpu(monkeypatch, True)
    return seen


@pytest.mark.parametrize("filled", [batch.FILLED, 0])
def test_on_a_gpu_the_vocoder_takes_a_batch(model, monkeypatch, filled):
    monkeypatch.setattr(batch, "FILLED", filled)
    seen, texts = vocoded(monkeypatch), [{"text": t, "speed": s} for t, s in zip(TEXTS, (1, 1.3, 0.8, 1, 2))]
    told, alone, plain = [], [], type(model).wave
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "wave", lambda self, mel, key: alone.append(1) or plain(self, mel, key))
        results = batch_generate(model, texts, seed=7, voice="bert", progress=lambda *now: told.append(now))
    assert seen and (filled or seen == [5]) and len(alone) == len(TEXTS) - sum(seen)
    assert [done for stage, done, _ in told if stage == "vocoder"] == [1, 2, 3, 4, 5]
    for r, (request, result) in enumerate(zip(texts, results)):
        assert_same(result, generate(model, request["text"], seed=7 + r, voice="bert", speed=request["speed"]))
        assert result.seconds["vocoder"] > 0
    on_gpu(monkeypatch, False)
    seen.clear()
    batch_generate(model, TEXTS, seed=7, voice="bert", steps=1)
    assert seen == []


def test_a_row_that_the_vocoder_cannot_make(model, monkeypatch):
    """Its mel is finite, what becomes of it is not: all rows go alone, and it alone fails."""
    monkeypatch.setattr(batch, "FILLED", 0)
    want, seen = [generate(model, "Hello there.", seed=3 + r, steps=1) for r in range(3)], vocoded(monkeypatch)
    plain = type(model.flow).together

    def together(self, rows, **options):
        mels = plain(self, rows, **options)
        return [mels[0], mels[1] * 1e38, *mels[2:]]

    monkeypatch.setattr(type(model.flow), "together", together)
    results = batch_generate(model, ["Hello there."] * 3, seed=3, steps=1, errors="return")
    [bad] = [r for r, result in enumerate(results) if isinstance(result, CosyH3Error)]
    assert seen == [3] and "vocoder's numbers are not finite" in str(results[bad])
    for r in {0, 1, 2} - {bad}:
        assert_same(results[r], want[r])


def test_cancelling_within_a_batch_of_the_vocoder(model, monkeypatch):
    monkeypatch.setattr(batch, "FILLED", 0)
    monkeypatch.setattr(hift, "_room", lambda: 30)
    seen, blocks, plain = vocoded(monkeypatch), [], HiFTStream.add

    def add(self, mel, last=False):
        blocks.append(1)
        run.cancel()
        return plain(self, mel, last)

    monkeypatch.setattr(HiFTStream, "add", add)
    run = SpeechBatch(model, TEXTS, seed=1, steps=1, note=quiet)
    assert all(r.finish_reason == "cancelled" and len(r.audio) == 0 for r in run.results())
    assert seen == [5] and blocks == [1]
