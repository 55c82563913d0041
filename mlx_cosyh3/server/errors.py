"""What goes wrong, as OpenAI's API says it: a status and {"error": {message, type, param, code}}."""

from starlette.responses import JSONResponse

from mlx_cosyh3.errors import DeadlineError

LONGEST = 500  # characters of a message, which may quote what the client sent
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """status    of HTTP
    param     the field that is wrong
    code      a word for programs, such as "model_not_found"
    headers   that go with it"""

    def __init__(self, status, message, *, param=None, code=None, headers=None):
        message = message if len(message) <= LONGEST else message[:LONGEST] + " ..."
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self):
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self):
        return JSONResponse(self.body(), self.status, self.headers)


def busy(seconds):
    """The queue is full; `seconds` is when to ask again."""
    return ApiError(
        429,
        f"too many requests are waiting already: try again in {seconds} s",
        code="queue_full",
        headers={"Retry-After": str(seconds)},
    )


def late(message):
    """A deadline that cannot be met, said before the work starts. Not 5xx: clients repeat those by themselves."""
    return ApiError(422, message, param="deadline", code="deadline_cannot_be_met")


def refused(error):
    """The answer to a CosyH3Error that says so, else None."""
    return late(str(error)) if isinstance(error, DeadlineError) else None


def closing():
    """The server ends before the answer could be made."""
    return ApiError(503, "the server is closing: ask again later", code="closing", headers={"Retry-After": "5"})
