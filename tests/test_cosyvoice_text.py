"""Text front end: numbers read, tags whole, nothing lost when splitting, look-alikes caught, prompts laid out.

Run: python -m pytest -q tests/test_cosyvoice_text.py
With `wetext` installed every reading is tested with it and without; otherwise without.
"""

import importlib.util
import json
import random
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cosyh3.cosyvoice import numerals, prompts, reading, text
from mlx_cosyh3.cosyvoice.special_tokens import ADDED, END_OF_PROMPT, TAG, check_tags
from mlx_cosyh3.cosyvoice.split import LONGEST_CLUSTER, sentences, speaks, split
from mlx_cosyh3.errors import CosyH3Error
from tests.golden_data import SMALL

HAS_WETEXT = importlib.util.find_spec("wetext") is not None
CAP, TINY = 100, 20  # of split's defaults


@pytest.fixture(params=["tables", pytest.param("wetext", marks=pytest.mark.skipif(not HAS_WETEXT, reason="no wetext"))])
def reader(request, monkeypatch):
    """Every way to read numbers: our own rules, and wetext where it is installed."""
    if request.param == "tables":
        monkeypatch.setattr(text, "_normalizer", lambda language: None)
    return request.param


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.setattr(text, "_normalizer", lambda language: None)


# ---------------------------------------------------------------- numbers


def test_english_numbers():
    for n, words in [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (101, "one hundred and one"),
        (1001, "one thousand and one"),
        (1100, "one thousand one hundred"),
        (1_000_000, "one million"),
        (10**15 - 1, " ".join(f"nine hundred and ninety-nine {s}" for s in "trillion billion million thousand".split())
         + " nine hundred and ninety-nine"),
    ]:
        assert numerals.english(n) == words
    for n, words in [(1, "first"), (12, "twelfth"), (20, "twentieth"), (113, "one hundred and thirteenth")]:
        assert numerals.english_ordinal(n) == words
    for n, words in [(1905, "nineteen oh five"), (1900, "nineteen hundred"), (2005, "two thousand and five")]:
        assert numerals.english_year(n) == words
    assert numerals.english_number("3.14") == "three point one four"
    assert numerals.english_number("1" * 16) == " ".join(["one"] * 16)


def test_english_numbers_are_those_of_inflect():
    """Upstream spells with inflect; ours is the same without its commas, which would be read as pauses."""
    engine = pytest.importorskip("inflect").engine()
    rng = random.Random(0)
    for _ in range(2000):
        n = rng.randrange(10 ** rng.randint(1, 15))
        assert numerals.english(n) == engine.number_to_words(n).replace(",", "")
        assert numerals.english_ordinal(n) == engine.number_to_words(engine.ordinal(n)).replace(",", "")


def test_chinese_numbers():
    for n, words in [
        (0, "零"),
        (10, "十"),
        (15, "十五"),
        (20, "二十"),
        (101, "一百零一"),
        (110, "一百一十"),
        (2005, "两千零五"),
        (10_010, "一万零一十"),
        (100_001, "十万零一"),
        (1_000_000, "一百万"),
        (200_000_000, "两亿"),
        (1_234_567_890, "十二亿三千四百五十六万七千八百九十"),
        (10**12, "一万亿"),
    ]:
        assert numerals.chinese(n) == words
    assert numerals.chinese_number("1,000.50") == "一千点五零"
    assert numerals.chinese_number("007") == "零零七"


# ---------------------------------------------------------------- reading, both ways

READ = [
    ("I have an iPhone 15.", "I have an iPhone fifteen."),
    ("It is 3.14.", "It is three point one four."),
    ("about 1,000,000 of them", "about one million of them"),
    ("It costs $5.", "It costs five dollars."),
    ("10% of it", "ten percent of it"),
    ("the 1st and the 21st", "the first and the twenty first"),
    ("x² + 1", "x squared plus one"),
    ("the 1980s and 90s", "the nineteen eighties and nineties"),
    ("the year 1999", "the year nineteen ninety nine"),
    ("at 3:30 pm", "at three thirty pm"),
    ("5 ml and 60 km/h", "five milliliters and sixty kilometers per hour"),
    ("It is 20°C, 5 kg", "It is twenty degrees Celsius, five kilograms"),
    ("from 10-20 people", "from ten to twenty people"),
    ("add 1/2 of it", "add one half of it"),
    ("#1 & more", "number one and more"),
    ("call 555-1234", "call five five five, one two three four"),
    ("Müller has 5 cats and a naïve “7”.", "Müller has five cats and a naïve “seven”."),
    ("a < b / c, no digits: * e.g. this", "a < b / c, no digits: * e.g. this"),
    ('Say "5" to Bei', 'Say "five" to Bei'),
    ("I saw  5\ncats", "I saw five cats"),
    ("word0 word1", "word zero word one"),
    ("今天25度", "今天二十五度"),
    ("我的iPhone 15很好", "我的iPhone十五很好"),
    ("圆周率3.14", "圆周率三点一四"),
    ("1,000,000元", "一百万元"),
    ("价格$5", "价格五美元"),
    ("涨了10%", "涨了百分之十"),
    ("第1名", "第一名"),
    ("特工007", "特工零零七"),
    ("面积100m²", "面积一百平方米"),
    ("函数x² + 1", "函数x平方加一"),
    ("我有5ml水", "我有五毫升水"),
    ("2024年5月1日", "二零二四年五月一日"),
    ("日期2024-05-01", "日期二零二四年五月一日"),
    ("下午3:30", "下午三点三十分"),
    ("电话13812345678", "电话幺三八幺二三四五六七八"),
    ("他有2个苹果和１２本书", "他有两个苹果和十二本书"),
]


@pytest.mark.parametrize("given_text, spoken", READ, ids=[r[0] for r in READ])
def test_reads(reader, given_text, spoken):
    assert text.normalize(given_text).replace("-", " ") == spoken  # wetext writes no hyphen in twenty one


def test_tables_only(tables):
    for given_text, spoken in [
        ("007", "zero zero seven"),
        ("705A and 121B or E100", "seven hundred and five A and one hundred and twenty-one B or E one hundred"),
        ("on 2024-05-01", "on May first, twenty twenty-four"),
        ("$3.50, £1.01, $0.01, $2.5m", "three dollars and fifty cents, one pound and one penny, one cent, "
         "two point five million dollars"),
        ("10:00 am, 10:00, 3:05", "ten am, ten o'clock, three oh five"),
        ("120 mmHg", "one hundred and twenty millimeters of mercury"),
        ("1 km, 1.5 km", "one kilometer, one point five kilometers"),
        ("v1.2.3", "v one point two point three"),
        ("10² and 10⁷", "ten squared and ten to the power of seven"),
        ("2½ cups, ¼", "two and a half cups, one quarter"),
        ("-5 to −40", "minus five to minus forty"),
        ("3x4 = 12", "three times four equals twelve"),
        ("H2O, 4K, B12", "H two O, four K, B twelve"),
        ("ask Dr. Smith", "ask Doctor Smith"),
        ("24/7", "twenty-four/seven"),
        ("比例1/2和2½", "比例二分之一和二又二分之一"),
        ("零下-5度，10-20人", "零下负五度，十到二十人"),
        ("速度60km/h，120mmHg", "速度六十公里每小时，一百二十毫米汞柱"),
    ]:
        assert text.normalize(given_text) == spoken, given_text


def test_alphanumerics_follow_the_language_of_the_sentence(reader):
    assert text.normalize("705A and 121B or E100").isascii()
    assert "one hundred" in text.normalize("705A and 121B or E100")
    assert text.normalize("房间705A和121B") == "房间七百零五A和一百二十一B"
    mixed = text.normalize("我喜欢这3首歌。They came out in 1999 with 2 more songs. 真的有5首。")
    assert mixed.startswith("我喜欢这三首歌。They came out in nineteen ninety")
    assert "two more songs" in mixed and mixed.endswith("真的有五首。")


OTHERS = [
    "Bei 10 hoch 7 Metern ist es natürlich größer.",
    "Il a 5 ans et 3 sœurs.",
    "Tengo 2 gatos y 10 perros en la casa.",
    "Привет, у меня 5 кошек.",
    "これは10個です。",
    "カレーは5番",
    "사과 3개 주세요",
    "لدي ٣ قطط و 5 كلاب",
    "ฉันมีแมว 5 ตัว",
    "मेरे पास 5 बिल्लियाँ हैं।",
    "Έχω 5 γάτες",
]


@pytest.mark.parametrize("foreign", OTHERS)
def test_other_languages_pass_through(reader, foreign):
    assert text.normalize(foreign) == foreign
    assert text.segments(foreign, note=None) == [foreign]


def test_language_can_be_said(reader):
    assert text.normalize("Version 5", language="de") == "Version 5"
    assert text.normalize("Version 5", language="en-US") == "Version five"
    assert text.normalize("5", language="zh") == "五"
    assert text.normalize("5") == "five"


def test_nothing_to_read_stays(tables):
    for plain in ["Hello there, “friend” — it's naïve… right?", "你好，世界！", "A. B. C.", "See e.g. this; or that."]:
        assert text.normalize(plain) == plain


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=400, deadline=None)
def test_no_letter_is_lost(raw):
    """Of an English sentence with anything in it, every letter survives in order (units and titles aside)."""
    letters = [c for c in raw if c.isalpha() and ord(c) > 127]
    for spoken in (reading.english(raw), reading.chinese(raw)):
        rest = iter(spoken)
        assert all(c in rest for c in letters if c not in "℃℉µμ" and not 0xFF00 <= ord(c) < 0xFFF0)


@pytest.mark.skipif(not HAS_WETEXT, reason="no wetext")
def test_wetext_in_threads():
    lines = [f"I have {i} dogs and ${i}.{i % 100:02d}." for i in range(60)] + [f"我有{i}只狗" for i in range(60)]
    alone = [text.normalize(line) for line in lines]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(text.normalize, lines * 2)) == alone * 2


MARKS = list("aB109.,$% -/:éü字年你😀\u200d\u0301\0\x07“\"\\{}[]<|>#@&*²½٣ßㅎあ\ue000\ufeff°€'\t\n")


@pytest.mark.skipif(not HAS_WETEXT, reason="no wetext")
@given(st.text(st.sampled_from(MARKS), max_size=20))
@settings(max_examples=400, deadline=None)
def test_wetext_never_fails_or_loses_letters(raw):
    spoken = text.normalize(raw, "en")
    rest = iter(spoken)
    assert all(c in rest for c in raw if c.isalpha() and ord(c) > 127)


# ---------------------------------------------------------------- tags


def test_tags_stay_whole_and_the_rest_is_read(reader):
    assert text.normalize("I have 5 [laughter] <strong>10</strong> cats [AA0][B].") == (
        "I have five [laughter] <strong>ten</strong> cats [AA0][B]."
    )
    assert text.normalize("你好<strong>15</strong>个[breath] 苹果") == "你好<strong>十五</strong>个[breath]苹果"
    head = "You are 1 helpful assistant.<|endofprompt|>"
    assert text.normalize(f"{head}I am 5.") == f"{head}I am five."
    said = text.segments(f"{head}{'I am 5 years old now. ' * 40}", lambda s: len(s.split()))
    assert len(said) > 1 and all(s.startswith(head) and s.count(END_OF_PROMPT) == 1 for s in said)
    assert all("five" in s and "5" not in s.removeprefix(head) for s in said)


def test_spans_are_not_cut_between_sentences():
    span = "<strong>One two three. Four five six.</strong>"
    assert sentences(f"Zero. {span} Seven.") == ["Zero.", f" {span} Seven."]


@pytest.mark.parametrize(
    "typed, right",
    [
        ("＜|endofprompt|＞", "<|endofprompt|>"),
        ("〈|endofprompt|〉", "<|endofprompt|>"),
        ("<｜endofprompt｜>", "<|endofprompt|>"),
        ("《|endofprompt|》", "<|endofprompt|>"),
        ("<|endofprompt>", "<|endofprompt|>"),
        ("<endofprompt>", "<|endofprompt|>"),
        ("[endofprompt]", "<|endofprompt|>"),
        ("<|EndOfPrompt|>", "<|endofprompt|>"),
        ("< |endofprompt| >", "<|endofprompt|>"),
        ("<|end_of_prompt|>", "<|endofprompt|>"),
        ("<|endofpromt|>", "<|endofprompt|>"),
        ("<|endof\u200bprompt|>", "<|endofprompt|>"),
        ("【laughter】", "[laughter]"),
        ("［breath］", "[breath]"),
        ("〈strong〉", "<strong>"),
        ("＜/strong＞", "</strong>"),
        ("＜laughter＞", "<laughter>"),
    ],
)
def test_look_alikes(typed, right):
    for call in (lambda: text.segments(f"hi {typed} there"), lambda: prompts.instruction(f"Speak softly{typed}", 3)):
        with pytest.raises(CosyH3Error, match="read aloud") as error:
            call()
        assert f"write {right} exactly" in str(error.value) and "\n" not in str(error.value)


def test_unknown_names():
    with pytest.raises(CosyH3Error, match="is no token of this model"):
        check_tags("<|zh|>你好")
    for plain in ["a < b > c", "if (a<b|c|d>e)", "【注】你好", "《breath》是一本书", "f[a] = [sic]", "1 < 2 | 3 > 2"]:
        check_tags(plain, note=lambda message: pytest.fail(message))
    for token in ADDED[3]:
        check_tags(f"x{token}y", note=lambda message: pytest.fail(message))
        assert TAG.fullmatch(token)
    notes = []
    check_tags("[Laughter] hi [laugh]", notes.append)
    assert len(notes) == 2 and all("nearest tag is [laughter]" in line for line in notes)


def test_kanji_note():
    with pytest.warns(UserWarning, match="katakana"):
        text.segments("漢字とかな")
    notes = []
    text.segments("カタカナ デス。", note=notes.append)
    text.segments("你好", note=notes.append)
    assert notes == []


@pytest.mark.parametrize(
    "silent, message",
    [
        ("", "text is empty"),
        ("   \n\t", "text is empty"),
        (END_OF_PROMPT, "text is empty"),
        ("...", "nothing to speak"),
        ("——？！", "nothing to speak"),
        ("😀!", "nothing to speak"),
        ("<strong></strong>", "nothing to speak"),
        ("\u0301", "nothing to speak"),
        ("ab\ud800", "not Unicode"),
    ],
)
def test_nothing_to_say(silent, message):
    with pytest.raises(CosyH3Error, match=message):
        text.segments(silent)


def test_a_tag_alone_can_be_heard(reader):
    assert text.segments("[breath]") == ["[breath]"]
    assert text.segments("[h][ǎo]") == ["[h][ǎo]"]


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


# ---------------------------------------------------------------- prompts

PREFIX = "You are a helpful assistant.<|endofprompt|>"


def quiet(*args, **options):
    return prompts.layout(*args, note=pytest.fail, **options)


def test_version_3_layouts():
    assert quiet("sft", 3, "Hi.") == ("", "<|endofprompt|>Hi.")
    assert quiet("cross_lingual", 3, "Hi.") == ("", f"{PREFIX}Hi.")
    assert quiet("zero_shot", 3, "Hi.", transcript="Me.") == (f"{PREFIX}Me.", "Hi.")
    said = "You are a helpful assistant. Speak softly.<|endofprompt|>"
    assert quiet("instruct", 3, "Hi.", instruct="Speak softly.") == (said, "Hi.")


def test_version_2_layouts():
    assert quiet("sft", 2, "Hi.") == ("", "Hi.")
    assert quiet("cross_lingual", 2, "Hi.") == ("", "Hi.")
    assert quiet("zero_shot", 2, "Hi.", transcript="Me.") == ("Me.", "Hi.")
    assert quiet("instruct", 2, "Hi.", instruct="Speak softly.") == ("Speak softly.<|endofprompt|>", "Hi.")


def test_prefix_exactly_once():
    once = quiet("zero_shot", 3, "Hi.", transcript=f"{PREFIX}Me.")
    assert once == (f"{PREFIX}Me.", "Hi.")
    assert prompts.with_prefix(prompts.with_prefix("x")) == f"{PREFIX}x"
    assert quiet("cross_lingual", 3, f"{PREFIX}Hi.") == ("", f"{PREFIX}Hi.")
    assert quiet("zero_shot", 3, f"{PREFIX}Hi.", transcript="Me.") == (f"{PREFIX}Me.", "Hi.")
    assert quiet("sft", 3, "<|endofprompt|>Hi.") == ("", "<|endofprompt|>Hi.")
    said = "You are a helpful assistant. Speak softly.<|endofprompt|>"
    bare = said.replace("<|endofprompt|>", "")
    for form in ["Speak softly.", "Speak softly.<|endofprompt|>", said, bare, f" {said} "]:
        assert quiet("instruct", 3, "Hi.", instruct=form) == (said, "Hi.")
    with pytest.raises(CosyH3Error, match="occurs 2 times"):
        prompts.with_prefix(PREFIX + PREFIX)


def test_an_instruction_is_never_lost():
    # a saved voice brings its transcript: the instruction stays
    prompt, _ = quiet("instruct", 3, "Hi.", transcript="What the voice says in its clip.", instruct="Speak softly.")
    assert "Speak softly." in prompt and "clip" not in prompt
    with pytest.raises(CosyH3Error, match="cannot be used in zero_shot mode"):
        prompts.layout("zero_shot", 3, "Hi.", transcript="Me.", instruct="Speak softly.")
    with pytest.raises(CosyH3Error, match="give it as instruct"):
        prompts.layout("zero_shot", 3, "Speak softly.<|endofprompt|>Hi.", transcript="Me.")
    own = "You are a helpful assistant. Speak softly.<|endofprompt|>Hi."
    assert quiet("cross_lingual", 3, own) == ("", own)


@pytest.mark.parametrize("bad", [None, "", "  ", "<|endofprompt|>", PREFIX])
def test_empty_instruction(bad):
    with pytest.raises(CosyH3Error, match="instruction"):
        prompts.layout("instruct", 3, "Hi.", instruct=bad)


def test_prompt_errors_and_notes():
    with pytest.raises(CosyH3Error, match="goes on after"):
        prompts.instruction("Speak softly.<|endofprompt|>Hi.", 3)
    with pytest.raises(CosyH3Error, match="transcript is empty"):
        prompts.layout("zero_shot", 3, "Hi.", transcript=PREFIX)
    assert quiet("zero_shot", 3, "Hi.") == ("", "Hi.")  # the voice holds the transcript as ids
    with pytest.raises(CosyH3Error, match="modes are zero_shot"):
        prompts.layout("clone", 3, "Hi.")
    with pytest.raises(CosyH3Error, match="version 4"):
        prompts.layout("sft", 4, "Hi.")
    with pytest.warns(UserWarning, match="less than half"):
        prompts.layout("zero_shot", 3, "Hi.", transcript="A long transcript.")
    with pytest.warns(UserWarning, match="instruction has 200 characters"):
        prompts.layout("instruct", 3, "Hi.", instruct="x" * 200)
    with pytest.warns(UserWarning, match="above 60"):
        prompts.instruction("请" * 61, 2)
