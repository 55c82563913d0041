"""The tokens that CosyVoice 2 and 3 add to Qwen2's vocabulary, version 1's languages, and how they are found in text.

Upstream appends them in code (cosyvoice/tokenizer/tokenizer.py), in this order, after the base vocabulary:
control tokens (<|endofprompt|>, sounds such as [laughter], spans such as <strong>..</strong>); version 3 adds
<|endofsystem|> and phonemes, [AA0] of CMU's set and [h] [ǎo] of pinyin. Version 1 has Whisper's tokens, of which
texts use the languages, <|en|>; it reads the control tokens as plain text, and was trained with some of them as such.
In text a tag is spelled exactly as here.
"""

import difflib
import re
import unicodedata

from mlx_cosyh3.errors import CosyH3Error

END_OF_PROMPT = "<|endofprompt|>"
QWEN2 = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # the base vocabulary's own, in its order
CONTROL = (
    END_OF_PROMPT,
    *"[breath] <strong> </strong> [noise] [laughter] [cough] [clucking] [accent] [quick_breath]".split(),
    *"<laughter> </laughter> [hissing] [sigh] [vocalized-noise] [lipsmack] [mn]".split(),
)
END_OF_SYSTEM = "<|endofsystem|>"

VOWELS = "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW".split()  # each bare and with the stresses 0, 1, 2
CONSONANTS = "B CH D DH F G HH JH K L M N NG P R S SH T TH V W Y Z ZH".split()
# Initials and finals with tone marks, in code point order, as upstream lists them (not every final has every tone).
PINYIN = """a ai an ang ao b c ch d e ei en eng f g h i ian in ing iu ià iàn iàng iào iá ián iáng iáo iè ié iòng ióng
iù iú iā iān iāng iāo iē iě iōng iū iǎ iǎn iǎng iǎo iǒng iǔ j k l m n o ong ou p q r s sh t u uang ue un uo uà uài uàn
uàng uá uái uán uáng uè ué uì uí uò uó uā uāi uān uāng uē uě uī uō uǎ uǎi uǎn uǎng uǐ uǒ vè w x y z zh à ài àn àng ào
á ái án áng áo è èi èn èng èr é éi én éng ér ì ìn ìng í ín íng ò òng òu ó óng óu ù ùn ú ún ā āi ān āng āo ē ēi ēn ēng
ě ěi ěn ěng ěr ī īn īng ō ōng ōu ū ūn ǎ ǎi ǎn ǎng ǎo ǐ ǐn ǐng ǒ ǒng ǒu ǔ ǔn ǘ ǚ ǜ""".split()
PHONEMES = tuple(
    f"[{p}]" for p in sorted(CONSONANTS + [v + stress for v in VOWELS for stress in ("", "0", "1", "2")]) + PINYIN
)

# Whisper's, in its order, then those that the 25 Hz variant of version 1 adds.
LANGUAGES = tuple(
    """en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml
    cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am yi
    lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue""".split()
)
DIALECTS = ("minnan", "wuyu", "dialect", "zh/en", "en/zh")
LANGUAGE_TAGS = frozenset(f"<|{code}|>" for code in (*LANGUAGES, *DIALECTS))

ADDED = {2: CONTROL, 3: (*CONTROL, END_OF_SYSTEM, *PHONEMES)}  # {version: tokens in id order}
TAGS = frozenset(QWEN2 + ADDED[3])  # what may stand in a text of version 2 or 3
VERSION_1 = frozenset(CONTROL)  # ... and of version 1, besides the special tokens of its tokenizer
SOUNDS = frozenset(t for t in ADDED[3] if t.startswith("["))  # heard by themselves, without any word

# What is never read, split or cut: known tags and everything in <|..|>. Longest first, as the tokenizer matches them.
TAG = re.compile(r"<\|[^<>|\s]{1,40}\|>|" + "|".join(re.escape(t) for t in sorted(TAGS, key=lambda t: (-len(t), t))))

_OPEN, _CLOSE = "<＜〈〈《‹«⟨❮﹤", ">＞〉〉》›»⟩❯﹥"
_BAR = "|｜¦│┃∣ǀ丨❘❙￨"
_WITH_BARS = re.compile(rf"[{_OPEN}]\s*[{_BAR}][^{_OPEN}{_CLOSE}\n]{{1,40}}?[{_BAR}]\s*[{_CLOSE}]")
_BRACKETS = re.compile(r"[<＜〈[［【〔]\s*/?[^\s<>＜＞〈〉\[\]［］【】〔〕][^<>＜＞〈〉\[\]［］【】〔〕\n]{0,30}[>＞〉\]］】〕]")


def _letters(name):
    """Only the letters, in one case and one width: how a look-alike is recognised."""
    return "".join(c for c in unicodedata.normalize("NFKC", name).casefold() if c.isalnum())


_NAMES = {_letters(t): t for t in (*QWEN2, END_OF_SYSTEM, *CONTROL) if "/" not in t and t != "<laughter>"}


def compose(text):
    """`text` with decomposed phoneme tags ("[a" + combining accent + "]") composed: only those spell a token."""
    def composed(match):
        tag = unicodedata.normalize("NFC", match[0])
        return tag if tag in TAGS else match[0]

    return re.sub(r"\[[^\[\]\s]{2,8}\]", composed, text)


def check_tags(text, note=None, tags=TAGS):
    """Raises CosyH3Error, with the right spelling, for what looks like a special token but would be spoken as text.

    That is: brackets or bars of another script (＜|endofprompt|＞, 【laughter】), a wrong case or missing bars around
    <|endofprompt|>, an unknown <|name|>. `note(message)` is told of a [name] that is only near a known tag.
    tags   those that the model knows
    """
    for match in _WITH_BARS.finditer(text):
        if match[0] in tags:
            continue
        right = _meant(_letters(match[0]), tags)
        said = f"is not {right}" if right else "is no token of this model"
        todo = f"write {right} exactly" if right else "remove it, or its brackets"
        raise CosyH3Error(f"{match[0]!r} at character {match.start()} {said} and would be read aloud; {todo}")
    for match in _BRACKETS.finditer(text):
        if match[0] in tags or _WITH_BARS.fullmatch(match[0]):
            continue
        name = _letters(match[0])
        right = _NAMES.get(name)
        if right and (right.startswith("<|") or not match[0].isascii()):
            if "/" in match[0] or (name == "laughter" and match[0][0] in "<＜〈"):
                right = f"<{'/' if '/' in match[0] else ''}{name}>"
            raise CosyH3Error(
                f"{match[0]!r} at character {match.start()} only looks like {right} and would be read aloud; "
                f"write {right} exactly"
            )
        if note and match[0].isascii() and match[0][0] == "[" and (right := _meant(name, tags)):
            note(f"{match[0]} is not a tag of this model and is read as text; the nearest tag is {right}")


def _meant(name, tags):
    """The one of `tags` that the letters `name` stand for, or nearly; None if there is none."""
    for tag in (_NAMES.get(name), f"<|{name}|>"):
        if tag in tags:
            return tag
    known = [n for n, tag in _NAMES.items() if tag in tags]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return _NAMES[close[0]] if close else None
