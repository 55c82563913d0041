"""PyTorch tensors in and out: values, dtypes, shared memory, and one line for what does not fit. Needs torch.

Run: python -m pytest -q tests/test_integrations_torch.py
"""

import mlx.core as mx
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mlx_cosyh3 import Voice, batch_generate, generate, stream_generate  # noqa: E402
from mlx_cosyh3.cosyvoice import audio  # noqa: E402
from mlx_cosyh3.errors import CosyH3Error  # noqa: E402
from mlx_cosyh3.integrations import torch as bridge  # noqa: E402

TEXT = {"max_tokens": 12, "seed": 3}
DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "uint8", "bool")


def sound(seconds=2, rate=24000):
    t = torch.arange(int(seconds * rate)) / rate
    return 0.3 * torch.sin(2 * torch.pi * 150 * t) * torch.sin(4 * torch.pi * t)


# ---------------------------------------------------------------- arrays


@pytest.mark.parametrize("convert", [bridge.to_torch, bridge._by_numpy])
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_of_mlx(dtype, convert):
    """By DLPack, and by numpy as on a Mac: the same numbers, the same memory."""
    a = (mx.arange(12) % 2 if dtype == "bool" else mx.arange(12)).astype(getattr(mx, dtype.replace("bool", "bool_")))
    a = a.reshape(3, 4)
    mx.eval(a)
    tensor = convert(a)
    assert tensor.dtype == getattr(torch, dtype) and list(tensor.shape) == [3, 4]
    assert tensor.tolist() == a.tolist()
    again = convert(a)
    assert again.data_ptr() == tensor.data_ptr()
    tensor[0, 0] = 1
    assert a[0, 0].item() == 1


def test_a_tensor_keeps_its_memory():
    tensor = bridge.to_torch(mx.arange(1000) * 3)
    others = [bridge.to_torch(mx.zeros(1000, dtype=mx.int32)) for _ in range(20)]
    assert tensor.tolist() == list(range(0, 3000, 3)) and not any(o.any() for o in others)


def test_out_of_a_view_and_of_something_lazy():
    a = mx.arange(12).reshape(3, 4)
    assert bridge.to_torch(a.T[1:, ::2]).tolist() == a.T[1:, ::2].tolist()
    assert bridge._by_numpy(a.T[1:, ::2]).tolist() == a.T[1:, ::2].tolist()
    assert bridge.to_torch(mx.zeros((0, 3))).shape == (0, 3)
    assert bridge.to_torch(mx.array(2.5)).item() == 2.5


def test_out_of_numpy():
    a = np.arange(4, dtype=np.float32)
    assert bridge.to_torch(a).data_ptr() == a.ctypes.data
    a.flags.writeable = False
    tensor = bridge.to_torch(a)
    tensor[0] = 9
    assert a[0] == 0  # what must not be written to is copied


@pytest.mark.parametrize("dtype", DTYPES)
def test_into_mlx(dtype):
    tensor = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
    a = bridge.from_torch(tensor)
    assert str(a.dtype).removeprefix("mlx.core.").removesuffix("_") == dtype
    assert a.tolist() == tensor.tolist()


def test_into_mlx_from_odd_tensors():
    base = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for tensor in (base.T, base[:, ::2], base.clone().requires_grad_(), base.expand(2, 3, 4), base[0, 0]):
        assert bridge.from_torch(tensor).tolist() == tensor.tolist()
    assert bridge.from_torch(base.double()).dtype == mx.float32
    z = torch.complex(base, base + 1)
    assert bridge.from_torch(z.conj()).tolist() == z.conj().tolist()
    with torch.inference_mode():
        assert bridge.from_torch(base * 2).tolist() == (base * 2).tolist()


@pytest.mark.parametrize("tensor, message", [
    (lambda: torch.eye(3).to_sparse(), "layout is sparse_coo: use .to_dense"),
    (lambda: torch.zeros(3, device="meta"), "no numbers"),
    (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "use .dequantize"),
    (lambda: torch.ones(2).to(torch.float8_e4m3fn), "no dtype like torch.float8_e4m3fn"),
    (lambda: [1.0], "not list"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_mlx_cannot_hold(tensor, message):
    with pytest.raises(CosyH3Error, match=message) as e:
        bridge.from_torch(tensor())
    assert "\n" not in str(e.value)


def test_half_precision_with_gradients_and_strides():
    tensor = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6).requires_grad_().T[::2]
    a = bridge.from_torch(tensor)
    assert a.dtype == mx.bfloat16 and a.tolist() == tensor.tolist()
    assert torch.equal(bridge.to_torch(a), tensor.detach())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs PyTorch with CUDA")
def test_tensors_of_a_gpu(model):
    tensor = torch.arange(6.0, device="cuda").reshape(2, 3)
    assert bridge.from_torch(tensor).tolist() == tensor.tolist()
    ids = model.tokenizer.encode("the cat")
    assert generate(model, torch.tensor(ids, device="cuda"), **TEXT).tokens == generate(model, ids, **TEXT).tokens


def test_what_is_no_array():
    with pytest.raises(CosyH3Error, match="not list"):
        bridge.to_torch([1, 2])


# ---------------------------------------------------------------- results


def test_text_result(model):
    want = generate(model, "the cat", logprobs=True, **TEXT)
    got = generate(model, "the cat", logprobs=True, output="torch", **TEXT)
    assert (got.text, got.finish_reason, got.prompt_tokens) == (want.text, want.finish_reason, want.prompt_tokens)
    assert got.tokens.dtype == torch.int64 and got.tokens.tolist() == want.tokens
    assert got.logprobs.dtype == torch.float32
    np.testing.assert_array_equal(got.logprobs.numpy(), np.float32(want.logprobs))
    assert generate(model, "the cat", output="torch", **TEXT).logprobs is None


def test_ids_as_tensors(model):
    """A prompt [T] or [1, T] of any integer dtype; and the ids that came out go in again."""
    ids = model.tokenizer.encode("the cat")
    want = generate(model, ids, **TEXT).tokens
    for dtype in (torch.int64, torch.int32, torch.int16):
        assert generate(model, torch.tensor(ids, dtype=dtype), **TEXT).tokens == want
    assert generate(model, torch.tensor([ids]), **TEXT).tokens == want
    on = torch.cat([torch.tensor(ids), torch.tensor(want[:5])])
    assert generate(model, on, output="torch", **TEXT).tokens.tolist() == generate(model, on.tolist(), **TEXT).tokens


def test_empty_ids(model):
    assert generate(model, torch.zeros(0, dtype=torch.int64), **TEXT).tokens == generate(model, [], **TEXT).tokens


def test_batch(model):
    ids = torch.tensor([model.tokenizer.encode(p) for p in ("the cat", "the dog")])
    got = batch_generate(model, ids, output="torch", **TEXT)
    assert [r.tokens.tolist() for r in got] == [r.tokens for r in batch_generate(model, ids.tolist(), **TEXT)]
    assert batch_generate(model, [], output="torch") == []


def test_text_stream(model):
    with stream_generate(model, torch.tensor(model.tokenizer.encode("the cat")), output="torch", **TEXT) as stream:
        assert stream.result is None
        text = "".join(stream)
    want = generate(model, "the cat", **TEXT)
    assert text == want.text and stream.result.tokens.tolist() == want.tokens


def test_a_closed_stream(model):
    stream = stream_generate(model, "the cat", output="torch", max_tokens=200, seed=3)
    next(stream)
    stream.close()
    assert stream.result.finish_reason == "cancelled" and 0 < len(stream.result.tokens) < 200


def test_speech_result(speaker, tmp_path):
    want = generate(speaker, "Hello there.", seed=1)
    got = generate(speaker, "Hello there.", seed=1, output="torch")
    assert got.audio.dtype == torch.float32 and got.audio.dim() == 1
    np.testing.assert_array_equal(got.audio.numpy(), want.audio)
    assert got.tokens.tolist() == want.tokens and got.sample_rate == want.sample_rate and got.mode == want.mode
    got.save(tmp_path / "a.wav")
    want.save(tmp_path / "b.wav")
    assert (tmp_path / "a.wav").read_bytes() == (tmp_path / "b.wav").read_bytes()


def test_a_result_shares_its_audio(speaker):
    result = generate(speaker, "Hello there.", seed=1)
    assert bridge.result_to_torch(result).audio.data_ptr() == result.audio.ctypes.data


def test_speech_stream(speaker):
    stream = stream_generate(speaker, "Hello there.", seed=1, output="torch", chunk_tokens=5)
    pieces = list(stream)
    assert len(pieces) > 1 and all(isinstance(p, torch.Tensor) for p in pieces)
    assert torch.equal(torch.cat(pieces), stream.result.audio)


def test_speech_batch(speaker):
    got = batch_generate(speaker, ["Yes.", "No."], seed=1, output="torch")
    want = batch_generate(speaker, ["Yes.", "No."], seed=1)
    assert [r.tokens.tolist() for r in got] == [r.tokens for r in want]
    assert all(isinstance(r.audio, torch.Tensor) for r in got)


def test_a_batch_with_an_error_in_it(speaker):
    """The text that fails is its error, the others are tensors."""
    good, bad = batch_generate(speaker, ["Yes.", "..."], seed=1, errors="return", output="torch")
    assert isinstance(good.audio, torch.Tensor) and isinstance(bad, CosyH3Error)
    assert "nothing to speak" in str(bad)


@pytest.mark.parametrize("function", [generate, stream_generate, batch_generate])
def test_unknown_output(model, function):
    with pytest.raises(CosyH3Error, match="'numpy' or 'torch', not 'jax'") as e:
        function(model, ["the"], output="jax")
    assert "\n" not in str(e.value)


# ---------------------------------------------------------------- recordings


@pytest.mark.parametrize("change", [
    lambda w: w,
    lambda w: w[None],
    lambda w: w[None, None],
    lambda w: torch.stack([w, w]),
    lambda w: w.double(),
    lambda w: w.clone().requires_grad_(),
    lambda w: torch.stack([w, w], dim=-1).T,
])  # fmt: skip
def test_a_voice_of_a_waveform(speaker, change):
    """Whatever the tensor is like, the voice is that of the same samples as an array."""
    wave = sound()
    want = Voice.from_audio(speaker, (wave.numpy(), 24000), "the cat")
    got = Voice.from_audio(speaker, bridge.recording(change(wave), 24000), "the cat")
    for name in ("embedding", "prompt_tokens", "prompt_mel"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_recordings_of_fewer_bits():
    wave = sound()
    half, rate = audio.read_audio(bridge.recording(wave.bfloat16()[None], 24000))
    np.testing.assert_allclose(half, wave.numpy(), atol=2e-3)
    pcm, rate = audio.read_audio(bridge.recording((wave * 32767).round().short()[None], 16000))
    np.testing.assert_allclose(pcm, wave.numpy(), atol=1e-4)
    assert rate == 16000


def test_a_short_stereo_clip_is_mixed_not_transposed():
    """[2, 3]: two channels of three samples, as PyTorch has it."""
    samples, _ = audio.read_audio(bridge.recording(torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.4, 0.5]]), 24000))
    np.testing.assert_allclose(samples, [0.2, 0.3, 0.4], atol=1e-7)


def test_convert_voice(speaker):
    wave = sound(1)
    want = speaker.convert_voice((wave.numpy(), 24000), "clara", seed=1)
    got = speaker.convert_voice(bridge.recording(wave[None], 24000), "clara", seed=1)
    np.testing.assert_array_equal(got.audio, want.audio)


@pytest.mark.parametrize("wave, message", [
    (torch.zeros(2, 1, 100), "holds 2: pick one"),
    (torch.zeros(1, 16000).to_sparse(), "use .to_dense"),
    (torch.zeros(1, 1, 1, 100), r"not \[1, 1, 1, 100\]"),
    (torch.tensor(1.0), r"not \[\]"),
    (np.zeros(3), "not ndarray"),
])  # fmt: skip
def test_bad_waveforms(wave, message):
    with pytest.raises(CosyH3Error, match=message):
        bridge.recording(wave, 24000)


@pytest.mark.parametrize("wave, message", [
    (torch.full((1, 48000), torch.nan), "48000 samples that are not finite"),
    (torch.zeros(1, 48000), "silent"),
    (torch.zeros(1, 0), "0 samples"),
    (torch.ones(1, 48000, dtype=torch.bool), "not bool"),
    (torch.ones(1, 48000, dtype=torch.complex64), "not complex64"),
])  # fmt: skip
def test_useless_recordings(speaker, wave, message):
    with pytest.raises(CosyH3Error, match=message):
        Voice.from_audio(speaker, bridge.recording(wave, 24000))


# ---------------------------------------------------------------- ids and logits


def test_logits(model):
    ids = model.tokenizer.encode("the cat sat")
    want = np.array(model(mx.array([ids])))[:, :, : model.config.vocab_size]
    for given in (torch.tensor(ids), torch.tensor([ids]), ids, [ids]):
        got = bridge.logits(model, given)
        assert got.dtype == torch.float32
        np.testing.assert_array_equal(got.numpy(), want)
    loss = torch.nn.functional.cross_entropy(bridge.logits(model, ids)[0, :-1], torch.tensor(ids[1:]))
    chosen = torch.from_numpy(want)[0, :-1].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
    assert loss.item() == pytest.approx(-chosen.mean().item(), abs=1e-6)


def test_logits_with_a_cache(model):
    ids, cache = torch.tensor([model.tokenizer.encode(p) for p in ("the cat", "the dog")]), model.make_cache(2)
    whole = bridge.logits(model, ids)
    parts = [bridge.logits(model, ids[:, :2], cache), bridge.logits(model, ids[:, 2:], cache)]
    np.testing.assert_allclose(torch.cat(parts, 1).numpy(), whole.numpy(), atol=1e-5)


@pytest.mark.parametrize("ids, message", [
    (torch.tensor([1.0]), "not float32"),
    (torch.tensor([True]), "not bool"),
    (torch.zeros(1, 0, dtype=torch.int64), r"not \[1, 0\]"),
    (torch.zeros(1, 1, 1, dtype=torch.int64), r"not \[1, 1, 1\]"),
    (torch.tensor([3, 262]), "id 262"),
    (torch.tensor([3, -1]), "id -1"),
    (torch.tensor([2**40]), "id 1099511627776"),
])  # fmt: skip
def test_bad_ids(model, ids, message):
    with pytest.raises(CosyH3Error, match=message):
        bridge.logits(model, ids)


@pytest.mark.parametrize("ids, message", [
    (torch.tensor([1.0]), "not float32"),
    (torch.tensor([[1], [2]]), "batch_generate"),
    (torch.tensor(1), r"not \[\]"),
    (torch.tensor([262]), "262 is outside"),
])  # fmt: skip
def test_bad_prompts(model, ids, message):
    with pytest.raises(CosyH3Error, match=message):
        generate(model, ids, **TEXT)


def test_no_logits_of_a_model_that_speaks(speaker):
    with pytest.raises(CosyH3Error, match="continues text"):
        bridge.logits(speaker, [1])
    with pytest.raises(CosyH3Error, match="must be a string"):
        generate(speaker, torch.tensor([1, 2]))
