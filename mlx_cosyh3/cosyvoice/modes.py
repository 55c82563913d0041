"""Which voice speaks, and in which mode, as it follows from what `generate` is given."""

from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.errors import CosyH3Error


def choose(model, o, converting=False):
    """(Voice, mode) for SpeechOptions `o`. Raises CosyH3Error for what does not go together.

    converting   a recording is to be spoken with the voice, instead of a text"""
    voice, named = find(model, o.voice), isinstance(o.voice, str) or o.voice is None
    check_made_for(model, voice)
    if converting:
        return voice, "convert"
    known = voice.is_told
    mode = o.mode
    if mode is None and o.instruct:
        mode = "instruct"
    elif mode is None:
        mode = "sft" if named or not voice.has_prompt else "zero_shot" if known else "cross_lingual"
    if (mode == "instruct") != bool(o.instruct):
        raise CosyH3Error(
            f"mode {mode!r} and instruct={o.instruct!r} do not go together: it goes with mode 'instruct' alone"
        )
    if mode in ("zero_shot", "cross_lingual") and not voice.has_prompt:
        raise CosyH3Error(
            f"mode {mode!r} needs a voice made from a recording; {voice.name!r} is a speaker embedding alone"
        )
    if mode == "zero_shot" and not known:
        raise CosyH3Error(
            f"mode 'zero_shot' needs the transcript of the voice {voice.name!r}: make it again with its text"
        )
    model.check_mode(mode, voice, named)
    return voice, mode


def find(model, voice):
    """The Voice that `voice` (one, its name in the model, or None: the model's first) means."""
    if voice is None:
        if not model.voices:
            raise CosyH3Error(
                "no voice: this model holds none; give a recording or a voice file (--voice F, in Python "
                "voice=Voice.from_audio(...))"
            )
        return next(iter(model.voices.values()))
    if isinstance(voice, str):
        return model.find_voice(voice)
    if not isinstance(voice, Voice):
        raise CosyH3Error(f"voice must be a Voice or the name of one, not {type(voice).__name__}")
    return voice


def check_made_for(model, voice):
    """Raise CosyH3Error for a Voice of another model. What it does not say of itself, or has not got, fits any."""
    again = "make it again with this model"
    if voice.made_for not in ("", f"cosyvoice{model.version}"):
        raise CosyH3Error(
            f"the voice {voice.name!r} was made for {voice.made_for.replace('cosyvoice', 'CosyVoice ')}, this model is "
            f"CosyVoice {model.version}: {again}"
        )
    if voice.codebook not in (0, model.codebook):
        raise CosyH3Error(
            f"the voice {voice.name!r} was made for a model with {voice.codebook} speech tokens, this one has "
            f"{model.codebook}: {again}"
        )
    if voice.has_prompt and voice.sample_rate != model.sample_rate:
        raise CosyH3Error(
            f"the voice {voice.name!r} was made for a model of {voice.sample_rate} Hz, this one has "
            f"{model.sample_rate}: {again}"
        )
    if voice.token_rate not in (None, model.token_rate):
        raise CosyH3Error(
            f"the voice {voice.name!r} was made for a model of {voice.token_rate} speech tokens a second, this one has "
            f"{model.token_rate}: {again}"
        )
