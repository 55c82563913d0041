"""What the language model is given as text in each mode: the system prefix, instructions and <|endofprompt|>.

Version 3 was trained with "You are a helpful assistant." before <|endofprompt|>, and speaks instructions aloud, or
nothing right, without that token. Versions 1 and 2 need it after an instruction only. Users give plain text; those who
write the prefix themselves, as upstream asks, get the same. After the examples in upstream's README and example.py.

Version 1 has the same modes. Its instruction says who speaks, "A cheerful young woman.", for one of the model's own
speakers; <|endofprompt|> is no token of its vocabulary but plain text. The language of a text is said before it,
<|en|>Hello; most of all in cross_lingual mode, where the clip speaks another one.
"""

import warnings

from mlx_cosyh3.cosyvoice.special_tokens import END_OF_PROMPT, TAGS, check_tags
from mlx_cosyh3.cosyvoice.text import HAN, normalize, take_head
from mlx_cosyh3.errors import CosyH3Error

SYSTEM = "You are a helpful assistant."
PREFIX = SYSTEM + END_OF_PROMPT
MODES = ("zero_shot", "cross_lingual", "instruct", "sft")
LONGEST_INSTRUCTION = 160  # characters (60 of Chinese); the known ones have at most half of that


def layout(mode, version, text, transcript=None, instruct=None, note=warnings.warn, tags=TAGS, normalise=True):
    """(prompt_text, text) to tokenise for one segment; the model reads them one after the other.

    mode         one of MODES (voice conversion has no text)
    version      1, 2 or 3
    text         one segment of text.segments
    transcript   zero_shot: what the voice's clip says; None when the voice holds it as ids, which then replace
                 the (empty) prompt_text. Other modes do not use it, so that the transcript in a saved voice can
                 never take an instruction's place
    instruct     instruct: "Please speak very softly.", with or without the system prefix and <|endofprompt|>
    note         called with one line when the prompt may spoil the speech; None: silent
    tags         that the model knows: `tokenizer.tags` in version 1
    normalise    read numbers and signs of transcript and instruction as words, where upstream does: see `as_read`
    """
    if mode not in MODES:
        raise CosyH3Error(f"mode {mode!r} is unknown; modes are {', '.join(MODES)}")
    if version not in (1, 2, 3):
        raise CosyH3Error(f"version {version!r} of CosyVoice has no text layout here; 1, 2 and 3 have")
    if instruct is not None and mode != "instruct":
        raise CosyH3Error(f"an instruction cannot be used in {mode} mode; leave instruct out, or use instruct mode")
    head, body = _head(text)
    if mode == "zero_shot":
        _no_instruction(head, mode)
        if transcript is None:
            return "", body
        if not take_head(transcript)[1].strip():
            raise CosyH3Error("the voice's transcript is empty; give what its clip says, or use cross_lingual mode")
        if note and body and 2 * len(body) < len(take_head(transcript)[1]):
            note(f"the text {body[:30]!r} is less than half as long as the voice's transcript; the speech may be poor")
        return (with_prefix(transcript) if version == 3 else as_read(transcript, normalise)), body
    if mode == "instruct":
        _no_instruction(head, mode)
        if isinstance(instruct, str):
            instruct = as_read(instruct, normalise and version == 1)
        return instruction(instruct, version, note, tags), body
    if version < 3 or head:  # a head that the user wrote is kept as it is
        return "", head + body
    return "", (PREFIX if mode == "cross_lingual" else END_OF_PROMPT) + body


def as_read(text, normalise):
    """A prompt of one piece: `text` with its numbers and signs as words, unless it holds a special token.

    Upstream reads so the transcripts of versions 1 and 2 and the instructions of version 1; it adds no full stop."""
    return normalize(text) if normalise and text.strip() and "<|" not in text else text


def with_prefix(text):
    """`text` after version 3's system prefix; unchanged when it holds an <|endofprompt|> already."""
    head, body = _head(text)
    return (head or PREFIX) + body


def instruction(instruct, version, note=warnings.warn, tags=TAGS):
    """The prompt text of an instruction: <|endofprompt|> at its end and, in version 3, the system sentence first."""
    if not isinstance(instruct, str) or not instruct.strip():
        raise CosyH3Error(f"the instruction is {instruct!r}; say how to speak, for instance 'Please speak softly.'")
    check_tags(instruct, note, tags)
    head, after = _head(instruct)
    if head and after.strip():
        raise CosyH3Error(
            f"the instruction goes on after {END_OF_PROMPT} ({after.strip()[:40]!r}); "
            "what is to be spoken goes into text"
        )
    words = (head.removesuffix(END_OF_PROMPT) if head else instruct).strip()
    if words.startswith(SYSTEM):
        words = words.removeprefix(SYSTEM).strip()
    if not words:
        raise CosyH3Error("the instruction holds nothing but the system prefix; say how to speak")
    limit = LONGEST_INSTRUCTION * 3 // 8 if HAN.search(words) else LONGEST_INSTRUCTION
    if note and len(words) > limit:
        note(f"the instruction has {len(words)} characters; above {limit} the model may speak it aloud: shorten it")
    return (f"{SYSTEM} {words}" if version == 3 else words) + END_OF_PROMPT


def _head(text):
    if text.count(END_OF_PROMPT) > 1:
        raise CosyH3Error(f"{END_OF_PROMPT} occurs {text.count(END_OF_PROMPT)} times in {text[:60]!r}; give it once")
    return take_head(text)


def _no_instruction(head, mode):
    if head.removesuffix(END_OF_PROMPT).strip() not in ("", SYSTEM):
        raise CosyH3Error(
            f"the text holds an instruction before {END_OF_PROMPT} ({head[:60]!r}), which {mode} mode would lose; "
            "give it as instruct"
        )
