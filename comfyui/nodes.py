"""The nodes: load a model, make a voice, speak, continue a text.

ComfyUI imports this file at its start, so that nothing heavy is imported here; a node imports mlx_cosyh3 when it runs.
AUDIO is ComfyUI's: {"waveform": float32 tensor [B, C, T], "sample_rate": Hz}. What goes wrong is one line of text.
"""

import logging
import sys
from pathlib import Path

MAX_SEED = 2**32 - 1


class LoadModel:
    """A model for the other nodes."""

    CATEGORY = "mlx_cosyh3"
    DESCRIPTION = "Loads a converted CosyVoice or H3 model."
    RETURN_TYPES = ("COSYH3_MODEL",)
    RETURN_NAMES = ("model",)
    FUNCTION = "load_model"

    @classmethod
    def INPUT_TYPES(cls):
        tip = "a folder, a hub repo (owner/name), or one that comes along: cosyvoice3-tiny speaks, h3-tiny writes"
        return {"required": {"model": ("STRING", {"default": "cosyvoice3-tiny", "tooltip": tip})}}

    @classmethod
    def IS_CHANGED(cls, model=""):
        """A folder that was written anew is loaded anew; ComfyUI compares what this returns with the time before.

        model   None, or left out, where it comes by a link"""
        config = Path((model or "").strip()).expanduser() / "config.json"
        return config.stat().st_mtime_ns if config.is_file() else 0

    def load_model(self, model):
        _installed()
        from mlx_cosyh3 import load
        from mlx_cosyh3.errors import CosyH3Error

        if not model.strip():
            raise CosyH3Error("model is empty: give a folder, a hub repo (owner/name), cosyvoice3-tiny or h3-tiny")
        return (load(model.strip()),)


class MakeVoice:
    """A voice from a recording."""

    CATEGORY = "mlx_cosyh3"
    DESCRIPTION = "Takes the voice of a recording: 3 to 30 seconds of one speaker."
    RETURN_TYPES = ("COSYH3_VOICE",)
    RETURN_NAMES = ("voice",)
    FUNCTION = "make_voice"

    @classmethod
    def INPUT_TYPES(cls):
        tip = "what is said in the recording, word for word: makes a better copy"
        return {
            "required": {"model": ("COSYH3_MODEL",), "audio": ("AUDIO",)},
            "optional": {"transcript": ("STRING", {"default": "", "multiline": True, "tooltip": tip})},
        }

    def make_voice(self, model, audio, transcript=""):
        _installed()
        from mlx_cosyh3 import Voice
        from mlx_cosyh3.integrations.torch import recording

        _check(model, speaks=True)
        samples = recording(audio["waveform"], audio["sample_rate"])
        return (Voice.from_audio(model, samples, transcript.strip() or None, name="recording", note=_note),)


class Speak:
    """Text to audio."""

    CATEGORY = "mlx_cosyh3"
    DESCRIPTION = "Speaks a text with a CosyVoice model."
    RETURN_TYPES = ("AUDIO",)
    RETURN_NAMES = ("audio",)
    FUNCTION = "speak"

    @classmethod
    def INPUT_TYPES(cls):
        named = "a voice that the model holds, if none is connected; empty: its first"
        return {
            "required": {
                "model": ("COSYH3_MODEL",),
                "text": ("STRING", {"default": "", "multiline": True}),
                "seed": ("INT", {"default": 0, "min": 0, "max": MAX_SEED, "control_after_generate": True}),
            },
            "optional": {
                "voice": ("COSYH3_VOICE",),
                "voice_name": ("STRING", {"default": "", "tooltip": named}),
                "instruct": ("STRING", {"default": "", "multiline": True, "tooltip": "how to speak"}),
                "speed": ("FLOAT", {"default": 1.0, "min": 0.5, "max": 2.0, "step": 0.05}),
                "steps": ("INT", {"default": 10, "min": 1, "max": 100, "tooltip": "of the flow: more are finer"}),
            },
        }

    def speak(self, model, text, seed, voice=None, voice_name="", instruct="", speed=1.0, steps=10):
        _installed()
        from mlx_cosyh3 import generate
        from mlx_cosyh3.errors import CosyH3Error

        _check(model, speaks=True)
        if voice is not None and voice_name.strip():
            raise CosyH3Error(f"a voice is connected and voice_name is {voice_name.strip()!r}: give one of them")
        result = generate(
            model, text, output="torch", voice=voice or voice_name.strip() or None, instruct=instruct.strip() or None,
            seed=seed, speed=speed, steps=steps, progress=Progress(), note=_note,
        )  # fmt: skip
        return ({"waveform": result.audio[None, None], "sample_rate": result.sample_rate},)  # [1, 1, T]


class ContinueText:
    """Text to text."""

    CATEGORY = "mlx_cosyh3"
    DESCRIPTION = "Continues a text with an H3 language model."
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("text",)
    FUNCTION = "continue_text"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "model": ("COSYH3_MODEL",),
                "prompt": ("STRING", {"default": "", "multiline": True}),
                "seed": ("INT", {"default": 0, "min": 0, "max": MAX_SEED, "control_after_generate": True}),
            },
            "optional": {
                "max_tokens": ("INT", {"default": 256, "min": 1, "max": 100000}),
                "temperature": ("FLOAT", {"default": 0.8, "min": 0.0, "max": 5.0, "step": 0.05}),
                "top_k": ("INT", {"default": 50, "min": 0, "max": 100000, "tooltip": "0: all"}),
                "top_p": ("FLOAT", {"default": 0.9, "min": 0.01, "max": 1.0, "step": 0.01}),
                "stop": ("STRING", {"default": "", "tooltip": "text that ends it, not returned; \\n: a line end"}),
            },
        }

    def continue_text(self, model, prompt, seed, max_tokens=256, temperature=0.8, top_k=50, top_p=0.9, stop=""):
        _installed()
        from mlx_cosyh3 import stream_generate
        from mlx_cosyh3.console import unescape

        _check(model, speaks=False)
        options = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        progress = Progress()
        with stream_generate(model, prompt, stop=[unescape(stop)] if stop else (), **options) as stream:
            for n, _ in enumerate(stream, start=1):
                progress("text", n, max_tokens)
        return (stream.result.text,)


class Progress:
    """Moves ComfyUI's progress bar, and raises ComfyUI's own exception when the user has pressed cancel."""

    def __init__(self):
        # Without ComfyUI around it, as in a script, there is neither.
        utils, self._management = sys.modules.get("comfy.utils"), sys.modules.get("comfy.model_management")
        self._bar = utils.ProgressBar(1) if utils else None

    def __call__(self, stage, done, all):
        if self._management:
            self._management.throw_exception_if_processing_interrupted()
        if self._bar and all:
            self._bar.update_absolute(done, all)


def _installed():
    try:
        import mlx_cosyh3  # noqa: F401
    except ModuleNotFoundError as e:
        raise RuntimeError(
            f"{e.name} is not installed in ComfyUI's Python ({sys.executable}): see the README.md of this node pack"
        ) from e


def _check(model, speaks):
    from mlx_cosyh3.errors import CosyH3Error

    if hasattr(model, "voices") != speaks:
        raise CosyH3Error(
            "this node needs a model that speaks (CosyVoice), the connected one continues text (H3)"
            if speaks
            else "this node needs a model that continues text (H3), the connected one speaks (CosyVoice)"
        )


def _note(text):
    logging.getLogger("mlx_cosyh3").warning(text)


NODE_CLASS_MAPPINGS = {
    "CosyH3LoadModel": LoadModel,
    "CosyH3MakeVoice": MakeVoice,
    "CosyH3Speak": Speak,
    "CosyH3Text": ContinueText,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "CosyH3LoadModel": "Load Model (mlx_cosyh3)",
    "CosyH3MakeVoice": "Make Voice (CosyVoice)",
    "CosyH3Speak": "Speak (CosyVoice)",
    "CosyH3Text": "Continue Text (H3)",
}
