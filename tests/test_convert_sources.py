"""Conversion: tokenizers, folders and files that a model comes from, the hub, the command. Tiny random models."""

import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import termios

import numpy as np
import pytest
from tests.h3_checkpoints import Lazy, make, save, save_tokenizer, state_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import mlx_cosyh3
from mlx_cosyh3.convert import main, sanitize
from mlx_cosyh3.convert import sources, vocabulary
from mlx_cosyh3.convert.sources import open_source, read_safetensors
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from tests.test_convert import EMBEDDING, source, weights_of  # noqa: F401 - `source` is a fixture

# Tokenizer


def wide(tmp_path, rows=264, **config):
    return save(tmp_path / "wide", state_dict(rows=rows, n_layer=1, attention=()), config=config or None).parent


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_tokenizer_sets_the_true_vocabulary(tmp_path, names):
    folder = save_tokenizer(tmp_path / "tokens", 260, names=names)
    make(wide(tmp_path), tmp_path / "out", tokenizer=str(folder))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["padded_vocab_size"], config["eos_token_id"]) == (260, 264, 259)
    model = mlx_cosyh3.load(tmp_path / "out")
    assert model.tokenizer.vocab_size == 260 and model.tokenizer.decode(model.tokenizer.encode("ab é")) == "ab é"
    assert "merges.txt" in os.listdir(tmp_path / "out") and "vocab.json" in os.listdir(tmp_path / "out")


def test_tokenizer_of_the_source_folder_and_its_eos(tmp_path):
    source = wide(tmp_path, eos_token_id=65)
    save_tokenizer(source, 260)
    make(source, tmp_path / "out", tokenizer=None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (260, 65)
    assert "tokenizer | the source's own |" in (tmp_path / "out" / "README.md").read_text()


def test_tokenizer_json(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    from mlx_cosyh3.tokenizer import ALPHABET

    bpe = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|endoftext|>"])
    source = wide(tmp_path)
    bpe.save(str(source / "tokenizer.json"))
    report = make(source, tmp_path / "out", tokenizer=None)
    assert (report.config["vocab_size"], report.config["eos_token_id"]) == (257, 256)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_tokenizer_errors(tmp_path, monkeypatch):
    source = wide(tmp_path)
    with pytest.raises(CosyH3Error, match="has 300 ids, more than the 264 rows"):
        make(source, tmp_path / "out", tokenizer=str(save_tokenizer(tmp_path / "big", 300)))
    with pytest.raises(CosyH3Error, match="no such folder"):
        make(source, tmp_path / "out", tokenizer=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CosyH3Error, match="holds neither tokenizer.json nor"):
        make(source, tmp_path / "out", tokenizer=str(tmp_path / "empty"))
    with pytest.raises(CosyH3Error, match="with 264 rows of embedding it is not GPT-2's either: pass --tokenizer"):
        make(source, tmp_path / "out", tokenizer=None)
    with pytest.raises(CosyH3Error, match="vocab_size 999 is not in 1..264"):
        make(wide(tmp_path, vocab_size=999), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_gpt2s_tokenizer_comes_from_the_hub(tmp_path, monkeypatch):
    """50,264 rows without a tokenizer beside them: GPT-2's, and only its two files."""
    asked = []
    folder = save_tokenizer(tmp_path / "hub", 270)

    def find_model(repo, **options):
        asked.append((repo, options))
        return folder

    monkeypatch.setattr(sys.modules["mlx_cosyh3.load"], "find_model", find_model)
    monkeypatch.setattr(vocabulary, "GPT2_ROWS", range(270, 280))
    report = make(wide(tmp_path, rows=272), tmp_path / "out", tokenizer=None)
    assert asked == [("openai-community/gpt2", {"allow_patterns": ["vocab.json", "merges.txt"]})]
    assert (report.config["vocab_size"], report.config["eos_token_id"]) == (270, 269)
    assert "`openai-community/gpt2` (MIT)" in (tmp_path / "out" / "README.md").read_text()


# Sources


def test_folder_with_several_models(source, tmp_path):
    save(source, state_dict(seed=1), name="other.safetensors")
    with pytest.raises(
        CosyH3Error, match=r"holds 2 models: pick one with --file \(model.safetensors, other.safetensors\)"
    ):
        make(source, tmp_path / "out")
    make(source, tmp_path / "out", file="other.safetensors")
    with pytest.raises(
        CosyH3Error, match="holds no file 'third.pt'; it holds model.safetensors, other.safetensors"
    ):
        make(source, tmp_path / "out2", file="third.pt")
    with pytest.raises(CosyH3Error, match="leave it out"):
        make(source / "model.safetensors", tmp_path / "out2", file="other.safetensors")
    (source / "training_args.bin").write_bytes(b"x")
    (source / "other.safetensors").unlink()
    make(source, tmp_path / "out3")


def test_sharded_source_with_and_without_index(tmp_path):
    tensors, folder = state_dict(), tmp_path / "a"
    names = list(tensors)
    parts = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for i, part in enumerate(parts):
        save(folder, {k: tensors[k] for k in names[i::3]}, name=part)
    make(folder, tmp_path / "plain", heads=2)
    index = {"weight_map": {k: parts[i % 3] for i, k in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    make(folder, tmp_path / "index", heads=2, file="model.safetensors.index.json")
    assert (tmp_path / "plain/model.safetensors").read_bytes() == (
        tmp_path / "index/model.safetensors"
    ).read_bytes()
    assert weights_of(tmp_path / "plain").keys() == sanitize(tensors).keys()
    (folder / parts[1]).unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of 3 files of the model: model-00002-of-00003.safetensors"):
        make(folder, tmp_path / "out", heads=2)


def test_source_reports_files_and_hashes(source):
    opened = open_source(str(source))
    assert opened.files == [("model.safetensors", sources.sha256(source / "model.safetensors"))]
    tensor = opened.tensors[EMBEDDING]
    assert (tensor.shape, tensor.dtype, tensor.nbytes) == ((104, 64), "F32", 104 * 64 * 4)
    assert np.array_equal(tensor.rows(3, 9), state_dict()[EMBEDDING][3:9])
    assert not tensor.numpy().flags.writeable


def test_state_dict_wrappers():
    inner = {k: Lazy(v) for k, v in state_dict().items()}
    for tree in (inner, {"state_dict": inner, "epoch": 3}, {"model": inner}):
        assert sources.state_dict(tree, "x.pt")[0].keys() == inner.keys()
    lightning = {
        "pytorch-lightning_version": "1.8",
        "state_dict": {**{f"model.{k}": v for k, v in inner.items()}, "loss.w": Lazy(np.ones(1))},
    }
    tensors, ignored = sources.state_dict(lightning, "x.pt")
    assert tensors.keys() == inner.keys() and ignored == ["loss.w"]
    for tree, message in [
        ([1], "holds one object of type list, not a state dict"),
        ({"a": 1}, "holds no tensors at its top .its keys: 'a'"),
        ({"pytorch-lightning_version": "1", "state_dict": {"a": inner[EMBEDDING]}}, "none of the keys"),
        ({"pytorch-lightning_version": "1"}, "without a state_dict"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            sources.state_dict(tree, "x.pt")


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_damaged_safetensors_never_crash(tmp_path_factory, data):
    """Any bytes changed in the header, or the file cut: an error of one line, or tensors inside the file."""
    folder = tmp_path_factory.getbasetemp()
    path = folder / "damaged.safetensors"
    save_file({"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(3, np.float16)}, path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 50))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        for tensor in read_safetensors(path).values():
            assert tensor.numpy().shape == tensor.shape
    except CheckpointError as e:
        assert "\n" not in str(e)


def hub_cache(tmp_path, repo, files):
    """A hub cache that holds a repo: what snapshot_download leaves behind."""
    root = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    for name, write in files.items():
        write(root / "snapshots" / commit, name)
    return {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "MLX_DISABLE_COMPILE": "1"}


def test_hub_repo_from_the_local_cache(tmp_path):
    def model(folder, name):
        save(folder, state_dict(rows=264, n_layer=1, attention=()), name=name)
        save_tokenizer(folder, 260)

    env = hub_cache(tmp_path, "danfu09/H3-small", {"model-a.safetensors": model, "model-b.safetensors": model})
    command = [
        sys.executable,
        "-m",
        "mlx_cosyh3.convert",
        "--model",
        "danfu09/H3-small",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (
        done.returncode == 2 and "pick one with --file (model-a.safetensors, model-b.safetensors)" in done.stderr
    )
    done = subprocess.run([*command, "--file", "model-b.safetensors"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    text = (tmp_path / "out" / "README.md").read_text()
    assert "license: bsd-3-clause\nbase_model: danfu09/H3-small\n" in text and "--file model-b.safetensors" in text


# Command


def test_dry_run_prints_the_plan_and_writes_nothing(source, tmp_path, capsys):
    for flag in ("--dry-run", "--dry_run"):
        command = ["--model", str(source), "--out", str(tmp_path / "out"), "--tokenizer", "none", "-q", "8", flag]
        assert main(command) == 0
        out = capsys.readouterr().out
        assert '"d_model": 64' in out and "layers.2.mlp.fc2.scales" in out and "would write" in out
        assert sorted(os.listdir(tmp_path)) == ["source"]


def test_report_and_summary(source, tmp_path, capsys):
    seen = []
    report = make(source, tmp_path / "out", quantize=4, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == (source / "model.safetensors").stat().st_size + report.bytes
    assert report.bits_per_weight == pytest.approx(8 * report.bytes / report.parameters)
    assert main(["--model", str(source), "--out", str(tmp_path / "b"), "--tokenizer", "none", "--quantize=4"]) == 0
    out, err = capsys.readouterr()
    assert f"32.00 -> {report.bits_per_weight:.2f} bits per weight" in out and err == ""  # no bar: not a terminal


def test_bar_on_a_terminal_only(source, tmp_path):
    command = [sys.executable, "-m", "mlx_cosyh3.convert", "--model", str(source), "--tokenizer", "none", "--out"]
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    subprocess.run([*command, str(tmp_path / "a")], stderr=slave, stdout=subprocess.DEVNULL, check=True)
    assert select.select([master], [], [], 5)[0] and b"converting" in os.read(master, 4096)
    os.close(slave)
    os.close(master)
    piped = subprocess.run([*command, str(tmp_path / "b")], capture_output=True, check=True, text=True)
    assert piped.stderr == "" and piped.stdout.count("\n") == 1


def test_wrong_options_end_with_2(tmp_path, capsys):
    assert main(["--model", str(tmp_path / "none.pt"), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: no such file or folder: ") and err.count("\n") == 1
    for argv in (["--model", "x"], ["--model", "x", "--out", "y", "--heads", "two"]):
        with pytest.raises(SystemExit) as e:
            main(argv)
        assert e.value.code == 2
