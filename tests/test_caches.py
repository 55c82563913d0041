"""Caches with a bound: what stays, what goes, and that what comes out is what was put in.

Run: python -m pytest -q tests/test_caches.py
"""

import io
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cosyh3 import load
from mlx_cosyh3.caches import ENTRY, BoundedCache, StateCache, VoiceCache, clear_all, nbytes
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.errors import CosyH3Error
from tests.small_voice_model import small_voice


def cache_of(units):
    return BoundedCache(units * (100 + ENTRY), size=lambda value: 100)


@given(st.lists(st.tuples(st.sampled_from("gpd"), st.integers(0, 6), st.integers(0, 900))), st.integers(0, 4000))
@settings(max_examples=200, deadline=None)
def test_like_a_plain_list(steps, bound):
    """Against the obvious way to do it: a list in order of use, cut from its front."""
    cache, plain = BoundedCache(bound, size=lambda value: value), []
    for what, key, size in steps:
        held = dict(plain)
        if what == "g":
            assert cache.get(key) == held.get(key)
            plain = [p for p in plain if p[0] != key] + [p for p in plain if p[0] == key]
        elif what == "d":
            cache.discard(key)
            plain = [p for p in plain if p[0] != key]
        else:
            cache.put(key, size)
            plain = [p for p in plain if p[0] != key]
            if size + ENTRY <= bound:
                plain.append((key, size))
            while sum(s + ENTRY for _, s in plain) > bound:
                plain.pop(0)
        assert len(cache) == len(plain) and all(k in cache for k, _ in plain)
        assert cache.bytes == sum(s + ENTRY for _, s in plain) <= bound
    cache.clear()
    assert len(cache) == cache.bytes == 0


def test_made_once_by_many_threads():
    cache, made, gate = cache_of(2), [], threading.Event()

    def make():
        made.append(threading.get_ident())
        assert gate.wait(60)
        return "value"

    with ThreadPoolExecutor(8) as pool:
        got = [pool.submit(cache.get_or_make, "a", make) for _ in range(8)]
        while not made:
            pass
        assert cache.get_or_make("b", lambda: "other") == "other"  # not held up by that
        gate.set()
        assert {g.result() for g in got} == {"value"} and len(made) == 1
    assert not cache._making


def test_all_are_emptied_while_others_are_made():
    over, every = threading.Event(), sys.getswitchinterval()

    def make():
        kept = []
        while not over.is_set():
            kept = [*kept[-100:], cache_of(3)]

    maker = threading.Thread(target=make)
    cache = cache_of(3)
    sys.setswitchinterval(1e-6)
    maker.start()
    try:
        for i in range(2000):
            cache.put(i, "value")
            clear_all()
            assert len(cache) == 0
    finally:
        over.set()
        maker.join()
        sys.setswitchinterval(every)


def test_an_error_is_not_kept():
    cache = cache_of(2)
    with pytest.raises(ZeroDivisionError):
        cache.get_or_make("a", lambda: 1 / 0)
    assert cache.get_or_make("a", lambda: 5) == 5 and not cache._making
    assert cache.get_or_make("a", lambda: 6) == 5


def test_too_large_is_not_kept_and_stats_count():
    cache = BoundedCache(1000)
    assert cache.get_or_make("a", lambda: np.zeros(1000)).shape == (1000,)
    assert cache.stats() == {"entries": 0, "bytes": 0, "max_bytes": 1000, "hits": 0, "misses": 1}
    cache.put("b", b"12345678")
    assert cache.get("b") and cache.stats() == {
        "entries": 1, "bytes": 8 + ENTRY, "max_bytes": 1000, "hits": 1, "misses": 1,
    }  # fmt: skip
    for bad in (-1, 1.5, None):
        with pytest.raises(CosyH3Error, match="max_bytes"):
            BoundedCache(bad)


def test_sizes():
    a, b = mx.zeros((10,)), np.zeros(5, np.int16)
    assert nbytes([a, {"b": b, "again": a}, "xyz", None, 5]) == 40 + 10 + 3
    voice = small_voice()
    assert nbytes(voice) >= voice.embedding.nbytes + voice.prompt_tokens.nbytes + voice.prompt_mel.nbytes


# ---------------------------------------------------------------- voices


def equal(a, b):
    for name in ("embedding", "prompt_tokens", "prompt_mel"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    for name in ("transcript", "codebook", "sample_rate", "made_for"):
        assert getattr(a, name) == getattr(b, name)


def test_a_recording_is_listened_to_once(speaker, tmp_path):
    samples = (0.1 * np.random.default_rng(0).standard_normal(24000)).astype(np.float32)
    cache = VoiceCache()
    want = Voice.from_audio(speaker, (samples, 24000), "the cat")
    equal(cache.from_audio(speaker, (samples, 24000), "the cat", name="one"), want)
    again = cache.from_audio(speaker, (samples, 24000), "the cat", name="two")
    equal(again, want)
    assert again.name == "two" and (cache.hits, cache.misses) == (1, 1)
    cache.from_audio(speaker, (samples, 24000), "another")
    cache.from_audio(speaker, (samples[:-1], 24000), "the cat")
    cache.from_audio(speaker, (samples, 22050), "the cat")
    assert (cache.hits, cache.misses) == (1, 4)

    path = tmp_path / "a.wav"
    soundfile.write(path, samples, 24000, "FLOAT")
    equal(cache.from_audio(speaker, path, "the cat"), want)
    with open(path, "rb") as file:
        equal(cache.from_audio(speaker, file, "the cat"), want)
    equal(cache.from_audio(speaker, io.BytesIO(path.read_bytes()), "the cat"), want)
    assert (cache.hits, cache.misses) == (3, 5)


def test_notes_come_again_and_errors_are_the_voices_own(speaker, tmp_path):
    long = (0.1 * np.random.default_rng(0).standard_normal(31 * 16000)).astype(np.float32)
    cache, first, second = VoiceCache(), [], []
    cache.from_audio(speaker, (long, 16000), note=first.append)
    cache.from_audio(speaker, (long, 16000), note=second.append)
    assert first == second and len(first) == 1 and "longer than 30 s" in first[0]
    for bad in (tmp_path / "none.wav", (np.zeros(24000, np.float32), 24000), 5 * [0]):
        with pytest.raises((CosyH3Error, TypeError)) as want:
            Voice.from_audio(speaker, bad)
        with pytest.raises(type(want.value)) as got:
            cache.from_audio(speaker, bad)
        if isinstance(want.value, CosyH3Error):
            assert str(got.value) == str(want.value)
    assert len(cache) == 1


def test_a_voice_file_is_read_again_when_it_has_changed(tmp_path):
    cache, path = VoiceCache(), tmp_path / "v.safetensors"
    small_voice(seed=1).save(path)
    first = cache.load(path)
    assert cache.load(str(path)) is first
    small_voice(seed=2).save(path)
    os.utime(path, ns=(1, 1))
    equal(cache.load(path), small_voice(seed=2))
    path.unlink()
    with pytest.raises(CosyH3Error, match="there is no voice file"):
        cache.load(path)


# ---------------------------------------------------------------- states of H3


def test_states_go_on_from_the_longest_start(model):
    states, ids = StateCache(1 << 24), list(range(40, 80))
    cache, known = states.start(model, ids)
    assert known == 0 and cache.lengths.tolist() == [39]
    whole = model.make_cache()
    model.prefill(mx.array([ids[:-1]]), whole)
    for a, b in zip(cache.arrays(), whole.arrays()):
        np.testing.assert_array_equal(np.array(a), np.array(b))
    model.step(mx.array([5]), cache)  # its caller's own: what is kept is not changed by that
    assert states.start(model, ids)[1] == 39
    assert states.start(model, ids[:10] + [0, 1])[1] == 0  # another text
    cache, known = states.start(model, ids + [1, 2, 3])
    assert known == 39 and cache.lengths.tolist() == [42]
    assert states.start(model, ids + [1, 2, 3, 4, 5])[1] == 42
    logits = model.prefill(mx.array([[3]]), cache)
    want = model.prefill(mx.array([ids + [1, 2, 3]]), model.make_cache())
    np.testing.assert_allclose(np.array(logits), np.array(want), atol=1e-4)


def test_states_of_models_do_not_mix_and_are_bounded(folder, model, tmp_path):
    from tests.small_model import write_model

    other, narrow = load(write_model(tmp_path / "other", 1)), load(folder, kv_window=4)
    states = StateCache(1 << 24)
    ids = [65, 66, 67, 68]
    for m in (model, other, narrow):
        assert states.start(m, ids)[1] == 0
    for m in (model, other, narrow):
        assert states.start(m, ids)[1] == 3
    size = states.bytes // 3
    few = StateCache(5 * size)
    for n in range(20):
        few.start(model, [65 + n, 66, 67])
        assert few.bytes <= few.max_bytes
    assert few.start(model, [65, 66, 67])[1] == 0 and few.start(model, [65 + 19, 66, 67])[1] == 2
