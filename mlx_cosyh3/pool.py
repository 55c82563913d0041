"""Several models in one process, within a bound on the memory that their weights take.

    pool = Pool(max_memory=4e9)
    with pool.get("my-voice-model") as lease:
        result = lease.submit("Hello there.", seed=1).result()

A model is loaded when it is asked for. When another needs its memory, the one that was not used for the longest time
leaves, unless somebody holds it (a lease) or it is at work; asked for again, it comes back from its folder.
"""

import gc
import importlib
import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from pathlib import Path

import mlx.core as mx

from mlx_cosyh3 import sampling
from mlx_cosyh3.caches import nbytes
from mlx_cosyh3.errors import CheckpointError, CosyH3Error, first_line
from mlx_cosyh3.load import EMBEDDED, FAMILIES, find_model, load, read_config
from mlx_cosyh3.scheduler import Closed, Scheduler
from mlx_cosyh3.stream import Beside
from mlx_cosyh3.ticket import forget_frames

SHARE = 0.6  # of the memory MLX advises to use at most, where no bound is given: the rest is for the work itself
MEMORY = ("max_recommended_working_set_size", "memory_size", "total_memory")  # names of it, on Metal and on CUDA
LOOK = 0.5  # s between looks for leases that were dropped without being closed


class PoolBusy(CosyH3Error):
    """There is no room for the model now, but there will be once others are no longer in use."""

    retry_after = 1  # s


class Pool:
    """max_memory   bytes that all weights together may take, or a share of this machine's memory (a float up to 1);
                 None: 0.6 of it
    load         what makes a model of a name: `load`, or a test's own
    size         says beforehand how many bytes a name's model will take; afterwards it is measured
    options      those of each model's Scheduler: workers, max_queue, per_client, policy, states

    An error while loading goes to all who wait for that model, and leaves no trace: the next one tries again."""

    def __init__(self, max_memory=None, *, load=load, size=None, **options):
        self.max_memory = memory_bound(max_memory)
        self._load, self._expect, self._options = load, size or expected_bytes, options
        Scheduler(None, **options).close()  # so that bad options are an error here, not at the first request
        self._changed = threading.Condition()  # guards all that follows
        self._models = OrderedDict()  # key -> _Model, the least recently used first
        self._loading = {}  # key -> _Loading
        self._keys = {}  # names that were found -> key: their folders may vanish
        self._sizes = {}  # key -> bytes that it took
        self._counts = {"loads": 0, "evictions": 0}
        self._closed = False

    def get(self, name=None, *, timeout=0, **options):
        """The model `name` (a folder, a hub repo id, None: see `load`), loaded if need be -> Lease.

        timeout   seconds to wait for room, if the models that take it are in use; but who holds a lease meanwhile may
                  wait for somebody who waits for that one
        options   of `load` (revision, kv_window, lighter): with other ones it is another model
        Raises PoolBusy, Closed, or CosyH3Error for a model that cannot be loaded or is larger than max_memory."""
        sampling.number("timeout", timeout, lambda x: x >= 0, "seconds from 0")
        given = str(find_model(None) if name is None else name), tuple(sorted(options.items()))
        key = self._key(given)
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                self._check_open()
                if key in self._models:
                    return self._lease(key)
                loading = self._loading.get(key)
                if loading is None:
                    mine = self._loading[key] = _Loading()
            if loading is None:
                return self._bring(key, given, mine, deadline)
            loading.done.wait()
            if isinstance(loading.error, CosyH3Error) and not isinstance(loading.error, PoolBusy):
                raise loading.error  # else it is here now, or this thread tries to bring it

    def _key(self, given):
        """(name, options) with the absolute path of a local model for its name, so that each has but one."""
        for path in (Path(given[0]), EMBEDDED / given[0]):
            if (path / "config.json").exists():
                return os.path.realpath(path), given[1]
        with self._changed:
            return self._keys.get(given, given)

    def _lease(self, key):
        self._models.move_to_end(key)
        lease = Lease(self, self._models[key])
        self._models[key].leases.add(lease)
        return lease

    # Loading

    def _bring(self, key, given, loading, deadline):
        """Load the model of `key`, for all who wait for it -> Lease."""
        name, options = key[0], dict(key[1])
        made = scheduler = None
        try:
            loading.bytes = self._sizes.get(key) or _in_words(self._expect, name, options)
            self._make_room(name, loading, deadline)
            made = _in_words(self._load, name, options)
            loading.bytes = self._sizes[key] = nbytes(made)
            self._make_room(name, loading, deadline)  # it may take more than it seemed
            scheduler = Scheduler(made, **self._options)
            scheduler.on_idle = self._wake
            with self._changed:
                self._check_open()
                self._keys[given] = key
                self._models[key] = _Model(name, scheduler, loading.bytes)
                self._counts["loads"] += 1
                return self._lease(key)
        except BaseException as e:
            loading.error = e
            if scheduler is not None:
                scheduler.close()
            made = scheduler = None  # the error holds this frame
            raise
        finally:
            with self._changed:
                del self._loading[key]
                self._changed.notify_all()
            loading.done.set()

    def _make_room(self, name, loading, deadline):
        """Let models go until there is room for one more, for which `loading.bytes` are set aside."""
        if loading.bytes > self.max_memory:
            raise CosyH3Error(
                f"the model {name} takes {_gb(loading.bytes)}, more than max_memory ({_gb(self.max_memory)}): "
                "raise it, or convert the model with -q"
            )
        while True:
            with self._changed:
                self._check_open()
                others = sum(x.bytes for x in self._loading.values() if x.room and x is not loading)
                gone = self._evict(self.max_memory - loading.bytes - others)
                if not gone and self.bytes + loading.bytes + others <= self.max_memory:
                    loading.room = True
                    return
                if not gone:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise PoolBusy(
                            f"no room for the model {name} ({_gb(loading.bytes)}): those that are in use take "
                            f"{_gb(self.bytes + others)} of {_gb(self.max_memory)}; try again later"
                        )
                    self._changed.wait(min(left, LOOK))
            _close(gone)

    def _evict(self, limit):
        """Take out models that are not in use, until the rest takes at most `limit` bytes -> those taken out."""
        gone = []
        for key, model in list(self._models.items()):
            if self.bytes <= limit:
                break
            if not model.in_use:
                gone.append(self._models.pop(key))
                self._counts["evictions"] += 1
        return gone

    def _wake(self):
        with self._changed:
            self._changed.notify_all()

    def _release(self, lease, model):
        with self._changed:
            model.leases.discard(lease)
            self._changed.notify_all()

    def _check_open(self):
        if self._closed:
            raise Closed("the pool is closed: it gives no more models")

    # The whole

    @property
    def bytes(self):
        """What the weights of all loaded models take."""
        with self._changed:
            return sum(model.bytes for model in self._models.values())

    @property
    def names(self):
        """The loaded models (folder or repo id), the least recently used first."""
        with self._changed:
            return [model.name for model in self._models.values()]

    def trim(self, max_bytes=0):
        """Let models that are not in use go until the rest takes at most `max_bytes`."""
        with self._changed:
            gone = self._evict(max_bytes)
        _close(gone)

    def stats(self):
        """{"bytes", "max_bytes", "loads", "evictions", "models": {name: Scheduler.stats() and "bytes", "leases"}}"""
        with self._changed:
            models = {
                m.name: m.scheduler.stats() | {"bytes": m.bytes, "leases": len(m.leases)} for m in self._models.values()
            }
            return {"bytes": self.bytes, "max_bytes": self.max_memory, **self._counts, "models": models}

    def close(self, drain=False, timeout=None):
        """Give no more models, end all requests (see Scheduler.close) and let everything go."""
        with self._changed:
            self._closed = True
            gone = list(self._models.values())
            self._models.clear()
            self._changed.notify_all()
        _close(gone, drain, timeout)

    def __enter__(self):
        return self

    def __exit__(self, kind, *exc):
        self.close(drain=kind is None)


class Lease:
    """A model that stays loaded until close(), or until nobody holds this any more. A context manager.

    A request that was submitted keeps its model loaded by itself, until it has ended."""

    def __init__(self, pool, model):
        self._pool, self._model = pool, model

    @property
    def _held(self):
        if self._model is None:
            raise CosyH3Error("the lease is closed: get another one from the pool")
        return self._model

    @property
    def name(self):
        return self._held.name

    @property
    def scheduler(self):
        return self._held.scheduler

    @property
    def model(self):
        return self._held.scheduler.model

    def submit(self, text, **options):
        """See Scheduler.submit."""
        return self.scheduler.submit(text, **options)

    def close(self):
        model, self._model = self._model, None
        if model is not None:
            self._pool._release(self, model)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class _Model:
    """A loaded model: its scheduler, which holds it, and the leases on it."""

    def __init__(self, name, scheduler, bytes):
        self.name, self.scheduler, self.bytes = name, scheduler, bytes
        self.leases = weakref.WeakSet()

    @property
    def in_use(self):
        return bool(self.leases) or self.scheduler.busy


class _Loading:
    """A model on its way: done once it is here or `error` is set; room: whether `bytes` are set aside for it."""

    def __init__(self):
        self.done, self.error, self.bytes, self.room = threading.Event(), None, 0, False


def _close(models, drain=False, timeout=None):
    """Free the memory of models that were taken out of a pool (the list is emptied)."""
    if not models:
        return
    while models:
        models.pop().scheduler.close(drain, timeout)
    gc.collect()  # a module may be part of a circle
    mx.clear_cache()


def _in_words(function, name, options):
    """function(name, **options); whatever goes wrong with files or memory is one line.

    In one of the threads of `stream.py`, as MLX keeps something for every thread that ever computed."""
    try:
        return Beside(lambda: function(name, **options)).result()
    except CosyH3Error as e:
        forget_frames(e)  # they hold what was loaded so far
        raise
    except (OSError, RuntimeError, MemoryError, ValueError, KeyError) as e:
        forget_frames(e)
        message = f"cannot load the model {name}: {first_line(e)}; check its folder, and the memory that is free"
        raise CheckpointError(message) from e


def expected_bytes(name, revision=None, lighter=None, **options):
    """What the weights of a model will take in memory, from its files' headers. Tables made from them come on top."""
    if lighter is not None:
        return expected_bytes(name, revision) + expected_bytes(lighter)
    folder = find_model(name, revision)
    config, files = read_config(folder), sorted(folder.glob("model*.safetensors"))
    module = importlib.import_module(FAMILIES[config["model_type"]])
    if "hifigan" in config:  # of another layout
        return sum(file.stat().st_size for file in files)
    weights = {}
    for file in files:
        weights.update(mx.load(str(file)))  # lazy: nothing is read
    if hasattr(module, "cast"):
        weights = module.cast(weights, config)
    return sum(a.nbytes for a in weights.values())


def memory_bound(value):
    """max_memory in bytes. Raises CosyH3Error."""
    if value is None:
        return SHARE * (_memory() or math.inf)
    sampling.number("max_memory", value, lambda x: x > 0, "bytes, or a share of the memory from 0 to 1")
    if not (isinstance(value, float) and value <= 1):
        return value
    if _memory() is None:
        raise CosyH3Error(f"max_memory={value}: the size of this machine's memory is not known; give bytes")
    return value * _memory()


def _memory():
    """Bytes of memory on the default device, or None."""
    if mx.default_device() == mx.gpu:
        info = mx.device_info(mx.gpu)
        return next((info[n] for n in MEMORY if info.get(n)), None)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not say
        return None


def _gb(n):
    return f"{n / 1e9:.2f} GB"
