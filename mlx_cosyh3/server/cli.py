"""The command `serve`."""

import ctypes
import os
import re
import signal
import socket
import sys
from pathlib import Path

from mlx_cosyh3 import logs, policy_cli
from mlx_cosyh3.errors import CosyH3Error

HOST, PORT = "127.0.0.1", 8000
DEFAULT_MODELS = ("cosyvoice3-tiny", "h3-tiny")
DRAIN = 60  # seconds
TOKEN = "MLX_COSYH3_TOKEN"


def add_arguments(parser):
    parser.add_argument("--model", action="append", metavar="[NAME=]DIR_OR_REPO", dest="models",
                        help="a model to serve, under NAME or its own; may be given several times; default: the two "
                        "small ones of the package")  # fmt: skip
    parser.add_argument(
        "--host", default=HOST, help=f"address to listen at ({HOST}: this machine alone); others need a token"
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"port; 0 = any free one ({PORT})")
    parser.add_argument(
        "--token-file", metavar="F", help=f"file with the token that every request must bear; or set {TOKEN}"
    )
    parser.add_argument("--cors", action="append", default=[], metavar="ORIGIN",
                        help="let pages of this origin use the server, such as https://example.org; may be given "
                        "several times")  # fmt: skip
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME",
                        help="another host name under which the server may be asked; where it also listens to other "
                        "machines the default is any")  # fmt: skip
    parser.add_argument("--voices", metavar="DIR", help="keep the voices that clients make here; default: in memory")
    parser.add_argument(
        "--max-voices", type=int, default=64, metavar="N", help="most voices that clients may make (64)"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="requests at work at a time, per model (1)")
    parser.add_argument(
        "--max-queue", type=int, default=64, metavar="N", help="requests at work or waiting (64); more get 429"
    )
    parser.add_argument("--max-text", type=int, default=10_000, metavar="N", help="most characters of a text (10000)")
    parser.add_argument("--max-upload", type=int, default=20, metavar="MB", help="largest upload (20 MB)")
    parser.add_argument(
        "--max-audio", type=float, default=600, metavar="S", help="most seconds of speech for a request (600)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=4096, metavar="N", help="most text tokens for a request (4096)"
    )
    parser.add_argument("--drain", type=int, default=DRAIN, metavar="S",
                        help=f"at SIGTERM: seconds that requests have to end ({DRAIN})")  # fmt: skip
    policy_cli.add_arguments(parser, lighter=False)


def run(args):
    give_memory_back()
    logs.setup(os.environ.get(logs.VARIABLE) or "warning")
    app = build(args)
    import uvicorn

    from mlx_cosyh3.server.connection import Connection

    # What clients do wrong and what fails, `guard` tells in our own log.
    config = uvicorn.Config(
        app, log_level="critical", access_log=False, server_header=False, proxy_headers=False,
        http=Connection, ws="none", lifespan="on", timeout_keep_alive=5, timeout_graceful_shutdown=args.drain,
        h11_max_incomplete_event_size=1 << 14,  # bytes of the headers
        limit_concurrency=args.max_queue + 64,
    )  # fmt: skip
    # The server handles SIGTERM while it runs: it takes no more, and ends what it has. Then it raises the signal once
    # more, for the handler that was there before: this one, which has nothing left to do.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with listen(args.host, args.port) as sock:
        host, port = sock.getsockname()[:2]
        print(
            f"listening at http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends it)",
            file=sys.stderr,
            flush=True,
        )
        uvicorn.Server(config).run(sockets=[sock])
    # All is ended and written. A process that loaded a model in a thread may abort when MLX's own threads are taken
    # down at exit, which a supervisor would take for a crash: so this one ends without that.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def give_memory_back():
    """Tell glibc to return large buffers when they are freed, and to keep few heaps.

    Else every thread has a heap of its own in which freed arrays leave holes, and the process seems to grow for hours.
    The variables by which glibc is told otherwise (MALLOC_ARENA_MAX ...) go first."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        set_option(-8, 2)  # M_ARENA_MAX
        set_option(-3, 1 << 18)  # M_MMAP_THRESHOLD, bytes; unless set it rises with what is freed


def listen(host, port):
    """A socket that listens. Raises CosyH3Error."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as e:
        raise CosyH3Error(
            f"cannot listen at {host} port {port} ({e.strerror or e}): choose another --port, or 0"
        ) from e


def build(args):
    """The app that parsed arguments ask for. Raises CosyH3Error."""
    try:
        import uvicorn  # noqa: F401

        from mlx_cosyh3.server.app import create_app
        from mlx_cosyh3.server.guard import LOOPBACK
    except ImportError as e:
        raise CosyH3Error(f"serve needs the package {e.name}: pip install starlette uvicorn") from e
    for name, least in (("workers", 1), ("max_queue", 1), ("max_text", 1), ("max_upload", 1), ("max_voices", 0),
                        ("drain", 0),
                        ("max_tokens", 1), ("port", 0), ("max_audio", 0)):  # fmt: skip
        if getattr(args, name) < least or name == "port" and args.port > 65535:
            raise CosyH3Error(f"--{name.replace('_', '-')} must be {least} or more, not {getattr(args, name)}")
    token = read_token(args.token_file)
    local = args.host in LOOPBACK
    if not local and token is None:
        raise CosyH3Error(
            f"--host {args.host} lets other machines in: give a token (--token-file F, or {TOKEN} in the environment)"
        )
    for origin in args.cors:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+/?", origin):
            raise CosyH3Error(f"--cors {origin}: give an origin, such as https://example.org, or * for all")
    hosts = LOOPBACK + tuple(args.allow_host) if local or args.allow_host else None
    defaults = policy_cli.options(args)
    return create_app(
        named(args.models or DEFAULT_MODELS), token=token, hosts=hosts,
        cors=tuple(o.rstrip("/").lower() for o in args.cors),
        voices_folder=None if args.voices is None else Path(args.voices).expanduser(), max_voices=args.max_voices,
        max_text=args.max_text, max_upload=args.max_upload << 20, max_queue=args.max_queue, max_audio=args.max_audio,
        max_tokens=args.max_tokens, workers=args.workers, **defaults,
    )  # fmt: skip


def named(models):
    """{name: folder or repo} of the values of --model."""
    out = {}
    for given in models:
        name, equals, path = given.partition("=")
        if not equals:
            name, path = given if given.count("/") == 1 and not Path(given).exists() else Path(given).name, given
        if not name or not path:
            raise CosyH3Error(f"--model {given}: give DIR_OR_REPO, or NAME=DIR_OR_REPO")
        if name in out:
            raise CosyH3Error(f"two models are called {name}: give one another name with --model NAME={path}")
        out[name] = path
    return out


def read_token(path):
    """The token of --token-file or the environment; None: none. No argument: those show in the list of processes."""
    if path is None:
        token = os.environ.get(TOKEN)
        if token is None:
            return None
        where = TOKEN
    else:
        token, where = Path(path).expanduser().read_text(encoding="utf-8", errors="replace"), path
    token = token.strip()
    if len(token) < 8 or not token.isascii() or not token.isprintable() or " " in token:
        raise CosyH3Error(f"the token in {where} must be one line of 8 or more letters, digits or signs without spaces")
    return token
