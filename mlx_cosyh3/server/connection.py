"""What is bounded before a request is one: connections, the time that a head takes, what a client leaves unread.

uvicorn waits for ever for the rest of a request's head, and for a client to take what was written; a few hundred
connections that do nothing would keep everyone else out, and need no token for it.
"""

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_cosyh3.server.client import STALL
from mlx_cosyh3.server.errors import ApiError, busy

HEAD = 10  # seconds in which the head of a request must be there


class Connection(H11Protocol):
    """uvicorn's, for its option `http`. `limit_concurrency` connections are served; as many again are told to come
    back later, and further ones are closed."""

    head, stall = HEAD, STALL

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self._most, self.limit_concurrency = self.limit_concurrency, None  # uvicorn's own refusal is not JSON
        self._head = self._unread = None  # timers

    def connection_made(self, transport):
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` tells of anything that is not taken
        if self._most is not None and len(self.connections) > self._most:
            self.app = _crowded
            if len(self.connections) > 2 * self._most:
                transport.abort()
        self._expect_head()

    def data_received(self, data):
        super().data_received(data)
        self._expect_head()

    def _expect_head(self):
        """Between two requests the clock runs from the first byte on; what is left of a body that nobody wants, too."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._head = _stop(self._head)
        elif self._head is None:
            self._head = self.loop.call_later(self.head, self.transport.abort)

    def pause_writing(self):
        super().pause_writing()
        self._unread = self.loop.call_later(self.stall, self.transport.abort)

    def resume_writing(self):
        super().resume_writing()
        self._unread = _stop(self._unread)

    def connection_lost(self, error):
        self._head, self._unread = _stop(self._head), _stop(self._unread)
        super().connection_lost(error)

    def send_400_response(self, message):
        """What is no HTTP. Overrides uvicorn's, which is not JSON."""
        answer = ApiError(400, "this is not an HTTP request", code="invalid_http").response()
        if self.conn.our_state is h11.IDLE or self.conn.our_state is h11.SEND_RESPONSE:
            head = h11.Response(
                status_code=400, reason=b"Bad Request", headers=[*answer.raw_headers, (b"connection", b"close")]
            )
            for event in (head, h11.Data(data=answer.body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()


async def _crowded(scope, receive, send):
    answer = busy(5).response()
    answer.headers["Connection"] = "close"
    await answer(scope, receive, send)


def _stop(timer):
    if timer is not None:
        timer.cancel()
