"""Text <-> ids for CosyVoice 2 and 3: Qwen2's byte-level BPE, then the special tokens that upstream adds in code.

The base vocabulary, of any size, comes from the folder's files; the added tokens follow it in the order of
special_tokens.py unless the files hold them (so <|endofprompt|> is 151646 with Qwen2's own files). As in
upstream's cosyvoice/tokenizer/tokenizer.py, nothing is put before or after the ids.
"""

import re
from pathlib import Path

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from mlx_cosyh3 import tokenizer as gpt2
from mlx_cosyh3.cosyvoice.special_tokens import ADDED, END_OF_PROMPT, QWEN2, TAGS, compose
from mlx_cosyh3.errors import CheckpointError, CosyH3Error

# Where Qwen2 cuts text before merging: 's, a word with one leading mark or blank, single digits, marks, blanks.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FOLDERS = ("CosyVoice-BlankEN", ".")  # where a published folder and a converted one keep the files
FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json")


class SpeechTextTokenizer(gpt2.Tokenizer):
    """`encode(text)` -> list of int; `special` is {added token: id}, `end_of_prompt_id` one of them."""

    tags = TAGS  # what may stand in a text in brackets

    def __init__(self, bpe, source, version):
        super().__init__(bpe, bpe.token_to_id(QWEN2[0]), source)
        self.special = {token: bpe.token_to_id(token) for token in ADDED[version]}
        self.end_of_prompt_id = self.special[END_OF_PROMPT]
        for id, token in bpe.get_added_tokens_decoder().items():
            self._bytes[id] = token.content.encode()  # decode() shows them: it is there to see what the model was given

    @classmethod
    def from_dir(cls, path, version=3):
        """The tokenizer of a model folder, or of its CosyVoice-BlankEN: tokenizer.json, else vocab.json + merges.txt.

        Raises CheckpointError when the files are missing, broken, or number their tokens differently from this.
        """
        if version not in ADDED:
            raise CosyH3Error(f"version {version!r} has no Qwen2 tokenizer; 2 and 3 have")
        folder = _folder(path)
        if (folder / "tokenizer.json").is_file():
            source, bpe = folder / "tokenizer.json", gpt2.read_tokenizer_json(folder / "tokenizer.json")
        else:
            for name in ("vocab.json", "merges.txt"):
                if not (folder / name).is_file():
                    raise CheckpointError(f"no tokenizer in {folder}: it lacks {name} and tokenizer.json")
            source, bpe = folder / "vocab.json", _read_pair(folder)
        added = _added_tokens(folder)
        for id, token in sorted(added.items()):
            _add(bpe, token, id, source)
        for token in (*QWEN2, *ADDED[version]):
            _add(bpe, token, None, source)
        return cls(bpe, source, version)

    def encode(self, text):
        """Ids (list of int) of `text`; tags in it ([laughter], <|endofprompt|>, [AA0]) are one id each.

        Raises CosyH3Error for text that is not Unicode, or that the vocabulary cannot spell.
        """
        return super().encode(compose(text))

    def count(self, text):
        """Number of ids: the `length` of split.split and text.segments."""
        return len(self.encode(text))

    def check(self, rows):
        """Raises CheckpointError when an id has no row in the language model's text embedding of `rows` rows."""
        if self.vocab_size > rows:
            raise CheckpointError(
                f"the tokenizer has {self.vocab_size} ids, but the language model's text embedding has {rows} rows; "
                "the tokenizer files and the weights do not belong together"
            )


def files(path):
    """The tokenizer files of a model folder (list of Path): all that from_dir needs beside one another."""
    folder = _folder(path)
    return [folder / name for name in FILES if (folder / name).is_file()]


def _folder(path):
    for name in FOLDERS:
        folder = Path(path) / name
        if any((folder / file).is_file() for file in FILES[:2]):
            return folder
    raise CheckpointError(
        f"no tokenizer in {path}: neither there nor in its {FOLDERS[0]} folder is a vocab.json or a tokenizer.json"
    )


def _read_pair(folder):
    bpe = gpt2.read_vocab_and_merges(folder / "vocab.json", folder / "merges.txt")
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return bpe


def _added_tokens(folder):
    """{id: token} that tokenizer_config.json, or the older added_tokens.json, adds to the vocabulary."""
    found = {}
    path = folder / "tokenizer_config.json"
    if path.is_file():
        added = gpt2.parse_json(path, gpt2.read_text(path), dict).get("added_tokens_decoder", {})
        if not isinstance(added, dict):
            raise CheckpointError(f"{path}: added_tokens_decoder is not a table of tokens; copy the file again")
        for id, token in added.items():
            content = token.get("content") if isinstance(token, dict) else None
            if not re.fullmatch("[0-9]{1,9}", id) or not content or not isinstance(content, str):
                raise CheckpointError(f"{path}: added token {id!r} is {token!r}; it needs a number and a content")
            found[int(id)] = content
    path = folder / "added_tokens.json"
    if path.is_file() and not found:
        for token, id in gpt2.parse_json(path, gpt2.read_text(path), dict).items():
            if type(id) is not int or id < 0 or not token:
                raise CheckpointError(f"{path}: added token {token!r} has the id {id!r}; ids are whole numbers")
            found[id] = token
    return found


def _add(bpe, token, id, source):
    """Makes `token` match whole in raw text, under its present id or the next free one; `id`: what that must be."""
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    if id is not None and bpe.token_to_id(token) != id:
        raise CheckpointError(
            f"{source}: the added token {token!r} should have the id {id}, but {bpe.token_to_id(token)} is next; "
            "the vocabulary is cut short or of another model"
        )
