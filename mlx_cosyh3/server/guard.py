"""What every request passes first: who may ask, and what every answer has.

A server on the loopback interface is still within reach of every web page in the user's browser. So a request that a
page of another origin makes is refused, unless that origin was allowed, and so is one that was addressed to another
host name (a page whose own name was made to point here). A token, where there is one, is compared in constant time.
"""

import asyncio
import hashlib
import hmac
import secrets
import time

from starlette.requests import Request
from starlette.responses import Response

from mlx_cosyh3 import logs
from mlx_cosyh3.server.body import Gone
from mlx_cosyh3.server.errors import ApiError, closing

LOOPBACK = ("localhost", "127.0.0.1", "::1")
OPEN = ("/", "/health")  # without a token: the page, which asks for it, and what a supervisor asks
ROUTES = ("/", "/health", "/metrics", "/v1/models", "/v1/voices", "/v1/audio/speech", "/v1/completions")
log = logs.get("server")


class Guard:
    """ASGI middleware.

    token     that a request must bear; None: none
    origins   of web pages that may ask, such as "https://example.org"; "*": all
    hosts     names this server may be asked under; None: any"""

    def __init__(self, app, *, token=None, origins=(), hosts=LOOPBACK, metrics):
        self.app, self.origins, self.hosts, self.metrics = app, tuple(origins), hosts, metrics
        self._token = None if token is None else _digest(token)

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request = Request(scope)
        scope["request_id"] = name = "req_" + secrets.token_hex(12)
        with logs.request(name):
            await self._answer(request, name, receive, send)

    async def _answer(self, request, name, receive, send):
        scope, begin, status = request.scope, time.perf_counter(), None
        origin = request.headers.get("origin")

        async def tell(message):
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = message | {"headers": [*message["headers"], *self._headers(name, origin)]}
            await send(message)

        try:
            try:
                self._check(request, origin)
                if request.method == "OPTIONS" and origin is not None:
                    return await self._preflight(request)(scope, receive, tell)
                self._check_token(request)
                await self.app(scope, receive, tell)
            except ApiError as e:
                if status is not None:  # the answer has begun: left unfinished, the client sees that it is cut off
                    log.error("answer cut off", route=_route(request), error=e)
                    status = e.status
                    return
                await e.response()(scope, receive, tell)
            except Gone:
                status = 499
            except asyncio.CancelledError:  # the server has no more patience with what it has not ended
                if status is None:
                    await closing().response()(scope, receive, tell)
            except Exception as e:  # of any kind: the server goes on, and the report says where it was
                log.error("request failed", route=_route(request), error=e)
                logs.report("server", e, route=_route(request))
                if status is not None:
                    status = 500
                    return
                e = ApiError(
                    500, f"something failed in the server; its log knows more under {name}", code="internal_error"
                )
                await e.response()(scope, receive, tell)
        finally:
            route = _route(request)
            self.metrics.add("requests_total", route=route, method=_method(request), status=status or 499)
            seconds = time.perf_counter() - begin
            self.metrics.observe("request_seconds", seconds, route=route)
            log.info("answered", route=route, method=_method(request), status=status or 499, seconds=seconds)

    def _check(self, request, origin):
        host = request.headers.get("host", "")
        if self.hosts is not None and _hostname(host) not in self.hosts:
            raise ApiError(403, f"this server does not answer under the name {host[:100]!r}", code="bad_host")
        if origin is None or origin in self.origins or "*" in self.origins:
            return
        if origin.partition("://")[2] != host:
            raise ApiError(
                403,
                f"pages of {origin[:100]} may not use this server; allow it with --cors {origin[:100]}",
                code="bad_origin",
            )

    def _check_token(self, request):
        if self._token is None or request.scope["path"] in OPEN:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(_digest(given.strip()), self._token):
            raise ApiError(401, "a valid token is needed: send Authorization: Bearer TOKEN", code="invalid_api_key",
                           headers={"WWW-Authenticate": "Bearer"})  # fmt: skip

    def _allows(self, origin):
        return origin is not None and (origin in self.origins or "*" in self.origins)

    def _preflight(self, request):
        if not self._allows(request.headers.get("origin")):
            return Response(status_code=204)
        asked = request.headers.get("access-control-request-headers", "authorization, content-type")
        return Response(status_code=204, headers={
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": asked if asked.isascii() and len(asked) < 1000 else "content-type",
            "Access-Control-Max-Age": "600",
        })  # fmt: skip

    def _headers(self, name, origin):
        out = {
            "X-Request-Id": name,
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
        }
        if self._allows(origin):
            out |= {
                "Access-Control-Allow-Origin": origin,
                "Vary": "Origin",
                "Access-Control-Expose-Headers": "X-Request-Id, Retry-After, Server-Timing",
            }
        return [(k.lower().encode(), v.encode("latin-1", "replace")) for k, v in out.items()]


def _digest(token):
    """Of equal length for all tokens, so that not even that shows."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _hostname(host):
    """The name in a Host header: without the port, IPv6 without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _route(request):
    path = request.scope["path"]  # not that of request.url, in which the Host header has a say
    if path.startswith("/v1/voices/"):
        return "/v1/voices/{id}"
    return path if path in ROUTES else "other"


def _method(request):
    return request.method if request.method in ("GET", "POST", "DELETE", "OPTIONS", "HEAD") else "other"
