"""Caches with a bound in bytes: voices made of recordings, and states of H3 models after the prompts they have read.

The least recently used entries leave first. What is kept is never changed by those who get it. When memory runs short
a `runtime.Policy` empties all caches of the process: what was kept is made anew when it is asked for.
"""

import dataclasses
import hashlib
import os
import threading
import time
import weakref
from collections import OrderedDict
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_cosyh3 import sampling
from mlx_cosyh3.cache import fingerprint
from mlx_cosyh3.errors import NotFiniteError
from mlx_cosyh3.stream import Stopped

ENTRY = 512  # bytes that any entry takes on top of its arrays: key and bookkeeping
VOICES = 64 << 20  # bytes; a voice of 10 s has some 170 kB
STATES = 256 << 20


class BoundedCache:
    """{key: value} of at most `max_bytes` in all, each value as large as size(value) says. Any thread may use it.

    hits, misses   how often `get` and `get_or_make` found something, and how often not"""

    def __init__(self, max_bytes, size=None):
        sampling.whole("max_bytes", max_bytes, 0, None)
        self.max_bytes, self._size = max_bytes, size or nbytes
        self.hits = self.misses = self._bytes = 0
        self._entries = OrderedDict()  # key -> (value, bytes), the least recently used first
        self._making = {}  # key -> lock of the thread that makes its value
        self._lock = threading.Lock()
        with _all_lock:
            _all.add(self)

    def __len__(self):
        return len(self._entries)

    def __contains__(self, key):
        return key in self._entries

    @property
    def bytes(self):
        return self._bytes

    def get(self, key, default=None):
        """The value of `key`, which is now the most recently used."""
        with self._lock:
            if key not in self._entries:
                self.misses += 1
                return default
            self.hits += 1
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key, value):
        """Keep `value`, and let others go for it; one that is larger than the whole cache is not kept."""
        size = self._size(value) + ENTRY
        gone = []  # let go outside of the lock
        with self._lock:
            self._drop(key, gone)
            if size > self.max_bytes:
                return
            while self._bytes + size > self.max_bytes:
                self._drop(next(iter(self._entries)), gone)
            self._entries[key] = value, size
            self._bytes += size

    def get_or_make(self, key, make):
        """The value of `key`; if there is none, that of make(), which only one thread at a time calls for a key."""
        missing = object()
        if (value := self.get(key, missing)) is not missing:
            return value
        with self._lock:
            turn, waiting = self._making.get(key, (threading.Lock(), 0))
            self._making[key] = turn, waiting + 1
        try:
            with turn:
                with self._lock:  # it may have been made meanwhile
                    if key in self._entries:
                        self._entries.move_to_end(key)
                        return self._entries[key][0]
                value = make()
                self.put(key, value)
                return value
        finally:
            with self._lock:
                turn, waiting = self._making.pop(key)
                if waiting > 1:
                    self._making[key] = turn, waiting - 1

    def discard(self, key):
        gone = []
        with self._lock:
            self._drop(key, gone)

    def clear(self):
        with self._lock:
            gone, self._entries, self._bytes = self._entries, OrderedDict(), 0
        del gone

    def stats(self):
        """{"entries", "bytes", "max_bytes", "hits", "misses"}"""
        with self._lock:
            return {
                "entries": len(self._entries), "bytes": self._bytes, "max_bytes": self.max_bytes, "hits": self.hits,
                "misses": self.misses,
            }  # fmt: skip

    def _drop(self, key, gone):
        value, size = self._entries.pop(key, (None, 0))
        self._bytes -= size
        gone.append(value)


_all = weakref.WeakSet()  # memory is the process's, so what frees it must know of all caches
_all_lock = threading.Lock()


def clear_all():
    """Empty all caches of this process -> bytes that they held."""
    held = 0
    with _all_lock:
        caches = list(_all)
    for cache in caches:
        held += cache.bytes
        cache.clear()
    return held


def nbytes(value):
    """Bytes of all arrays within `value`: an array, a container, a module with its private tables, a Voice, a state."""
    seen, total, todo = set(), 0, [value]
    while todo:
        v = todo.pop()
        if id(v) in seen:
            continue
        seen.add(id(v))
        if isinstance(v, (mx.array, np.ndarray)):
            total += v.nbytes
        elif isinstance(v, dict):  # also nn.Module
            todo += [*v.values(), *(vars(v).values() if isinstance(v, nn.Module) else ())]
        elif isinstance(v, (list, tuple, set)):
            todo += v
        elif isinstance(v, (str, bytes)):
            total += len(v)
        elif type(v).__module__.startswith("mlx_cosyh3.") and hasattr(v, "__dict__"):  # a Voice, the tables of a scan
            todo += vars(v).values()
    return total


class VoiceCache(BoundedCache):
    """Voices, so that a recording is listened to once. Keyed by what is in the recording, not by what it is called."""

    def __init__(self, max_bytes=VOICES):
        super().__init__(max_bytes)

    def from_audio(self, model, recording, text=None, *, name="", note=None, compat=False):
        """What Voice.from_audio returns for the same arguments; also the notes come again."""
        # Imported here: states of language models need no audio.
        from mlx_cosyh3.cosyvoice import audio
        from mlx_cosyh3.cosyvoice.voice import Voice

        model.need("campplus", "speech_tokenizer")
        # By what makes the voice: another model with the same front ends would make the same.
        made_by = tuple(fingerprint(model[part]) for part in ("campplus", "speech_tokenizer"))
        digest = _digest(recording)
        settings = tuple(model.mel_settings().values()), model.version, model.codebook

        def make():
            notes = []
            return Voice.from_audio(model, recording, text, note=notes.append, compat=compat), notes

        voice, notes = self.get_or_make((digest, text, compat, made_by, settings), make)
        for n in notes:
            (note or audio.warn)(n)
        return dataclasses.replace(voice, name=name)

    def load(self, path):
        """What Voice.load returns; read anew when the file has changed."""
        from mlx_cosyh3.cosyvoice.voice import Voice

        path = Path(path).expanduser()
        try:
            stat = path.stat()
        except OSError:
            return Voice.load(path)  # which says what is wrong
        key = os.path.realpath(path), stat.st_mtime_ns, stat.st_size
        return self.get_or_make(key, lambda: Voice.load(path))


def _digest(recording):
    """A hash of the content of `recording`, which may be read anew."""
    digest = hashlib.sha256()
    if isinstance(recording, tuple):
        samples = np.ascontiguousarray(recording[0])
        digest.update(f"{samples.dtype} {samples.shape} {recording[1]!r}".encode())
        digest.update(samples.tobytes())
    elif hasattr(recording, "read"):
        start = recording.tell()
        _update(digest, recording)
        recording.seek(start)
    elif isinstance(recording, (str, os.PathLike)):
        path = Path(recording).expanduser()
        if path.is_file():  # else what reads it says what is wrong
            with open(path, "rb") as file:
                _update(digest, file)
    return digest.digest()


def _update(digest, file):
    while block := file.read(1 << 20):
        digest.update(block)


class StateCache(BoundedCache):
    """States of H3 models after the texts they have read: a prompt that begins like an earlier one goes on from there.

    A state holds rounding of its own way of reading: a text from a cached state is as good as one without, but need
    not be the same bytes. The same prompt again is: it starts from the very state that it had the first time."""

    def __init__(self, max_bytes=STATES):
        super().__init__(max_bytes)

    def start(self, model, ids, on_chunk=None):
        """A cache (its caller's own) that has read all of `ids`, a list, but for the last one; and the longest start
        of `ids` that was known, in tokens. Raises NotFiniteError for what is not worth keeping."""
        ids = tuple(ids[:-1])
        key = self._longest(model, ids)
        found = None if key is None else self.get(key)
        if found is None:
            found, known = model.make_cache(), 0
        else:
            found, known = found.copy(), len(key[2])
        if known < len(ids):
            logits = model.prefill(mx.array([ids[known:]], dtype=mx.int32), found, on_chunk=on_chunk)
            if not mx.isfinite(logits).all().item():  # or all who go on from here would fail, too
                raise NotFiniteError("the model gave inf or NaN for the prompt: try --dtype float32")
            self.keep(model, found, ids)
        return found, known

    def keep(self, model, cache, ids):
        """Remember a copy of `cache`, whose single row has read the first of `ids`, as many as it says."""
        kept = cache.copy()
        kept.pending = None
        mx.eval(kept.arrays())  # other threads may use it
        self.put(_key(model, tuple(ids[: int(cache.lengths[0])])), kept)

    def run(self, run):
        """`run`, a generation of one row that has not begun, as one that starts from here and leaves its state here."""
        return _Remembered(self, run)

    def _longest(self, model, ids):
        """The key of the longest start of `ids` that is known, or None."""
        mine = _key(model, ids)[:2]
        with self._lock:
            keys = [k for k in self._entries if k[:2] == mine and len(k[2]) <= len(ids)]
        for key in sorted(keys, key=lambda k: -len(k[2])):
            if ids[: len(key[2])] == key[2]:
                return key
        return None


def _key(model, ids):
    return model.fingerprint, model.kv_window, ids


class _Remembered:
    """See StateCache.run."""

    waited = 0.0

    def __init__(self, states, run):
        self._states, self._run, self.stopped = states, run, run.stopped
        self._read, self._seconds = 0, 0.0  # tokens, and the time they took

    def pieces(self):
        run, states = self._run, self._states
        run.waited = self.waited
        run.start()
        ids = run.prompts[0]
        if len(ids) > 1:
            begin = time.perf_counter()
            try:
                run.cache, known = run.request.guard("text", states.start, run.model, ids, run.between)
            except Stopped:
                return
            run.prompts = [ids[-1:]]
            self._read, self._seconds = len(ids) - 1, time.perf_counter() - begin
            run.control.prompt_read(len(ids) - 1 - known, self._seconds)
        yield from run.pieces()
        if len(ids) > 1 and not self.stopped.is_set():
            states.keep(run.model, run.cache, ids + run.rows[0].tokens)

    def result(self):
        result = self._run.result()
        result.prompt_tokens += self._read
        result.seconds["prompt"] += self._seconds
        result.prompt_tps = result.prompt_tokens / max(result.seconds["prompt"], 1e-9)
        return result
