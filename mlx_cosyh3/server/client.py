"""The other end of a request: what is sent to it, and whether it is still there."""

import asyncio

from starlette.requests import Request

from mlx_cosyh3.server.body import Gone

STALL = 30  # seconds in which a client must take a piece of what it is sent
PIECE = 1 << 18  # bytes


def endpoint(read, answer):
    """An ASGI app: `asked = await read(request)` takes the request, `await answer(request, client, *asked)` answers it.

    `answer` is cancelled when the client goes away. It returns a Response, or has sent one through `client`."""

    class Endpoint:
        async def __call__(self, scope, receive, send):
            request = Request(scope, receive)
            asked = await read(request)
            client = Client(send)
            response = await unless_gone(request, answer(request, client, *asked))
            if response is not None:
                await client.give(response)

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
    """Takes an answer. Nothing is sent before `begin`, so that until then an error can still be the answer."""

    def __init__(self, send):
        self._send, self.begun = send, False

    async def begin(self, media_type, headers=()):
        pairs = [("content-type", media_type), *headers]
        await self._head(200, [(k.lower().encode(), v.encode("latin-1")) for k, v in pairs])

    async def write(self, data):
        if data:
            await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def give(self, response):
        """A whole Response, in pieces, so that only a client that takes nothing is given up."""
        await self._head(response.status_code, response.raw_headers)
        for at in range(0, len(response.body), PIECE):
            await self.write(response.body[at : at + PIECE])
        await self.end()

    async def end(self):
        await self._put({"type": "http.response.body", "body": b""})

    async def _head(self, status, headers):
        self.begun = True
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def _put(self, message):
        try:
            await asyncio.wait_for(self._send(message), STALL)
        except asyncio.TimeoutError:  # it does not read what it asked for
            raise Gone from None
