"""Every version of CosyVoice, converted in every format, speaks in every mode, at once and streamed; threads, errors.

`test_every_cell` is the README's table: versions x modes x streaming x quantisation. That the numbers are upstream's
is tested in test_cosyvoice_versions.py, what converting says of itself in test_convert_all_versions.py.
"""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3 import generate, stream_generate
from mlx_cosyh3.errors import CosyH3Error
from tests.speech_folders import KINDS, converted, kinds, sources  # noqa: F401 - two are fixtures

FORMATS = ["fp32", "int8", *(pytest.param(how, marks=pytest.mark.slow) for how in ("8 bits", "4 bits"))]
MODES = {
    "sft": {"voice": "anna"},
    "zero_shot": {"voice": "anna", "mode": "zero_shot"},
    "cross_lingual": {"voice": "anna", "mode": "cross_lingual"},
    "instruct": {"voice": "anna", "instruct": "Speak fast."},
}
TEXT = "The cat sat."
QUIET = dict(note=lambda text: None)
CHUNKS = dict(chunk_tokens=5, max_chunk_tokens=5)


@kinds
@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("live", [False, True], ids=["at once", "streamed"])
@pytest.mark.parametrize("mode", [*MODES, "vc"])
def test_every_cell(converted, monkeypatch, name, how, live, mode):  # noqa: F811
    model = converted(name, how)[2]
    count = 30 if model.token_rate == 25 else 50  # speech tokens
    options = dict(seed=1, steps=1, **QUIET)
    if mode == "vc":
        said = np.random.default_rng(0).integers(0, 99, count).astype(np.int32)
        monkeypatch.setattr(type(model), "speech_tokens", lambda self, samples, rate: said)
        monkeypatch.setattr(type(model), "need", lambda self, *parts: None)
        sound = 0.1 * np.random.default_rng(1).standard_normal(19200).astype(np.float32), 24000
        stream = model.start_conversion(sound, "anna", live, **options, **(CHUNKS if live else {}))
    else:
        options |= dict(max_seconds=count / model.token_rate, win_size=0, **MODES[mode])
        stream = model.start(TEXT, live, **options, **(CHUNKS if live else {}))
    pieces = list(stream)
    result = stream.result
    assert result.mode == ("convert" if mode == "vc" else mode) and result.sample_rate == model.sample_rate
    assert np.isfinite(result.audio).all() and result.audio.any() and np.abs(result.audio).max() <= 1
    assert result.duration == pytest.approx(count / model.token_rate, abs=0.02 * len(pieces))
    assert len(result.tokens) == count and (len(pieces) > 1) == live
    assert all(0 <= token < model.codebook for token in result.tokens)


@pytest.mark.parametrize("name", ["v2", "v3"])
@pytest.mark.parametrize("how", FORMATS)
def test_text_in_pieces(converted, name, how):  # noqa: F811
    model = converted(name, how)[2]
    for voice in ("anna", "晓"):
        stream = stream_generate(model, iter(["The cat ", "sat."]), voice=voice, seed=1, steps=1, max_seconds=0.8,
                                 win_size=0, **QUIET)  # fmt: skip
        assert sum(map(len, stream)) > 0 and np.isfinite(stream.result.audio).all()


def _streamed(model, **options):
    stream = stream_generate(model, TEXT, **CHUNKS, **options)
    np.testing.assert_array_equal(np.concatenate(list(stream)), stream.result.audio)
    return stream.result


@kinds
def test_streamed_is_offline(converted, name):  # noqa: F811
    """The same tokens; in version 3 the same audio, in 2 the same length, in 1 but for a frame rounded in a window."""
    model = converted(name, "fp32")[2]
    options = dict(seed=1, steps=2, win_size=0, max_seconds=1.2, voice="anna", mode="zero_shot", **QUIET)
    live, whole = _streamed(model, **options), generate(model, TEXT, causal=name == "v3", **options)
    windows = len(live.tokens) // CHUNKS["chunk_tokens"] if name.startswith("v1") else 0
    assert live.tokens == whole.tokens and abs(len(whole.audio) - len(live.audio)) <= 256 * windows
    if name == "v3":
        np.testing.assert_allclose(live.audio, whole.audio, atol=1e-3)


# ---------------------------------------------------------------- threads, and what is kept


@kinds
def test_threads_make_the_same_bytes(converted, name):  # noqa: F811
    model = converted(name, "int8")[2]

    def speak(seed):
        options = dict(seed=seed, steps=1, win_size=0, max_seconds=0.8, **QUIET)
        return (_streamed(model, **options) if seed % 2 else generate(model, TEXT, **options)).audio

    want = [speak(seed) for seed in (0, 1)]
    with ThreadPoolExecutor(4) as pool:
        for seed, audio in enumerate(pool.map(speak, [0, 1] * 4)):
            np.testing.assert_array_equal(audio, want[seed % 2])


def _held():
    """(bytes of arrays, threads, open files) once all is given back that can be."""
    mx.clear_cache()
    files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    return mx.get_active_memory(), threading.active_count(), files


@kinds
def test_nothing_is_left_behind(converted, name):  # noqa: F811
    model, held = converted(name, "fp32")[2], []
    for n in range(8):
        options = dict(seed=n, steps=1, win_size=0, max_seconds=0.4, **QUIET)
        generate(model, TEXT, **options)
        _streamed(model, **options)
        with stream_generate(model, TEXT, **options | {"max_seconds": 9.0}, **CHUNKS) as stream:
            next(stream)  # and no more of it
        held.append(_held())
    memory, threads, files = zip(*held[3:])
    assert max(memory) <= 1.01 * min(memory) and max(threads) <= held[3][1] and max(files) <= held[3][2], held


# ---------------------------------------------------------------- names of voices


@kinds
def test_a_voice_is_found_as_it_is_typed(converted, name):  # noqa: F811
    model = converted(name, "fp32")[2]
    xiao = model.voices["晓"]
    bytewise = "晓".encode().decode("ascii", "surrogateescape")  # a terminal that is not set to UTF-8
    for typed in ("晓", bytewise, "\\u6653"):
        assert model.find_voice(typed) is xiao
        result = generate(model, TEXT, voice=typed, seed=1, steps=1, win_size=0, max_seconds=0.4, **QUIET)
        assert result.mode == "sft"
    for unknown in ("暁", "\ud800", b"\xcf\xfe".decode("ascii", "surrogateescape"), ""):
        with pytest.raises(CosyH3Error, match="has no voice .*it has: anna, 晓"):
            model.find_voice(unknown)
    model.voices["Zoé"] = xiao
    try:
        assert model.find_voice("Zoe\u0301") is xiao
    finally:
        del model.voices["Zoé"]


# ---------------------------------------------------------------- what cannot be


@kinds
def test_bad_requests_are_one_line(converted, name):  # noqa: F811
    model, others = converted(name, "fp32")[2], {n: converted(n, "fp32")[2] for n in KINDS if n != name}
    foreign = {f"voice of {n}": ({"voice": m.voices["anna"]}, "was made for") for n, m in others.items()}
    asked = foreign | {
        "unknown voice": ({"voice": "ana"}, "no voice 'ana' .it has: anna, 晓."),
        "no recording": ({"voice": "晓", "mode": "zero_shot"}, "'晓' is a speaker embedding alone"),
        "steps": ({"steps": 0}, "steps"),
        "speed 0": ({"speed": 0}, "speed"),
        "speed 10": ({"speed": 10}, "speed"),
        "chunk": ({"chunk_tokens": 0}, "chunk_tokens"),
        "mode": ({"mode": "singing"}, "mode must be one of"),
        "instruct": ({"instruct": "  "}, "instruct is empty"),
    }
    for what, (options, said) in asked.items():
        with pytest.raises(CosyH3Error, match=said) as e:
            generate(model, TEXT, **options)
        assert "\n" not in str(e.value), what
    for text in ("", "  \n", "...", "。！？"):
        with pytest.raises(CosyH3Error, match="nothing|empty"):
            generate(model, text)
