"""From speech tokens, and from text, to audio as upstream makes it: offline, streamed its way, at another speed.

Run: MLX_COSYH3_GOLDENS=folder python -m pytest -q tests/test_cosyvoice_speech_golden.py
"""

import json

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_cosyh3 import generate, load
from mlx_cosyh3.convert import convert
from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.cosyvoice import cfm, llm
from mlx_cosyh3.cosyvoice.flow import Flow, FlowConfig, sanitize
from mlx_cosyh3.cosyvoice.ras import RecordedDraws
from mlx_cosyh3.cosyvoice.speech import SpeechOptions
from mlx_cosyh3.cosyvoice.utterance import Utterance
from mlx_cosyh3.cosyvoice.voice import Voice
from tests import cosyvoice_hift_data as vocoders
from tests.cosyvoice_hift_data import decibels, error
from tests.golden_data import cosyvoice_golden, large
from tests.small_voice_model import write_voice_model

TOLERANCE = 1e-2  # of a wav, end to end: the phase adds up what rounds off
TEXTS = ("s0", "s1", "s2", "s3", "s4")


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """(model with the goldens' flow and vocoder, its voice, io). Its speech tokenizer always hears the same tokens."""
    io = load_file(cosyvoice_golden("v3_e2e") / "io.safetensors")
    folder = cosyvoice_golden("v3_flow")
    model = load(write_voice_model(tmp_path_factory.mktemp("golden") / "m", chunk_size=25))
    flow = Flow(FlowConfig.from_dict(json.loads((folder / "config.json").read_text())))
    weights = sanitize({k: t.numpy() for k, t in open_source(folder / "flow.pt").tensors.items()})
    flow.load_weights([(k, mx.array(np.ascontiguousarray(v, np.float32))) for k, v in weights.items()])
    mx.eval(flow.parameters())
    model.flow, model.hift = flow, vocoders.golden("v3_hift")[0]
    voice = Voice(io["in.embedding"][0], io["in.prompt_token"][0], io["in.prompt_feat"][0], None, None, "golden", 0)
    return model, voice, io


def spoken(golden, monkeypatch, streamed=False, **options):
    """The chunks of audio that the golden's tokens become."""
    model, voice, io = golden
    monkeypatch.setattr(type(model), "speech_tokens", lambda self, samples, rate: io["in.token"][0])
    o, source = SpeechOptions(voice=voice, **options), (np.zeros(24000), 24000)
    run = Utterance(model, None, o, streamed, None, None, source=source)
    return list(run.pieces())


@pytest.mark.parametrize("name, options", [("nostream", {}), ("nostream_speed1.3", {"speed": 1.3})])
def test_offline(golden, monkeypatch, name, options):
    [wav] = spoken(golden, monkeypatch, **options)
    assert error(wav, golden[2][f"{name}.wav"][0]) < TOLERANCE


def test_streamed_as_upstream_does(golden, monkeypatch):
    chunks = spoken(golden, monkeypatch, streamed=True, compat=True)
    assert len(chunks) == 3
    for i, chunk in enumerate(chunks):
        assert error(chunk, golden[2][f"stream.chunk{i}"][0]) < TOLERANCE


def test_only_the_last_chunk_differs_without_compat(golden, monkeypatch):
    chunks = spoken(golden, monkeypatch, streamed=True)
    for i in range(2):
        assert error(chunks[i], golden[2][f"stream.chunk{i}"][0]) < TOLERANCE
    assert chunks[2].shape == golden[2]["stream.chunk2"][0].shape
    [at_once] = spoken(golden, monkeypatch, causal=True)
    assert error(np.concatenate(chunks), at_once) < 1e-3


# ---------------------------------------------------------------- the small trained model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(model, io, what io.json tells)"""
    source = large("checkpoints", "cosyvoice3-tiny")
    out = tmp_path_factory.mktemp("trained") / "m"
    convert(source, out)
    return load(out), load_file(source / "io.safetensors"), json.loads((source / "io.json").read_text())


@pytest.fixture
def draw_as_recorded(monkeypatch, trained):
    """draw_as_recorded(name): the language model draws with the uniform numbers of that text."""
    made = llm.SpeechLM.generate

    def use(name):
        draws = RecordedDraws.start(trained[1][f"{name}.u"])
        monkeypatch.setattr(
            llm.SpeechLM,
            "generate",
            lambda self, text, prompt, speech, options, key: made(self, text, prompt, speech, options, draws),
        )

    return use


@pytest.mark.parametrize("name", TEXTS)
def test_the_trained_model_says_what_upstream_says(trained, draw_as_recorded, name):
    model, io, told = trained
    draw_as_recorded(name)
    run = Utterance(model, told[name]["text"], SpeechOptions(voice=told[name]["voice"], pause=0), False, None, None)
    ids = [segment.text_ids for segment in run.segments]
    assert ids == [io[f"{name}.text_ids"].tolist()]
    [wav] = run.pieces()
    np.testing.assert_array_equal(run.tokens, io[f"{name}.tokens"].reshape(-1))
    assert error(wav, io[f"{name}.wav"].reshape(-1)) < TOLERANCE
    assert decibels(wav, io[f"{name}.wav"].reshape(-1)) > 50
    assert run.result().duration == pytest.approx(told[name]["seconds"])


def test_the_trained_model_streams_as_upstream_does(trained, draw_as_recorded):
    model, io, told = trained
    draw_as_recorded("s3")
    stream = model.stream_generate(told["s3"]["text"], voice=told["s3"]["voice"], compat=True)
    for i, chunk in enumerate(stream):
        want = io[f"s3.chunk{i}"].reshape(-1)
        assert error(chunk, want) < TOLERANCE and decibels(chunk, want) > 50
    assert i == 2


def test_the_trained_model_goes_on_from_a_stored_prompt(trained):
    """Zero-shot with the transcript that is stored as ids; all three voices."""
    model = trained[0]
    for name, voice in model.voices.items():
        result = generate(
            model, "The birch canoe slid on the smooth planks.", voice=voice, seed=1, note=lambda text: None
        )
        assert result.mode == "zero_shot" and result.finish_reason == "stop" and 1.5 < result.duration < 5, name


def test_the_flow_takes_the_very_times_that_upstream_takes():
    io = load_file(cosyvoice_golden("v3_flow") / "io.safetensors")
    np.testing.assert_array_equal(cfm.times(10)[0], io["nostream_final.t"][:, 0])
