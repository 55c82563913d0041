"""Published CosyVoice folders of every version, small and random, and what their tests share; fixtures to import."""

import functools
import json
import shutil

import mlx.core as mx
import pytest
from mlx_cosyh3.convert import convert

from mlx_cosyh3 import load
from mlx_cosyh3.errors import CosyH3Error
from tests import onnx_writer
from tests.cosyvoice_layouts import SIZES, version_1
from tests.golden_data import cosyvoice_golden
from tests.make_cosyvoice_folder import make_folder

KINDS = {"v1": (1, 50), "v1-25Hz": (1, 25), "v2": (2, None), "v3": (3, None)}  # name -> version, rate
YAMLS = {1: "cosyvoice.yaml", 2: "cosyvoice2.yaml", 3: "cosyvoice3.yaml"}
TOKENIZERS = {"v1": "s3_v1_50hz", "v1-25Hz": "s3_v1_25hz", "v2": "s3_v2", "v3": "s3_v3"}  # goldens

FORMATS = {
    "fp32": {},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "8 bits": {"quantize": 8},
    "4 bits": {"quantize": "4", "store": "float16"},
    "mixed": {"quantize": "llm=int8,flow=8", "dtype": "llm=bfloat16,flow=float32", "store": "hift=bfloat16"},
}
kinds = pytest.mark.parametrize("name", KINDS)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """{name of KINDS: folder}"""
    root = tmp_path_factory.mktemp("versions")
    return {name: make_folder(root / name, version=v, rate=rate or 50) for name, (v, rate) in KINDS.items()}


@pytest.fixture(scope="module")
def converted(sources, tmp_path_factory):
    """converted(name, format) -> (folder, its report, the model, which speaks on and on)"""
    root = tmp_path_factory.mktemp("converted")

    @functools.cache
    def made(name, how):
        folder = root / f"{name} {how}"
        report = convert(str(sources[name]), str(folder), **FORMATS[how])
        model = load(folder)
        if KINDS[name][0] > 1:  # random weights would end at once, where no length is the least
            head = model.llm.llm_decoder
            head.weight = mx.where(mx.arange(head.weight.shape[0])[:, None] < model.codebook, head.weight, 0)
            mx.eval(head.weight)
        for voice in model.voices.values():  # its stored transcript holds random ids; version 3 wants an end of it
            if voice.transcript_ids is not None and KINDS[name][0] == 3:
                voice.transcript_ids[-1] = model.tokenizer.end_of_prompt_id
        return folder, report, model

    return made


@pytest.fixture
def copy_of(sources, tmp_path):
    """A folder of the test's own."""
    return lambda name: shutil.copytree(sources[name], tmp_path / "source")


def numbers_of(name):
    """What a folder's shapes and yaml are filled with."""
    version, rate = KINDS[name]
    return version_1("small", rate) if version == 1 else SIZES[version]["small"]


def error(folder, tmp_path, **options):
    """The message of a failed conversion, which must be one line and leave nothing behind."""
    with pytest.raises(CosyH3Error) as e:
        convert(str(folder), str(tmp_path / "out"), **options)
    assert "\n" not in str(e.value)
    assert not [p.name for p in tmp_path.iterdir() if "out" in p.name]
    return str(e.value)


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def add_front_ends(folder, version, speech_tokenizer):
    """The goldens' small front ends; `speech_tokenizer`: the name of one."""
    shutil.copy(cosyvoice_golden("campplus") / "campplus_tiny.onnx", folder / "campplus.onnx")
    path = folder / f"speech_tokenizer_v{version}.onnx"
    if version == 1:
        from tests.test_cosyvoice_front_ends import golden_v1_graph

        nodes, weights, out = golden_v1_graph(speech_tokenizer, True, False, False)
        path.write_bytes(onnx_writer.graph(nodes, weights, ["feats"], [out]))
    else:
        shutil.copy(cosyvoice_golden(speech_tokenizer) / "tokenizer_lookalike.onnx", path)


def config_of(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))
