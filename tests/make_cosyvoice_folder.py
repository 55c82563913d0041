"""Writes a CosyVoice folder with random weights, in upstream's layout and key names, without PyTorch.

    python -m tests.make_cosyvoice_folder FOLDER [--version 1|2|3] [--size full|small] [--rate 50|25] [--tokenizer FILE]
                                                 [--campplus FILE] [--speech-tokenizer FILE]

"full" has the sizes of the released model (1.7, 3.0, 3.4 GB), "small" takes some megabytes. The weights say nothing;
the folder is for conversion, memory and speed. What such a folder holds is in cosyvoice_layouts.py.
"""

import argparse
import base64
import json
import shutil
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from tests.cosyvoice_layouts import SHAPES, SIZES, YAML, version_1


def numbers(name, shape):
    """Random float32 weights, the same for the same name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    n = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("inv_freq"):
        return (10000 ** -(np.arange(0, 64, 2) / 64)).astype(np.float32)
    if name.endswith(("alpha", "original0")) or (name.endswith("weight") and len(shape) == 1):
        return 1 + 0.1 * n
    return 0.1 * n if len(shape) == 1 else n / np.sqrt(np.float32(np.prod(shape[1:])))


def write_torch(path, tensors):
    """A zip as of torch.save: {key: tensor}, or dicts of them. A tensor is an array, or (name, shape) for `numbers`."""
    storages = []

    def text(value):
        raw = value.encode()
        return b"X" + struct.pack("<I", len(raw)) + raw

    def number(n):
        return b"\x8a" + bytes([8]) + struct.pack("<q", n)

    def pickle(value):
        if isinstance(value, str):
            return text(value)
        if isinstance(value, dict):
            return b"}(" + b"".join(text(k) + pickle(v) for k, v in value.items()) + b"u"
        shape = value[1] if isinstance(value, tuple) else value.shape
        kind = b"IntStorage" if not isinstance(value, tuple) and value.dtype == np.int32 else b"FloatStorage"
        strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        storages.append(value)
        storage = b"(" + text("storage") + b"ctorch\n" + kind + b"\n" + text(str(len(storages) - 1)) + text("cpu")
        storage += number(int(np.prod(shape))) + b"tQ"
        sizes = b"".join(b"(" + b"".join(map(number, x)) + b"t" for x in (shape, strides))
        return (
            b"ctorch._utils\n_rebuild_tensor_v2\n("
            + storage
            + number(0)
            + sizes
            + b"\x89ccollections\nOrderedDict\n)RtR"
        )

    stream = b"\x80\x02" + pickle(tensors) + b"."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as out:
        out.writestr("archive/data.pkl", stream)
        out.writestr("archive/byteorder", "little")
        for i, value in enumerate(storages):
            array = numbers(*value) if isinstance(value, tuple) else np.ascontiguousarray(value)
            info = zipfile.ZipInfo(f"archive/data/{i}")
            # As torch.save does, with a field that means nothing: data begins at a multiple of 64. The header is 30
            # bytes, and zip64's own field 20.
            gap = -(out.fp.tell() + 30 + len(info.filename) + 20 + 4) % 64
            info.extra = b"FB" + struct.pack("<H", gap) + bytes(gap)
            with out.open(info, "w", force_zip64=True) as f:
                f.write(memoryview(array.reshape(-1)).cast("B"))
        out.writestr("archive/version", "3\n")


def write_tokenizer(folder, base):
    """vocab.json of `base` tokens (bytes, then pairs, then threes), merges.txt, and Qwen2's three special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    vocab, merges = letters[:], []
    pairs = [(a, b) for a in letters for b in letters]
    for a, b in pairs + [(a + b, c) for a, b in pairs[: 1 << 14] for c in letters[:8]]:
        if len(vocab) == base:
            break
        vocab.append(a + b)
        merges.append(f"{a} {b}")
    assert len(vocab) == base
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    added = {str(base + i): {"content": t, "special": True, "normalized": False} for i, t in enumerate(special)}
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(vocab)}), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))


def qwen2_config(s):
    return {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": s["hidden"], "intermediate_size": s["inner"],
        "num_attention_heads": s["heads"], "num_hidden_layers": s["layers"], "num_key_value_heads": s["kv_heads"],
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True, "vocab_size": s["vocab"],
    }  # fmt: skip


def write_ranks(path, merges=4):
    """A small file of tiktoken ranks: all bytes, then a few pairs of letters."""
    tokens = [bytes([b]) for b in range(256)] + [bytes([b, b]) for b in b"abcdefgh"[:merges]]
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    return path


def voice(s, prompt=30, seed=0):
    """An entry of spk2info.pt; `prompt` speech tokens, 0 for a voice that is an embedding alone."""
    rng = np.random.default_rng(seed)
    entry = {"embedding": rng.standard_normal((1, 192), dtype=np.float32)}
    if prompt:
        frames = int(prompt / s["rate"] * 22050 / 256) if "rate" in s else 2 * prompt
        tokens = rng.integers(0, s["codes"], (1, prompt), dtype=np.int32)
        ids = rng.integers(0, 256 if "rate" in s else s["base_vocab"], (1, 8), dtype=np.int32)
        entry |= {"prompt_text": ids, "llm_prompt_speech_token": tokens, "flow_prompt_speech_token": tokens}
        entry |= {"prompt_speech_feat": rng.standard_normal((1, frames, 80), dtype=np.float32)}
        entry |= {"llm_embedding": entry["embedding"], "flow_embedding": entry["embedding"]}
    return entry


def make_folder(folder, size="small", campplus=None, speech_tokenizer=None, version=3, rate=50, tokenizer=None):
    """Write the model folder; the ONNX files are copied from the given paths.

    rate        version 1: 50 or 25 speech tokens a second, which are two kinds of text tokenizers, too
    tokenizer   version 1: its file of ranks; None: a small one, with which texts are spelt byte by byte"""
    folder, s = Path(folder), version_1(size, rate) if version == 1 else SIZES[version][size]
    folder.mkdir(parents=True)
    for file, shapes in SHAPES[version].items():
        write_torch(folder / file, {name: (name, shape) for name, shape in shapes(s).items()})
    write_torch(folder / "spk2info.pt", {"anna": voice(s), "晓": voice(s, 0, 1)})
    yaml = folder / ("cosyvoice.yaml" if version == 1 else f"cosyvoice{version}.yaml")
    yaml.write_text(YAML[version].format(**s))
    if version == 1:
        name = "multilingual.tiktoken" if rate == 50 else "multilingual_zh_ja_yue_char_del.tiktoken"
        write_ranks(folder / name) if tokenizer is None else shutil.copy(tokenizer, folder / name)
    else:
        (folder / "CosyVoice-BlankEN").mkdir()
        (folder / "CosyVoice-BlankEN" / "config.json").write_text(json.dumps(qwen2_config(s)))
        write_tokenizer(folder / "CosyVoice-BlankEN", s["base_vocab"])
    for path, name in ((campplus, "campplus.onnx"), (speech_tokenizer, f"speech_tokenizer_v{version}.onnx")):
        if path is not None:
            shutil.copy(path, folder / name)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--version", type=int, choices=SIZES, default=3)
    parser.add_argument("--size", choices=SIZES[3], default="small")
    parser.add_argument("--rate", type=int, choices=(50, 25), default=50)
    parser.add_argument("--campplus")
    parser.add_argument("--speech-tokenizer")
    parser.add_argument("--tokenizer")
    args = parser.parse_args()
    make_folder(args.folder, args.size, args.campplus, args.speech_tokenizer, args.version, args.rate, args.tokenizer)
