"""The tokenizer of a converted model. H3's own repos hold none: they use GPT-2's, padded to 50,264 rows."""

from pathlib import Path

from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.tokenizer import Tokenizer

GPT2_REPO = "openai-community/gpt2"
GPT2_ROWS = range(50257, 50265)  # GPT-2's vocabulary, as it is or padded up to a multiple of 8
LAYOUTS = (
    {"tokenizer.json": "tokenizer.json"},
    {"vocab.json": "vocab.json", "merges.txt": "merges.txt"},
    {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"},  # OpenAI's names -> everyone else's
)


class Vocabulary:
    """`size` ids, end-of-text id `eos`, files to copy: [(path, name in the model folder)]; `origin` in words."""

    def __init__(self, size, eos, files, origin):
        self.size, self.eos, self.files, self.origin = size, eos, files, origin


def find_vocabulary(option, source, config, rows):
    """The tokenizer to go with a model whose embedding has `rows` rows.

    option   --tokenizer: a folder, "none", or None (the source's own folder, else GPT-2's from the hub)
    source   the opened checkpoint
    config   config.json beside it, {} when there is none
    """
    eos = config.get("eos_token_id")
    if eos is not None and (type(eos) is not int or not 0 <= eos < rows):
        raise CosyH3Error(f"config.json of {source.name}: eos_token_id {eos!r} is not an id of 0..{rows - 1}")
    if option == "none":
        size = config.get("vocab_size", rows)
        if type(size) is not int or not 0 < size <= rows:
            raise CosyH3Error(f"config.json of {source.name}: vocab_size {size!r} is not in 1..{rows}")
        if eos is not None and eos >= size:
            raise CosyH3Error(f"config.json of {source.name}: eos_token_id {eos} is outside vocab_size {size}")
        return Vocabulary(size, eos, [], "none: this model takes and gives token ids")
    if option is not None:
        folder = Path(option).expanduser()
        if not folder.is_dir():
            raise CosyH3Error(f"--tokenizer {option}: no such folder (a folder with tokenizer files, or 'none')")
        files, origin = _files(folder), f"`{folder.resolve().name}`"
        if not files:
            raise CosyH3Error(f"--tokenizer {option} holds neither tokenizer.json nor vocab.json and merges.txt")
    else:
        folder, files, origin = source.folder, _files(source.folder), "the source's own"
        if not files:
            folder = _fetch_gpt2(source, rows)
            files, origin = _files(folder), f"`{GPT2_REPO}` (MIT)"
    tokenizer = Tokenizer.from_dir(folder, eos_token_id=eos)
    if tokenizer.vocab_size > rows:
        raise CosyH3Error(
            f"the tokenizer of {folder} has {tokenizer.vocab_size} ids, more than the {rows} rows of the "
            "embedding: it is another model's; pass the right one with --tokenizer"
        )
    return Vocabulary(tokenizer.vocab_size, tokenizer.eos_token_id, files, origin)


def _files(folder):
    for layout in LAYOUTS:
        if all((folder / name).is_file() for name in layout):
            return [(folder / name, standard) for name, standard in layout.items()]
    return []


def _fetch_gpt2(source, rows):
    if rows not in GPT2_ROWS:
        raise CosyH3Error(
            f"{source.name} holds no tokenizer, and with {rows} rows of embedding it is not GPT-2's either: "
            "pass --tokenizer DIR (or 'none' for a model of raw token ids)"
        )
    # Imported here: load imports the model, and a source with its own tokenizer needs neither.
    from mlx_cosyh3.load import find_model

    try:
        return Path(find_model(GPT2_REPO, allow_patterns=["vocab.json", "merges.txt"]))
    except CosyH3Error as e:
        raise CosyH3Error(
            f"{source.name} holds no tokenizer and GPT-2's is out of reach ({e}): pass --tokenizer DIR"
        ) from e
