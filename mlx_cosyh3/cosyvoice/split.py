"""Long text in segments of about 80 units, cut where a speaker would breathe.

After upstream's split_paragraph (cosyvoice/utils/frontend_utils.py): cut after each sentence ender, then merge pieces
greedily. Different on purpose: nothing is lost or added ("".join(split(text)) == text), no segment is above the cap
even without punctuation, `3.14` and `e.g.` are no sentence ends, tags and characters made of several code points
stay whole, and a short rest is never left alone.
"""

import bisect
import re
import unicodedata

from mlx_cosyh3.cosyvoice.special_tokens import SOUNDS, TAG
from mlx_cosyh3.errors import CosyH3Error

ENDERS = "。？！；：、.?!;:｡､।॥؟۔؛።៕။‼⁇⁈⁉"
CLOSERS = "\"'”’»›」』）)]】》〉〕］｣"
_END = re.compile(f"[{re.escape(ENDERS)}]+[{re.escape(CLOSERS)}]*")
_SPAN = re.compile(r"<(strong|laughter)>.{0,999}?</\1>", re.DOTALL)  # its two tags belong in one segment
_CLAUSE = "，,、；;：:—–…）)。？！?!"
_WORD = re.compile(r"[0-9A-Za-z.'’_@/-]")
# No sentence ends after these and a full stop, nor after a single letter or a word with a full stop inside.
ABBREVIATIONS = frozenset(
    """dr mr mrs ms prof st jr sr vs etc no fig vol ch sec pp inc ltd co corp dept univ approx est ca cf al
    gen col sgt capt lt rev hon gov sen rep jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri
    bzw usw nr bsp str""".split()
)
LONGEST_CLUSTER = 32  # code points of one character; a longer pile of combining marks may be cut


def split(text, length=len, max_units=80, min_units=60, merge=20):
    """Segments of `text`, in order; joined they are `text`, character for character.

    length      text -> units: `len` for Chinese, a tokenizer's count for other languages
    max_units   a segment is closed when the next piece would take it above this
    min_units   ... and it has more than this already
    merge       a rest below this joins its neighbour. No segment is above the cap, max_units + merge.
    """
    if max_units < 1 or min_units < 0 or merge < 0:
        raise CosyH3Error(f"max_units {max_units}, min_units {min_units}, merge {merge}: want at least 1, 0 and 0")
    cap = max_units + merge
    segments, current = [], ""
    for piece in sentences(text):
        both = current + piece
        units, have = length(both), length(current)
        if units <= max_units or (have <= min_units and units <= cap):
            current = both
            continue
        if current and have >= merge:
            segments.append(current)
            current = piece
        else:
            current = both
        *full, current = _shorten(current, length, max_units, cap)
        segments += full
    if segments and length(current) < merge:
        *full, current = _shorten(segments.pop() + current, length, max_units, cap)
        segments += full
    return [*segments, current] if current else segments


def sentences(text):
    """`text` cut after each sentence, closing quotes included; blanks lead the next piece. Joined: `text`."""
    spans = [(m.start(), m.end()) for pattern in (TAG, _SPAN) for m in pattern.finditer(text)]
    inside = _inside(spans)
    pieces, start, seen, heard = [], 0, 0, False  # heard: text[start:seen] speaks
    for match in _END.finditer(text):
        end = match.end()
        if end == len(text) or inside(end) or not _ends_sentence(text, match):
            continue
        heard, seen = heard or speaks(text[seen:end]), end
        if heard:
            pieces.append(text[start:end])
            start, heard = end, False
    rest = text[start:]
    if pieces and not speaks(rest):  # a tail of dashes, quotes or blanks belongs to the last sentence
        pieces[-1] += rest
    elif rest:
        pieces.append(rest)
    return pieces


def speaks(text):
    """Whether anything in `text` can be heard: a letter, a digit, or a sound tag such as [laughter] or [AA0]."""
    at = 0
    for tag in TAG.finditer(text):
        if tag[0] in SOUNDS or _has_letters(text[at : tag.start()]):
            return True
        at = tag.end()
    return _has_letters(text[at:])


def _has_letters(text):
    return any(unicodedata.category(c)[0] in "LN" for c in text)


def _ends_sentence(text, match):
    after = text[match.end()]
    mark = match[0].rstrip(CLOSERS)[-1]
    if not mark.isascii():
        return True
    if not (after.isspace() or ord(after) >= 0x2E80):
        return False  # 3.14, 10:30, file.txt, a.b
    if mark != "." or len(match[0]) > 1:
        return True
    before = text[max(0, match.start() - 24) : match.start()]
    word = re.search(r"[^\s(\[\"“‘']*$", before)[0]
    if ord(after) >= 0x2E80 and not word.isascii():
        return True
    plain = word.lower()
    return not (plain in ABBREVIATIONS or "." in plain or (len(plain) == 1 and plain.isalpha() and plain != "i"))


def _inside(spans):
    """A function: does cutting before index i cut one of `spans` in two?"""
    merged = []
    for a, b in sorted(spans):
        if merged and a < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], b)
        else:
            merged.append([a, b])
    starts = [a for a, _ in merged]

    def inside(i):
        at = bisect.bisect_left(starts, i) - 1
        return at >= 0 and i < merged[at][1]

    return inside


# ---------------------------------------------------------------- a sentence that is too long by itself


def _shorten(text, length, max_units, cap):
    """`text` in parts of at most `cap` units, about equal where two are left: no tiny rest."""
    parts = []
    if length(text) <= cap:
        return [text]
    inside = _inside([(m.start(), m.end()) for m in TAG.finditer(text)])
    start, size = 0, len(text)
    while start < size:
        two = _within(text, start, length, 2 * max_units)
        if two == size:
            total = length(text[start:])
            if total <= cap:
                break
            low, aim, high = 0.3 * total, 0.5 * total, min(0.65 * total, max_units)
        else:
            low, aim, high = 0.5 * max_units, 0.85 * max_units, max_units
        low, aim, high = (_within(text, start, length, units) for units in (low, aim, high))
        cut = _best_cut(text, start, low, aim, high, inside)
        if cut >= size:
            break
        parts.append(text[start:cut])
        start = cut
    return [*parts, text[start:]]


def _within(text, start, length, units):
    """The largest end with length(text[start:end]) <= units, by doubling and halving; at least start + 1."""
    low, step = start + 1, max(16, int(units))
    high = low
    while high < len(text) and length(text[start:high]) <= units:
        low, high, step = high, min(len(text), high + step), 2 * step
    if length(text[start:high]) <= units:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if length(text[start:middle]) <= units:
            low = middle
        else:
            high = middle
    return low


def _best_cut(text, start, low, aim, high, inside):
    """Where to cut in start < i <= high: after a clause, else before a blank, else between words, else anywhere."""
    best, best_rank = None, None
    for i in range(high, start, -1):
        if i < low and best is not None:
            break
        if i < len(text) and (inside(i) or not _between_characters(text, i)):
            continue
        rank = (_grade(text, i) if i >= low else 0, -abs(i - aim))
        if best is None or rank > best_rank:
            best, best_rank = i, rank
    if best is None:  # one tag, or one endless character: past the tag, through the character
        best = high
        while best < len(text) and inside(best):
            best += 1
    return best


def _grade(text, i):
    if i >= len(text):
        return 3
    before, after = text[i - 1], text[i]
    if before in _CLAUSE and after not in _CLAUSE and after not in CLOSERS and not (before.isascii() and _word(after)):
        return 3
    if after.isspace() and not before.isspace():
        return 2
    return 0 if (_word(before) and _word(after)) or after in _CLAUSE or after in CLOSERS else 1


def _word(char):
    return bool(_WORD.match(char)) or (char.isalpha() and ord(char) < 0x2E80)


def _between_characters(text, i):
    """Whether a character as a reader sees it (grapheme) ends before index i. Close to UAX #29, without its tables."""
    before, after = text[i - 1], text[i]
    if _continues(after):
        begin = i - 1
        while begin > 0 and i - begin < LONGEST_CLUSTER and _continues(text[begin]):
            begin -= 1
        return i - begin >= LONGEST_CLUSTER
    if before == "\u200d" or (before == "\r" and after == "\n") or unicodedata.combining(before) == 9:  # joiner, virama
        return False
    if "\ud800" <= before <= "\udbff" and "\udc00" <= after <= "\udfff":  # halves of one character
        return False
    if 0x1100 <= ord(before) <= 0x11FF and 0x1100 <= ord(after) <= 0x11FF:  # jamo of one Korean syllable
        return False
    if _flag(before) and _flag(after):  # pairs of regional indicators are flags
        run = 1
        while i - run - 1 >= 0 and run < 64 and _flag(text[i - run - 1]):
            run += 1
        return run % 2 == 0
    return True


def _continues(char):
    """Combining marks, joiners, variation selectors, emoji skin tones and tags: they belong to what is before."""
    return unicodedata.category(char) in ("Mn", "Mc", "Me", "Cf") or 0x1F3FB <= ord(char) <= 0x1F3FF


def _flag(char):
    return 0x1F1E6 <= ord(char) <= 0x1F1FF
