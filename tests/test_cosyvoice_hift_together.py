"""The vocoder of CosyVoice 3 on several utterances in one batch: each is what it is alone, and ends where it ends.

Run: pytest tests/test_cosyvoice_hift_together.py"""

import types

import mlx.core as mx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_cosyh3.cosyvoice import hift
from mlx_cosyh3.cosyvoice.hift import HiFTStream, change_speed
from mlx_cosyh3.errors import CosyH3Error, NotFiniteError
from tests.cosyvoice_hift_data import error, golden, mel_of, random_mel, small, trained

BOUND = 1e-6


@pytest.fixture
def room(monkeypatch):
    """A call sets the frames of a block."""
    return lambda frames: monkeypatch.setattr(hift, "_room", lambda: frames)


def blocks_of(monkeypatch):
    """The [rows, frames] of each block from now on."""
    seen, plain = [], HiFTStream.add
    monkeypatch.setattr(HiFTStream, "add", lambda self, mel: seen.append(mel.shape[:2]) or plain(self, mel))
    return seen


def assert_as_alone(model, mels):
    made = model.together(mels)
    assert len(made) == len(mels)
    for mel, wav in zip(mels, made):
        assert wav.dtype == mx.float32 and error(wav, model(mel)) <= BOUND


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5), frames=st.integers(1, 200))
@example([1], 200)  # one row
@example([1, 2, 3, 1], 200)
@example([1, 2, 3, 1], 1)  # a frame of each row at a time
@example([10, 20, 30], 30)  # ends at the borders of blocks
@example([12, 22, 5], 36)  # the rest is as long as what the vocoder looks ahead
@example([2, 7, 40], 30)  # rows that have left by then
@example([9, 9, 9], 12)  # of one length
@example([0, 3, 0], 6)  # nothing said
def test_each_is_what_it_is_alone(lengths, frames):
    plain, hift._room = hift._room, lambda: frames
    try:
        assert_as_alone(small(), [random_mel(n, seed) for seed, n in enumerate(lengths)])
    finally:
        hift._room = plain


def test_golden_in_a_batch(room):
    model, io = golden("v3_hift")
    for frames in (200, 45):
        room(frames)
        for others in ([], [40], [3, 35, 29]):
            made = model.together([*(random_mel(n, n) for n in others), mel_of(io)])
            assert error(made[-1], io["final.wav"]) < 2e-6


def test_trained_in_a_batch(room):
    model, io = trained()
    room(100)
    for j, wav in enumerate(model.together([mx.array(io[f"s{j}.mel"].T[None]) for j in range(3)])):
        assert error(wav[0], io[f"s{j}.wav"]) < 1e-4


def test_other_tempos(room):
    room(30)
    assert_as_alone(small(), [change_speed(random_mel(25, s), speed) for s, speed in enumerate((0.7, 1, 1.3, 2))])


def test_weights_in_a_smaller_dtype(room):
    room(30)
    model = small.__wrapped__()
    model.set_dtype(mx.bfloat16)
    mels = [random_mel(n, n) for n in (20, 13, 4)]
    for mel, wav in zip(mels, model.together(mels)):
        assert error(wav, model(mel)) < 0.02 and mx.abs(wav).max().item() > 0.1


def test_the_ends_are_audible():
    """So that the tests above would see what is wrong with one."""
    wav = small()(random_mel(9))
    assert mx.abs(wav).max().item() < 0.99 and mx.abs(wav[:, -4:]).min().item() > 1e-3


def test_no_utterance():
    assert small().together([]) == []


def test_a_row_does_not_hear_the_others(room):
    """To the bit, where blocks are alike."""
    room(40)
    model, mel = small(), random_mel(11)
    one, two = (model.together([random_mel(17, seed), mel])[1] for seed in (5, 6))
    assert mx.array_equal(one, two)


def test_blocks_hold_no_more_than_there_is_room_for(room, monkeypatch):
    room(40)
    seen = blocks_of(monkeypatch)
    small().together([random_mel(n) for n in (30, 12, 60, 31)])
    # The 12 leave when 8 frames have followed them, then the rest share the room; the last block takes what follows.
    assert seen == [(4, 10), (4, 10), (3, 13), (3, 13), (1, 22)]


def test_a_small_rest_makes_no_block(room, monkeypatch):
    room(40)
    seen = blocks_of(monkeypatch)
    small().together([random_mel(20), random_mel(18)])
    assert seen == [(2, 28)]


def test_room(monkeypatch):
    assert hift._room() == 2 * hift.CPU_BLOCK
    monkeypatch.setattr(hift, "_dispatch", types.SimpleNamespace(on_gpu=lambda: True))
    for budget, frames in ((2e9, 476), (35e9, 8333), (1e8, hift.GPU_BLOCK)):
        monkeypatch.setattr(hift, "default_budget", lambda budget=budget: budget)
        assert hift._room() == frames


def test_a_row_that_is_not_finite(room):
    room(40)
    bad = random_mel(9)
    bad[0, 4, 7] = mx.nan
    with pytest.raises(NotFiniteError, match=r"not finite, first in the mel \(the flow's work\)"):
        small().together([random_mel(20), bad])


def test_bad_shape():
    with pytest.raises(CosyH3Error, match=r"must be \[batch, frames, 80\], not \[2, 17, 40\]"):
        small().together([mx.zeros((1, 9, 40))] * 2)


def test_what_is_called_after_each_block(room):
    room(20)
    told = []
    small().together([random_mel(30), random_mel(12)], on_block=lambda: told.append(1))
    assert len(told) == 3

    class Enough(Exception):
        pass

    def enough():
        raise Enough

    with pytest.raises(Enough):
        small().together([random_mel(30)], on_block=enough)
