"""Numbers as words: English and Chinese. Input is ASCII digits; nothing here knows about sentences."""

UNITS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen""".split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()
SCALES = (("trillion", 10**12), ("billion", 10**9), ("million", 10**6), ("thousand", 1000))
LARGEST = 15  # digits; longer numbers are read digit by digit
IRREGULAR = {
    **{"one": "first", "two": "second", "three": "third", "five": "fifth"},
    **{"eight": "eighth", "nine": "ninth", "twelve": "twelfth"},
}

CHINESE = "零一二三四五六七八九"


def english(n):
    """1999 -> "one thousand nine hundred and ninety-nine". n: int, 0 <= n < 10**15."""
    if n < 20:
        return UNITS[n]
    if n < 100:
        return TENS[n // 10] + (f"-{UNITS[n % 10]}" if n % 10 else "")
    if n < 1000:
        return f"{UNITS[n // 100]} hundred" + (f" and {english(n % 100)}" if n % 100 else "")
    name, size = next(scale for scale in SCALES if n >= scale[1])
    rest = n % size
    joint = " and " if 0 < rest < 100 else " "
    return f"{english(n // size)} {name}" + (f"{joint}{english(rest)}" if rest else "")


def english_digits(digits):
    """"007" -> "zero zero seven"."""
    return " ".join(UNITS[int(d)] for d in digits)


def english_number(number):
    """"3.14" -> "three point one four"; "1,000" and "007" too. number: digits, commas and at most one point."""
    whole, _, part = number.replace(",", "").partition(".")
    if not whole:
        words = "zero"
    elif len(whole) > LARGEST or (len(whole) > 1 and whole[0] == "0"):
        words = english_digits(whole)
    else:
        words = english(int(whole))
    return f"{words} point {english_digits(part)}" if part else words


def english_ordinal(n):
    """21 -> "twenty-first"."""
    words = english(n)
    at = max(words.rfind(" "), words.rfind("-")) + 1
    last = words[at:]
    if last in IRREGULAR:
        last = IRREGULAR[last]
    else:
        last = f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th"
    return words[:at] + last


def english_year(n):
    """1999 -> "nineteen ninety-nine", 1905 -> "nineteen oh five", 1900 -> "nineteen hundred". n: 1000..2999."""
    century, year = divmod(n, 100)
    if century % 10 == 0 and year < 10:
        return english(n)  # two thousand and five
    if year == 0:
        return f"{english(century)} hundred"
    return f"{english(century)} {'oh ' if year < 10 else ''}{english(year)}"


def plural(word):
    """The plural of a number word: "eighty" -> "eighties", "hundred" -> "hundreds"."""
    return f"{word[:-1]}ies" if word.endswith("y") else f"{word}es" if word.endswith("x") else f"{word}s"


def chinese(n):
    """110 -> 一百一十, 15 -> 十五, 10005 -> 一万零五, 2000 -> 两千. n: int, 0 <= n < 10**16."""
    words = _chinese(n) or CHINESE[0]
    return words[1:] if words.startswith("一十") else words


def _chinese(n):
    for size, name in ((10**8, "亿"), (10**4, "万")):
        if n >= size:
            head, rest = divmod(n, size)
            zero = "零" if 0 < rest < size // 10 else ""
            return ("两" if head == 2 else _chinese(head)) + name + zero + _chinese(rest)
    out, zero = "", False
    for size, name in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit, n = divmod(n, size)
        if digit:
            out += "零" * zero + ("两" if digit == 2 and size == 1000 else CHINESE[digit]) + name
        zero = bool(out) and digit == 0
    return out


def chinese_digits(digits, one="一"):
    """"1999" -> 一九九九. `one`: 幺 in telephone numbers."""
    return "".join(one if d == "1" else CHINESE[int(d)] for d in digits)


def chinese_number(number):
    """"3.14" -> 三点一四; "1,000" and "007" too."""
    whole, _, part = number.replace(",", "").partition(".")
    if len(whole) > LARGEST or (len(whole) > 1 and whole[0] == "0"):
        words = chinese_digits(whole)
    else:
        words = chinese(int(whole or "0"))
    return f"{words}点{chinese_digits(part)}" if part else words
