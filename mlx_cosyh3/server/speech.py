"""POST /v1/audio/speech: a text as audio, at once or while it is made.

Without `stream` or `stream_format` the whole audio is made first, in the better, offline way; every error is then an
answer of its own. With one of them the audio is sent chunk by chunk, and begins much sooner.
"""

import base64
import contextlib
import json
import time

from starlette.responses import Response

from mlx_cosyh3 import logs
from mlx_cosyh3.cosyvoice import modes
from mlx_cosyh3.cosyvoice.options import SpeechOptions
from mlx_cosyh3.errors import CosyH3Error, StageError
from mlx_cosyh3.logs import plain
from mlx_cosyh3.server import body
from mlx_cosyh3.server.encode import FORMATS, Encoder, encode, media_type
from mlx_cosyh3.server.errors import ApiError, closing, late, refused

# Fields that go to `generate` as they are
OPTIONS = {
    "seed": int, "temperature": float, "top_k": int, "top_p": float, "win_size": int, "tau_r": float, "steps": int,
    "language": str, "mode": str, "normalize": bool, "max_seconds": float, "pause": float, "causal": bool,
    "chunk_tokens": int, "max_chunk_tokens": int, "deadline": float, "late": str,
}  # fmt: skip
FIELDS = {
    "model": str, "input": str, "voice": (str, dict), "instructions": str, "response_format": str, "speed": float,
    "stream_format": str, "stream": bool, "user": str,
} | OPTIONS  # fmt: skip
MOST_STEPS = 100
log = logs.get("server")


async def read(request):
    service = request.app.state.service
    fields = body.take(await body.read_json(request, service.limits.json_bytes), FIELDS)
    text = fields.get("input")
    if text is None or not text.strip():
        raise ApiError(400, "input is missing or empty: give the text to speak", param="input")
    if len(text) > service.limits.text:
        raise ApiError(
            400, f"input has {len(text)} characters, the limit is {service.limits.text}: send it in parts",
            param="input", code="text_too_long",
        )  # fmt: skip
    if len(fields.get("instructions", "")) > service.limits.text:
        raise ApiError(
            400, f"instructions are longer than the limit of {service.limits.text} characters",
            param="instructions", code="text_too_long",
        )  # fmt: skip
    kind = fields.get("response_format", "mp3")
    if kind not in FORMATS:
        raise ApiError(
            400, f"response_format must be one of {', '.join(FORMATS)}, not {kind[:40]!r}", param="response_format"
        )
    events = fields.get("stream_format", "audio")
    if events not in ("audio", "sse"):
        raise ApiError(400, f"stream_format must be audio or sse, not {events[:40]!r}", param="stream_format")
    streamed = fields.get("stream", "stream_format" in fields)
    if not streamed and events == "sse":
        raise ApiError(400, "stream_format sse goes with stream true, or without stream", param="stream")
    options = service.defaults | {name: fields[name] for name in OPTIONS if name in fields}
    options |= {"speed": fields.get("speed", 1.0), "instruct": fields.get("instructions")}
    if options.get("steps", 1) > MOST_STEPS:
        raise ApiError(400, f"steps must be at most {MOST_STEPS} here, not {options['steps']}", param="steps")
    if streamed and options.pop("causal", None) is not None:
        raise ApiError(400, "causal goes without stream, which always computes so: leave it out", param="causal")
    try:
        SpeechOptions(**options)
    except CosyH3Error as e:
        raise ApiError(400, str(e).replace("instruct ", "instructions ")) from None
    options["max_seconds"] = min(options.get("max_seconds", service.limits.audio), service.limits.audio)
    voice = fields.get("voice")
    if isinstance(voice, dict):
        voice = voice.get("id")
        if not isinstance(voice, str):
            raise ApiError(400, 'voice must be a name, or an object {"id": name}', param="voice")
        body.check_text("voice", voice)
    name = service.models.find(fields.get("model"), "speech")
    return text, name, voice, kind, events if streamed else None, options, service.client(request, fields.get("user"))


async def answer(request, client, text, name, voice, kind, streamed, options, who):
    service = request.app.state.service
    begin = time.perf_counter()
    notes = []
    with service.slot():
        async with service.models.scheduler(name) as scheduler:
            if (model := scheduler.model) is None:
                raise closing()
            options["voice"] = find_voice(service, model, voice)
            ask = service.models.ticket(
                scheduler.submit, text, stream=streamed is not None, client=who, note=notes.append,
                **in_time(options, begin),
            )  # fmt: skip
            async with ask as ticket:
                if streamed is None:
                    response = await _whole(service, ticket, kind)
                elif streamed == "sse":
                    return await _events(service, client, ticket, kind, model, notes, begin)
                else:
                    return await _audio(service, client, ticket, kind, model.sample_rate, begin)
        await client.give(response)  # in here: as long as it is held in memory it counts


def in_time(options, begin):
    """The options with what is left of `deadline` since `begin`: a model may have been loaded meanwhile."""
    asked, spent = options.get("deadline"), time.perf_counter() - begin
    if asked is None or spent < 0.01 * asked:  # so that what is said of it names what was asked for
        return options
    if spent >= asked:
        raise late(f"deadline={asked:g} passed before the model was loaded: ask again")
    return options | {"deadline": asked - spent}


def find_voice(service, model, voice):
    """What `voice` means for `model`: a name it holds, or a Voice that a client made. None: the model's first."""
    try:
        made = None if voice is None else service.voices.get(voice)
        if made is not None:
            modes.check_made_for(model, made)
            return made
        modes.find(model, voice)
    except CosyH3Error as e:
        raise ApiError(400, str(e), param="voice", code="voice_not_found") from None
    return voice


async def _whole(service, ticket, kind):
    result = await _end(service, ticket)
    data = await service.models.in_thread(encode, result.audio, result.sample_rate, kind)
    return Response(data, media_type=media_type(kind), headers={"Server-Timing": timing(result)})


async def _end(service, ticket):
    """The result of a ticket, counted. Raises ApiError unless it is whole."""
    result = await outcome(ticket.aresult())
    service.metrics.add("audio_seconds_total", result.duration)
    for stage, seconds in result.seconds.items():
        if stage != "first_audio":
            service.metrics.add("stage_seconds_total", seconds, stage=stage)
    if result.finish_reason == "cancelled":
        raise closing()
    if not len(result.audio):
        raise ApiError(500, "the model made no audio", code="no_audio")
    return result


async def outcome(awaitable):
    """Await the work of a ticket; an error of ours in it is one of the server, since all input was checked before."""
    try:
        return await awaitable
    except StageError as e:
        raise failed(e) from e
    except CosyH3Error as e:
        raise refused(e) or ApiError(500, str(e), code="generation_failed") from e


def failed(error):
    """The answer to a StageError; what it quotes of the machine is for the log."""
    log.error("a stage failed", error=error)
    logs.report("server", error)
    return ApiError(
        500, "a stage of the model failed: try again, or ask for less at once; the server's log knows more",
        code="generation_failed",
    )  # fmt: skip


async def _encoded(service, ticket, kind, rate, begin):
    """Yield the bytes of `kind` as they are ready."""
    encoder = Encoder(rate, kind)
    pieces, first = aiter(ticket.apieces()), True
    try:
        while (piece := await outcome(anext(pieces, None))) is not None:
            if first:
                service.metrics.observe("first_piece_seconds", time.perf_counter() - begin, route="/v1/audio/speech")
                first = False
            if data := encoder.add(piece):
                yield data
        if not first and (data := encoder.finish()):  # of nothing it would be a header alone
            yield data
    finally:
        encoder.close()


async def _audio(service, client, ticket, kind, rate, begin):
    async with contextlib.aclosing(_encoded(service, ticket, kind, rate, begin)) as encoded:
        async for data in encoded:
            if not client.begun:
                await client.begin(media_type(kind))
            await client.write(data)
    await _end(service, ticket)  # raises, before the answer is complete, if it is not
    await client.end()


async def _events(service, client, ticket, kind, model, notes, begin):
    """Server-sent events: audio in base64, and at last what it took."""
    try:
        async with contextlib.aclosing(_encoded(service, ticket, kind, model.sample_rate, begin)) as encoded:
            async for data in encoded:
                if not client.begun:
                    await client.begin("text/event-stream")
                await client.write(event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()}))
        result = await _end(service, ticket)
        read = await service.models.in_thread(lambda: sum(map(model.tokenizer.count, result.segments)))
    except ApiError as e:
        if not client.begun:
            raise
        await client.write(event({"type": "error"} | e.body()))
        await client.end()
        return
    written = len(result.tokens)
    await client.write(event({
        "type": "speech.audio.done",
        "usage": {"input_tokens": read, "output_tokens": written, "total_tokens": read + written},
        "duration": result.duration, "rtf": result.rtf, "mode": result.mode, "finish_reason": result.finish_reason,
        "seconds": result.seconds, "decisions": plain(result.decisions), "notes": notes,
    }))  # fmt: skip
    await client.end()


def event(value):
    return f"data: {json.dumps(value, allow_nan=False)}\n\n".encode()


def timing(result):
    """The stages of a result as a Server-Timing header, milliseconds."""
    return ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in result.seconds.items())
