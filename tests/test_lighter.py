"""Models with a second, lighter set of weights: which two go together, and which requests use it.

Run: python -m pytest -q tests/test_lighter.py
"""

import itertools
import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_cosyh3 import generate, h3, lighter, load, stream_generate
from mlx_cosyh3.caches import nbytes
from mlx_cosyh3.costs import ENOUGH, Costs
from mlx_cosyh3.cosyvoice import cosyvoice3
from mlx_cosyh3.deadline import LEAST_STEPS, Speech, SpeechController, TextController
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.int8 import quantize_int8
from mlx_cosyh3.pool import Pool
from tests.policies import SPEECH_STAGES, alone, costly, no_gpu, policy  # noqa: F401 - `alone` is a fixture
from tests.small_model import write_model
from tests.small_voice_model import small_voice, write_voice_model

TEXT = "Hello there."
INT8 = {"mode": "int8"}


def int8_form(folder, build, quantization):
    """A copy of a model's folder whose linear layers are int8, as `convert -q int8` makes it."""
    out = folder.with_name(folder.name + "-int8")
    shutil.copytree(folder, out)
    config = json.loads((folder / "config.json").read_text()) | {"quantization": quantization}
    (out / "config.json").write_text(json.dumps(config))
    weights = mx.load(str(folder / "model.safetensors"))
    for name, a in tree_flatten(build(config).parameters()):
        if a.dtype == mx.int8:
            q, scale = quantize_int8(np.array(weights[name]))
            weights |= {name: mx.array(q), name.removesuffix("weight") + "scale": mx.array(scale)}
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    return out


@pytest.fixture(scope="module")
def voices(tmp_path_factory):
    """(folder, folder of the int8 form) of a CosyVoice model."""
    folder = write_voice_model(tmp_path_factory.mktemp("models") / "voice")
    return folder, int8_form(folder, cosyvoice3.build, {"llm": INT8, "flow": INT8})


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The same of an H3 model."""
    folder = write_model(tmp_path_factory.mktemp("models") / "text")
    return folder, int8_form(folder, h3.build, INT8)


@pytest.fixture(scope="module")
def speaker(voices):
    return load(voices[0], lighter=voices[1])


@pytest.fixture(scope="module")
def writer(texts):
    return load(texts[0], lighter=texts[1])


# ---------------------------------------------------------------- two that go together


def test_both_are_held_and_cost_their_memory(speaker, writer, voices, texts):
    for both, folders in ((speaker, voices), (writer, texts)):
        one, other = (nbytes(load(folder)) for folder in folders)
        assert nbytes(both) == pytest.approx(one + other, rel=0.01) and other < one
        assert lighter.of(lighter.of(both)) is None and lighter.of(load(folders[0])) is None
        parameters = dict(tree_flatten(both.parameters()))
        assert parameters.keys() == dict(tree_flatten(load(folders[0]).parameters())).keys()


def test_what_does_not_go_together_is_one_line(voices, texts, tmp_path):
    other = write_voice_model(tmp_path / "other", chunk_size=10)
    for folder, second, words in (
        (voices[0], voices[0], "its weights take .* MB, those of the model itself"),
        (voices[1], voices[0], "its weights take"),
        (voices[0], texts[1], "it is another model, its config.json differs in"),
        (voices[0], other, "differs in chunk_size"),
    ):
        with pytest.raises(CosyH3Error, match=f"^lighter: .*{words}") as e:
            load(folder, lighter=second)
        assert "\n" not in str(e.value)


def test_a_wrong_name_is_told_before_anything_is_loaded(voices, tmp_path, monkeypatch):
    monkeypatch.setattr(mx, "load", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(CosyH3Error, match="no such model: .*/none is neither"):
        load(voices[0], lighter=tmp_path / "none")
    with pytest.raises(CosyH3Error, match="has no config.json"):
        load(voices[0], lighter=tmp_path)


def test_a_pool_holds_both(voices):
    with Pool() as pool, pool.get(voices[0], lighter=str(voices[1])) as lease:
        assert lighter.of(lease.model) is not None
        assert pool.bytes == nbytes(lease.model)


# ---------------------------------------------------------------- which requests use it

STEP = {"prefill": 1e-3, "llm": 0.02, "flow": 1e-3, "flow_chunk": 1e-3, "vocoder": 1e-3, "prompt": 1e-3, "text": 0.02}


def costs(slow):
    made = Costs(clock=lambda: 0.0)
    for stage, rate in STEP.items():
        for size in (10, 50, 100, 200, 400):
            made.add(stage, "cpu", size, slow * rate * size)
    return made


def speech(seconds, light, late="best"):
    control = SpeechController(
        costs(1.0), no_gpu().request(clock=lambda: 0.0), seconds, late, lambda device: 0.001, lighter=light
    )
    chunks = [(25, 28), (6, 9)]
    return control, lambda: control.begin(Speech(60, 120, 1, 100, 2, 10, chunks))


def test_lighter_weights_come_after_chunks_and_before_steps():
    chosen = []
    for seconds in np.arange(6, 0.1, -0.1):
        control, begin = speech(seconds, costs(0.5))
        plan = begin()
        chosen.append((plan.steps, control.lighter, plan.chunk))
    order = [key for key, _ in itertools.groupby(chosen)]
    assert order[:4] == [(10, False, 25), (10, False, 6), (10, True, 25), (10, True, 6)]
    assert order[-1] == (LEAST_STEPS, True, 6)
    steps = [s for s, _, _ in order]
    assert steps == sorted(steps, reverse=True) and len(set(steps)) > 3


def test_the_decision_is_recorded():
    control, begin = speech(1.5, costs(0.5))
    begin()
    (told,) = [d for d in control.request.decisions if d["stage"] == "weights"]
    assert told["weights"] == "lighter" and told["reason"].startswith("deadline: ")
    control, begin = speech(60, costs(0.5))
    begin()
    assert not [d for d in control.request.decisions if d["stage"] == "weights"]


def test_slower_ones_are_no_help():
    control, begin = speech(1.5, costs(2.0))
    begin()
    assert not control.lighter
    with pytest.raises(CosyH3Error, match="cannot be met"):
        speech(0.2, costs(0.9), "refuse")[1]()


def test_what_was_never_measured_is_tried_before_quality_is_given_up():
    light = Costs(clock=lambda: 0.0)
    for _ in range(ENOUGH):
        control, begin = speech(1.5, light, "refuse")
        assert begin().steps == 10 and control.lighter
        assert "have not been measured yet: tried" in control.request.decisions[-1]["reason"]
        control.first_token(60, 0.1)
        control.tokens_made(28, 2.0)
        control.mel_made(150, 10, 5.0, streamed=True)
        control.audio_made(56, 3.0)
    with pytest.raises(CosyH3Error, match="cannot be met"):  # now it is known to be slower still
        speech(0.3, light, "refuse")[1]()


def test_text():
    def text(seconds, late="refuse"):
        request = no_gpu().request(clock=lambda: 0.0)
        control = TextController(costs(1.0), request, seconds, late, lambda device: 0.001, lighter=costs(0.5))
        control.begin(20, 100, False)
        return control

    assert not text(3).lighter and text(1.5).lighter
    with pytest.raises(CosyH3Error, match="a text of max_tokens=100 takes about 1"):
        text(0.5)


# ---------------------------------------------------------------- models


def used(result):
    return [d["weights"] for d in result.decisions if d["stage"] == "weights"]


def both_known(p, model, stages, own, light):
    """Seconds of each stage with the model's own weights, and with the lighter ones."""
    costly(p, model, stages, own)
    costly(p, lighter.of(model), stages, light)


@pytest.mark.parametrize("streamed", [False, True])
def test_speech_with_the_lighter_weights(speaker, streamed):
    def ask(model, **options):
        if not streamed:
            return generate(model, TEXT, voice=small_voice(), seed=1, **options)
        stream = stream_generate(model, TEXT, voice=small_voice(), seed=1, **options)
        assert len(list(stream)) > 0
        return stream.result

    p = no_gpu()
    both_known(p, speaker, SPEECH_STAGES, 70.0, 0.01)
    plain = ask(speaker, deadline=6000, policy=p)
    assert not used(plain)
    want, got = ask(lighter.of(speaker)), ask(speaker, deadline=60, policy=p)
    assert used(got) == ["lighter"] and got.tokens == want.tokens and got.finish_reason == want.finish_reason
    np.testing.assert_array_equal(got.audio, want.audio)
    assert plain.tokens == ask(speaker).tokens


def test_text_with_the_lighter_weights(writer):
    p, options = no_gpu(), {"seed": 1, "max_tokens": 20, "logprobs": True}
    both_known(p, writer, ("prompt", "text"), 70.0, 0.01)
    want, got = generate(lighter.of(writer), "the cat", **options), None
    got = generate(writer, "the cat", deadline=60, policy=p, **options)
    assert used(got) == ["lighter"] and got.tokens == want.tokens and got.logprobs == want.logprobs
    assert want.logprobs != generate(writer, "the cat", **options).logprobs
    with pytest.raises(CosyH3Error, match="cannot be met"):  # a cache is of the model's own weights
        generate(writer, "the cat", deadline=60, policy=p, cache=writer.make_cache(), **options)


def test_where_no_times_are_known_nothing_changes(speaker):
    p = policy()
    got = generate(speaker, TEXT, voice=small_voice(), seed=1, deadline=60, policy=p)
    assert not used(got) and "no times of this model" in got.decisions[3]["reason"]
