"""The state of an H3 model between calls: what it remembers of the tokens it has read.

An H3 layer keeps a fixed-size recurrent state, an attention layer its keys and values (all of them, or the last
`kv_window`). A cache is copied, saved to a file and loaded again: continuing from it equals never having stopped.

Rows of a batch may have read different numbers of tokens. Keys and values are aligned at their end, so that every
row's next token goes to the same slot; `pad` counts the unused slots in front of a row.
"""

import hashlib
import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_cosyh3.errors import CosyH3Error

FORMAT = "mlx_cosyh3.h3_cache.1"


class H3State:
    """One H3 layer: `shift` [B, D, N], `ssm` [B, H, hd, hd, M, 2] (re, im), both fp32."""

    names = ("shift", "ssm")

    def __init__(self, shift, ssm):
        self.shift, self.ssm = shift, ssm

    def copy(self):
        return H3State(self.shift, self.ssm)  # arrays are values: nobody writes into them

    def mark(self):
        return self.shift, self.ssm

    def rewind(self, mark, tokens):
        self.shift, self.ssm = mark

    def arrays(self):
        return [self.shift, self.ssm]

    def repeat(self, batch):
        self.shift, self.ssm = (mx.repeat(a, batch, axis=0) for a in (self.shift, self.ssm))


class KVState:
    """One attention layer: keys (after rotation) and values [B, heads, slots, dim], `end` slots of them in use."""

    names = ("keys", "values")
    step = 256  # slots by which the buffer grows

    def __init__(self, batch, heads, dim, dtype, window=None):
        self.keys = self.values = mx.zeros((batch, heads, 0, dim), dtype=dtype)
        self.end = 0
        self.window = window
        self.pad = np.zeros(batch, dtype=np.int64)  # unused slots in front of each row

    def append(self, k, v):
        """Add k, v [B, heads, T, dim]; returns all keys and values a query of these T tokens may look at."""
        T = k.shape[2]
        if self.end + T > self.keys.shape[2]:
            self._make_room(T)
        self.keys[:, :, self.end : self.end + T] = k
        self.values[:, :, self.end : self.end + T] = v
        self.end += T
        start = 0 if self.window is None else max(0, self.end - T - (self.window - 1))
        return self.keys[:, :, start : self.end], self.values[:, :, start : self.end], start

    def _make_room(self, T):
        keep = self.end if self.window is None else min(self.end, self.window)
        drop = self.end - keep
        slots = -(-(keep + T + (0 if self.window is None else self.step)) // self.step) * self.step
        B, heads, _, dim = self.keys.shape
        blank = mx.zeros((B, heads, slots - keep, dim), dtype=self.keys.dtype)
        self.keys = mx.concatenate([self.keys[:, :, drop : self.end], blank], axis=2)
        self.values = mx.concatenate([self.values[:, :, drop : self.end], blank], axis=2)
        self.pad = np.maximum(self.pad - drop, 0)
        self.end = keep

    def align(self, gaps):
        """Move row b right by gaps[b] slots: the last gaps[b] entries of row b were padding of a ragged batch."""
        index = np.arange(self.end)[None, :] - np.asarray(gaps)[:, None]  # [B, end]
        index = mx.array(np.maximum(index, 0))[:, None, :, None]
        self.keys = mx.take_along_axis(self.keys[:, :, : self.end], index, axis=2)
        self.values = mx.take_along_axis(self.values[:, :, : self.end], index, axis=2)
        self.pad = np.minimum(self.pad + np.asarray(gaps), self.end)

    def mask(self, T, start):
        """What the last T tokens may look at among the slots from `start` on: None, "causal", or boolean [B|1, 1, T, S]."""
        windowed = self.window is not None and self.end - start > self.window
        if not windowed and not self.pad.any():
            return None if T == 1 else "causal"
        slot = np.arange(start, self.end)
        query = np.arange(self.end - T, self.end)[:, None]
        allowed = slot <= query  # [T, S]
        if self.window is not None:
            allowed &= slot > query - self.window
        allowed = allowed[None] & (slot >= self.pad[:, None])[:, None]  # [B, T, S]
        return mx.array(allowed[:, None])

    def copy(self):
        other = KVState.__new__(KVState)
        other.__dict__.update(self.__dict__)
        # A slice assignment rebinds self.keys to a new array, so sharing the old one is safe.
        other.keys, other.values = self.keys[:], self.values[:]
        return other

    def mark(self):
        return None  # forgetting the newest entries is enough

    def rewind(self, mark, tokens):
        self.end -= tokens

    def arrays(self):
        return [self.keys, self.values]

    def repeat(self, batch):
        self.keys, self.values = (mx.repeat(a, batch, axis=0) for a in (self.keys, self.values))
        self.pad = np.repeat(self.pad, batch)


class H3Cache:
    """All layers' states. Made by `model.make_cache()`; passed to the model, to `generate`, and to the REPL.

    lengths   tokens read by each row
    pending   the last generated token of each row, or None: drawn, but not yet read by the model
    """

    def __init__(self, make_layers, fingerprint):
        self._make_layers = make_layers
        self.fingerprint = fingerprint
        self.reset()

    def reset(self):
        """Forget everything."""
        self.layers = self._make_layers()
        batch = self.layers[0].arrays()[0].shape[0]
        self.lengths = np.zeros(batch, dtype=np.int64)
        self.pending = None

    @property
    def batch_size(self):
        return len(self.lengths)

    @property
    def length(self):
        """Tokens read so far, the pending one included (of the longest row)."""
        return int(self.lengths.max()) + (self.pending is not None)

    @property
    def nbytes(self):
        return sum(a.nbytes for layer in self.layers for a in layer.arrays())

    def copy(self):
        """An independent cache with the same content."""
        other = H3Cache.__new__(H3Cache)
        other.__dict__.update(self.__dict__)
        other.layers = [layer.copy() for layer in self.layers]
        other.lengths = self.lengths.copy()
        return other

    def take_from(self, other):
        """Become what `other` is (a copy made earlier)."""
        self.layers = [layer.copy() for layer in other.layers]
        self.lengths, self.pending = other.lengths.copy(), other.pending

    def mark(self):
        """Remember this moment, for `rewind`."""
        return [layer.mark() for layer in self.layers], self.lengths

    def rewind(self, mark):
        """Go back to a mark made at most one step ago (an attention window keeps no more than it needs)."""
        marks, lengths = mark
        for layer, m in zip(self.layers, marks):
            layer.rewind(m, int(self.lengths[0] - lengths[0]))
        self.lengths = lengths

    def repeated(self, batch):
        """A copy with its single row repeated `batch` times (or a plain copy if it has that many rows)."""
        other = self.copy()
        if other.batch_size == batch:
            return other
        if other.batch_size != 1:
            raise CosyH3Error(f"the cache holds {other.batch_size} rows, the batch {batch}: pass a cache of 1 or {batch}")
        for layer in other.layers:
            layer.repeat(batch)
        other.lengths = np.repeat(other.lengths, batch)
        other.pending = None if self.pending is None else self.pending * batch
        return other

    def arrays(self):
        return [a for layer in self.layers for a in layer.arrays()]

    def save(self, path):
        """Write the cache to `path` (safetensors). The file appears whole or not at all."""
        tensors = {}
        for i, layer in enumerate(self.layers):
            for name, a in zip(layer.names, layer.arrays()):
                if isinstance(layer, KVState):
                    a = a[:, :, max(0, layer.end - (layer.window or layer.end)) : layer.end]
                tensors[f"layers.{i}.{name}"] = a
        kept = [t.shape[2] for name, t in tensors.items() if name.endswith(".keys")]
        first = next((s for s in self.layers if isinstance(s, KVState)), None)
        pad = [] if first is None else np.maximum(first.pad - (first.end - kept[0]), 0).tolist()
        metadata = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "lengths": json.dumps(self.lengths.tolist()),
            "pending": json.dumps(self.pending),
            "pad": json.dumps(pad),
        }
        path = Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}.safetensors")
        try:
            mx.save_safetensors(str(part), tensors, metadata)
            os.replace(part, path)
        except (OSError, RuntimeError) as e:
            raise CosyH3Error(f"cannot write the state to {path}: {e}") from e
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path, model):
        """Read a cache that `save` wrote; raises CosyH3Error unless it was made by this very model."""
        if not Path(path).is_file():
            raise CosyH3Error(f"no saved state at {path}")
        try:
            tensors, metadata = mx.load(str(path), format="safetensors", return_metadata=True)
        except RuntimeError as e:
            raise CosyH3Error(f"{path} is not a saved state: {str(e).splitlines()[0]}") from e
        if metadata.get("format") != FORMAT:
            raise CosyH3Error(f"{path} is not a saved state of this program (format {metadata.get('format')!r})")
        cache = model.make_cache()
        if metadata["fingerprint"] != cache.fingerprint:
            raise CosyH3Error(f"{path} was saved with another model: load that model, or start anew")
        lengths = json.loads(metadata["lengths"])
        if len(lengths) != 1:
            cache = model.make_cache(len(lengths))
        cache.lengths = np.array(lengths, dtype=np.int64)
        cache.pending = json.loads(metadata["pending"])
        for i, layer in enumerate(cache.layers):
            a, b = (tensors[f"layers.{i}.{name}"] for name in layer.names)
            if isinstance(layer, KVState):
                layer.keys, layer.values, layer.end = a, b, a.shape[2]
                layer.pad = np.array(json.loads(metadata["pad"]), dtype=np.int64)
            else:
                layer.shift, layer.ssm = a, b
        mx.eval(cache.arrays())
        return cache


def fingerprint(model):
    """A short hash that tells models apart: every parameter's name, shape and dtype, and the values of its vectors."""
    digest = hashlib.sha256()
    for name, a in sorted(tree_flatten(model.parameters())):
        digest.update(f"{name} {a.shape} {a.dtype}".encode())
        if a.ndim == 1:
            digest.update(np.array(a.astype(mx.float32)).tobytes())
    return digest.hexdigest()[:32]
