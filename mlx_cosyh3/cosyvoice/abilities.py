"""What can be asked of a CosyVoice model, by its version, front ends and voices: for `info` and for errors."""

CLONE = "a voice made of a recording"
CANNOT = "no: "  # what begins so cannot be had


def modes(version, text_in_pieces, lacking, voices):
    """{mode: with what it can be used here, or why it cannot be had}

    lacking   those of the front ends "campplus" and "speech_tokenizer" that the model has not
    voices    {name: Voice} that it holds"""
    cannot = f"{CANNOT}the folder has no {' and no '.join(name.replace('_', ' ') for name in lacking)}"

    def takes(names, cloned=True, lacks="and no voice with a recording"):
        ways = [", ".join(names)] if names else []
        ways += [CLONE] if cloned and not lacking else []
        return " or ".join(ways) or (f"{cannot}, {lacks}" if cloned else f"{CANNOT}the folder holds no voices")

    heard = [name for name, v in voices.items() if v.has_prompt]
    told = [name for name in heard if voices[name].is_told]
    named = version == 1  # instructions go with the model's own voices alone
    made = {
        "sft": takes(list(voices), cloned=False),
        "zero_shot": takes(told, lacks="and no voice with a recording and its transcript"),
        "cross_lingual": takes(heard),
        "instruct": takes(list(voices), cloned=not named, lacks="and no voices"),
        "vc": f"{CANNOT}the folder has no speech tokenizer" if "speech_tokenizer" in lacking else takes(list(voices)),
        "streaming": f"audio as it is made; text {'as it arrives' if text_in_pieces else 'only as a whole'}",
    }
    if named and voices:
        made["instruct"] += " (the model CosyVoice-300M-Instruct was trained for it)"
    return made


def line(made):
    """The same in one line: modes that can be had, and how."""
    names = {"vc": "voice conversion"}
    can = [names.get(mode, mode) for mode, how in made.items() if mode != "streaming" and not how.startswith(CANNOT)]
    streamed = "streamed, also from text in pieces" if "arrives" in made["streaming"] else "streamed"
    return f"{', '.join(can) or 'nothing, without a voice'}, at once or {streamed}"
