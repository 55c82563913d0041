"""Windows that are faded into each other: the weights, the bookkeeping, and the vocoders and the flow behind them.

Run: MLX_COSYH3_GOLDENS=folder python -m pytest -q tests/test_cosyvoice_crossfade.py
"""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mlx_cosyh3.cosyvoice.crossfade import Fade, FadedFlow, FadedVocoder, windows
from mlx_cosyh3.cosyvoice.flow_regulated import OVERLAP
from mlx_cosyh3.cosyvoice.hift_centred import CentredHiFT
from mlx_cosyh3.cosyvoice.source import CentredSource, SourceEnd
from mlx_cosyh3.errors import CosyH3Error
from tests.cosyvoice_hift_data import error, golden, random_mel
from tests.golden_data import cosyvoice_golden

FRAMES = {"v1": 20, "v2": 8}  # that windows overlap by
CUTS = st.lists(st.integers(0, 12), min_size=1, max_size=12)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("n", [1, 2, 34, 3840, 5120])
def test_weights_add_up_to_one(n):
    rise, fall = windows(n)
    assert rise.dtype == fall.dtype == np.float32 and rise.shape == fall.shape == (n,)
    np.testing.assert_array_equal(rise + fall, np.ones(n, np.float32))
    assert (np.diff(rise) > 0).all() and rise[0] > 0 and rise[-1] <= 1


def test_weights_of_upstream():
    want = load_file(cosyvoice_golden("v2_e2e") / "io.safetensors")["speech_window"]
    np.testing.assert_array_equal(np.concatenate(windows(3840, compat=True)), want)
    assert max(sum(windows(3840, compat=True))) == pytest.approx(1.08, abs=1e-3)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 6))
def test_what_overlaps_alike_stays_as_it_is(cuts, n):
    """Pieces of one signal, each beginning n before the end of the one before, are joined to that signal."""
    signal = np.random.default_rng(0).standard_normal(2 * n + sum(cuts)).astype(np.float32)
    fade, start, made = Fade(n), 0, []
    for i, cut in enumerate(cuts):
        stop = start + 2 * n + cut if i == 0 else start + n + cut
        made.append(fade.add(mx.array(signal[None, start:stop]), last=i == len(cuts) - 1))
        start = stop - n
    np.testing.assert_allclose(mx.concatenate(made, axis=1)[0], signal, atol=1e-6)


# ---------------------------------------------------------------- bookkeeping, with parts that see one frame only


class Repeat:
    """In place of a vocoder: each frame's first bin, 4 times. Its source tells how many frames came before."""

    class config:
        samples_per_frame = 4

    def __init__(self):
        self.windows, self.keys = [], []

    def __call__(self, mel, cache_source=None, end=None, *, key):
        assert (end is None) == (cache_source is None)
        self.windows.append(mel.shape[1])
        self.keys.append(tuple(key.tolist()))
        source = mx.repeat(mel[..., 1], 4, axis=1)
        if cache_source is not None:
            np.testing.assert_array_equal(source[:, : cache_source.shape[1]], cache_source)
        return mx.repeat(mel[..., 0], 4, axis=1), source, SourceEnd(source, source, source)


class Twice:
    """In place of a flow: each token becomes two frames that tell it and their place."""

    def __init__(self):
        self.windows = []

    def frames(self, tokens):
        return 2 * tokens

    def __call__(self, tokens, prompt_tokens, prompt_mel, embedding, *, key, steps, cache, on_step):
        assert cache == (len(self.windows) or None) and steps == 3
        self.windows.append(tokens.shape[1])
        mel = mx.repeat(mx.repeat(tokens, 2, axis=1)[..., None], 80, axis=2).astype(mx.float32)
        return mel, len(self.windows)


@settings(deadline=None, max_examples=60)
@given(CUTS, st.integers(1, 8))
def test_every_frame_becomes_audio_once(cuts, frames):
    mel = random_mel(max(1, sum(cuts)))
    hift, made, at = Repeat(), [], 0
    stream = FadedVocoder(hift, frames, mx.random.key(0))
    for i, n in enumerate(cuts):
        last = i == len(cuts) - 1
        made.append(stream.add(mel[:, at : at + n], last))
        at += n
        assert sum(a.shape[1] for a in made) == 4 * (at if last else max(0, at - frames))
    audio = mx.concatenate(made, axis=1)
    np.testing.assert_allclose(audio[0], np.repeat(np.array(mel[0, : sum(cuts), 0]), 4), atol=1e-6)
    # A window is what is new and the overlap, whatever came before; each draws with a key of its own.
    assert all(n <= frames + frames + max(cuts) for n in hift.windows) and len(set(hift.keys)) == len(hift.keys)
    with pytest.raises(CosyH3Error, match="has ended"):
        stream.add(mel)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_every_token_becomes_frames_once(cuts):
    tokens = list(range(sum(cuts)))
    flow, made, at = Twice(), [], 0
    stream = FadedFlow(flow, (None, None, None), 3, mx.random.key(0))
    for i, n in enumerate(cuts):
        last = i == len(cuts) - 1
        made.append(stream.add(tokens[at : at + n], last))
        at += n
        assert sum(m.shape[1] for m in made) == 2 * (at if last else max(0, at - OVERLAP))
    mel = np.array(mx.concatenate(made, axis=1))
    np.testing.assert_allclose(mel[0, :, 0], np.repeat(tokens, 2), atol=1e-4)
    assert all(n <= 2 * OVERLAP + max(cuts) for n in flow.windows)


# ---------------------------------------------------------------- the vocoders


def heard(version, mel, sizes, key=0, compat=False):
    """The pieces of audio that the golden vocoder of a version makes of pieces of `mel`."""
    model, at, made = golden(f"{version}_hift", CentredHiFT)[0], 0, []
    stream = FadedVocoder(model, FRAMES[version], mx.random.key(key), compat)
    for i, n in enumerate(sizes):
        made.append(np.array(stream.add(mel[:, at : at + n], i == len(sizes) - 1)[0]))
        at += n
    return made


@pytest.mark.parametrize("version", FRAMES)
def test_one_piece_is_what_the_vocoder_makes(version):
    model, mel = golden(f"{version}_hift", CentredHiFT)[0], random_mel(24)
    [audio] = heard(version, mel, [24])
    want, *_ = model(mel, key=mx.random.split(mx.random.key(0))[1])
    np.testing.assert_array_equal(audio, want[0])


@pytest.mark.parametrize("version", FRAMES)
def test_length_and_seams(version):
    """As many samples as in one piece; where pieces meet, no larger steps than elsewhere."""
    sizes, frames = [40, 30, 30, 1, 5, 30], FRAMES[version]
    made = heard(version, random_mel(sum(sizes)), sizes)
    per_frame = golden(f"{version}_hift", CentredHiFT)[0].config.samples_per_frame
    assert [len(a) for a in made] == [per_frame * n for n in (40 - frames, 30, 30, 1, 5, 30 + frames)]
    meet, steps = np.cumsum([len(a) for a in made])[:-1], np.abs(np.diff(np.concatenate(made)))
    assert steps[meet - 1].max() <= np.delete(steps, meet - 1).max()


@pytest.mark.parametrize("version", FRAMES)
def test_a_key_is_all_that_is_random(version):
    mel, sizes = random_mel(90), [40, 30, 20]
    want = np.concatenate(heard(version, mel, sizes))
    with ThreadPoolExecutor(2) as pool:
        for other in pool.map(lambda _: np.concatenate(heard(version, mel, sizes)), range(2)):
            np.testing.assert_array_equal(other, want)
    assert error(np.concatenate(heard(version, mel, sizes, key=1)), want) > 1e-4


@pytest.mark.parametrize("version", FRAMES)
def test_compat_fades_and_starts_the_source_anew(version):
    """What comes before the seam is the same; beyond what is faded, it is the phase of the source that differs."""
    mel, sizes, frames = random_mel(100), [50, 50], FRAMES[version]
    per_frame = golden(f"{version}_hift", CentredHiFT)[0].config.samples_per_frame
    a, b = (np.concatenate(heard(version, mel, sizes, compat=compat)) for compat in (False, True))
    begin = (50 - frames) * per_frame
    np.testing.assert_array_equal(a[:begin], b[:begin])
    assert error(a[begin : begin + frames * per_frame], b[begin : begin + frames * per_frame]) > 1e-3
    assert error(a[50 * per_frame :], b[50 * per_frame :]) > 1e-3


# ---------------------------------------------------------------- the source where windows meet


def sources(version, f0, sizes, in_phase=True):
    """The source of windows of `sizes` frames, each beginning with the last FRAMES of the one before; without noise."""
    source = golden(f"{version}_hift", CentredHiFT)[0].m_source
    frames, hop = FRAMES[version], source._config.samples_per_frame
    overlap, made, before, start = frames * hop, [], None, 0
    for n in sizes:
        pitch = mx.array(f0[None, start : start + n])
        phases = mx.random.uniform(-3, 3, (1, 9), key=mx.random.key(start))  # each window draws its own
        wave, end = source(pitch, mx.zeros((1, n * hop, 9)), phases, before if in_phase else None)
        if before is not None and not in_phase:
            wave = mx.concatenate([before[0], wave[:, overlap:]], axis=1)
        before = wave[:, (n - frames) * hop :], end
        made.append(np.array(wave[0, : (n - frames) * hop]))
        start += n - frames
    return np.concatenate([*made, np.array(before[0][0])])


@pytest.mark.parametrize("version", FRAMES)
@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(21, 60), min_size=2, max_size=5), st.integers(0, 1000))
def test_the_source_goes_on_in_phase(version, sizes, seed):
    """Windows give the source that one piece gives; with upstream's way they do not."""
    frames = FRAMES[version]
    total = sum(sizes) - (len(sizes) - 1) * frames
    f0 = np.random.default_rng(seed).uniform(90, 300, total).astype(np.float32)
    whole = sources(version, f0, [total])
    assert error(sources(version, f0, sizes), whole) < 5e-3  # phases of thousands of rad are rounded
    assert error(sources(version, f0, sizes, in_phase=False), whole) > 3e-2


@pytest.mark.parametrize("version", FRAMES)
def test_no_jump_in_the_source(version):
    """Where windows meet, no larger steps from sample to sample than elsewhere; upstream's way makes them."""
    frames, hop = FRAMES[version], golden(f"{version}_hift", CentredHiFT)[0].config.samples_per_frame
    sizes = [50] * 6
    total = sum(sizes) - 5 * frames
    f0 = (150 + 20 * np.sin(np.arange(total) / 9)).astype(np.float32)
    meet = (50 + np.arange(5) * (50 - frames)) * hop
    for in_phase in (True, False):
        steps = np.abs(np.diff(sources(version, f0, sizes, in_phase)))
        seams = np.concatenate([steps[m - hop // 2 - 2 : m + 2] for m in meet])
        assert (seams.max() <= np.abs(np.diff(sources(version, f0, [total]))).max()) == in_phase


def test_a_long_stream_keeps_its_phase_small():
    """What a window hands on does not grow, so that hours of speech are as exact as a second."""
    for version in FRAMES:
        source = golden(f"{version}_hift", CentredHiFT)[0].m_source
        assert isinstance(source, CentredSource)
        n, hop = 60, source._config.samples_per_frame
        before = None
        for _ in range(4):
            wave, end = source(mx.full((1, n), 400.0), mx.zeros((1, n * hop, 9)), mx.zeros((1, 9)), before)
            before = wave[:, (n - 20) * hop :], end
            assert 0 <= np.array(end.turns).min() and np.array(end.turns).max() < 1
