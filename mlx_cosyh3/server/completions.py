"""POST /v1/completions: a text goes on, at once or, with `stream`, as server-sent events.

Where a field is left out, max_tokens is 16 as OpenAI has it, and the others are those of `generate`.
"""

import asyncio
import contextlib
import time

from starlette.responses import JSONResponse

from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.server import body
from mlx_cosyh3.server.errors import ApiError, closing
from mlx_cosyh3.server.speech import event, in_time, outcome
from mlx_cosyh3.textgen import TextOptions

FIELDS = {
    "model": str, "prompt": (str, list), "max_tokens": int, "temperature": float, "top_p": float, "n": int,
    "stream": bool, "stream_options": dict, "stop": (str, list), "seed": int, "echo": bool, "logprobs": int,
    "user": str,
    "top_k": int, "min_p": float, "repetition_penalty": float,
    "deadline": float, "late": str,
    "suffix": str, "presence_penalty": float, "frequency_penalty": float, "logit_bias": dict, "best_of": int,
}  # fmt: skip
OPTIONS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "deadline",
    "late",
)
# OpenAI's fields that change nothing at these values, which some clients always send, and are not here otherwise
NEUTRAL = {"suffix": "", "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}
CHOICES = 16  # texts made for one request
STOPS = 4


async def read(request):
    service = request.app.state.service
    fields = body.take(await body.read_json(request, service.limits.json_bytes), FIELDS)
    for name, neutral in NEUTRAL.items():
        if fields.get(name, neutral) != neutral:
            raise ApiError(400, f"{name} is not supported: leave it out", param=name, code="unsupported")
    prompts = _prompts(fields.get("prompt", ""), service.limits.text)
    n = fields.get("n", 1)
    if n < 1 or n * len(prompts) > CHOICES:
        raise ApiError(
            400, f"n must be from 1 to {CHOICES // len(prompts)} for {len(prompts)} prompts, not {n}", param="n"
        )
    if fields.get("best_of", n) != n:
        raise ApiError(400, f"best_of must be n ({n}) here, or left out", param="best_of", code="unsupported")
    logprobs = "logprobs" in fields
    if fields.get("logprobs", 0) != 0:
        raise ApiError(400, "logprobs must be 0 (of the tokens that were drawn) here, or left out", param="logprobs")
    streamed = fields.get("stream", False)
    about = body.take(fields.get("stream_options", {}), {"include_usage": bool, "include_obfuscation": bool})
    if about and not streamed:
        raise ApiError(400, "stream_options goes with stream true", param="stream_options")
    if logprobs and streamed:
        raise ApiError(400, "logprobs and stream do not go together here: leave one out", param="logprobs")
    echo = fields.get("echo", False)
    if echo and not all(isinstance(p, str) for p in prompts):
        raise ApiError(400, "echo needs prompts of text, not of ids", param="echo")
    options = {"max_tokens": 16, "logprobs": logprobs} | service.defaults
    options |= {name: fields[name] for name in OPTIONS if name in fields}
    if options["max_tokens"] > service.limits.tokens:
        raise ApiError(
            400,
            f"max_tokens must be at most {service.limits.tokens} here, not {options['max_tokens']}",
            param="max_tokens",
        )
    _check(options)
    name = service.models.find(fields.get("model"), "text")
    usage = bool(about.get("include_usage"))
    return (
        name,
        [p for p in prompts for _ in range(n)],
        options,
        echo,
        streamed,
        usage,
        service.client(request, fields.get("user")),
    )


def _prompts(prompt, longest):
    """A text, a list of ids, or a list of either -> list of prompts."""
    ids = lambda p: isinstance(p, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in p)  # noqa: E731
    if prompt == []:
        raise ApiError(400, "prompt is an empty list: give at least one prompt", param="prompt")
    prompts = [prompt] if isinstance(prompt, str) or ids(prompt) else prompt
    if len(prompts) > CHOICES:
        raise ApiError(400, f"there are {len(prompts)} prompts, the limit is {CHOICES}", param="prompt")
    for p in prompts:
        if not isinstance(p, str) and not ids(p):
            raise ApiError(400, "prompt must be a text, a list of ids, or a list of either", param="prompt")
        if len(p) > longest:
            raise ApiError(
                400, f"a prompt is longer ({len(p)}) than the limit of {longest}", param="prompt", code="text_too_long"
            )
        if isinstance(p, str):
            body.check_text("prompt", p)
    return prompts


def _check(options):
    stops = options.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if len(stops) > STOPS or not all(isinstance(s, str) and len(s) <= 1000 for s in stops):
        raise ApiError(400, f"stop must be a text or a list of at most {STOPS} short ones", param="stop")
    for stop in stops:
        body.check_text("stop", stop)
    options["stop"] = tuple(stops)
    try:
        TextOptions(**options)
    except CosyH3Error as e:
        raise ApiError(400, str(e)) from None


async def answer(request, client, name, prompts, options, echo, streamed, usage, who):
    service = request.app.state.service
    about = {
        "id": f"cmpl-{request.scope['request_id']}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
    }
    seed, begin = options.pop("seed", None), time.perf_counter()
    async with contextlib.AsyncExitStack() as stack:
        tickets = []
        for r, prompt in enumerate(prompts):
            stack.enter_context(service.slot())
            scheduler = await stack.enter_async_context(service.models.scheduler(name))
            own = in_time(options, begin) | {"seed": None if seed is None else seed + r}
            ask = service.models.ticket(scheduler.submit, prompt, stream=streamed, client=who, **own)
            tickets.append(await stack.enter_async_context(ask))
        heads = [p if echo else "" for p in prompts]
        if streamed:
            await _stream(service, client, tickets, heads, about, usage)
            return None
        results = [await _end(service, ticket) for ticket in tickets]
        tokenizer = scheduler.model.tokenizer
    choices = [
        _choice(i, head + r.text, r.finish_reason, _logprobs(r, tokenizer))
        for i, (head, r) in enumerate(zip(heads, results))
    ]
    return JSONResponse(about | {"choices": choices, "usage": _usage(results)})


async def _end(service, ticket):
    """The result of a ticket, counted. Raises ApiError unless it is whole."""
    result = await outcome(ticket.aresult())
    service.metrics.add("tokens_total", result.prompt_tokens, kind="read")
    service.metrics.add("tokens_total", len(result.tokens), kind="written")
    for stage, seconds in result.seconds.items():
        service.metrics.add("stage_seconds_total", seconds, stage=stage)
    if result.finish_reason == "cancelled":
        raise closing()
    return result


async def _stream(service, client, tickets, heads, about, usage):
    """All choices at once, each piece as it comes."""
    waiting, begin = asyncio.Queue(), time.perf_counter()

    async def follow(i, ticket):
        try:
            if heads[i]:
                waiting.put_nowait(_choice(i, heads[i]))
            async with contextlib.aclosing(ticket.apieces()) as pieces:
                while (piece := await outcome(anext(pieces, None))) is not None:
                    waiting.put_nowait(_choice(i, piece))
            result = await _end(service, ticket)
            waiting.put_nowait(_choice(i, "", result.finish_reason))
            waiting.put_nowait(result)
        except Exception as e:  # told to the one who sends
            waiting.put_nowait(e)

    tasks = [asyncio.ensure_future(follow(i, ticket)) for i, ticket in enumerate(tickets)]
    results = []
    try:
        while len(results) < len(tasks):
            news = await waiting.get()
            if isinstance(news, Exception):
                raise news
            if not isinstance(news, dict):
                results.append(news)
                continue
            if not client.begun:
                service.metrics.observe("first_piece_seconds", time.perf_counter() - begin, route="/v1/completions")
                await client.begin("text/event-stream")
            await client.write(event(about | {"choices": [news]} | ({"usage": None} if usage else {})))
        if usage:
            await client.write(event(about | {"choices": [], "usage": _usage(results)}))
    except ApiError as e:
        if not client.begun:
            raise
        await client.write(event(e.body()))
        await client.end()
        return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await client.write(b"data: [DONE]\n\n")
    await client.end()


def _choice(index, text, finish_reason=None, logprobs=None):
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(result, tokenizer):
    """As OpenAI has them, of the drawn tokens alone; a token that is part of a character shows as "\ufffd"."""
    if result.logprobs is None:
        return None
    tokens = [tokenizer.token_bytes(t).decode(errors="replace") if tokenizer else str(t) for t in result.tokens]
    return {"tokens": tokens, "token_logprobs": result.logprobs, "top_logprobs": None, "text_offset": None}


def _usage(results):
    read, written = sum(r.prompt_tokens for r in results), sum(len(r.tokens) for r in results)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
