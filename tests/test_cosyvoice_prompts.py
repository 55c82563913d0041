"""What the language models of versions 1 and 2 read in each mode, and language tags on every segment of a text.

Run: python -m pytest -q tests/test_cosyvoice_prompts.py
Then version 3's layouts, and what all versions share.
"""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cosyh3.cosyvoice import prompts, text
from mlx_cosyh3.cosyvoice.special_tokens import LANGUAGE_TAGS, VERSION_1
from mlx_cosyh3.errors import CosyH3Error

TAGS = VERSION_1 | LANGUAGE_TAGS
BARE = re.compile(r"<\|..\|>|\s")


def quiet(mode, version, said, **options):
    return prompts.layout(mode, version, said, note=pytest.fail, tags=TAGS if version == 1 else prompts.TAGS, **options)


def segments(raw, **options):
    return text.segments(raw, note=pytest.fail, tags=TAGS, **options)


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    """Our own reading of numbers, whatever is installed."""
    monkeypatch.setattr(text, "_normalizer", lambda language: None)


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("said", ["Hi.", "<|en|>Hi."])
def test_layouts(version, said):
    """Neither version has a system prefix; <|endofprompt|> comes after an instruction alone."""
    assert quiet("sft", version, said) == ("", said)
    assert quiet("cross_lingual", version, said) == ("", said)
    assert quiet("zero_shot", version, said, transcript="Me.") == ("Me.", said)
    assert quiet("zero_shot", version, said) == ("", said)  # the voice holds the transcript as ids
    how = "A fiery rebel leader."
    for form in (how, f"{how}<|endofprompt|>", f" {how} "):
        assert quiet("instruct", version, said, instruct=form) == (f"{how}<|endofprompt|>", said)
    # what a saved voice says in its clip never takes an instruction's place
    assert quiet("instruct", version, said, instruct=how, transcript="Me.") == (f"{how}<|endofprompt|>", said)


@pytest.mark.parametrize(
    "transcript, read",
    [
        ("It is 5 o'clock.", "It is five o'clock."),
        ("  Me,\nagain ", "Me, again"),
        ("我有3只猫，", "我有三只猫。"),
        ("No stop is added", "No stop is added"),
        ("<|en|>It is 5.", "<|en|>It is 5."),  # with a special token, as it is
        ("A sentence of 5. " * 30, ("A sentence of five. " * 30).strip()),  # whole, however long
    ],
)
def test_a_transcript_is_read_as_upstream_does(transcript, read):
    for version in (1, 2):
        assert quiet("zero_shot", version, "Hi. " * 200, transcript=transcript)[0] == read
        assert quiet("zero_shot", version, "Hi. " * 200, transcript=transcript, normalise=False)[0] == transcript
    assert quiet("zero_shot", 3, "Hi. " * 200, transcript=transcript)[0] == prompts.PREFIX + transcript


def test_an_instruction_is_read_in_version_1_alone():
    for version, read in ((1, "five"), (2, "5")):
        said = f"A leader of {read} rebels."
        assert quiet("instruct", version, "Hi.", instruct="A leader of 5 rebels.")[0] == f"{said}<|endofprompt|>"
    as_told = "A leader of 5.<|endofprompt|>"
    assert quiet("instruct", 1, "Hi.", instruct=as_told)[0] == as_told
    assert quiet("instruct", 1, "Hi.", instruct="A leader of 5.", normalise=False)[0] == as_told


@pytest.mark.parametrize("version", [1, 2])
def test_an_instruction_in_the_text(version):
    """In the modes that have no prompt text the model reads the same as with it."""
    for mode in ("sft", "cross_lingual"):
        assert quiet(mode, version, "Softly.<|endofprompt|>Hi.") == ("", "Softly.<|endofprompt|>Hi.")
    for mode, options in (("zero_shot", {"transcript": "Me."}), ("instruct", {"instruct": "Loudly."})):
        with pytest.raises(CosyH3Error, match="give it as instruct"):
            prompts.layout(mode, version, "Softly.<|endofprompt|>Hi.", **options)


@pytest.mark.parametrize("version", [1, 2])
def test_errors_and_notes(version):
    for bad in (None, "", " ", "<|endofprompt|>"):
        with pytest.raises(CosyH3Error, match="instruction"):
            prompts.layout("instruct", version, "Hi.", instruct=bad)
    with pytest.raises(CosyH3Error, match="goes on after"):
        prompts.layout("instruct", version, "Hi.", instruct="Softly.<|endofprompt|>Hi.")
    with pytest.raises(CosyH3Error, match="cannot be used in sft mode"):
        prompts.layout("sft", version, "Hi.", instruct="Softly.")
    with pytest.raises(CosyH3Error, match="transcript is empty"):
        prompts.layout("zero_shot", version, "Hi.", transcript=" ")
    with pytest.warns(UserWarning, match="less than half"):
        prompts.layout("zero_shot", version, "Hi.", transcript="A long transcript.")
    with pytest.warns(UserWarning, match="instruction has 200 characters"):
        prompts.layout("instruct", version, "Hi.", instruct="x" * 200)


def test_a_language_tag_in_an_instruction_is_version_1_s():
    assert quiet("instruct", 1, "Hi.", instruct="<|en|>Softly.")[0] == "<|en|>Softly.<|endofprompt|>"
    with pytest.raises(CosyH3Error, match="no token of this model"):
        quiet("instruct", 2, "Hi.", instruct="<|en|>Softly.")


# ---------------------------------------------------------------- language tags


def test_a_leading_tag_is_on_every_segment():
    one = "And then later on, fully acquiring that company. "
    got = segments("<|en|>" + one * 8, length=lambda said: len(said.split()), max_units=16, min_units=8, merge=4)
    assert len(got) == 4 and all(s.startswith("<|en|>And then") and s.count("<|en|>") == 1 for s in got)
    got = segments("<|zh|>" + "收到好友从远方寄来的生日礼物。" * 20)
    assert len(got) > 3 and all(s.startswith("<|zh|>收到好友") for s in got)
    assert "".join(got).replace("<|zh|>", "") == "收到好友从远方寄来的生日礼物。" * 20
    got = segments("Softly.<|endofprompt|><|en|>" + one * 30)
    assert len(got) > 3 and all(s.startswith("Softly.<|endofprompt|><|en|>And") for s in got)


def test_a_tag_holds_until_the_next():
    words = {"length": lambda said: len(said.split()), "max_units": 3, "min_units": 1, "merge": 1, "normalise": False}
    said = "I am here. <|en|>You are here. She is here. <|ja|>We are here. They are here. <|zh|>All."
    assert segments(said, **words) == [
        "I am here.", "<|en|>You are here.", "<|en|>She is here.", "<|ja|>We are here.", "<|ja|>They are here.",
        "<|zh|>All.",
    ]  # fmt: skip
    assert segments("<|en|>Hello <|zh|>你好。") == ["<|en|>Hello <|zh|>你好。"]  # short text is not cut
    assert segments(" <|en|> Hello. ") == ["<|en|> Hello."]
    assert segments("Hello. [laughter] Ha.") == ["Hello. [laughter] Ha."]
    assert segments("<|en|>Hello. <|zh|>", normalise=False) == ["<|en|>Hello."]


def test_a_tag_says_the_language_of_numbers():
    assert segments("<|en|>25") == ["<|en|>twenty-five."]
    assert segments("<|zh|>25") == segments("<|yue|>25".replace("yue", "zh")) == ["<|zh|>二十五。"]
    assert segments("<|yue|>我有25本") == ["<|yue|>我有二十五本。"]
    assert segments("<|ja|>今日25日") == ["<|ja|>今日25日"]  # kanji alone would be taken for Chinese
    assert segments("<|ko|>25") == ["<|ko|>25"]
    assert segments("<|zh/en|>我有25本") == ["<|zh/en|>我有二十五本。"]
    assert segments("<|ja|>25", language="en") == ["<|ja|>twenty-five."]  # who says it, means it


def test_kanji_with_kana_is_version_1_s():
    said = "<|ja|>今日は良い天気です。"
    assert segments(said) == [said]
    with pytest.warns(UserWarning, match="katakana"):
        text.segments("今日は良い天気です。")


def test_tags_alone_are_nothing_to_speak():
    with pytest.raises(CosyH3Error, match="nothing to speak"):
        segments("<|en|> <|zh|>")


PARTS = [
    *["Hello there. ", "你好，世界。", "<|en|>", "<|ja|>", "<|zh|>"],
    *["Some words without end ", "こんにちは。", "5 ", "[laughter]"],
]


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=60), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_segment_after_a_tag_has_one(parts, normalise):
    raw = "".join(parts)
    try:
        got = text.segments(raw, normalise=normalise, max_units=30, min_units=10, merge=8, note=None, tags=TAGS)
    except CosyH3Error as e:
        assert "nothing to speak" in str(e)
        return
    begun = [any(s.startswith(tag) for tag in LANGUAGE_TAGS) for s in got]
    first = begun.index(True) if True in begun else len(got)
    tagged = [any(tag in s for tag in LANGUAGE_TAGS) for s in got]
    assert all(begun[first:]) and all(begun[i + 1] for i in range(len(got) - 1) if tagged[i])
    if not normalise:  # nothing else is lost
        assert BARE.sub("", "".join(got)) == BARE.sub("", raw)


# ---------------------------------------------------------------- version 3

PREFIX = "You are a helpful assistant.<|endofprompt|>"


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
