"""The server as an ASGI app. `create_app(models)` is what `mlx_cosyh3 serve` runs; any ASGI server can.

One process and one event loop: all MLX work happens in the threads of the models' schedulers.
"""

import asyncio
import base64
import contextlib
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import mlx_cosyh3
from mlx_cosyh3.server import completions, speech, voices_api
from mlx_cosyh3.server.client import endpoint
from mlx_cosyh3.server.errors import ApiError, busy
from mlx_cosyh3.server.guard import LOOPBACK, Guard
from mlx_cosyh3.server.metrics import Metrics
from mlx_cosyh3.server.models import Models
from mlx_cosyh3.server.voices import Voices

PAGE = Path(__file__).with_name("page.html")


@dataclass
class Limits:
    """text        characters of a text to speak, of a prompt, of a transcript
    upload      bytes of a form with a recording; uploads, how many of them at a time
    recording   seconds of a recording
    audio       seconds of speech made for one request
    tokens      text tokens written for one request
    queue       requests at work or waiting, over all models"""

    text: int = 10_000
    upload: int = 20 << 20
    uploads: int = 4
    recording: float = 60.0
    audio: float = 600.0
    tokens: int = 4096
    queue: int = 64

    @property
    def json_bytes(self):
        """Of a JSON body: a character takes up to 12 bytes, escaped, and there may be several prompts."""
        return max(1 << 16, 24 * self.text)


class Service:
    """What all requests share."""

    def __init__(self, models, limits, voices):
        self.models, self.limits, self.voices, self.metrics = models, limits, voices, Metrics()
        self.active = self.uploading = 0
        self.defaults = {}  # options of requests that leave them out

    @contextlib.contextmanager
    def slot(self):
        """A place among the requests at work or waiting. Raises ApiError 429 when all are taken."""
        if self.active >= self.limits.queue:
            raise busy(2)
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    @contextlib.contextmanager
    def upload(self):
        """Likewise for the bodies that are held in memory."""
        if self.uploading >= self.limits.uploads:
            raise busy(2)
        self.uploading += 1
        try:
            yield
        finally:
            self.uploading -= 1

    def client(self, request, user):
        """Who asks, as far as fairness goes: a host, and what it says of its users."""
        return (request.client.host if request.client else "", (user or "")[:100])

    def gauges(self):
        yield "active", {}, self.active
        yield "voices", {}, len(self.voices)
        for name, stats in self.models.stats().items():
            for state in ("queued", "running"):
                yield "scheduler", {"model": name, "state": state}, stats[state]
            for state in ("done", "failed", "cancelled"):
                yield "ended_total", {"model": name, "state": state}, stats[state]


def create_app(models, *, pool=None, token=None, cors=(), hosts=LOOPBACK, voices_folder=None, max_voices=64,
               max_text=Limits.text, max_upload=Limits.upload, max_queue=Limits.queue, max_audio=Limits.audio,
               max_tokens=Limits.tokens, workers=1, policy=None, deadline=None, late="refuse"):  # fmt: skip
    """The server's app.

    models     a loaded model, or {name for clients: a loaded model, or a folder or hub repo id, loaded when needed}
    pool       a pool.Pool that loads those; None: one of our own
    token      that every request must bear (but for the page and /health); None: none
    cors       origins of web pages that may use the server, such as "https://example.org"; "*": all
    hosts      names under which the server may be asked; None: any
    voices_folder   where voices that clients make are kept; None: in memory, until the server ends
    max_...    bounds: see Limits
    policy     a runtime.Policy for all requests; None: as the environment says
    deadline, late   of requests that bring none, see deadline.py
    Raises CosyH3Error for a model that is not one."""
    limits = Limits(text=max_text, upload=max_upload, queue=max_queue, audio=max_audio, tokens=max_tokens)
    voices = Voices(voices_folder, max_voices)
    service = Service(Models(models, pool, workers, max_queue, policy), limits, voices)
    if deadline is not None:
        service.defaults = {"deadline": deadline, "late": late}

    @contextlib.asynccontextmanager
    async def lifespan(app):
        yield
        await asyncio.to_thread(service.models.close)

    nothing, new_voice = _nothing, endpoint(voices_api.read, voices_api.create)
    routes = [
        Route("/", endpoint(nothing, page), methods=["GET"]),
        Route("/health", endpoint(nothing, health), methods=["GET"]),
        Route("/metrics", endpoint(nothing, metrics), methods=["GET"]),
        Route("/v1/models", endpoint(nothing, show_models), methods=["GET"]),
        Route("/v1/voices", _ByMethod(GET=endpoint(nothing, voices_api.show), POST=new_voice), methods=["GET", "POST"]),
        Route("/v1/voices/{id}", endpoint(nothing, voices_api.delete), methods=["DELETE"]),
        Route("/v1/audio/speech", endpoint(speech.read, speech.answer), methods=["POST"]),
        Route("/v1/completions", endpoint(completions.read, completions.answer), methods=["POST"]),
    ]  # fmt: skip
    guard = Middleware(Guard, token=token, origins=cors, hosts=hosts, metrics=service.metrics)
    app = Starlette(
        routes=routes, middleware=[guard], exception_handlers={HTTPException: _http_error}, lifespan=lifespan
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


class _ByMethod:
    """An ASGI app for each method of a route."""

    def __init__(self, **apps):
        self.apps = apps

    async def __call__(self, scope, receive, send):
        await self.apps["GET" if scope["method"] == "HEAD" else scope["method"]](scope, receive, send)


async def _nothing(request):
    """What a request without a body asks."""
    return ()


async def _http_error(request, e):
    """Starlette's own errors: no such path, no such method."""
    path = request.scope["path"][:100]
    what = {
        404: f"there is nothing at {path}",
        405: f"{request.method[:20]} does not go with {path}",
    }
    return ApiError(e.status_code, what.get(e.status_code, str(e.detail)), headers=e.headers).response()


async def show_models(request, client):
    models = request.app.state.service.models
    about = {"object": "model", "created": models.created, "owned_by": "mlx_cosyh3"}
    data = [{"id": name, "kind": kind} | about for name, kind in models.kinds.items()]
    return JSONResponse({"object": "list", "data": data})


async def health(request, client):
    service = request.app.state.service
    return JSONResponse({"status": "ok", "version": mlx_cosyh3.__version__, "active": service.active})


async def metrics(request, client):
    service = request.app.state.service
    return PlainTextResponse(service.metrics.text(service.gauges()), media_type="text/plain; version=0.0.4")


async def page(request, client):
    text = PAGE.read_text(encoding="utf-8")
    allowed = {
        tag: " ".join(_hash(code) for code in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL))
        for tag in ("script", "style")
    }
    policy = (f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
              "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")  # fmt: skip
    return Response(text, media_type="text/html; charset=utf-8", headers={"Content-Security-Policy": policy})


def _hash(code):
    """As a Content-Security-Policy names a script that may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
