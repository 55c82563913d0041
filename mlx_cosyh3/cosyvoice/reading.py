"""Digits, units and symbols as words, by a table of rules for English and one for Chinese.

What no rule knows stays as it is: nothing is dropped, and the model reads it as best it can. `english` and `chinese`
do the whole work when `wetext` is not installed; `english_first` holds the cases that wetext reads wrongly.
Rules run in order, each on what the earlier ones left. ASCII digits only ([0-9], never \\d).
"""

import re

from mlx_cosyh3.cosyvoice import numerals as n

NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
ALONE = r"(?<![0-9A-Za-z.,_])"  # a number starts here
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
FULL_WIDTH = {code: code - 0xFEE0 for code in (*range(0xFF10, 0xFF1A), 0xFF05, 0xFF04)} | {0xFF0B: ord("+")}
MONTHS = """January February March April May June July August September October November December""".split()
DATE = re.compile(r"(?<![\w-])([12][0-9]{3})-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])(?![\w-])")
TIME = re.compile(r"(?<![\w:.])([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?(?![\w:]|\.[0-9])")
RANGE = re.compile(rf"(?<![\w.,–-])({NUMBER})[-–~～—]({NUMBER})(?![0-9A-Za-z_–-])")
VERSION = re.compile(r"(?<![0-9.])[0-9]+(?:\.[0-9]+){2,}(?!\.?\w)")

# ------------------------------------------------------------------------------------------------ English

SCALE = {"k": "thousand", "K": "thousand", "m": "million", "M": "million", "bn": "billion", "B": "billion"}
MONEY = {"$": ("dollar", "cent"), "€": ("euro", "cent"), "£": ("pound", "penny"), "¥": ("yen", ""), "￥": ("yuan", "")}
FRACTIONS = {
    **{"½": "one half", "¼": "one quarter", "¾": "three quarters", "⅓": "one third", "⅔": "two thirds"},
    **{"⅛": "one eighth", "⅜": "three eighths", "⅝": "five eighths", "⅞": "seven eighths", "⅕": "one fifth"},
}
_UNITS = """km/h kilometer/s per hour|kph kilometer/s per hour|mph mile/s per hour|m/s meter/s per second|
mmHg millimeter/s of mercury|ml milliliter/s|mL milliliter/s|cl centiliter/s|dl deciliter/s|l liter/s|L liter/s|
mg milligram/s|µg microgram/s|μg microgram/s|g gram/s|kg kilogram/s|lb pound/s|lbs pound/s|oz ounce/s|
nm nanometer/s|mm millimeter/s|cm centimeter/s|m meter/s|km kilometer/s|ft foot/feet|mi mile/s|
mm² square millimeter/s|cm² square centimeter/s|m² square meter/s|km² square kilometer/s|
mm³ cubic millimeter/s|cm³ cubic centimeter/s|m³ cubic meter/s|
ms millisecond/s|min minute/s|hr hour/s|hrs hour/s|Hz hertz|kHz kilohertz|MHz megahertz|GHz gigahertz|
W watt/s|kW kilowatt/s|MW megawatt/s|kWh kilowatt hour/s|V volt/s|mA milliamp/s|dB decibel/s|
KB kilobyte/s|kB kilobyte/s|MB megabyte/s|GB gigabyte/s|TB terabyte/s|°C degree/s Celsius|°F degree/s Fahrenheit|
℃ degree/s Celsius|℉ degree/s Fahrenheit|° degree/s"""
UNITS = dict(line.strip().split(" ", 1) for line in _UNITS.replace("\n", "").split("|"))
BARE = {"m", "l", "L", "g", "W", "V", "B"}  # one letter: a unit only after a space or a longer context, never "5m"
TITLES = {"Dr": "Doctor", "Mr": "Mister", "Mrs": "Missus", "Prof": "Professor", "vs": "versus"}


def _unit(name, one):
    """"foot/feet", "meter/s per hour" in the singular or the plural."""
    words = []
    for word in UNITS[name].split():
        stem, _, many = word.partition("/")
        words.append(stem if one or not many else many if len(many) > 1 else stem + many)
    return " ".join(words)


def _money(m):
    unit, small = MONEY[m[1]]
    number, scale = m[2], SCALE.get(m[3], m[3])
    many = unit if unit in ("yen", "yuan") else f"{unit}s"
    if scale:
        return f"{n.english_number(number)} {scale} {many}"
    whole, _, part = number.replace(",", "").partition(".")
    if len(part) == 2 and small and part != "00":
        coins = f"{n.english(int(part))} {small if int(part) == 1 else 'pence' if small == 'penny' else f'{small}s'}"
        if not int(whole):
            return coins
        return f"{n.english_number(whole)} {unit if int(whole) == 1 else many} and {coins}"
    number = whole if part == "00" else number
    return f"{n.english_number(number)} {unit if number == '1' else many}"


def _measure(m):
    number, gap, name = m[1], m[2], m[3]
    if name in BARE and not gap:
        return m[0]
    return f"{n.english_number(number)} {_unit(name, number == '1')}"


def _clock(m):
    hour, minute, second = m[1], m[2], m[3]
    words = n.english(int(hour))
    if minute == "00" and not second:
        return f"{words} o'clock" if 1 <= int(hour) <= 12 else f"{words} hundred"
    words += f" {'oh ' if 0 < int(minute) < 10 else ''}{n.english(int(minute))}"
    return words + (f" and {n.english(int(second))} seconds" if second else "")


def _am_pm(m):
    return f"{n.english(int(m[1]))}{m[2]}"  # "10:00 am" is ten am, not ten o'clock am


def _date(m):
    return f"{MONTHS[int(m[2]) - 1]} {n.english_ordinal(int(m[3]))}, {n.english_year(int(m[1]))}"


def _decade(m):
    century, tens = m[1], int(m[2])
    if not tens and century in ("", "20"):
        return "two thousands" if century else m[0]
    words = n.plural(n.english(tens)) if tens else "hundreds"
    return f"{n.english(int(century))} {words}" if century else words


def _phone(m):
    return ", ".join(n.english_digits(part) for part in re.findall(r"[0-9]+", m[0]))


def _fraction(m):
    top, bottom = int(m[1]), int(m[2])
    if top >= bottom:
        return m[0]
    word = {2: "half", 4: "quarter"}.get(bottom) or n.english_ordinal(bottom)
    return f"{n.english(top)} {word if top == 1 else 'halves' if bottom == 2 else f'{word}s'}"


def _power(m):
    power = {"²": "squared", "³": "cubed"}.get(m[1]) or f"to the power of {n.english_number(_plain(m[1]))}"
    return f"{' ' if m.start() else ''}{power}"


def _plain(superscript):
    return superscript.translate(SUPERSCRIPTS)


def _mixed(m):
    words = FRACTIONS[m[2]]
    if not m[1]:
        return words
    return f"{m[1]} and {words.replace('one ', 'a ', 1) if words.startswith('one ') else words}"


def _nth(m):
    return n.english_ordinal(int(m[1].replace(",", "")))


def _spaced(m, words):
    """A number inside a word ("705A", "word0") gets a space on the sides where a letter or mark touches it."""
    before, after = m.string[: m.start()][-1:], m.string[m.end() :][:1]
    return f"{' ' if before.isalpha() else ''}{words}{' ' if after.isalpha() else ''}"


_SQUARE = r"(?<![\w²³])(mm|cm|km|m)([²³])"
_UNIT = "|".join(re.escape(u) for u in sorted(UNITS, key=len, reverse=True))

_ENGLISH_FIRST = [
    (rf"{ALONE}((?:1[0-9]|20)?)([0-9]0)s\b", _decade),  # 1980s, 90s
    (r"(?<![\w-])(?:\+?[0-9]{1,3}[ -])?[0-9]{3}-(?:[0-9]{3}-)?[0-9]{4}(?![\w-])", _phone),
    (rf"(?<![0-9.,])({NUMBER})(\s?)(mm[²³]|cm[²³]|km²|m[²³])(?!\w)", _measure),
    (_SQUARE, lambda m: _unit(m[1] + m[2], True) if m[1] + m[2] in UNITS else m[0]),
    (r"([⁰¹²³⁴⁵⁶⁷⁸⁹]+)", _power),
]
_ENGLISH = [
    (r"((?<![0-9])[0-9]{1,9})?([½¼¾⅓⅔⅛⅜⅝⅞⅕])", _mixed),
    (DATE, _date),
    (r"(?<![\w:.])(1[0-2]|0?[1-9]):00(\s?[aApP]\.?[mM]\b)", _am_pm),
    (TIME, _clock),
    (rf"([$€£¥￥])\s?({NUMBER})(?:\s?(thousand|million|billion|trillion|k|K|m|M|bn|B)\b)?", _money),
    (rf"{ALONE}({NUMBER})\s?%", lambda m: f"{n.english_number(m[1])} percent"),
    (rf"{ALONE}((?:[0-9]{{1,3}}(?:,[0-9]{{3}}){{1,4}}|[0-9]{{1,15}}))(?:st|nd|rd|th)\b", _nth),
    (VERSION, lambda m: _spaced(m, " point ".join(n.english_number(part) for part in m[0].split(".")))),
    (r"(?<![\w/-])([1-9][0-9]{0,2})/([2-9]|10|16|100)(?![\w/])", _fraction),
    (rf"(?<![\w.,)-])[-−](?={NUMBER})", "minus "),
    (RANGE, lambda m: f"{m[1]} to {m[2]}"),
    (rf"{ALONE}({NUMBER})(\s?)({_UNIT})(?![\w/])", _measure),
    (r"(?<![\w#])#(?=[0-9])", "number "),
    (r"(?<=[\w)])\s?×\s?(?=[\w(])|(?<=[0-9])\s?x\s?(?=[0-9])", " times "),
    (r"(?<=[\w)])(?:\s\+\s|(?<=[0-9])\+(?=[0-9]))(?=[\w(])", " plus "),
    (r"(?<=[\w)])(?:\s=\s|(?<=[0-9])=(?=[0-9]))(?=[\w(])", " equals "),
    (r"(?<=[\w)])\s?÷\s?(?=[\w(])", " divided by "),
    (r"±\s?(?=[0-9])", "plus or minus "),
    (r"(?<=\s)&(?=\s)", "and"),
    (rf"{ALONE}(1[1-9][0-9]{{2}}|20[1-9][0-9])(?![0-9A-Za-z_]|[.,][0-9])", lambda m: n.english_year(int(m[1]))),
    (rf"{ALONE}(\.[0-9]+)", lambda m: n.english_number(m[1])),
    (rf"({NUMBER})", lambda m: _spaced(m, n.english_number(m[1]))),
    (rf"\b({'|'.join(TITLES)})\.(?=\s+\S)", lambda m: TITLES[m[1]]),
]


# ------------------------------------------------------------------------------------------------ Chinese

CHINESE_MONEY = {"$": "美元", "€": "欧元", "£": "英镑", "¥": "元", "￥": "元"}
_CHINESE_UNITS = """ml 毫升|mL 毫升|mmHg 毫米汞柱|km/h 公里每小时|m/s 米每秒|mg 毫克|kg 千克|g 克|mm 毫米|cm 厘米|
km 公里|m 米|km² 平方公里|m² 平方米|cm² 平方厘米|mm² 平方毫米|m³ 立方米|cm³ 立方厘米|kHz 千赫|MHz 兆赫|GHz 吉赫|Hz 赫兹|
kW 千瓦|kWh 千瓦时|dB 分贝|°C 摄氏度|℃ 摄氏度|°F 华氏度|℉ 华氏度|° 度"""
CHINESE_UNITS = dict(line.strip().split(" ") for line in _CHINESE_UNITS.replace("\n", "").split("|"))
_CHINESE_UNIT = "|".join(re.escape(u) for u in sorted(CHINESE_UNITS, key=len, reverse=True))
COUNTED = "个只位条张本件次天名种份台辆棵朵间座头匹双对块杯瓶碗"  # after these measure words two is 两


def _ascii(pattern):
    """The pattern with Chinese characters outside of words: 日期2024-05-01."""
    return re.compile(pattern.pattern, re.ASCII)


def _chinese_clock(m):
    words = n.chinese(int(m[1])) + "点"
    if m[2] != "00" or m[3]:
        words += f"{'零' if 0 < int(m[2]) < 10 else ''}{n.chinese(int(m[2]))}分"
    return words + (f"{n.chinese(int(m[3]))}秒" if m[3] else "")


def _chinese_date(m):
    return f"{n.chinese_digits(m[1])}年{n.chinese(int(m[2]))}月{n.chinese(int(m[3]))}日"


def _chinese_mixed(m):
    top, bottom = {"½": (1, 2), "¼": (1, 4), "¾": (3, 4), "⅓": (1, 3), "⅔": (2, 3)}[m[2]]
    return f"{m[1] or ''}{'又' if m[1] else ''}{n.chinese(bottom)}分之{n.chinese(top)}"


def _chinese_fraction(m):
    return f"{n.chinese(int(m[2]))}分之{n.chinese(int(m[1]))}"


_CHINESE_FIRST = [  # wetext would read the digits and leave the mark between them
    (r"(?<=[0-9A-Za-z)])\s?×\s?(?=[0-9A-Za-z(])", "乘"),
    (r"(?<=[0-9A-Za-z²³)])\s?\+\s?(?=[0-9A-Za-z(])", "加"),
    (r"(?<=[0-9A-Za-z²³)])\s?=\s?(?=[0-9A-Za-z(])", "等于"),
]
_CHINESE = [
    (r"((?<![0-9])[0-9]{1,9})?([½¼¾⅓⅔])", _chinese_mixed),
    (_ascii(DATE), _chinese_date),
    (r"(?<![0-9])([0-9]{4})(?=\s?年)", lambda m: n.chinese_digits(m[1])),
    (_ascii(TIME), _chinese_clock),
    (r"(?<![0-9])1[3-9][0-9]{9}(?![0-9])", lambda m: n.chinese_digits(m[0], one="幺")),
    (rf"([$€£¥￥])\s?({NUMBER})(\s?[万亿])?", lambda m: n.chinese_number(m[2]) + (m[3] or "") + CHINESE_MONEY[m[1]]),
    (rf"(?<![0-9.,])({NUMBER})\s?%", lambda m: f"百分之{n.chinese_number(m[1])}"),
    (_ascii(VERSION), lambda m: "点".join(n.chinese_number(part) for part in m[0].split("."))),
    (r"(?<![0-9A-Za-z/])([0-9]{1,3})/([1-9][0-9]{0,2})(?![0-9A-Za-z/])", _chinese_fraction),
    (rf"(?<![0-9A-Za-z.,)）-])[-−](?={NUMBER})", "负"),
    (_ascii(RANGE), lambda m: f"{m[1]}到{m[2]}"),
    (
        rf"(?<![0-9.,])({NUMBER})\s?({_CHINESE_UNIT})(?![0-9A-Za-z/])",
        lambda m: n.chinese_number(m[1]) + CHINESE_UNITS[m[2]],
    ),
    (r"(?<![0-9A-Za-z])(km|cm|mm|m)([²³])", lambda m: CHINESE_UNITS.get(m[0], m[0])),
    ("²", "平方"),
    ("³", "立方"),
    (r"([⁰¹⁴⁵⁶⁷⁸⁹]+)", lambda m: f"的{n.chinese_number(_plain(m[1]))}次方"),
    (rf"(?<![0-9.,第])2(?=[{COUNTED}])", "两"),
    (rf"({NUMBER})", lambda m: n.chinese_number(m[1])),
]


# ------------------------------------------------------------------------------------------------ what others call


def _apply(rules, text):
    for pattern, read in rules:
        text = re.sub(pattern, read, text)  # re keeps the compiled patterns
    return text


def english_first(text):
    """The few readings that must be done before wetext: it reads 1980s as "eighty seconds", and refuses x²."""
    return _apply(_ENGLISH_FIRST, text.translate(FULL_WIDTH))


def english(text):
    """Numbers, units and symbols of an English text as English words; all else unchanged."""
    return _apply(_ENGLISH, english_first(text))


def chinese_first(text):
    """The readings that must be done before wetext in Chinese."""
    return _apply(_CHINESE_FIRST, text.translate(FULL_WIDTH))


def chinese(text):
    """Numbers, units and symbols of a Chinese text as Chinese words; all else unchanged."""
    return _apply(_CHINESE, chinese_first(text))
