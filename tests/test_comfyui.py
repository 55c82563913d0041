"""The ComfyUI node pack: imported as ComfyUI imports a folder, graphs executed by its conventions. Needs torch.

`Comfy` below is the part of ComfyUI that a node sees: it checks a graph in API format against INPUT_TYPES and
RETURN_TYPES, then runs each node's FUNCTION once, inside torch.inference_mode, with what its links gave.

Run: python -m pytest -q tests/test_comfyui.py
"""

import importlib.util
import json
import os
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mlx_cosyh3 import Voice, generate, load  # noqa: E402
from tests.small_model import write_model  # noqa: E402
from tests.small_voice_model import write_voice_model  # noqa: E402

PACK = Path(__file__).parent.parent / "comfyui"
KINDS = {"STRING": str, "INT": int, "FLOAT": (int, float), "BOOLEAN": bool}


def import_pack(path):
    """As ComfyUI does: under its path, dots replaced, as the name."""
    name = str(path).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, path / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class LoadAudio:
    """Stands for ComfyUI's own node: two channels of a tone that comes and goes, 2 s."""

    RETURN_TYPES = ("AUDIO",)
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    def load(self):
        wave = sound()
        return ({"waveform": torch.stack([wave, wave])[None], "sample_rate": 24000},)


class SaveAudio:
    """Stands for ComfyUI's own node: checks what that would write, and keeps it."""

    RETURN_TYPES = ()
    FUNCTION = "save"
    OUTPUT_NODE = True
    saved = None

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"audio": ("AUDIO",), "filename_prefix": ("STRING", {"default": "ComfyUI"})}}

    def save(self, audio, filename_prefix):
        assert set(audio) == {"waveform", "sample_rate"} and type(audio["sample_rate"]) is int
        assert audio["waveform"].dtype == torch.float32 and audio["waveform"].dim() == 3
        SaveAudio.saved = audio
        return {"ui": {"audio": [{"filename": f"{filename_prefix}_00001_.flac"}]}}


class Invalid(Exception):
    """What ComfyUI answers to a graph before it runs anything of it."""


class Comfy:
    def __init__(self, nodes):
        self.nodes, self.cache, self.ran = nodes, {}, []

    def check(self, graph):
        for key, node in graph.items():
            if node["class_type"] not in self.nodes:
                raise Invalid(f"{key}: no node {node['class_type']}")
            kinds = self.nodes[node["class_type"]].INPUT_TYPES()
            known = kinds["required"] | kinds.get("optional", {})
            for name in kinds["required"]:
                if name not in node["inputs"]:
                    raise Invalid(f"{key}: {name} is missing")
            for name, value in node["inputs"].items():
                kind, options = known[name][0], dict(*known[name][1:])
                if isinstance(value, list):
                    given = self.nodes[graph[value[0]]["class_type"]].RETURN_TYPES[value[1]]
                    if given != kind:
                        raise Invalid(f"{key}: {name}, {given} != {kind}")
                elif not isinstance(value, KINDS[kind]):
                    raise Invalid(f"{key}: {name} is no {kind}")
                elif "min" in options and not options["min"] <= value <= options["max"]:
                    raise Invalid(f"{key}: {name} is out of range")

    def run(self, graph):
        """-> {node: what it returned}. Raises Invalid, or what a node raised."""
        self.check(graph)
        out = {}
        with torch.inference_mode():
            for key in graph:
                self._node(graph, key, out)
        return out

    def _node(self, graph, key, out):
        """Run a node after those it is linked to, unless its inputs are what they were before. -> its inputs, flat"""
        node, linked, inputs = graph[key], [], {}
        for name, value in node["inputs"].items():
            if isinstance(value, list):
                linked.append(self._node(graph, value[0], out))
                value = out[value[0]][value[1]]
            inputs[name] = value
        cls = self.nodes[node["class_type"]]
        constant = {name: value for name, value in node["inputs"].items() if not isinstance(value, list)}
        changed = cls.IS_CHANGED(**constant) if hasattr(cls, "IS_CHANGED") else None  # links are not told to it
        seen = json.dumps([node, linked, changed])
        if key not in out and seen in self.cache:
            out[key] = self.cache[seen]
        elif key not in out:
            self.ran.append(key)
            result = getattr(cls(), cls.FUNCTION)(**inputs)
            result = result.get("result", ()) if isinstance(result, dict) else result
            assert type(result) is tuple and len(result) == len(cls.RETURN_TYPES)
            out[key] = self.cache[seen] = result
        return seen


def node(kind, **inputs):
    return {"class_type": kind, "inputs": inputs}


def sound(seconds=2, rate=24000):
    t = torch.arange(int(seconds * rate)) / rate
    return 0.3 * torch.sin(2 * torch.pi * 150 * t) * torch.sin(4 * torch.pi * t)


@pytest.fixture(scope="module")
def pack():
    return import_pack(PACK)


@pytest.fixture
def comfy(pack):
    return Comfy(pack.NODE_CLASS_MAPPINGS | {"LoadAudio": LoadAudio, "SaveAudio": SaveAudio})


@pytest.fixture(scope="module")
def speaks(tmp_path_factory):
    return str(write_voice_model(tmp_path_factory.mktemp("models") / "voice"))


@pytest.fixture(scope="module")
def writes(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "text"))


# ---------------------------------------------------------------- the conventions


def test_the_mappings(pack):
    assert pack.NODE_CLASS_MAPPINGS.keys() == pack.NODE_DISPLAY_NAME_MAPPINGS.keys()
    for cls in pack.NODE_CLASS_MAPPINGS.values():
        assert callable(getattr(cls, cls.FUNCTION)) and cls.CATEGORY == "mlx_cosyh3" and cls.DESCRIPTION
        assert type(cls.RETURN_TYPES) is tuple and len(cls.RETURN_NAMES) == len(cls.RETURN_TYPES)
        kinds = cls.INPUT_TYPES()
        json.dumps(kinds)  # it goes to the browser
        assert kinds.keys() <= {"required", "optional"}


def test_inputs_are_arguments(pack):
    """Every input is an argument of the function; those with a default are optional, with the same default."""
    import inspect

    for cls in pack.NODE_CLASS_MAPPINGS.values():
        kinds, signature = cls.INPUT_TYPES(), inspect.signature(getattr(cls, cls.FUNCTION)).parameters
        assert list(signature)[1:] == [*kinds["required"], *kinds.get("optional", {})]
        for name, kind in kinds.get("optional", {}).items():
            assert signature[name].default == (kind[1]["default"] if len(kind) > 1 else None)


def test_a_copy_elsewhere(tmp_path, writes):
    """The folder stands for itself: copied into custom_nodes, under a name with a dot."""
    import shutil

    folder = tmp_path / "custom_nodes" / "pack.1"
    shutil.copytree(PACK, folder, ignore=shutil.ignore_patterns("__pycache__"))
    comfy = Comfy(import_pack(folder).NODE_CLASS_MAPPINGS)
    graph = {"1": node("CosyH3LoadModel", model=writes), "2": node("CosyH3Text", model=["1", 0], prompt="the", seed=1)}
    assert comfy.run(graph)["2"][0]


# ---------------------------------------------------------------- graphs


def test_load_and_speak(comfy, speaks):
    graph = {
        "1": node("CosyH3LoadModel", model=speaks),
        "2": node("CosyH3Speak", model=["1", 0], text="Hello there.", seed=1, voice_name="bert", speed=1.25, steps=5),
    }
    audio = comfy.run(graph)["2"][0]
    want = generate(load(speaks), "Hello there.", seed=1, voice="bert", speed=1.25, steps=5)
    assert audio["waveform"].shape == (1, 1, len(want.audio)) and audio["sample_rate"] == 24000
    np.testing.assert_array_equal(audio["waveform"][0, 0].numpy(), want.audio)


def test_a_voice_of_a_recording(comfy, speaks):
    graph = {
        "9": node("SaveAudio", audio=["4", 0], filename_prefix="x"),
        "4": node("CosyH3Speak", model=["1", 0], text="Hello there.", seed=2, voice=["3", 0]),
        "3": node("CosyH3MakeVoice", model=["1", 0], audio=["2", 0], transcript=" the cat \n"),
        "2": node("LoadAudio"),
        "1": node("CosyH3LoadModel", model=speaks),
    }
    comfy.run(graph)
    assert sorted(comfy.ran) == ["1", "2", "3", "4", "9"]
    model = load(speaks)
    voice = Voice.from_audio(model, (sound().numpy(), 24000), "the cat")
    want = generate(model, "Hello there.", seed=2, voice=voice)
    assert want.mode == "zero_shot"
    np.testing.assert_array_equal(SaveAudio.saved["waveform"][0, 0].numpy(), want.audio)


def test_without_a_transcript_and_with_an_instruction(comfy, speaks):
    graph = {
        "1": node("CosyH3LoadModel", model=speaks),
        "2": node("LoadAudio"),
        "3": node("CosyH3MakeVoice", model=["1", 0], audio=["2", 0]),
        "4": node("CosyH3Speak", model=["1", 0], text="Yes.", seed=2, voice=["3", 0], instruct="Softly."),
    }
    out = comfy.run(graph)
    assert out["3"][0].transcript is None and out["3"][0].has_prompt
    want = generate(out["1"][0], "Yes.", seed=2, voice=out["3"][0], instruct="Softly.")
    np.testing.assert_array_equal(out["4"][0]["waveform"][0, 0].numpy(), want.audio)


def test_text(comfy, writes):
    options = {"max_tokens": 20, "temperature": 1.0, "top_k": 0, "top_p": 0.95}
    graph = {
        "1": node("CosyH3LoadModel", model=writes),
        "2": node("CosyH3Text", model=["1", 0], prompt="the cat", seed=5, **options),
    }
    text = comfy.run(graph)["2"][0]
    assert text == generate(load(writes), "the cat", seed=5, **options).text
    graph["2"]["inputs"]["stop"] = text[5:7]
    assert comfy.run(graph)["2"][0] == text[: text.index(text[5:7])]


def test_text_into_speech(comfy, speaks, writes):
    """A STRING output links to a STRING input."""
    graph = {
        "1": node("CosyH3LoadModel", model=writes),
        "2": node("CosyH3Text", model=["1", 0], prompt="the cat", seed=5, max_tokens=5, stop="\\n"),
        "3": node("CosyH3LoadModel", model=speaks),
        "4": node("CosyH3Speak", model=["3", 0], text=["2", 0], seed=1),
    }
    out = comfy.run(graph)
    want = generate(out["3"][0], out["2"][0], seed=1)
    np.testing.assert_array_equal(out["4"][0]["waveform"][0, 0].numpy(), want.audio)


def test_nothing_is_computed_twice(comfy, speaks):
    graph = {
        "1": node("CosyH3LoadModel", model=speaks),
        "2": node("CosyH3Speak", model=["1", 0], text="Yes.", seed=1),
    }
    first = comfy.run(graph)["2"][0]
    assert comfy.run(graph)["2"][0] is first and comfy.ran == ["1", "2"]
    graph["2"]["inputs"]["seed"] = 2
    other = comfy.run(graph)["2"][0]
    assert comfy.ran == ["1", "2", "2"] and not torch.equal(other["waveform"], first["waveform"])


def test_a_folder_that_was_written_anew_is_loaded_anew(pack, tmp_path):
    comfy = Comfy(pack.NODE_CLASS_MAPPINGS)
    graph = {"1": node("CosyH3LoadModel", model=str(write_model(tmp_path / "text")))}
    comfy.run(graph)
    comfy.run(graph)
    assert comfy.ran == ["1"]
    os.utime(tmp_path / "text" / "config.json", ns=(1, 1))
    comfy.run(graph)
    assert comfy.ran == ["1", "1"]
    load_model = pack.NODE_CLASS_MAPPINGS["CosyH3LoadModel"]
    assert load_model.IS_CHANGED("h3-tiny") == 0
    assert load_model.IS_CHANGED() == load_model.IS_CHANGED(None) == 0  # one that comes by a link


def test_the_graph_that_comes_along(comfy):
    comfy.run(json.loads((PACK / "speak.json").read_text()))
    assert SaveAudio.saved["waveform"].abs().max() > 0.05 and SaveAudio.saved["sample_rate"] == 24000


def test_the_readme_names_what_there_is(pack):
    """Its table: each node by its display name, and the example's file."""
    text = (PACK / "README.md").read_text()
    rows = [row.split("|")[1].strip() for row in text.splitlines() if row.startswith("| ")][2:]
    assert rows == list(pack.NODE_DISPLAY_NAME_MAPPINGS.values())
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (PACK / link).exists()


# ---------------------------------------------------------------- errors, progress, cancel


def test_graphs_that_do_not_fit(comfy, speaks):
    """The types of links, and the ranges, are such that ComfyUI refuses these before it runs anything."""
    loaded = node("CosyH3LoadModel", model=speaks)
    for wrong in (
        node("CosyH3Speak", model=["1", 0], text="Yes."),
        node("CosyH3Speak", model=["1", 0], text="Yes.", seed=-1),
        node("CosyH3Speak", model=["1", 0], text="Yes.", seed=1, speed=3.0),
        node("CosyH3Speak", model=["1", 0], text=["1", 0], seed=1),
        node("CosyH3Speak", model=["1", 0], text="Yes.", seed=1, voice=["1", 0]),
        node("CosyH3MakeVoice", model=["1", 0], audio=["1", 0]),
        node("CosyH3Text", model=["1", 0], prompt="the", seed=1, top_p=0.0),
    ):
        with pytest.raises(Invalid):
            comfy.run({"1": loaded, "2": wrong})
    assert not comfy.ran


def test_errors_are_one_line(comfy, speaks, writes, tmp_path):
    def speak(model=("1", 0), **inputs):
        return node("CosyH3Speak", model=list(model), seed=1, **inputs)

    speaker, writer = node("CosyH3LoadModel", model=speaks), node("CosyH3LoadModel", model=writes)
    recorded = {"2": node("LoadAudio"), "3": node("CosyH3MakeVoice", model=["1", 0], audio=["2", 0])}
    for graph, message in (
        ({"1": node("CosyH3LoadModel", model=" ")}, "model is empty"),
        ({"1": node("CosyH3LoadModel", model=str(tmp_path))}, "has no config.json"),
        ({"1": node("CosyH3LoadModel", model="no-such-model")}, "no such model"),
        ({"1": speaker, "2": speak(text=" ")}, "text is empty"),
        ({"1": speaker, "2": speak(text="Yes.", voice_name="bret")}, "no voice 'bret'"),
        ({"1": speaker, **recorded, "4": speak(text="Yes.", voice=["3", 0], voice_name="bert")}, "give one of them"),
        ({"1": writer, "2": speak(text="Yes.")}, "needs a model that speaks"),
        ({"1": speaker, "2": node("CosyH3Text", model=["1", 0], prompt="the", seed=1)}, "needs a model that continues"),
        ({"1": writer, **recorded}, "needs a model that speaks"),
    ):
        with pytest.raises(ValueError, match=message) as e:
            comfy.run(graph)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("wave, message", [
    (torch.zeros(1, 2, 48000), "silent"),
    (sound()[None, None].expand(2, 1, -1), "holds 2: pick one"),
    (torch.zeros(1, 1, 0), "0 samples"),
])  # fmt: skip
def test_bad_recordings(comfy, speaks, monkeypatch, wave, message):
    monkeypatch.setattr(LoadAudio, "load", lambda self: ({"waveform": wave, "sample_rate": 24000},))
    graph = {
        "1": node("CosyH3LoadModel", model=speaks),
        "2": node("LoadAudio"),
        "3": node("CosyH3MakeVoice", model=["1", 0], audio=["2", 0]),
    }
    with pytest.raises(ValueError, match=message) as e:
        comfy.run(graph)
    assert "\n" not in str(e.value)


class Interrupted(Exception):
    pass


@pytest.fixture
def host(monkeypatch):
    """The two modules of ComfyUI that a node may use: {"bars": [progress bars], "left": checks until cancel}."""
    state = {"bars": [], "left": None}

    class ProgressBar:
        def __init__(self, total):
            self.moves = []
            state["bars"].append(self)

        def update_absolute(self, value, total=None, preview=None):
            self.moves.append((value, total))

    def throw_exception_if_processing_interrupted():
        if state["left"] is not None:
            state["left"] -= 1
            if state["left"] < 0:
                raise Interrupted

    utils, management = types.ModuleType("comfy.utils"), types.ModuleType("comfy.model_management")
    utils.ProgressBar = ProgressBar
    management.throw_exception_if_processing_interrupted = throw_exception_if_processing_interrupted
    monkeypatch.setitem(sys.modules, "comfy.utils", utils)
    monkeypatch.setitem(sys.modules, "comfy.model_management", management)
    return state


def graphs(speaks, writes):
    return [
        {"1": node("CosyH3LoadModel", model=speaks), "2": node("CosyH3Speak", model=["1", 0], text="Yes.", seed=1)},
        {"1": node("CosyH3LoadModel", model=writes), "2": node("CosyH3Text", model=["1", 0], prompt="the", seed=1)},
    ]


def test_the_progress_bar(comfy, host, speaks, writes):
    for graph in graphs(speaks, writes):
        comfy.run(graph)
    speech, text = (bar.moves for bar in host["bars"])
    assert (10, 10) in speech and speech[-1] == (1, 1)  # the flow's steps, then the vocoder
    assert [n for n, _ in text] == list(range(1, len(text) + 1)) and {total for _, total in text} == {256}


@pytest.mark.parametrize("left", [0, 3])
def test_cancel(comfy, host, speaks, writes, left):
    """ComfyUI's own exception ends a node, and the next run works."""
    for graph in graphs(speaks, writes):
        host["left"] = left
        with pytest.raises(Interrupted):
            comfy.run(graph)
        host["left"] = None
        assert comfy.run(graph)["2"][0]


def test_notes_go_to_the_log(comfy, speaks, monkeypatch, caplog):
    clipped = (sound()[None, None] * 4).clamp(-1, 1)
    monkeypatch.setattr(LoadAudio, "load", lambda self: ({"waveform": clipped, "sample_rate": 24000},))
    graph = {
        "1": node("CosyH3LoadModel", model=speaks),
        "2": node("LoadAudio"),
        "3": node("CosyH3MakeVoice", model=["1", 0], audio=["2", 0], transcript="the cat"),
    }
    comfy.run(graph)
    assert "clipped" in caplog.text
