"""Text front end: numbers read, tags whole, nothing lost when splitting, look-alikes caught, prompts laid out.

Run: python -m pytest -q tests/test_cosyvoice_text.py
With `wetext` installed every reading is tested with it and without; otherwise without.
"""

import importlib.util
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cosyh3.cosyvoice import numerals, prompts, reading, text
from mlx_cosyh3.cosyvoice.special_tokens import ADDED, END_OF_PROMPT, TAG, check_tags
from mlx_cosyh3.cosyvoice.split import sentences
from mlx_cosyh3.errors import CosyH3Error

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
