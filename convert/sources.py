"""Where weights come from: a .pt file, a .safetensors file, a folder of either, or a repo on the Hugging Face hub.

`open_source` picks the files, reads no more than their directories, and gives one mapping of tensor names to lazy
tensors that all have the same interface (shape, dtype, nbytes, numpy(), rows(start, stop)); weights stay in a
read-only memory map until a block of rows is asked for, so a checkpoint of any size can be walked in little
memory.
"""

import hashlib
import json
import math
import mmap
import os
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mlx_cosyh3.errors import CheckpointError, CosyH3Error

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|rng_state|random_states)[\w.-]*\.(pt|pth|bin)$")
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors$")
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "encoder.json", "vocab.bpe")

# safetensors' dtype names; numpy has no bfloat16, so BF16 is handed out as its bit pattern
NUMPY_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "C64": np.complex64,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
NAMES = {np.dtype(t): name for name, t in NUMPY_DTYPES.items() if name != "BF16"}
FLOATS = ("F64", "F32", "F16", "BF16")


def as_float32(block, dtype):
    """A numpy block of a float tensor as fp32; `dtype` is the tensor's own ("BF16" arrives as uint16 bits)."""
    if dtype == "BF16":
        return (block.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(block, dtype=np.float32)


class SafeTensor:
    """One tensor of a memory-mapped .safetensors file."""

    def __init__(self, buffer, dtype, shape, start):
        self.dtype, self.shape = dtype, tuple(shape)
        self._buffer, self._start = buffer, start

    @property
    def nbytes(self):
        return math.prod(self.shape) * np.dtype(NUMPY_DTYPES[self.dtype]).itemsize

    def numpy(self):
        """The whole tensor as a read-only view of the file."""
        count = math.prod(self.shape)
        flat = np.frombuffer(self._buffer, NUMPY_DTYPES[self.dtype], count, self._start) if count else np.zeros(0)
        return flat.astype(NUMPY_DTYPES[self.dtype], copy=False).reshape(self.shape)

    def rows(self, start, stop):
        return self.numpy()[start:stop]


class ArrayTensor:
    """A numpy array, often a view of a memory-mapped file, with the interface of a tensor in a file."""

    def __init__(self, array):
        self.array, self.shape, self.nbytes = array, tuple(array.shape), array.nbytes
        self.dtype = NAMES[array.dtype]

    def numpy(self):
        return self.array

    def rows(self, start, stop):
        return self.array[start:stop]


def read_safetensors(path):
    """Open a .safetensors file -> {name: SafeTensor}. Its header is checked against the file before any use."""
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as f:
        length = struct.unpack("<Q", f.read(8))[0] if size >= 8 else -1
        if not 0 < length <= min(size - 8, 100_000_000):
            raise CheckpointError(f"{path} is not a safetensors file, or is cut short ({size} bytes)")
        try:
            header = json.loads(f.read(length))
            header.pop("__metadata__", None)
            entries = {k: (v["dtype"], v["shape"], *v["data_offsets"]) for k, v in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise CheckpointError(f"{path}: the safetensors header is damaged ({type(e).__name__})") from e
        buffer = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    tensors, base = {}, 8 + length
    for name, (dtype, shape, start, stop) in entries.items():
        if dtype not in NUMPY_DTYPES:
            raise CheckpointError(f"{path}: tensor {name!r} has the dtype {dtype}, which cannot be read")
        numbers = [*shape, start, stop] if isinstance(shape, list) else [-1]
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise CheckpointError(f"{path}: tensor {name!r} has a damaged header entry")
        tensor = SafeTensor(buffer, dtype, shape, base + start)
        if stop - start != tensor.nbytes or base + stop > size:
            raise CheckpointError(
                f"{path}: tensor {name!r} does not fit in the file of {size} bytes: it is damaged or cut short"
            )
        tensors[name] = tensor
    return tensors


@dataclass
class Source:
    """An opened checkpoint."""

    name: str  # what to call it: a repo id, or the name of a local file or folder
    folder: Path  # where config.json and tokenizer files may lie
    paths: list[Path]  # the weight files
    tensors: dict
    repo: str | None = None
    revision: str | None = None
    ignored: list[str] = field(default_factory=list)  # entries of a .pt that are no tensors of the model

    @property
    def nbytes(self):
        return sum(os.path.getsize(p) for p in self.paths)

    def hash_files(self, progress=lambda n: None):
        """[(name, sha256)] of the weight files, in order; `progress` is told the bytes read."""
        return [(path.name, sha256(path, progress)) for path in self.paths]

    @property
    def files(self):
        return self.hash_files()

    def config(self):
        """config.json beside the weights, or {} when there is none (or one of another kind of model)."""
        path = self.folder / "config.json"
        if not path.is_file():
            return {}
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as e:
            raise CosyH3Error(f"{path} is not valid JSON ({e}): repair it or move it away") from e
        if not isinstance(config, dict):
            raise CosyH3Error(f"{path} does not hold a JSON object: repair it or move it away")
        return config


def sha256(path, progress=lambda n: None):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def open_source(model, file=None, revision=None):
    """Open the checkpoint `model`: a local file or folder, else a hub repo id. `file` picks one of several."""
    path = Path(model).expanduser()
    if path.exists():
        if revision is not None:
            raise CosyH3Error(
                f"--revision {revision} goes with a hub repo, and {model} is a local path: leave it out"
            )
        if path.is_dir():
            return _open_files(path, _pick(path.name or str(path), _local_files(path), file), path.resolve().name)
        if file is not None:
            raise CosyH3Error(
                f"--file {file} goes with a folder or a hub repo, and {model} is a file: leave it out"
            )
        if path.suffix != ".safetensors" and path.suffix not in TORCH_SUFFIXES:
            known = ", ".join((".safetensors", *TORCH_SUFFIXES))
            raise CosyH3Error(
                f"{model}: unknown file type {path.suffix or 'without a suffix'!r}, expected {known}"
            )
        return _open_files(path.parent, [path.name], path.name)
    if not REPO_ID.match(str(model)) or path.suffix in (".safetensors", *TORCH_SUFFIXES):
        raise CosyH3Error(f"no such file or folder: {model}")
    return _open_repo(str(model), file, revision)


def _open_repo(repo, file, revision):
    """Fetch what is needed of a hub repo (or find it in the hub's local cache) and open it."""
    # Imported here: load imports the model, and a local checkpoint needs neither.
    from mlx_cosyh3.load import find_model

    names = [file] if file else _pick(repo, repo_files(repo, revision), None)
    # Without the list of files: whatever weights the local cache holds.
    wanted = names or ["*.safetensors", *(f"*{s}" for s in TORCH_SUFFIXES)]
    if file and file.endswith(".index.json"):
        wanted = [file, "*.safetensors"]
    small = ["config.json", "*.safetensors.index.json", *TOKENIZER_FILES]
    folder = Path(find_model(repo, revision=revision, allow_patterns=wanted + small))
    source = _open_files(folder, names or _pick(repo, _local_files(folder), None), repo)
    source.repo, source.revision = repo, revision
    return source


def repo_files(repo, revision):
    """The names of a repo's top files, or None without a network (then find_model knows what to say)."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        files = HfApi().model_info(repo, revision=revision, timeout=10).siblings or []
        return [f.rfilename for f in files if "/" not in f.rfilename]
    except (OSError, OfflineModeIsEnabled, HfHubHTTPError, HFValidationError):
        return None
    except Exception as e:  # the http client's own errors (their package changed between hub releases)
        if type(e).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "requests", "urllib3"):
            return None
        raise


def _local_files(folder):
    return sorted(p.name for p in folder.iterdir() if p.is_file())


def _pick(where, names, file):
    """Which of a folder's files hold the model -> list of names; None when `names` is."""
    if names is None:
        return None
    if file is not None:
        if file not in names and "/" not in file:
            found = ", ".join(n for n in names if _is_weights(n)) or "no weights"
            raise CosyH3Error(f"{where} holds no file {file!r}; it holds {found}")
        return [file]
    candidates = {}
    for name in names:
        if _is_weights(name):
            shard = SHARD.match(name)
            candidates.setdefault(f"{shard[1]}-*-of-{shard[3]}.safetensors" if shard else name, []).append(name)
    if not candidates:
        known = ", ".join((".safetensors", *TORCH_SUFFIXES))
        raise CosyH3Error(f"{where} holds no model: there is no file that ends in {known}")
    if len(candidates) > 1:
        listed = ", ".join(candidates)
        raise CosyH3Error(f"{where} holds {len(candidates)} models: pick one with --file ({listed})")
    return next(iter(candidates.values()))


def _is_weights(name):
    if name.endswith(".safetensors"):
        return True
    return Path(name).suffix in TORCH_SUFFIXES and not NOT_WEIGHTS.match(Path(name).name)


def _open_files(folder, names, name):
    """Open weight files of one folder and join their tensors."""
    if len(names) == 1 and names[0].endswith(".index.json"):
        names = _index_files(folder / names[0])
    _check_shards(folder, names)
    source = Source(name=name, folder=Path(folder), paths=[Path(folder) / n for n in names], tensors={})
    for path in source.paths:
        if not path.is_file():
            raise CosyH3Error(f"no such file: {path}")
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path} is empty")
        if path.suffix == ".safetensors":
            tensors = read_safetensors(path)
        else:
            # Imported here: a safetensors source does not need it.
            from mlx_cosyh3.convert.torch_file import read_torch

            tensors, ignored = state_dict(read_torch(path), path)
            source.ignored += ignored
        for key, tensor in tensors.items():
            if key in source.tensors:
                raise CheckpointError(f"{path}: tensor {key!r} is in another file of this model too")
            source.tensors[key] = tensor
    if not source.tensors:
        raise CheckpointError(f"{source.paths[0]} holds no tensors")
    return source


def _index_files(path):
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{path} is not a safetensors index ({type(e).__name__})") from e
    if not names or any(os.path.basename(n) != n for n in names):
        raise CheckpointError(f"{path} names files that are not in its folder")
    return names


def _check_shards(folder, names):
    shard = SHARD.match(names[0])
    if not shard:
        return
    stem, total = shard[1], int(shard[3])
    wanted = [f"{stem}-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
    missing = [n for n in wanted if n not in names]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {total} files of the model: {missing[0]} is missing"
        )


def state_dict(tree, path):
    """The model's tensors in what a .pt file held -> ({name: tensor}, [names of entries that were left out]).

    A Lightning checkpoint (key `pytorch-lightning_version`) keeps them in `state_dict` under the prefix `model.`.
    """
    if not isinstance(tree, dict):
        kind = getattr(tree, "name", type(tree).__name__)  # of a pickled object, its class
        raise CheckpointError(f"{path} holds one object of type {kind}, not a state dict (a dict of tensors)")
    if "pytorch-lightning_version" in tree:
        inner = tree.get("state_dict")
        if not isinstance(inner, dict):
            raise CheckpointError(f"{path} is a Lightning checkpoint without a state_dict")
        kept = {k[len("model.") :]: v for k, v in inner.items() if isinstance(k, str) and k.startswith("model.")}
        if not kept:
            raise CheckpointError(f"{path}: none of the keys of this Lightning checkpoint begins with 'model.'")
        ignored = [str(k) for k in inner if not (isinstance(k, str) and k.startswith("model."))]
        tensors = {k: v for k, v in kept.items() if is_tensor(v)}
        return tensors, ignored + [k for k in kept if k not in tensors]
    if not any(is_tensor(v) for v in tree.values()):
        for key in ("state_dict", "model_state_dict", "model"):
            if isinstance(tree.get(key), dict) and any(is_tensor(v) for v in tree[key].values()):
                tree = tree[key]
                break
        else:
            keys = ", ".join(repr(k) for k in list(tree)[:5]) or "none"
            raise CheckpointError(f"{path} holds no tensors at its top (its keys: {keys})")
    tensors = {k: v for k, v in tree.items() if isinstance(k, str) and is_tensor(v)}
    return tensors, [str(k) for k in tree if k not in tensors]


def is_tensor(value):
    return hasattr(value, "shape") and hasattr(value, "rows") and hasattr(value, "nbytes")
