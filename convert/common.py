"""What the recipes of all model families share: the report, checks before anything is written, and progress."""

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from mlx_cosyh3.errors import CosyH3Error


@dataclass
class ConvertReport:
    """What `convert` did, or with dry_run would do."""

    out: Path
    source: str
    config: dict
    tensors: list  # of writer.Entry, as stored
    parameters: int
    source_bytes: int  # of the tensors of the model in the checkpoint
    bytes: int  # of the tensors written
    quantize: str | None
    unquantized: list[str]  # layers that -q left as they are
    notes: list[str] = field(default_factory=list)  # what the user should know
    dry_run: bool = False
    seconds: float = 0.0

    @property
    def bits_per_weight(self):
        return 8 * self.bytes / self.parameters

    @property
    def tied(self):
        return self.config["tie_word_embeddings"]

    def summary(self):
        """One line."""
        before = 8 * self.source_bytes / self.parameters
        done = "would write" if self.dry_run else "wrote"
        return (
            f"{done} {self.out}: {self.parameters:,} parameters, {self.source_bytes:,} -> {self.bytes:,} bytes, "
            f"{before:.2f} -> {self.bits_per_weight:.2f} bits per weight"
        )

    def plan(self):
        """The whole plan as text: config, tensors, sizes."""
        width = max(len(e.name) for e in self.tensors)
        rows = [f"{e.name:{width}}  {e.dtype:4}  {str(list(e.shape)):16} {e.nbytes:>14,}" for e in self.tensors]
        return "\n".join([json.dumps(self.config, indent=2, sort_keys=True), *rows, self.summary()])


def keep_sources(target, folders):
    """--overwrite must not delete what is being read: raises CosyH3Error if `target` is or holds one of `folders`."""
    for folder in folders:
        if target == folder.resolve() or target in folder.resolve().parents:
            raise CosyH3Error(f"--out {target} holds what is to be converted ({folder}): choose another folder")


def check_space(target, nbytes):
    folder = target.parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise CosyH3Error(f"the disk of {folder} is too full: {nbytes:,} bytes are needed, {free:,} are free")


def some(names, limit=4):
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


class Progress:
    """Counts bytes: to the caller's function, or to a bar on stderr when that is a terminal."""

    def __init__(self, total, function):
        self._total, self._done, self._function, self._bar = total, 0, function, None

    def __enter__(self):
        if self._function is None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="B", unit_scale=True, desc="converting", leave=False)
        return self._tick

    def _tick(self, nbytes):
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        if self._function is not None:
            self._function(self._done, self._total)

    def __exit__(self, *error):
        if self._bar is not None:
            self._bar.close()


@dataclass
class TextTokenizer:
    """The text tokenizer of a published CosyVoice folder."""

    tokenizer: object
    files: dict  # {name in the converted folder: path}
    read: list = field(default_factory=list)  # paths of further files that it was read from
    config: dict = None  # what config.json says of it (version 1)
    qwen2: dict = None  # Qwen2's own config.json (versions 2 and 3)
