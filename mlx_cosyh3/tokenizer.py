"""Text <-> ids with GPT-2's byte-level BPE, and ids -> text piece by piece while they are being generated.

Byte-level BPE writes each byte as one printable character (its "alphabet") and merges pairs of those, so an id
stands for bytes, not for characters: one character may be spread over several ids, and ids may spell bytes that are
not UTF-8 at all. All decoding here therefore joins bytes first and reads them as UTF-8 after.
"""

import codecs
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mlx_cosyh3.errors import CheckpointError, CosyH3Error

END_OF_TEXT = "<|endoftext|>"
PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # the same two files under both their names


def _alphabet():
    """{character: byte}. Printable Latin-1 stands for itself; the other 68 bytes, in order, for U+0100 onwards."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(moved)}


ALPHABET = _alphabet()


class Tokenizer:
    """Byte-level BPE. `vocab_size` counts every id, `eos_token_id` is the end-of-text id, or None."""

    def __init__(self, bpe, eos_token_id, source):
        """`bpe`: a tokenizers.Tokenizer. `source`: the file it came from, for messages."""
        bpe.no_truncation()  # a tokenizer.json may carry a maximum length: it would cut prompts without a word
        bpe.no_padding()
        self._bpe = bpe
        self.eos_token_id = eos_token_id
        added = bpe.get_added_tokens_decoder()
        vocab = bpe.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self._bytes = [b""] * self.vocab_size
        for token, i in vocab.items():
            if i in added:
                self._bytes[i] = b"" if added[i].special else token.encode()
                continue
            try:
                self._bytes[i] = bytes(ALPHABET[char] for char in token)
            except KeyError:
                raise CheckpointError(
                    f"{source}: token {i}, {token!r}, is not byte-level BPE; only tokenizers of "
                    "GPT-2's kind can be used"
                ) from None
        self._missing = {byte for char, byte in ALPHABET.items() if char not in vocab}

    @classmethod
    def from_dir(cls, path, eos_token_id=None):
        """The tokenizer of a folder: tokenizer.json, else vocab.json + merges.txt (or encoder.json + vocab.bpe).

        `eos_token_id`: the end-of-text id the model's config names; None looks for <|endoftext|>.
        Raises CheckpointError when the files are missing, empty, broken, or not byte-level BPE.
        """
        path = Path(path)
        if (path / "tokenizer.json").is_file():
            source, bpe = path / "tokenizer.json", read_tokenizer_json(path / "tokenizer.json")
        else:
            source, bpe = path / "vocab.json", None
            for vocab, merges in ((path / a, path / b) for a, b in PAIRS):
                if vocab.is_file() and merges.is_file():
                    source, bpe = vocab, read_vocab_and_merges(vocab, merges)
                    break
                if vocab.is_file() or merges.is_file():
                    have, lack = (vocab, merges) if vocab.is_file() else (merges, vocab)
                    raise CheckpointError(f"{path} has {have.name} but not {lack.name}; add the missing file")
            if bpe is None:
                raise CheckpointError(
                    f"no tokenizer in {path}: it needs tokenizer.json, or vocab.json and merges.txt"
                )
        token = END_OF_TEXT
        if eos_token_id is None:
            eos_token_id = bpe.token_to_id(END_OF_TEXT)
        elif (token := bpe.id_to_token(eos_token_id) if eos_token_id >= 0 else None) is None:
            raise CheckpointError(f"{source}: eos_token_id {eos_token_id} of the config is not one of its ids")
        # GPT-2's two files do not say which tokens are special. A special token is matched whole in a prompt, and
        # left out of decoded text.
        special = {t for t in (token, END_OF_TEXT) if bpe.token_to_id(t) is not None}
        bpe.add_special_tokens(sorted(special))
        return cls(bpe, eos_token_id, source)

    def encode(self, text):
        """Ids (list of int) of `text`; <|endoftext|> in it becomes its id.

        Raises CosyH3Error for text that is not Unicode, or that the vocabulary cannot spell.
        """
        try:
            raw = text.encode()
        except UnicodeEncodeError as e:  # how Python hands over bytes of a command line that were not UTF-8
            code = ord(text[e.start])
            what = (
                f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"half a character, U+{code:04X},"
            )
            raise CosyH3Error(f"the text is not Unicode: {what} at character {e.start}; give UTF-8 text") from None
        if self._missing and (bad := self._missing.intersection(raw)):
            # The tokenizers package would drop such bytes without a word.
            at, char = next((i, char) for i, char in enumerate(text) if bad.intersection(char.encode()))
            raise CosyH3Error(
                f"character {char!r} at position {at} cannot be encoded: this model's vocabulary lacks "
                "its bytes; remove or replace it"
            )
        return self._bpe.encode(text, add_special_tokens=False).ids

    def token_bytes(self, id):
        """The bytes an id stands for: b"" for special tokens and unused ids."""
        if not 0 <= id < self.vocab_size:
            raise CosyH3Error(f"token id {id} is outside the vocabulary, 0..{self.vocab_size - 1}")
        return self._bytes[id]

    def decode(self, ids):
        """Text of `ids`. Special tokens are left out; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(int(i)) for i in ids).decode("utf-8", errors="replace")

    def detokenizer(self):
        """A fresh Detokenizer: text while the ids arrive."""
        return Detokenizer(self)


class Detokenizer:
    """Ids in, text out, in linear time: the pieces of add() and the rest of finish() join to decode(all ids)."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, id):
        """The text that `id` completes; "" while a character still lacks bytes."""
        return self._utf8.decode(self._tokenizer.token_bytes(int(id)))

    def finish(self):
        """What is left: U+FFFD for a character that was never completed, else ""."""
        return self._utf8.decode(b"", final=True)


def read_tokenizer_json(path):
    text = read_text(path)
    decoder = json.dumps(parse_json(path, text, dict).get("decoder"))
    if '"ByteLevel"' not in decoder:
        raise CheckpointError(
            f"{path}: not a byte-level BPE tokenizer (its decoder is {decoder[:60]}); only "
            "tokenizers of GPT-2's kind can be used"
        )
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as e:  # the package raises plain Exception for every fault of the file
        raise CheckpointError(f"{path} cannot be used: {e}") from None


def read_vocab_and_merges(vocab_path, merges_path):
    vocab = parse_json(vocab_path, read_text(vocab_path), dict)
    owner = {}
    for token, i in vocab.items():
        if type(i) is not int or not 0 <= i < 2**31:
            raise CheckpointError(f"{vocab_path}: token {token!r} has the id {i!r}; ids are whole numbers from 0")
        if owner.setdefault(i, token) != token:
            raise CheckpointError(f"{vocab_path}: id {i} belongs to two tokens, {owner[i]!r} and {token!r}")
    if not vocab:
        raise CheckpointError(f"{vocab_path} holds no tokens; copy the file again")

    merges = []
    # Not splitlines(): its notion of a line end includes characters that a token may hold.
    for number, line in enumerate(read_text(merges_path).split("\n"), start=1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(pair):
            raise CheckpointError(f"{merges_path}: line {number}, {line[:40]!r}, is not two tokens and a space")
        for token in (*pair, "".join(pair)):
            if token not in vocab:
                raise CheckpointError(
                    f"{merges_path}: line {number} uses the token {token!r}, which is not in "
                    f"{vocab_path.name}; the two files do not belong together"
                )
        merges.append(tuple(pair))
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    return bpe


def read_text(path):
    raw = path.read_bytes()
    if not raw.strip():
        raise CheckpointError(f"{path} is empty; copy the file again")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        byte = raw[e.start]
        raise CheckpointError(f"{path} is not UTF-8 text: byte 0x{byte:02x} at position {e.start}") from None


def parse_json(path, text, kind):
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as e:
        raise CheckpointError(f"{path} is not valid JSON: {e}; copy the file again") from None
    if not isinstance(value, kind):
        raise CheckpointError(f"{path} does not hold a JSON object; copy the file again")
    return value
