"""The other end of a request: what is sent to it, and whether it is still there."""

import asyncio

from starlette.requests import Request

from mlx_cosyh3.server.body import Gone

STALL = 30  # seconds in which a client must take what it is sent


def endpoint(read, answer):
    """An ASGI app: `asked = await read(request)` takes the request, `await answer(request, client, *asked)` answers it.

    `answer` is cancelled when the client goes away. It returns a Response, or has sent one through `client`."""

    class Endpoint:
        async def __call__(self, scope, receive, send):
            request = Request(scope, receive)
            asked = await read(request)
            response = await unless_gone(request, answer(request, Client(send), *asked))
            if response is not None:
                await asyncio.wait_for(response(scope, receive, send), STALL)

    return Endpoint()


async def unless_gone(request, work):
    """Await `work`, a coroutine, unless the client goes away first: then it is cancelled, and Gone is raised."""

    async def gone():
        while (await request.receive())["type"] != "http.disconnect":
            continue

    tasks = working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Gone
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Client:
    """A streamed answer. Nothing is sent before `begin`, so that until then an error can still be the answer."""

    def __init__(self, send):
        self._send, self.begun = send, False

    async def begin(self, media_type, headers=()):
        pairs = [("content-type", media_type), *headers]
        self.begun = True
        await self._put({"type": "http.response.start", "status": 200,
                         "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in pairs]})  # fmt: skip

    async def write(self, data):
        if data:
            await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self):
        await self._put({"type": "http.response.body", "body": b""})

    async def _put(self, message):
        try:
            await asyncio.wait_for(self._send(message), STALL)
        except asyncio.TimeoutError:  # it does not read what it asked for
            raise Gone from None
