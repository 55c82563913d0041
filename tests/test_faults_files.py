"""Files that fail, as a user meets them: a full disk, a damaged voice, a model folder that goes away.

Run: python -m pytest -q tests/test_faults_files.py
"""

import errno
import os
import random
import shutil
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3 import generate, load
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.pool import Pool
from tests.faults import Fault, gpu
from tests.small_model import write_model
from tests.small_voice_model import small_voice, write_voice_model

TEXT = "The cat."
OPTIONS = {"seed": 1, "note": lambda text: None}


def one_line(e):
    assert "\n" not in str(e.value) and len(str(e.value)) > 20
    return str(e.value)


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def full(monkeypatch, tmp_path):
    """The disk that holds the program's own files is full: a file can be made, nothing written. Counts the tries."""
    monkeypatch.setenv("MLX_COSYH3_CACHE", str(tmp_path / "cache"))
    tries = []

    def write(self, *data, **options):
        self.touch()
        tries.append(self.name)
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr("pathlib.Path.write_text", write)
    monkeypatch.setattr("pathlib.Path.write_bytes", write)
    return tries


def left(folder):
    """All files below `folder`."""
    return [p for p in folder.rglob("*") if p.is_file()]


def test_costs_and_reports_find_no_room(speaker, model, full, tmp_path):
    """The work goes on without them, and nothing half written stays."""
    for m, text, way in ((speaker, TEXT, {"note": OPTIONS["note"]}), (model, "the cat", {"max_tokens": 6})):
        policy = gpu()
        with Fault(m) as healthy:
            want = generate(m, text, seed=1, policy=policy, **way)
        with Fault(m, healthy.calls, "metal", "gpu"):  # which is reported
            got = generate(m, text, seed=1, policy=policy, **way)
        assert got.tokens == want.tokens and any("again" in d["reason"] for d in got.decisions)
        for costs in policy.costs.values():
            costs.save(now=True)
        assert any("failure-gpu" in name for name in full) and any("cosyvoice" in n or ".json" in n for n in full)
    assert not left(tmp_path)


def test_a_result_finds_no_room(speaker, full, tmp_path):
    result = generate(speaker, TEXT, **OPTIONS)
    for save in (lambda: result.save(tmp_path / "a.wav"), lambda: result.save(tmp_path / "a.flac"),
                 lambda: small_voice().save(tmp_path / "v.safetensors")):  # fmt: skip
        with pytest.raises(CosyH3Error, match="cannot write .*No space left on device") as e:
            save()
        one_line(e)
    assert not left(tmp_path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["say", "Hello.", "-o", "-"], ["generate", "the", "--max-tokens", "3"]])
def test_a_full_disk_behind_stdout(voice_folder, folder, words):
    model = voice_folder if words[0] == "say" else folder
    with open("/dev/full", "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", "mlx_cosyh3", *words, "--model", str(model), "--seed", "1"], stdout=stdout,
            stderr=subprocess.PIPE, text=True, timeout=120,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )  # fmt: skip
    assert done.returncode == 2 and "No space left" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


# ---------------------------------------------------------------- a damaged voice


def test_a_voice_that_is_cut_off_anywhere(speaker, tmp_path):
    path = tmp_path / "v.safetensors"
    small_voice().save(path)
    whole, draw = path.read_bytes(), random.Random(0)
    for length in (0, 1, 8, *(draw.randrange(len(whole)) for _ in range(60))):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError) as e:
            Voice.load(path)
        assert str(path) in one_line(e)
    path.write_bytes(whole)
    assert generate(speaker, TEXT, voice=Voice.load(path), **OPTIONS).duration > 0


def test_a_voice_with_a_wrong_bit_anywhere(speaker, tmp_path):
    """It is told, or what it says is the same."""
    path = tmp_path / "v.safetensors"
    voice = small_voice()
    voice.save(path)
    whole, draw, told = path.read_bytes(), random.Random(1), 0
    header = int.from_bytes(whole[:8], "little") + 8
    for at in [draw.randrange(header) for _ in range(100)] + [draw.randrange(len(whole)) for _ in range(100)]:
        bad = bytearray(whole)
        bad[at] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        try:
            got = Voice.load(path)
        except CosyH3Error as e:
            assert "\n" not in str(e)
            told += 1
            continue
        for n in ("embedding", "prompt_tokens", "prompt_mel"):
            assert np.array_equal(getattr(got, n), getattr(voice, n)), f"byte {at} of {len(whole)}, header {header}"
        assert (got.transcript, got.name, got.codebook, got.sample_rate) == ("the cat", "prompted", 81, 24000), at
    assert told > 150
    path.write_bytes(whole)
    want = generate(speaker, TEXT, voice=voice, **OPTIONS)
    assert np.array_equal(generate(speaker, TEXT, voice=Voice.load(path), **OPTIONS).audio, want.audio)


# ---------------------------------------------------------------- a model folder that goes away


@pytest.fixture(params=["text", "speech"])
def a_folder(request, tmp_path):
    """(folder, a request to the model in it, its answer)"""
    made = (write_model if request.param == "text" else write_voice_model)(tmp_path / "model")
    ask = (lambda m: generate(m, "the cat", seed=1, max_tokens=6).tokens) if request.param == "text" else (
        lambda m: generate(m, TEXT, **OPTIONS).tokens)  # fmt: skip
    return made, ask, ask(load(made))


def test_a_model_that_was_loaded_needs_its_folder_no_more(a_folder):
    folder, ask, want = a_folder
    model = load(folder)
    shutil.rmtree(folder)
    assert ask(model) == want
    with pytest.raises(CosyH3Error, match="no such model|is not a model folder") as e:
        load(folder)
    one_line(e)


@pytest.mark.parametrize("files", ["model.safetensors", "config.json", "vocab.json"])
def test_a_folder_that_goes_while_it_is_read(a_folder, monkeypatch, tmp_path, files):
    """A file vanishes as soon as the program has looked whether it is there."""
    folder, ask, want = a_folder
    away = shutil.copytree(folder, tmp_path / "away")
    real = load.__globals__["read_config"]

    def then_gone(*args):
        config = real(*args)
        (folder / files).unlink()
        return config

    with monkeypatch.context() as m:
        m.setitem(load.__globals__, "read_config", then_gone)
        try:
            model = load(folder)
        except CosyH3Error as e:
            assert "\n" not in str(e) and str(folder) in str(e)
        else:  # it had been read by then, or a language model goes without a tokenizer
            assert files != "model.safetensors" and (files == "vocab.json" or ask(model) == want)
    shutil.rmtree(folder)
    shutil.copytree(away, folder)
    assert ask(load(folder)) == want


def test_weights_that_go_between_their_header_and_their_bytes(a_folder, monkeypatch, tmp_path):
    """MLX reads the weights later than their names: the file is cut off in between."""
    folder, ask, want = a_folder
    file, read = folder / "model.safetensors", mx.load
    whole = file.read_bytes()

    def cut(path, *args, **options):
        made = read(path, *args, **options)
        os.truncate(path, len(whole) // 3)
        return made

    with monkeypatch.context() as m:
        m.setattr(mx, "load", cut)
        with np.errstate(all="ignore"), pytest.raises(CosyH3Error) as e:  # numbers that could not be read are any
            load(folder)
        one_line(e)
    file.write_bytes(whole)
    assert ask(load(folder)) == want


def test_a_pool_whose_model_is_gone_serves_the_others(a_folder, tmp_path):
    folder, ask, want = a_folder
    other = write_model(tmp_path / "other", seed=1)
    with Pool(1e9) as pool:
        with pool.get(folder) as lease:
            assert ask(lease.model) == want
        away = shutil.move(folder, tmp_path / "away")
        pool.trim()  # it leaves, and should come back
        for _ in range(2):
            with pytest.raises(CosyH3Error, match="no such model") as e:
                pool.get(folder)
            one_line(e)
        with pool.get(other) as lease:
            assert lease.submit("the", max_tokens=3).result().tokens
        shutil.move(away, folder)
        with pool.get(folder) as lease:
            assert ask(lease.model) == want
