"""The models of a server: names that clients use, and what is behind them.

A client chooses among the names that the server was started with; it can never name a folder or a repository.
"""

import asyncio
import contextlib
import contextvars
import functools
import time
from concurrent.futures import ThreadPoolExecutor

from mlx_cosyh3 import logs
from mlx_cosyh3.errors import CosyH3Error, nearest
from mlx_cosyh3.load import find_model, read_config
from mlx_cosyh3.pool import Pool, PoolBusy
from mlx_cosyh3.scheduler import Closed, QueueFull, Scheduler
from mlx_cosyh3.server.errors import ApiError, busy, closing, refused

THREADS = 4  # for what would hold up the event loop: checking texts, decoding and encoding audio
LOADERS = 2  # threads that load models, or wait for room for one
PATIENCE = 30  # seconds to wait for that room
log = logs.get("server")


class Models:
    """models      {name: a loaded model, or a folder or hub repo id}, or one loaded model
    pool        a pool.Pool for those that are to be loaded; None: one of our own
    workers, max_queue, policy   of a loaded model's scheduler (see scheduler.Scheduler)"""

    def __init__(self, models, pool=None, workers=1, max_queue=64, policy=None):
        if hasattr(models, "generate"):
            models = {_type(models): models}
        if not models:
            raise CosyH3Error("a server needs a model: give one, or leave the default")
        self.created, self.policy = int(time.time()), policy
        self._paths, self._schedulers, self.kinds = {}, {}, {}
        for name, model in models.items():
            if hasattr(model, "generate"):
                self._schedulers[name] = Scheduler(model, workers=workers, max_queue=max_queue, policy=policy)
                self.kinds[name] = _kind(_type(model))
            else:
                self._paths[name] = str(find_model(model))
                self.kinds[name] = _kind(read_config(self._paths[name])["model_type"])
        self._own = pool is None and bool(self._paths)
        if self._own:
            pool = Pool(policy and policy.max_memory, workers=workers, max_queue=max_queue, policy=policy)
        self.pool = pool
        self._loaders = ThreadPoolExecutor(LOADERS, thread_name_prefix="mlx_cosyh3 server loader")
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="mlx_cosyh3 server")

    def find(self, name, kind):
        """The name of a model of `kind` ("speech" or "text"); None: the first there is."""
        able = [n for n, k in self.kinds.items() if k == kind]
        does = "speaks" if kind == "speech" else "continues text"
        if name is None and able:
            return able[0]
        if name in able:
            return name
        if name in self.kinds:
            message = f"the model {name!r} is not one that {does}; {_listed(able)}"
        elif name is None:
            message = f"this server has no model that {does}"
        else:
            message = f"there is no model {name[:100]!r} that {does}{nearest(name, able)}; {_listed(able)}"
        raise ApiError(404, message, param="model", code="model_not_found")

    @contextlib.asynccontextmanager
    async def scheduler(self, name):
        """The Scheduler of the model `name`, which is loaded if need be and stays while the block runs."""
        if name in self._schedulers:
            yield self._schedulers[name]
            return
        try:
            load = functools.partial(self.pool.get, self._paths[name], timeout=PATIENCE)
            lease = await self._in(self._loaders, load, lambda lease: lease.close())
        except PoolBusy:
            raise busy(5) from None
        except Closed:
            raise closing() from None
        except (CosyH3Error, OSError) as e:  # its folder has gone, or the memory: nothing the client could know
            log.error("a model cannot be loaded", model=name, error=e)
            message = f"the model {name!r} cannot be loaded; the server's log knows why"
            raise ApiError(500, message, code="model_not_loaded") from e
        with lease:
            yield lease.scheduler

    async def in_thread(self, function, *args, undo=None, **keywords):
        """function(*args, **keywords) in a thread. Cancelled meanwhile, `undo` gets the result that comes too late."""
        return await self._in(self._threads, functools.partial(function, *args, **keywords), undo)

    async def _in(self, threads, call, undo):
        future = asyncio.get_running_loop().run_in_executor(threads, contextvars.copy_context().run, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda f: _late(f, undo))
            raise

    @contextlib.asynccontextmanager
    async def ticket(self, submit, *args, **keywords):
        """A Ticket of submit(*args, **keywords), a Scheduler's method; cancelled when the block is left early.

        What is refused becomes an ApiError."""
        try:
            ticket = await self.in_thread(submit, *args, undo=lambda ticket: ticket.cancel(), **keywords)
        except QueueFull as e:
            raise busy(e.retry_after) from None
        except Closed:
            raise closing() from None
        except CosyH3Error as e:
            raise refused(e) or ApiError(400, str(e)) from None
        try:
            yield ticket
        finally:
            if not ticket.done:
                ticket.cancel()

    def stats(self):
        """{name: Scheduler.stats()} of those that are loaded."""
        out = {name: scheduler.stats() for name, scheduler in self._schedulers.items()}
        if self._paths:
            held = self.pool.stats()["models"]
            out |= {name: held[path] for name, path in self._paths.items() if path in held}
        return out

    def close(self):
        """Cancel what is left, and let everything go."""
        for scheduler in self._schedulers.values():
            scheduler.close()
        if self._own:
            self.pool.close()
        for threads in (self._threads, self._loaders):
            threads.shutdown(wait=True, cancel_futures=True)


def _late(future, undo):
    if undo is not None and not future.cancelled() and future.exception() is None:
        undo(future.result())


def _type(model):
    config = model.config
    return config["model_type"] if isinstance(config, dict) else "h3"


def _kind(model_type):
    return "speech" if model_type.startswith("cosyvoice") else "text"


def _listed(names):
    return f"the ones that do: {', '.join(names)}" if names else "none here does"
