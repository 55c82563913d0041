"""LangChain: H3 as an LLM, and CosyVoice as a tool that an agent may call to speak.

    llm = H3LLM("H3-125M-int8", max_tokens=40)
    for piece in llm.stream("Once upon a time"): ...

    tool = SpeakTool("Fun-CosyVoice3", folder="spoken", voice=Voice.load("me.voice.safetensors"))

Both take a model that load() returned, or what load() takes. Work that nobody waits for any more is given up: when a
stream is closed, and when an asyncio task is cancelled.
"""

import asyncio
import contextlib
import threading
import uuid
from pathlib import Path
from typing import Any

from mlx_cosyh3.errors import CosyH3Error, take_options
from mlx_cosyh3.integrations import MissingExtra
from mlx_cosyh3.load import load
from mlx_cosyh3.textgen import TextOptions

try:
    from langchain_core.language_models.llms import BaseLLM
    from langchain_core.outputs import Generation, GenerationChunk, LLMResult
    from langchain_core.tools import BaseTool, ToolException
    from pydantic import Field, create_model
except ImportError as e:
    raise MissingExtra("langchain-core", "langchain") from e


# ---------------------------------------------------------------- text


class H3LLM(BaseLLM):
    """A language model for LangChain: invoke, stream, batch and their async forms. See TextOptions for the fields.

    Options and `stop` may also be given with a call; several prompts at once run as one batch, where row r draws with
    seed + r. `generation_info` of a generation has its finish_reason ("stop" or "length"), its numbers of tokens, and
    log-probabilities if asked for.
    Raises CosyH3Error for a model that cannot be loaded or does not continue text, and for options out of range."""

    model: Any = Field(exclude=True, repr=False)
    max_tokens: int = TextOptions.max_tokens
    temperature: float = TextOptions.temperature
    top_k: int = TextOptions.top_k
    top_p: float = TextOptions.top_p
    min_p: float = TextOptions.min_p
    repetition_penalty: float | None = TextOptions.repetition_penalty
    seed: int | None = TextOptions.seed
    stop: str | list[str] | None = None
    logprobs: bool = TextOptions.logprobs

    def __init__(self, model=None, **fields):
        options = {name: fields[name] for name in fields if name in OPTIONS or name not in type(self).model_fields}
        _options(options)  # here, where an error is one line
        super().__init__(model=_model(model, speaks=False), **fields)

    @property
    def _llm_type(self):
        return "mlx_cosyh3"

    @property
    def _identifying_params(self):
        """What LangChain's caches and traces know a model by."""
        return {"model": self.model.fingerprint} | {name: getattr(self, name) for name in OPTIONS}

    def get_token_ids(self, text):
        """Ids of `text`: what LangChain counts tokens with."""
        return self.model.tokenizer.encode(text)

    def _for_call(self, stop, given):
        """The options of one call; its `stop` replaces the model's."""
        options = {name: getattr(self, name) for name in OPTIONS} | given
        if stop is not None:
            options["stop"] = stop
        return _options(options)

    def _generate(self, prompts, stop=None, run_manager=None, **given):
        options = self._for_call(stop, given)
        if len(prompts) == 1:
            return _llm_result([self.model.generate(prompts[0], **options)])
        return _llm_result(self.model.batch_generate(prompts, **options))

    def _stream(self, prompt, stop=None, run_manager=None, **given):
        with self.model.stream_generate(prompt, **self._for_call(stop, given)) as stream:
            for piece in stream:
                chunk = GenerationChunk(text=piece)
                if run_manager:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        yield GenerationChunk(text="", generation_info=_info(stream.result))

    async def _agenerate(self, prompts, stop=None, run_manager=None, **given):
        if len(prompts) > 1:  # a batch is no stream: it runs to its end
            return await super()._agenerate(prompts, stop, run_manager, **given)
        stream = self.model.stream_generate(prompts[0], **self._for_call(stop, given))
        async with _pieces(stream) as pieces:
            async for _ in pieces:
                continue
        return _llm_result([stream.result])

    async def _astream(self, prompt, stop=None, run_manager=None, **given):
        stream = self.model.stream_generate(prompt, **self._for_call(stop, given))
        async with _pieces(stream) as pieces:
            async for piece in pieces:
                chunk = GenerationChunk(text=piece)
                if run_manager:
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        yield GenerationChunk(text="", generation_info=_info(stream.result))


OPTIONS = tuple(name for name in H3LLM.model_fields if name in TextOptions.__dataclass_fields__ and name != "cache")


def _options(given):
    """Options of `generate`, checked. LangChain's None for `stop` is ours of nothing."""
    options = {name: value for name, value in given.items() if name != "stop" or value is not None}
    take_options(TextOptions, options)
    return options


def _info(result):
    info = {
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": len(result.tokens),
    }
    return info if result.logprobs is None else info | {"logprobs": result.logprobs}


def _llm_result(results):
    """[TextResult] -> LLMResult."""
    generations = [[Generation(text=r.text, generation_info=_info(r))] for r in results]
    read, made = sum(r.prompt_tokens for r in results), sum(len(r.tokens) for r in results)
    usage = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
    return LLMResult(generations=generations, llm_output={"token_usage": usage})


def _pieces(stream):
    """The pieces of a Stream without blocking the event loop; left early, it closes the stream at its next piece."""
    return contextlib.aclosing(_read(stream))


async def _read(stream):
    loop, pieces, gone = asyncio.get_running_loop(), asyncio.Queue(), threading.Event()

    def read():
        with stream:
            for piece in stream:
                if gone.is_set():
                    return
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

    def ended(reading):
        if not reading.cancelled():
            reading.exception()  # seen, though nobody may be left to hear of it
        pieces.put_nowait(None)

    reading = loop.run_in_executor(None, read)
    reading.add_done_callback(ended)
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        await reading  # raises what ended it
    finally:
        gone.set()


# ---------------------------------------------------------------- speech


class SpeakTool(BaseTool):
    """A tool that speaks a text into a wav file of its own and tells where it is.

    model     as for H3LLM: one that speaks
    folder    where the files go; their names are made here, never by the caller
    voice     a Voice, or the name of one of the model: the only one. None: the caller chooses among the model's
    options   others of SpeechOptions (seed, speed, max_seconds ...), the same for all calls

    The artifact of a call is a dict: path, seconds, sample_rate, voice, finish_reason. What goes wrong in a call, such
    as a text with nothing to speak, is one line that the agent gets to read."""

    name: str = "speak"
    description: str = "Speak a text aloud. Returns the path of the audio file."
    response_format: str = "content_and_artifact"
    handle_tool_error: Any = True
    model: Any = Field(exclude=True, repr=False)
    folder: Path
    voice: Any = Field(default=None, exclude=True, repr=False)
    options: dict = Field(default_factory=dict)

    def __init__(self, model="cosyvoice3-tiny", folder=".", voice=None, **given):
        from mlx_cosyh3.cosyvoice import modes
        from mlx_cosyh3.cosyvoice.speech import SpeechOptions

        options = {name: given.pop(name) for name in list(given) if name not in type(self).model_fields}
        take_options(SpeechOptions, options)  # here, where an error is one line
        model, folder = _model(model, speaks=True), Path(folder).expanduser()
        if not folder.is_dir():
            raise CosyH3Error(f"there is no folder {folder} to write speech to: make it first")
        modes.find(model, voice)
        arguments = {"text": (str, Field(description="what to say, in plain words"))}
        if voice is None and len(model.voices) > 1:
            names = ", ".join(model.voices)
            arguments["voice"] = (str | None, Field(default=None, description=f"who speaks: one of {names}"))
        arguments["instruct"] = (str | None, Field(default=None, description="how to speak, in words; rarely needed"))
        given = {"args_schema": create_model("Speak", **arguments)} | given
        super().__init__(model=model, folder=folder, voice=voice, options=options, **given)

    def _asked(self, text, voice, instruct):
        """What goes to the model for a call."""
        asked = {"voice": voice or self.voice} | self.options
        if instruct and instruct.strip():
            asked["instruct"] = instruct
        return text, asked

    def _run(self, text, voice=None, instruct=None, run_manager=None):
        text, asked = self._asked(text, voice, instruct)
        try:
            return self._saved(self.model.generate(text, **asked), asked["voice"])
        except CosyH3Error as e:
            raise ToolException(str(e)) from e

    async def _arun(self, text, voice=None, instruct=None, run_manager=None):
        text, asked = self._asked(text, voice, instruct)
        loop = asyncio.get_running_loop()
        try:
            stream = await loop.run_in_executor(None, lambda: self.model.start(text, False, **asked))
            try:
                await asyncio.shield(loop.run_in_executor(None, _drain, stream))
            except asyncio.CancelledError:
                await loop.run_in_executor(None, stream.close)  # ends the reader, too
                raise
            return await loop.run_in_executor(None, self._saved, stream.result, asked["voice"])
        except CosyH3Error as e:
            raise ToolException(str(e)) from e

    def _saved(self, result, voice):
        """Write a SpeechResult -> (what the agent reads, artifact)."""
        path = self.folder / f"speech-{uuid.uuid4().hex}.wav"
        result.save(path)
        name = voice if isinstance(voice, str) else voice.name if voice else next(iter(self.model.voices))
        told = {
            "path": str(path), "seconds": round(result.duration, 3), "sample_rate": result.sample_rate, "voice": name,
            "finish_reason": result.finish_reason,
        }  # fmt: skip
        cut = "" if result.finish_reason == "stop" else ", cut off by a limit"
        return f"spoke {result.duration:.1f} s of audio{cut} to {path}", told


def _drain(stream):
    for _ in stream:
        continue


def _model(model, speaks):
    """A loaded model of the right kind."""
    if model is None or isinstance(model, (str, Path)):
        model = load(model)
    if not hasattr(model, "generate"):
        raise CosyH3Error(f"model must be one that load() returned, or its name or folder, not {type(model).__name__}")
    if hasattr(model, "voices") != speaks:
        kind, other = ("speaks", "SpeakTool") if not speaks else ("continues text", "H3LLM")
        raise CosyH3Error(f"this model {kind}: use {other} for it")
    return model
