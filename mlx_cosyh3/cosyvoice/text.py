"""The text front end: from what a user writes to the segments the language model speaks.

`segments` does it all: check, normalise (numbers and symbols as words), split. Chinese and English are normalised,
sentence by sentence in each sentence's language; every other language passes through unchanged. A language tag (in
version 1, <|en|>) says the language and holds for all segments up to the next one. With the `wetext`
package (extra `text`) its grammars do the reading, otherwise the small tables of reading.py. After upstream's
cosyvoice/cli/frontend.py, which skips all of this for any text with a <|tag|>; here tags stay whole and the rest is
read as ever.

`note`, wherever it is taken, is called with one line about what may sound wrong; the default is `warnings.warn`.
"""

import re
import warnings

from mlx_cosyh3.cosyvoice import reading
from mlx_cosyh3.cosyvoice.special_tokens import END_OF_PROMPT, LANGUAGE_TAGS, TAG, TAGS, check_tags
from mlx_cosyh3.cosyvoice.split import CLOSERS, ENDERS, sentences, speaks, split
from mlx_cosyh3.errors import CosyH3Error

HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_KANA = re.compile(r"[\u3041-\u3096\u30a1-\u30fa\u31f0-\u31ff\uff66-\uff9d]")
_HANGUL = re.compile(r"[\u1100-\u11ff\u3131-\u318e\uac00-\ud7a3]")
_WORDS = re.compile(r"[^\W\d_]+")
# Words that tell English from its neighbours in the same script; words of both (in, was, die, van) are in neither list.
_ENGLISH = frozenset(
    """the and of to is it you that this with for are have be at he she they we my your his her not what who how
    from will would can has had were been there their or but if which about please do does did""".split()
)
_FOREIGN = frozenset(
    """der das und ist nicht ein eine mit bei von zu den dem auf für ich sie wir le les des et une un que pas dans
    sur je il elle nous vous au du el los las es del por una su os em não uma seu di che non sono della gli een het
    niet dat op te zijn en de på och att det som är ikke og jeg nie jest się na bir ve bu için""".split()
)
LONGEST_WAIT = 400  # characters that `pieces` holds back
_READABLE = re.compile(r"[0-9０-９²³½¼¾⅓⅔$€£¥￥%％&@#+=°℃℉×÷±]|\b(?:Dr|Mr|Mrs|Ms|Prof|St|Jr|Sr|vs)\.")
NORMALISED = ("zh", "en")
CHINESE, MIXED = ("zh", "yue", "minnan", "wuyu"), ("dialect", "zh/en", "en/zh")  # language tags
LONGEST_FOR_WETEXT = 240  # characters at a time: its cost a character grows with the length


def segments(
    text, length=len, language=None, normalise=True, max_units=80, min_units=60, merge=20, note=warnings.warn, tags=TAGS
):
    """What to speak, one string a run of the model, each with something to say; ends without a full stop get one.

    text       may hold tags ([laughter], <strong>..</strong>, phonemes). What comes before an <|endofprompt|>
               (an instruction) is left alone and leads every segment.
    length     text -> units; Chinese is counted in characters whatever it says
    language   "zh", "en" or another code; None looks at the language tag that the text begins with, then at the text
    max_units, min_units, merge: see split.split
    tags       that the model knows: `tokenizer.tags` in version 1
    Raises CosyH3Error for text that is empty or holds nothing to speak, and for look-alikes of special tokens.
    """
    check(text, note, tags)
    head, body = take_head(text)
    language = _code(language) or _tagged_language(body) or language_of(body)
    if normalise:
        body = _with_full_stop(normalize(body, language), language)
    pieces = _with_language(split(body, len if language == "zh" else length, max_units, min_units, merge))
    return [head.lstrip() + piece for piece in pieces if speaks(piece)]


def _with_language(pieces):
    """Yield each piece without blanks around it and, if it does not say its language, with the last one that did."""
    last = ""
    for piece in pieces:
        here = [tag for tag in TAG.finditer(piece) if tag[0] in LANGUAGE_TAGS]
        begun = bool(here) and not piece[: here[0].start()].strip()
        if here and not piece[here[-1].end() :].strip():
            piece = piece[: here[-1].start()]  # a tag at the end is the next piece's
        yield piece.strip() if begun else last + piece.strip()
        last = here[-1][0] if here else last


def pieces(parts, normalise=True, language=None, note=warnings.warn):
    """Text that arrives in parts (an iterable of str, cut anywhere) -> generator of pieces of it, ready to tokenise.

    A piece is let go before a blank or after a comma, once nothing that follows can change how it is read: where there
    are digits or symbols, at the end of the sentence. Blanks lead a piece; joined, the pieces are the whole text, read.
    """
    waiting, heard, seen, last = "", False, "", ""
    for part in parts:
        if not isinstance(part, str):
            raise CosyH3Error(f"the parts of a text must be strings, not {type(part).__name__}")
        waiting += part
        end = _settled(waiting)
        if end:
            ready, waiting = waiting[:end], waiting[end:]
            heard, seen = heard or speaks(ready), (seen + ready)[:1000]
            last = _piece(ready, seen, normalise, language, note)
            yield last
    seen = (seen + waiting)[:1000]
    if not heard:
        check(seen if not speaks(waiting) else waiting, note)
    rest = _piece(waiting, seen, normalise, language, note)
    if normalise:
        end = last if not rest.strip() else rest  # what the full stop depends on
        rest = "" if end is last else rest
        rest += _with_full_stop(end, _code(language) or language_of(seen))[len(end) :]
    if rest:
        yield rest


def _settled(text):
    """How much of the start of an unfinished text can be read already."""
    *whole, rest = sentences(text) or [""]
    end = sum(map(len, whole))
    if len(rest) > LONGEST_WAIT:  # no end in sight
        return end + len(split(rest)[0])
    if not _READABLE.search(rest):
        brackets = [i for i in (rest.rfind("<"), rest.rfind("[")) if i >= 0 and not TAG.match(rest, i)]
        rest = rest[: min(brackets, default=len(rest))]  # an open bracket may become a tag
        ends = [m.start() for m in re.finditer(r"(?<=\S)\s+", rest)] + [m.end() for m in re.finditer("[，、；]", rest)]
        end += max(ends, default=0)
    return end


def _piece(text, seen, normalise, language, note):
    if END_OF_PROMPT in text:
        raise CosyH3Error(f"text that arrives in parts cannot hold {END_OF_PROMPT}; give an instruction as instruct")
    _unicode(text)
    check_tags(text, note)
    if not normalise or not text.strip():
        return text
    language = _code(language) or language_of(seen)
    if language not in NORMALISED:
        return text
    body = text.strip()
    blank = text[0].isspace() and (language == "en" or body.isascii())
    return " " * blank + _words(body, language)


def _unicode(text):
    if (bad := re.search("[\ud800-\udfff]", text)) is not None:
        raise CosyH3Error(f"the text is not Unicode: U+{ord(bad[0]):04X} at character {bad.start()}; give UTF-8 text")


def check(text, note=warnings.warn, tags=TAGS):
    """Raises CosyH3Error for text that cannot be spoken; notes what would be spoken wrongly. tags: see `segments`."""
    if not isinstance(text, str):
        raise CosyH3Error(f"text must be a string, not {type(text).__name__}")
    _unicode(text)
    check_tags(text, note, tags)
    body = take_head(text)[1]
    if not body.strip():
        raise CosyH3Error("text is empty; give something to speak")
    if not speaks(body):
        raise CosyH3Error(f"text {body.strip()[:40]!r} holds nothing to speak: no letter, digit or sound tag")
    if note and "<|ja|>" not in tags and _KANA.search(body) and HAN.search(body):
        note("the text holds Japanese with kanji, which CosyVoice 3 reads as Chinese; write it in katakana")


def take_head(text):
    """(head, body): all up to the last <|endofprompt|>, and what is to be spoken. head is "" without that token."""
    head, token, body = text.rpartition(END_OF_PROMPT)
    return head + token, body


def _tagged_language(text):
    """The language of the tag that `text` begins with, as normalisation knows it; None if that says nothing."""
    tag = TAG.match(text.lstrip("\ufeff").lstrip())
    if tag is None or tag[0] not in LANGUAGE_TAGS:
        return None
    name = tag[0].strip("<|>")
    return "zh" if name in CHINESE else None if name in MIXED else name


def language_of(text):
    """"zh", "en", "ja", "ko", or "other", by script and, in Latin script, by frequent words. Tags do not count."""
    text = TAG.sub(" ", text)
    if _KANA.search(text):
        return "ja"
    if _HANGUL.search(text):
        return "ko"
    if HAN.search(text):
        return "zh"
    words = ["".join(filter(str.isalpha, w)) for w in _WORDS.findall(text)]  # x² is x
    words = [w.lower() for w in words if w and not (len(w) > 1 and w.isupper())]  # MIT is not German
    if not words:
        return "en"
    latin = [w for w in words if w[0] < "\u0250" or "\u1e00" <= w[0] < "\u1f00"]
    if 2 * len(latin) < len(words):
        return "other"
    english, foreign = (sum(w in listed for w in latin) for listed in (_ENGLISH, _FOREIGN))
    marked = sum(not w.isascii() for w in latin)  # naïve and café are English, too
    return "other" if foreign > english or (marked and not english) else "en"


def _code(language):
    """"en-US" -> "en"; None stays."""
    return re.split("[-_]", language.lower())[0] if language else None


def normalize(text, language=None):
    """`text` with numbers, units and symbols as words. Tags, and all before an <|endofprompt|>, are left alone.

    language   "zh" or "en"; others return the text unchanged; None looks at the text. In a mixed text, sentences
               of Chinese and of English are each read in their own.
    """
    head, body = take_head(text)
    language = _code(language) or language_of(body)
    if language not in NORMALISED:
        return text
    body = _words(body, language)
    return head + (re.sub(r"[，,、]+$", "。", body) if language == "zh" else body)


def _words(text, language):
    text = _lines(text.lstrip("\ufeff").strip(), language)
    return "".join(_sentence(s, _language_here(s, language)) for s in sentences(text)).strip()


def _language_here(sentence, language):
    """A sentence of a mixed text: Chinese if it has Chinese characters, Latin if it has three words or more."""
    plain = TAG.sub(" ", sentence)
    if HAN.search(plain):
        return "zh"
    if len(_WORDS.findall(plain)) < 3:
        return language
    return language_of(plain)


def _lines(text, language):
    """Line breaks: in Chinese the end of a sentence; in English a blank, unless the line between is empty."""
    text = re.sub(r"[^\S\n]+", " ", text)
    if language == "zh":
        text = re.sub(f"(?<=[{re.escape(ENDERS + CLOSERS)}，,…])\\s*\n\\s*", "", text)
        return re.sub(r" ?\n\s*", "。", text)
    text = re.sub(f"(?<![{re.escape(ENDERS + CLOSERS)},\\s]) ?\n ?\n\\s*", ". ", text)
    return re.sub(r"\s+", " ", text)


def _sentence(sentence, language):
    if language not in NORMALISED:
        return sentence
    read, at = [], 0
    for tag in TAG.finditer(sentence):
        read += [_read(sentence[at : tag.start()], language), tag[0]]
        at = tag.end()
    text = "".join([*read, _read(sentence[at:], language)])
    return _chinese_marks(text) if language == "zh" else text


def _read(text, language):
    """One stretch without tags. wetext does not see what it has nothing to do with: it would drop dots and quotes."""
    if language == "zh":
        first, ours = reading.chinese_first, reading.chinese
    else:
        first, ours = reading.english_first, reading.english
    return ours(_wetext(first(text), language) if _READABLE.search(text) else text)


def _wetext(text, language):
    """`text` as wetext reads it; unchanged when wetext is not installed, refuses the text, or loses a letter of it."""
    normalizer = _normalizer(language)
    if normalizer is None:
        return text
    if len(text) > LONGEST_FOR_WETEXT:
        pieces = split(text, len, LONGEST_FOR_WETEXT - 60, LONGEST_FOR_WETEXT - 120, 40)
        return "".join(_wetext(piece, language) for piece in pieces)
    body = text.strip()
    try:
        out = normalizer.normalize(body)
    except (AssertionError, RuntimeError, ValueError, IndexError, KeyError):
        return text  # its English grammar does not accept every character; our own rules do
    out = out.replace('\\"', '"') if '\\"' not in body else out
    if body and not out or not _is_subsequence((c for c in body if c.isalpha() and not c.isascii()), out):
        return text
    out = _same_case(body, out) if language == "en" else out
    return text[: len(text) - len(text.lstrip())] + out + text[len(text.rstrip()) :]


def _normalizer(language):
    try:
        from wetext import Normalizer
    except ImportError:
        return None
    return Normalizer(lang=language, operator="tn", **({"remove_erhua": False} if language == "zh" else {}))


def _is_subsequence(letters, text):
    rest = iter(text)
    return all(letter in rest for letter in letters)


def _same_case(text, read):
    """`read` with the words it shares with `text` in their first spelling: wetext turns "Bei" into "BEI"."""
    words, at = _WORDS.findall(text), 0

    def first_spelling(match):
        nonlocal at
        for i in range(at, min(at + 8, len(words))):
            if words[i].lower() == match[0].lower():
                at = i + 1
                return words[i]
        return match[0]

    return _WORDS.sub(first_spelling, read)


def _chinese_marks(text):
    """Punctuation as upstream writes it for Chinese: full stops, no blanks beside Chinese, no brackets."""
    text = text.replace(" - ", "，").replace("——", " ")
    text = re.sub(r"(?<![!-~]) | (?![!-~])", "", text)
    text = re.sub(r"(?<![0-9A-Za-z.])\.(?!\.)|(?<!\.)\.(?! ?[0-9A-Za-z.])", "。", text)  # not in 3.14, e.g., ...
    return re.sub(r"[（）【】`]", "", text)


def _with_full_stop(text, language):
    """A text that stops without an ender gets one: models speak the last word of an open sentence badly."""
    if language not in NORMALISED:
        return text
    said = TAG.sub("", text).rstrip().rstrip(CLOSERS)
    if not said or said[-1] in ENDERS:
        return text
    return text.rstrip() + ("。" if language == "zh" else ".")
