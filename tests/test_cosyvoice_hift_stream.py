"""The vocoder and the tempo change in chunks: the same audio as at once, at a cost that does not grow.

Run: pytest tests/test_cosyvoice_hift_stream.py"""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_cosyh3.cosyvoice.hift import HiFTStream
from mlx_cosyh3.cosyvoice.speed import SpeedStream, change_speed, speed_stream
from mlx_cosyh3.errors import CosyH3Error
from tests.cosyvoice_hift_data import error, golden, mel_of, random_mel, small, trained

FRAMES = 45


def streamed(stream, mel, sizes):
    """All that `stream` gives for chunks of these sizes, the rest of the mel in the last one -> list."""
    out, start = [], 0
    for size in sizes:
        out.append(stream.add(mel[:, start : start + size]))
        start += size
    return [*out, stream.add(mel[:, start:], last=True)]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 20), max_size=8))
@example([1] * FRAMES)
@example([])
@example([FRAMES])
@example([9])
@example([8, 1, 0, 1])
def test_chunks_of_any_size(sizes):
    mel, whole = random_mel(FRAMES), _whole()
    pieces = streamed(small().stream(), mel, sizes)
    assert error(mx.concatenate(pieces, axis=1), whole) < 1e-6
    seen = given_ = 0
    for size, piece in zip(sizes, pieces):  # upstream's schedule, at every moment
        seen, given_ = min(FRAMES, seen + size), given_ + piece.shape[1]
        assert given_ == 480 * max(0, seen - 8)


_made = {}


def _whole():
    if not _made:
        _made["wav"] = small()(random_mel(FRAMES))
    return _made["wav"]


@pytest.mark.parametrize("size", (1, 4, 7, 30))
def test_golden_in_chunks(size):
    model, io = golden("v3_hift")
    wav = mx.concatenate(streamed(model.stream(), mel_of(io), [size] * (29 // size)), axis=1)
    assert error(wav, io["final.wav"]) < 2e-6


def test_trained_in_chunks():
    model, io = trained()
    mel = mx.array(io["s0.mel"].T[None])
    wav = mx.concatenate(streamed(model.stream(), mel, [50, 1, 25]), axis=1)
    assert error(wav[0], io["s0.wav"]) < 1e-4


def test_streams_do_not_share():
    model, a, b = small(), random_mel(24, 1), random_mel(24, 2)
    one, two = model.stream(), model.stream()
    got = [[], []]
    for i in range(0, 24, 6):
        got[0].append(one.add(a[:, i : i + 6], i == 18))
        got[1].append(two.add(b[:, i : i + 6], i == 18))
    for mel, pieces in zip((a, b), got):
        assert error(mx.concatenate(pieces, axis=1), model(mel)) < 1e-6


def test_state_does_not_grow():
    stream = small().stream()
    sizes = []
    for i in range(12):
        stream.add(random_mel(10, i))
        state = [*stream._past.arrays(), stream._mel, stream._source, stream._overlap, stream._held]
        sizes.append(sum(a.nbytes for a in state))
    assert len(set(sizes[1:])) == 1


def test_memory_does_not_grow():
    """What is kept does not hold on to whole chunks through slices of them."""
    stream, used = small().stream(), []
    chunks = [random_mel(10, i) for i in range(8)]
    for chunk in chunks:
        stream.add(chunk)
        used.append(mx.get_active_memory())
    # The counter is the process's: what other tests left may still go in between.
    assert used[-1] - used[2] < 20_000


def test_nothing_said():
    stream = small().stream()
    assert stream.add(mx.zeros((1, 0, 80))).shape == (1, 0)
    assert stream.add(mx.zeros((1, 0, 80)), last=True).shape == (1, 0)


def test_after_the_end():
    stream = small().stream()
    stream.add(random_mel(3), last=True)
    with pytest.raises(CosyH3Error, match="has ended"):
        stream.add(random_mel(1))


def test_a_stream_is_what_the_model_makes():
    assert isinstance(small().stream(), HiFTStream)


# Speed


def interpolated(mel, n):
    """torch.nn.functional.interpolate(mode="linear", size=n, align_corners=False) in float64."""
    T = mel.shape[1]
    p = np.clip((np.arange(n) + 0.5) * (T / n) - 0.5, 0, T - 1)
    return np.stack([np.interp(p, np.arange(T), mel[0, :, c]) for c in range(mel.shape[2])], axis=1)[None]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 60), st.floats(0.5, 2))
@example(39, 1.3)
@example(2, 2.0)
@example(17, 1.0)
def test_change_speed(frames, speed):
    mel = random_mel(frames)
    got = change_speed(mel, speed)
    assert got.shape[1] == int(frames / speed)
    assert error(got, interpolated(np.array(mel, np.float64), int(frames / speed))) < 5e-5  # torch's float32 ratio


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 17), min_size=1, max_size=8), st.floats(0.5, 2))
@example([1] * 20, 2.0)
@example([1] * 20, 0.5)
@example([3, 0, 2], 1.7)
@example([10], 1.0)
def test_speed_in_chunks(sizes, speed):
    """Steps of exactly `speed`, whatever the chunks; as many frames as offline."""
    frames = sum(sizes)
    mel = random_mel(frames)
    got = mx.concatenate(streamed(speed_stream(speed), mel, sizes), axis=1)
    n = int(frames / speed)
    assert got.shape == (1, n, 80)
    if n:
        p = np.clip((np.arange(n) + 0.5) * speed - 0.5, 0, frames - 1)
        m = np.array(mel[0], np.float64)
        want = np.stack([np.interp(p, np.arange(frames), m[:, c]) for c in range(80)], axis=1)
        assert error(got[0], want) < 1e-5


@pytest.mark.parametrize("frames, speed", ((40, 2.0), (40, 0.5), (39, 1.3), (30, 1.25), (24, 0.75), (20, 1.0)))
def test_speed_in_chunks_equals_offline(frames, speed):
    """Where frames / speed is whole, to rounding."""
    mel = random_mel(frames)
    got = mx.concatenate(streamed(SpeedStream(speed), mel, [7, 1, 9]), axis=1)
    assert error(got, change_speed(mel, speed)) < 5e-5


def test_speed_keeps_little():
    stream = speed_stream(1.7)
    for i in range(30):
        stream.add(random_mel(5, i))
        assert stream._mel.shape[1] <= 4


@pytest.mark.parametrize("speed", (0, 0.49, 2.01, 10, float("nan"), "fast", None))
def test_bad_speed(speed):
    for make in (speed_stream, lambda s: change_speed(random_mel(5), s)):
        with pytest.raises(CosyH3Error, match="speed must be a number from 0.5 to 2.0"):
            make(speed)


def test_speed_that_leaves_nothing():
    with pytest.raises(CosyH3Error, match="leave no frame"):
        change_speed(random_mel(1), 2)
