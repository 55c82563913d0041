"""Text cut into segments, and text that arrives in pieces: nothing lost, nothing too long, whatever is typed.

Run: python -m pytest -q tests/test_cosyvoice_split.py
"""

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cosyh3.cosyvoice import reading, text
from mlx_cosyh3.cosyvoice.special_tokens import END_OF_PROMPT, TAG
from mlx_cosyh3.cosyvoice.split import LONGEST_CLUSTER, sentences, speaks, split
from mlx_cosyh3.errors import CosyH3Error
from tests.golden_data import SMALL
from tests.test_cosyvoice_text import reader, tables  # noqa: F401 - fixtures

CAP, TINY = 100, 20  # of split's defaults


# ---------------------------------------------------------------- splitting

GOLDEN = json.loads((SMALL / "cosyvoice" / "frontend" / "text.json").read_text())["cases"]


@pytest.mark.parametrize("case", GOLDEN, ids=[c["input"][:20] for c in GOLDEN])
def test_golden_split(case):
    """Upstream's normalised text gives upstream's segments."""
    language = text.language_of(case["input"])
    unit = len if language == "zh" else lambda s: len(s.split())
    assert split(text._with_full_stop(case["unsplit"], language), unit) == case["segments"]


# Where the normalised text differs from upstream's (without wetext), and why.
DIFFERENT = {
    "今天气温": "digits are read: upstream leaves 25 and 100m平方",
    "你好 world": '" - " is a comma: upstream removes its blanks first and so never finds it; no doubled blank is left',
    "Hello world. This": "1999 is read as pairs, not as a number with a comma in it",
    "word0 word1": "a number apart from its letter: word zero, not wordzero",
}


@pytest.mark.parametrize("case", GOLDEN, ids=[c["input"][:20] for c in GOLDEN])
def test_golden_normalise(case, tables):
    why = [reason for start, reason in DIFFERENT.items() if case["input"].startswith(start)]
    assert (text.normalize(case["input"]) != case["unsplit"]) == bool(why), why


def test_long_text_without_punctuation():
    said = split("字" * 500)
    assert "".join(said) == "字" * 500
    assert TINY <= min(map(len, said)) and max(map(len, said)) <= CAP
    words = ("word " * 700).strip()
    said = split(words)
    assert "".join(said) == words and all(s.lstrip().startswith("word") and s.endswith("word") for s in said)
    commas = "这里没有句号只有逗号，" * 30
    assert all(s.endswith("，") for s in split(commas))


def test_what_is_no_sentence_end():
    for whole in [
        "It is 3.14 m. wide",
        "Use tools, e.g. this one",
        "At 10:30 in a.b or file.txt",
        "Dr. Smith and Mr. J. Doe",
        "the U.S. Army",
        "see http://a.com/x?y=1 now",
        "共1,000,000个和3.5米",
    ]:
        assert len(sentences(whole)) == 1 or whole == "It is 3.14 m. wide", whole
    assert all(not s.endswith("3.") for s in sentences("It is 3.14. Right."))
    assert sentences("Hi! You? I: me; x. End") == ["Hi!", " You?", " I:", " me;", " x. End"]
    assert sentences("他说：“好！”然后走了。真的？") == ["他说：", "“好！”", "然后走了。", "真的？"]
    assert sentences('He said "stop." Then') == ['He said "stop."', " Then"]
    assert sentences("What?!... Yes") == ["What?!...", " Yes"]


def test_nothing_is_lost_at_the_ends(reader):
    assert text.segments("你好世界") == ["你好世界。"]
    assert text.segments("第一段\n第二段") == ["第一段。第二段。"]
    assert text.segments("No stop here") == ["No stop here."]
    assert text.segments("Title\n\nMore text") == ["Title. More text."]
    assert text.segments("He said “stop.”") == ["He said “stop.”"]
    assert text.segments("Hello. [laughter]") == ["Hello. [laughter]"]
    assert text.segments("Hello", normalise=False) == ["Hello"]


def test_short_rest_joins():
    said = split("甲" * 70 + "。" + "乙" * 5 + "。")
    assert said == ["甲" * 70 + "。" + "乙" * 5 + "。"]
    said = split("甲" * 95 + "。" + "乙" * 10 + "。")  # 107 units: shared out, not 96 and a tiny rest
    assert len(said) == 2 and min(map(len, said)) >= TINY and max(map(len, said)) <= CAP


PIECES = st.sampled_from(
    ["。", "，", ".", "!", "?", " ", "\n", "”", '"', "[laughter]", "<strong>", "</strong>", "<|endofprompt|>", "3.14"]
    + ["e.g. ", "字", "你好世界", "hello ", "Dr. ", "👨‍👩‍👧", "é", "e\u0301", "\u0301", "\u200d", "🇩🇪", "각", "1,000,000"]
    + ["²", "$5", "word", "…", "——", "[AA0]", "क्षि", "\ud83d", "\udc00", "٣", "ß", "\0", "\ufeff"]
)
ANY_TEXT = st.one_of(
    st.text(max_size=300),
    st.lists(PIECES, max_size=200).map("".join),
    st.tuples(st.text(min_size=1, max_size=3), st.integers(1, 400)).map(lambda t: t[0] * t[1]),
)


@given(ANY_TEXT)
@settings(max_examples=3000, deadline=None)
def test_split_of_any_text(raw):
    said = split(raw)
    assert "".join(said) == raw and all(said)
    assert all(len(s) <= CAP for s in said)
    assert len(said) < 2 or min(map(len, said)) >= TINY
    cuts, at = set(), 0
    for s in said[:-1]:
        at += len(s)
        cuts.add(at)
    for tag in TAG.finditer(raw):
        assert not any(tag.start() < cut < tag.end() for cut in cuts)
    for cut in cuts:
        mark = unicodedata.category(raw[cut])[0] == "M" or "\u200d" in raw[cut - 1 : cut + 1]
        pile = raw[max(0, cut - LONGEST_CLUSTER) : cut]  # only an endless pile of marks may be cut
        assert not mark or all(unicodedata.category(c) in ("Mn", "Mc", "Me", "Cf") for c in pile[1:])
        assert not ("\ud800" <= raw[cut - 1] <= "\udbff" and "\udc00" <= raw[cut] <= "\udfff")


@given(ANY_TEXT, st.integers(1, 12), st.integers(0, 12), st.integers(0, 4))
@settings(max_examples=500, deadline=None)
def test_split_with_any_sizes(raw, most, least, merge):
    assert "".join(split(raw, len, most, least, merge)) == raw
    assert "".join(split(raw, lambda s: 1000, most, least, merge)) == raw  # a length that never fits still ends


@given(ANY_TEXT)
@settings(max_examples=800, deadline=None)
def test_segments_of_any_text(raw):
    try:
        said = text.segments(raw, note=None)
    except CosyH3Error as error:
        assert "\n" not in str(error)
    else:
        assert said and all(speaks(s) and s == s.strip() for s in said)


def test_bad_sizes():
    with pytest.raises(CosyH3Error, match="max_units 0"):
        split("a", max_units=0)


HOSTILE = ["<strong>" * 9000 + "a", ". " * 20000 + "a", "字" + " " * 60000 + "字", "[a" * 20000, "1" * 60000]
HOSTILE += ["\u0301" * 40000, "🇩" * 40000, "<|" * 20000, "1,111" * 9000, "1-1" * 15000, "½" * 20000, "a\n\n" * 20000]


@pytest.mark.parametrize("raw", HOSTILE, ids=[h[:4].encode("unicode_escape").decode() for h in HOSTILE])
def test_long_hostile_texts(raw, tables):
    """The work grows with the length, not with its square: what `length` is asked to measure is counted."""
    measured = 0

    def length(piece):
        nonlocal measured
        measured += len(piece)
        return len(piece)

    assert "".join(split(raw, length)) == raw
    assert measured < 100 * len(raw)
    assert reading.english(raw) and reading.chinese(raw)
    if speaks(raw):
        assert text.segments(raw, note=None)


# ---------------------------------------------------------------- text that arrives in pieces


def test_streamed_text(reader):
    def parts(*given_parts, **options):
        return list(text.pieces(given_parts, note=None, **options))

    assert parts("Hel", "lo the", "re, my fri", "end") == ["Hello", " there, my", " friend."]
    assert "".join(parts("I have 1", "5 ca", "ts. And", " more")) == "I have fifteen cats. And more."
    assert "".join(parts(*"It costs $5.50 or 1,000,000 [laughter] <strong>now</strong>.")) == text.segments(
        "It costs $5.50 or 1,000,000 [laughter] <strong>now</strong>."
    )[0]
    assert "".join(parts(*"你好，我有猫。真的吗，")) == "你好，我有猫。真的吗，。"
    assert "".join(parts(*"我有3只猫，还有2本书。真的")) == "我有三只猫，还有两本书。真的。"
    german = ["Ich habe ", "5 Kat", "zen und das ist gut"]
    assert "".join(parts(*german)) == "".join(parts(*german, language="de")) == "".join(german)
    assert parts("Hello ", "\n") == ["Hello", "."]
    long = "字" * 3000
    assert "".join(parts(*long, normalise=False)) == long and max(map(len, parts(*long))) < 500
    assert "".join(parts("I have 5", " cats", normalise=False)) == "I have 5 cats"


def test_streamed_text_is_spoken_as_it_comes():
    stream, given_so_far = None, []

    def source():
        for part in ["The first ", "words of ", "a sentence ", "without digits"]:
            given_so_far.append(part)
            yield part

    stream = text.pieces(source())
    assert next(stream) == "The first" and len(given_so_far) == 1


def test_streamed_text_errors():
    for bad, message in [
        ([], "text is empty"),
        (["  ", ""], "text is empty"),
        (["...", "!"], "nothing to speak"),
        (["a", 5], "not int"),
        (["ok ", "【laughter】 x "], "only looks like"),
        (["a <|endofprompt|> b"], "cannot hold"),
        (["x \ud800 "], "not Unicode"),
    ]:
        with pytest.raises(CosyH3Error, match=message):
            list(text.pieces(bad))


@given(ANY_TEXT, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_streamed_text_loses_nothing(raw, rng):
    raw = "".join(raw.replace(END_OF_PROMPT, "").split("\n"))
    cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(5))
    parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)])]
    try:
        assert "".join(text.pieces(parts, normalise=False, note=None)) == raw
    except CosyH3Error as error:
        assert "\n" not in str(error)
