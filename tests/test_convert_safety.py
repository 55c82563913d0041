"""Bad input and bad luck: the target is absent, or whole, or as it was, and the message is one line."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import namedtuple

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.convert import main, writer
from mlx_cosyh3.convert import common, pipeline
from mlx_cosyh3.convert.writer import OutputFolder
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from tests.h3_checkpoints import golden, make, save, state_dict

COMMAND = [sys.executable, "-m", "mlx_cosyh3.convert"]
ENV = {**os.environ, "MLX_DISABLE_COMPILE": "1"}


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "source", state_dict(), config={"num_heads": 2}).parent


def arguments(source, out, *more):
    return [*COMMAND, "--model", str(source), "--out", str(out), "--tokenizer", "none", *more]


def assert_whole(folder):
    """Every file is there and every tensor can be read."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    stored = {f: mx.load(str(folder / f)) for f in set(index.values())}
    assert all(name in stored[file] for name, file in index.items())
    assert (
        json.loads((folder / "config.json").read_text())["model_type"] == "h3" and (folder / "README.md").is_file()
    )


def snapshot(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# Bad input


@pytest.mark.parametrize("model", ["missing.pt", "no/such/folder", "./missing", "missing"])
def test_missing_source(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--model", model, "--out", "out"]) == 2
    assert capsys.readouterr().err == f"error: no such file or folder: {model}\n"


def test_folder_without_a_model(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("x")
    with pytest.raises(CosyH3Error, match="a holds no model: there is no file that ends in .safetensors, .pt"):
        make(tmp_path / "a", tmp_path / "out")
    with pytest.raises(CosyH3Error, match="unknown file type '.txt'"):
        make(tmp_path / "a" / "notes.txt", tmp_path / "out")


@pytest.mark.parametrize("part", [0, 1, 1000, 0.3, 0.5, 0.999])
def test_truncated_pt(part, tmp_path):
    raw = golden("hybrid", "model.pt").read_bytes()
    path = tmp_path / "model.pt"
    path.write_bytes(raw[: part if isinstance(part, int) else int(part * len(raw))])
    with pytest.raises(CheckpointError) as e:
        make(path, tmp_path / "out", heads=4)
    assert str(path) in str(e.value) and "\n" not in str(e.value)
    assert os.listdir(tmp_path) == ["model.pt"]


@pytest.mark.parametrize("part", [0, 5, 200, 0.5, 0.999])
def test_truncated_safetensors(part, source, tmp_path):
    path = source / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[: part if isinstance(part, int) else int(part * len(raw))])
    with pytest.raises(CheckpointError, match="cut short|is empty"):
        make(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quantize", [None, "int8", 4])
def test_nan_weights_name_the_tensor(value, quantize, tmp_path):
    tensors = state_dict()
    tensors["backbone.layers.2.mlp.fc1.weight"][200, 3] = value
    path = save(tmp_path / "a", tensors)
    with pytest.raises(CheckpointError, match=rf"tensor 'layers.2.mlp.fc1.weight' holds {value} at \[200, 3\]"):
        make(path, tmp_path / "out", heads=2, quantize=quantize)
    assert os.listdir(tmp_path) == ["a"]


def test_mixed_up_layers_end_with_2(tmp_path, capsys):
    tensors = state_dict()
    a, b = "backbone.layers.0.mlp.fc1.weight", "backbone.layers.0.mlp.fc2.weight"
    tensors[a], tensors[b] = tensors[b], tensors[a]
    path = save(tmp_path / "a", tensors)
    assert main(["--model", str(path), "--out", str(tmp_path / "out"), "--heads", "2", "--tokenizer", "none"]) == 2
    err = capsys.readouterr().err
    assert "'layers.0.mlp.fc1.weight' has the shape [64, 256], expected [256, 64]" in err and err.count("\n") == 1
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("option", [["--dtype", "float8"], ["-q", "3"]])
def test_unknown_formats_end_with_2(source, tmp_path, option, capsys):
    assert main([*arguments(source, tmp_path / "out")[3:], *option]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: unknown ") and repr(option[1]) in err and err.count("\n") == 1


@pytest.mark.parametrize("network", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_no_network_is_one_line(network, tmp_path):
    env = {**ENV, "HF_HOME": str(tmp_path / "hf"), **network}
    command = [*COMMAND, "--model", "danfu09/H3-125M", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: danfu09/H3-125M ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_network_for_the_tokenizer(tmp_path):
    source = save(tmp_path / "a", state_dict(d_model=8, n_layer=1, attention=(), rows=50264, d_state=8)).parent
    env = {**ENV, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [*COMMAND, "--model", str(source), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "GPT-2's is out of reach" in done.stderr and "--tokenizer DIR" in done.stderr
    assert not (tmp_path / "out").exists()


# The target


def test_existing_target_is_refused_before_anything_is_read(source, tmp_path):
    make(source, tmp_path / "out")
    before = snapshot(tmp_path / "out")
    with pytest.raises(CosyH3Error, match="out exists: pass --overwrite"):
        make(tmp_path / "not even there.pt", tmp_path / "out")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CosyH3Error, match="exists"):
        make(source, tmp_path / "file")
    assert snapshot(tmp_path / "out") == before


def test_overwrite(source, tmp_path):
    make(source, tmp_path / "out")
    (tmp_path / "out" / "extra").write_text("x")
    make(source, tmp_path / "out", quantize=4, overwrite=True)
    assert_whole(tmp_path / "out")
    assert not (tmp_path / "out" / "extra").exists() and sorted(os.listdir(tmp_path)) == ["out", "source"]


def test_overwrite_replaces_models_only(source, tmp_path):
    """--overwrite --out ~ must not be the end of a home folder."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("precious", "file"):
        with pytest.raises(CosyH3Error, match="is not a converted model: it is not replaced"):
            make(source, tmp_path / name, overwrite=True)
    assert (tmp_path / "precious" / "thesis.txt").exists() and (tmp_path / "file").exists()
    (tmp_path / "empty").mkdir()
    make(source, tmp_path / "empty", overwrite=True)
    assert_whole(tmp_path / "empty")


def test_overwrite_never_deletes_its_own_source(source, tmp_path):
    make(source, source / "sub" / "model")  # within is fine
    make(source, tmp_path / "out")
    before = snapshot(tmp_path / "out")
    with pytest.raises(CosyH3Error, match="holds what is to be converted"):
        make(tmp_path / "out", tmp_path / "out", quantize="int8", overwrite=True)
    with pytest.raises(CosyH3Error, match="holds what is to be converted"):
        make(source, tmp_path / "out", tokenizer=str(tmp_path / "out"), overwrite=True)
    assert snapshot(tmp_path / "out") == before


def test_failed_overwrite_keeps_the_old_model(source, tmp_path):
    make(source, tmp_path / "out")
    before = snapshot(tmp_path / "out")
    tensors = state_dict()
    tensors["backbone.ln_f.bias"][:] = np.nan
    with pytest.raises(CheckpointError, match="norm_f.bias"):
        make(save(tmp_path / "bad", tensors), tmp_path / "out", heads=2, overwrite=True)
    assert snapshot(tmp_path / "out") == before and sorted(os.listdir(tmp_path)) == ["bad", "out", "source"]


def test_target_behind_a_link(source, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    make(source, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert_whole(tmp_path / "real")


def test_missing_parent_folders_are_made(source, tmp_path):
    make(source, tmp_path / "a" / "b" / "out")
    assert_whole(tmp_path / "a" / "b" / "out")


# Full disks


def test_full_disk_while_writing(source, tmp_path):
    """The system refuses to let a file grow: one line, no target, nothing left."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))  # noqa: E731
    done = subprocess.run(
        arguments(source, tmp_path / "out"), env=ENV, preexec_fn=limit, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == f"error: cannot write to {tmp_path}: the disk is full; nothing was left behind\n"
    assert os.listdir(tmp_path) == ["source"]


def test_too_little_space_is_seen_before_writing(source, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(common.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CosyH3Error, match="too full: [0-9,]+ bytes are needed, 1,000 are free"):
        make(source, tmp_path / "deep" / "out")
    assert os.listdir(tmp_path) == ["source"]


def test_target_that_cannot_be_made(source, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CosyH3Error, match="cannot write to"):
        make(source, tmp_path / "file" / "out")
    with pytest.raises(CosyH3Error, match="cannot be the output folder"):
        make(source, "/")


# Killed


def leftovers(folder):
    return [p for p in folder.iterdir() if p.name.startswith(".out.")]


def test_killed_at_random_moments(tmp_path):
    """SIGKILL: the target is absent or whole; the next run removes what is left and succeeds."""
    source = save(
        tmp_path / "source", state_dict(d_model=256, n_layer=8, rows=4096), config={"num_heads": 4}
    ).parent
    command = arguments(source, tmp_path / "out", "-q", "8")
    rng, killed, runs, length = random.Random(0), 0, 0, 1e9
    while killed < 6:
        runs += 1
        assert runs < 40
        process = subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not leftovers(tmp_path) and process.poll() is None:
            time.sleep(0.001)
        begin = time.perf_counter()
        if runs > 1:  # the first run tells how long writing takes
            time.sleep(rng.uniform(0, length))
            process.kill()
        if process.wait() == -signal.SIGKILL:
            killed += 1
        else:
            length = min(length, time.perf_counter() - begin)
        if (tmp_path / "out").exists():
            assert_whole(tmp_path / "out")
            assert not leftovers(tmp_path)
            for path in (tmp_path / "out").iterdir():
                path.unlink()
            (tmp_path / "out").rmdir()
        else:
            assert len(leftovers(tmp_path)) == 1
            # Cleaned as the next run does it: that run's own folder must be the only one the loop above sees.
            writer.clean_up(tmp_path / "out")
            assert leftovers(tmp_path) == []
    subprocess.run(command, env=ENV, check=True, capture_output=True)
    assert_whole(tmp_path / "out")


CRASH = """
import os, sys
from mlx_cosyh3.convert import main, writer
rename, count = os.rename, 0
def crash(*args):
    global count
    count += 1
    if count == int(sys.argv[1]):
        os._exit(9)
    rename(*args)
writer.os.rename = crash
rmtree = writer.shutil.rmtree
writer.shutil.rmtree = lambda *a, **k: os._exit(9) if sys.argv[1] == "3" else rmtree(*a, **k)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_killed_while_replacing(source, tmp_path, moment):
    """Before the first rename, between the two, and before the old model is deleted."""
    make(source, tmp_path / "out")
    old = snapshot(tmp_path / "out")
    options = arguments(source, tmp_path / "out", "-q", "4", "--overwrite")[3:]
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(moment), *options], env=ENV, capture_output=True, text=True
    )
    assert done.returncode == 9, done.stderr
    if moment == 1:
        assert snapshot(tmp_path / "out") == old
    if moment == 2:
        assert not (tmp_path / "out").exists() and len(leftovers(tmp_path)) == 2
    if moment == 3:
        assert_whole(tmp_path / "out")
        assert snapshot(tmp_path / "out") != old
    # The next run, even one that is refused, puts the old model back where none is, and removes the rest.
    with pytest.raises(CosyH3Error, match="exists: pass --overwrite"):
        make(source, tmp_path / "out")
    if moment == 2:
        assert snapshot(tmp_path / "out") == old
    make(source, tmp_path / "out", quantize="int8", overwrite=True)
    assert_whole(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


def test_a_running_conversion_is_not_cleaned_away(source, tmp_path):
    """Two at once to one target: the first to finish wins, the other says so and leaves nothing."""
    with pytest.raises(CosyH3Error, match="exists: pass --overwrite"):
        with OutputFolder(tmp_path / "out") as slow:
            make(source, tmp_path / "out")
            assert slow.exists()
    assert_whole(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


def test_a_folder_locked_elsewhere_is_left_alone(source, tmp_path):
    """The process id may be of another machine that shares the disk: the lock tells."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    folder = tmp_path / f".out.tmp-{dead.pid}-0123abcd"
    folder.mkdir()
    lock = writer._lock(folder)
    make(source, tmp_path / "out")
    assert folder.exists()
    os.close(lock)
    make(source, tmp_path / "out", overwrite=True)
    assert not folder.exists()


def test_similar_names_are_not_cleaned(source, tmp_path):
    names = [".out.tmp-notes", ".out.tmp-1x-00000000", "out.tmp-999999-00000000", ".out2.tmp-999999-00000000"]
    for name in names:
        (tmp_path / name).mkdir()
    make(source, tmp_path / "out")
    assert all((tmp_path / name).is_dir() for name in names)


def test_interrupt_leaves_nothing(source, tmp_path, monkeypatch, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "write_tensors", interrupt)
    assert main(arguments(source, tmp_path / "out")[3:]) == 130
    assert capsys.readouterr().err == "interrupted; nothing was written\n"
    assert os.listdir(tmp_path) == ["source"]
