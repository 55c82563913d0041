"""PyTorch tensors in and out.

Out, nothing is copied: a tensor made of a numpy or an MLX array shares its memory (DLPack; on a Mac, whose memory the
CPU and the GPU share, numpy's view of it), so writing into the tensor writes into the array. In, MLX takes over the
memory where it can and copies it once where it cannot. bfloat16 stays bfloat16.
"""

import dataclasses

import mlx.core as mx
import numpy as np

from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.integrations import MissingExtra

try:
    import torch
except ImportError as e:
    raise MissingExtra("torch", "torch") from e

DLPACK_CPU, DLPACK_CUDA = 1, 2  # DLDeviceType
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


# ---------------------------------------------------------------- out


def to_torch(array):
    """An MLX or numpy array as a torch tensor of the same shape, memory and dtype.

    A read-only numpy array is copied. An array on an NVIDIA GPU becomes a CUDA tensor where this
    PyTorch has CUDA; any other becomes a CPU tensor. Raises CosyH3Error for anything else."""
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array if array.flags.writeable else array.copy())  # torch knows no read-only tensors
    if not isinstance(array, mx.array):
        raise CosyH3Error(f"to_torch takes an MLX or a numpy array, not {type(array).__name__}")
    mx.eval(array)
    device = array.__dlpack_device__()[0]
    if device == DLPACK_CPU or device == DLPACK_CUDA and torch.cuda.is_available():
        return torch.from_dlpack(array)
    return _by_numpy(array)


def _by_numpy(array):
    """numpy's view of an MLX array, as a tensor. numpy has no bfloat16: it sees the bits."""
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.uint16), copy=False)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, copy=False))


def result_to_torch(result):
    """A result of `generate` with tensors in place of its arrays and lists of numbers: what output="torch" returns.

    SpeechResult: audio float32 [N] (the same memory), tokens int64 [n]. TextResult: tokens int64 [n], logprobs float32
    [n]. An error stays one: it stands for a text of batch_generate(..., errors="return")."""
    if isinstance(result, Exception):
        return result
    changes = {"tokens": torch.tensor(result.tokens, dtype=torch.int64)}
    if getattr(result, "audio", None) is not None:
        changes["audio"] = to_torch(result.audio)
    if getattr(result, "logprobs", None) is not None:
        changes["logprobs"] = torch.tensor(result.logprobs, dtype=torch.float32)
    return dataclasses.replace(result, **changes)


class TorchStream:
    """A Stream whose audio pieces are float32 tensors [n]; pieces of text pass as they are.

    Raises what the Stream raises."""

    def __init__(self, stream):
        self._stream = stream

    def __iter__(self):
        return self

    def __next__(self):
        piece = next(self._stream)
        return piece if isinstance(piece, str) else to_torch(piece)

    @property
    def result(self):
        """The whole result, once the stream has ended or was closed."""
        return None if self._stream.result is None else result_to_torch(self._stream.result)

    def close(self):
        """Stop generating; what was made stays in `result`."""
        self._stream.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


# ---------------------------------------------------------------- in


def from_torch(tensor):
    """A torch tensor (any device, any strides, with or without gradients) as an MLX array of its shape and dtype.

    float64 becomes float32, complex128 complex64. Raises CosyH3Error for what MLX cannot hold: a sparse, quantized or
    empty ("meta") tensor, and dtypes such as float8."""
    tensor = _numbers(tensor).resolve_conj().resolve_neg()
    if tensor.dtype == torch.float64:
        tensor = tensor.float()  # MLX computes with float64 on CPUs alone
    try:
        return mx.from_dlpack(tensor)
    except ValueError as e:
        raise CosyH3Error(f"MLX has no dtype like {tensor.dtype}: convert the tensor first, as by .float()") from e


def _numbers(tensor):
    """The tensor without gradients, in the CPU's memory. Raises CosyH3Error for one that holds no plain numbers."""
    if not isinstance(tensor, torch.Tensor):
        raise CosyH3Error(f"a torch tensor is needed here, not {type(tensor).__name__}")
    if tensor.is_meta:
        raise CosyH3Error("the tensor is on the device 'meta', where it has a shape and no numbers")
    if tensor.layout != torch.strided:
        raise CosyH3Error(f"the tensor's layout is {str(tensor.layout).removeprefix('torch.')}: use .to_dense()")
    if tensor.is_quantized:
        raise CosyH3Error("the tensor is quantized: use .dequantize()")
    return tensor.detach().cpu()


def recording(waveform, sample_rate):
    """A waveform as PyTorch's audio libraries hold it -> (samples [T, C], Hz), which stands wherever a recording does.

    waveform   [T], [C, T] or [1, C, T], on any device; floats from -1 to 1, or integers at full scale
    Raises CosyH3Error for another shape, or what is no tensor of plain numbers.
    `Voice.from_audio(model, recording(waveform, 16000))`, `model.convert_voice(recording(waveform, rate), voice)`."""
    waveform = _numbers(waveform)
    shape = list(waveform.shape)
    if waveform.dim() == 3:
        if len(waveform) != 1:
            raise CosyH3Error(f"a recording is one clip, this waveform {shape} holds {len(waveform)}: pick one of them")
        waveform = waveform[0]
    if waveform.dim() == 1:
        waveform = waveform[None]
    if waveform.dim() != 2:
        raise CosyH3Error(f"a waveform has the shape [T], [C, T] or [1, C, T], not {shape}")
    return (waveform.float() if waveform.is_floating_point() else waveform).numpy().T, sample_rate


def token_ids(tensor):
    """A tensor of token ids [T] or [1, T], of any integer dtype, as a list of int: a prompt.

    Raises CosyH3Error for another shape or dtype; whether they are in the vocabulary the model sees."""
    shape, ids = list(tensor.shape), tensor.squeeze(0) if tensor.dim() == 2 else tensor
    if ids.dim() != 1:
        raise CosyH3Error(f"a prompt is one row of ids, [T] or [1, T], not {shape}: batch_generate takes several")
    return _whole(ids).tolist()


def logits(model, ids, cache=None):
    """What a language model makes of `ids` -> logits [B, T, vocabulary], a tensor that nobody else holds.

    ids     integers [T] or [B, T]: a tensor or lists
    cache   `model.make_cache(B)`: go on from what it has read; it moves on by T tokens
    For a long text of which only the last logits matter use model.prefill: it keeps memory flat."""
    if not hasattr(model, "prefill"):
        raise CosyH3Error("logits takes a model that continues text, this one speaks")
    ids = _whole(torch.as_tensor(ids))
    ids = ids[None] if ids.dim() == 1 else ids
    vocab = model.config.vocab_size
    if ids.dim() != 2 or not ids.numel():
        raise CosyH3Error(f"ids must be [T] or [B, T] with at least one token, not {list(ids.shape)}")
    low, high = int(ids.min()), int(ids.max())
    if not 0 <= low <= high < vocab:
        raise CosyH3Error(f"id {low if low < 0 else high} is outside of the vocabulary (0 to {vocab - 1})")
    return to_torch(model(from_torch(ids.to(torch.int32)), cache)[:, :, :vocab])


def _whole(ids):
    ids = _numbers(ids)
    if ids.dtype not in INTEGERS:
        raise CosyH3Error(f"token ids are integers, not {str(ids.dtype).removeprefix('torch.')}: use .long()")
    return ids
