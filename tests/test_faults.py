"""A stage that fails at a random point (no memory, an error of the GPU, numbers that are not finite), for all models
and ways to ask: the right answer where another device is left, else one clear error; and the next request works.

Run: MLX_COSYH3_GOLDENS=folder python -m pytest -q tests/test_faults.py
"""

import numpy as np
import pytest

from mlx_cosyh3 import batch_generate, generate, load, runtime
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.gate import GATE
from tests import golden_voice_models
from tests.faults import ERRORS, Fault, ask, cpu, gpu, same, some
from tests.small_voice_model import write_voice_model

BOUND = 1e-3  # of audio whose sums were made in another order: a batch is spoken row by row after a failure
MODELS = ("h3", 1, 2, 3)


@pytest.fixture(params=MODELS)
def any_model(request, model, monkeypatch):
    if request.param == "h3":
        return model
    made = golden_voice_models.model(request.param)
    monkeypatch.setattr(made, "short", True)
    return made


@pytest.mark.parametrize("seed", range(6))
def test_the_answer_is_right_where_another_device_is_left(any_model, seed):
    way, how, call, want = some(seed, any_model)
    with Fault(any_model, call, how, "gpu") as fault:
        same(ask(any_model, way, gpu()), want, BOUND)
    assert fault.calls >= call, "the fault never came"
    same(ask(any_model, way, gpu()), want)


@pytest.mark.parametrize("seed", range(6, 12))
def test_else_it_is_one_clear_error(any_model, seed):
    way, how, call, want = some(seed, any_model)
    with Fault(any_model, call, how) as fault, pytest.raises(CosyH3Error) as e:
        ask(any_model, way, cpu())
    assert fault.calls >= call
    assert "\n" not in str(e.value) and len(str(e.value)) > 20
    same(ask(any_model, way, cpu()), want)


@pytest.mark.parametrize("how", ERRORS)
def test_one_text_of_a_batch_fails_alone(how, monkeypatch):
    """Its row is an error, the others are as without it."""
    speaker = golden_voice_models.model(3)
    monkeypatch.setattr(speaker, "short", True)
    texts = ["The cat.", "It sat on the mat.", "Tea."]
    options = {"voice": "anna", "seed": 2, "steps": 2, "policy": cpu(), "note": lambda text: None, "errors": "return"}
    want = batch_generate(speaker, texts, **options)
    with Fault(speaker) as healthy:
        batch_generate(speaker, texts, **options)
    with Fault(speaker, healthy.calls, how):  # the last one: of a vocoder
        got = batch_generate(speaker, texts, **options)
    failed = [e for e in got if isinstance(e, Exception)]
    assert len(failed) == 1 and isinstance(failed[0], CosyH3Error) and "\n" not in str(failed[0])
    same(
        [r.audio for r, e in zip(want, got) if e is not failed[0]], [e.audio for e in got if e is not failed[0]], BOUND
    )


@pytest.mark.parametrize("how", ERRORS)
@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_failure_spoils_no_context(model, how, call):
    """What a conversation's cache has read stays as it was, so that the same can be asked again."""
    options = {"max_tokens": 6, "seed": 1, "policy": cpu()}

    def talk(fault=0):
        cache = model.make_cache()
        first = generate(model, "the cat", cache=cache, **options).text
        if fault:
            with Fault(model, fault, how), pytest.raises(CosyH3Error):
                generate(model, " and", cache=cache, **options)
        return first, generate(model, " and", cache=cache, **options).text

    assert talk(call) == talk()


@pytest.mark.parametrize("policy", [cpu, gpu])
@pytest.mark.parametrize("part", ["speech_tokens", "speaker"])
def test_a_voice_is_made_in_spite_of_a_failure_or_not_at_all(tmp_path, monkeypatch, part, policy):
    speaker = load(write_voice_model(tmp_path / "voice"))
    monkeypatch.setattr(runtime, "default_policy", policy)
    recording = (0.1 * np.random.default_rng(0).standard_normal(24000).astype(np.float32), 24000)
    want = Voice.from_audio(speaker, recording, "the cat")
    original, places = getattr(type(speaker), part), []

    def fails(self, *args):
        places.append(GATE.here)
        if len(places) == 1:
            raise ERRORS["memory"]()
        return original(self, *args)

    monkeypatch.setattr(type(speaker), part, fails)
    if policy is cpu:
        with pytest.raises(CosyH3Error, match="voice failed on the CPU .*Unable to allocate"):
            Voice.from_audio(speaker, recording, "the cat")
    got = Voice.from_audio(speaker, recording, "the cat")
    assert places == (["cpu", "cpu"] if policy is cpu else ["gpu", "cpu"])
    for name in ("embedding", "prompt_tokens", "prompt_mel"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
