"""How weights are stored: float32, float16, bfloat16, our int8, or MLX's affine 4 and 8 bit.

A `Format` says which stored tensors a weight becomes (`entries`), makes them block by block (`blocks`), writes the
`quantization` part of config.json, and undoes it all for `verify` together with the error that is allowed. It is
H3's; `PartFormat` is that of a part of a speech model.

H3's --dtype applies to linear layers, embedding and norms; SSM tensors are always fp32. With int8 all that is not
int8 is fp32, so that no other --dtype goes with it. Affine quantisation is `mx.quantize` of the weight in the dtype
that is stored, which is also the dtype of its scales.
"""

import mlx.core as mx
import numpy as np

from mlx_cosyh3.convert.h3 import is_matrix, is_ssm
from mlx_cosyh3.convert.sources import as_float32
from mlx_cosyh3.convert.writer import Entry
from mlx_cosyh3.errors import CheckpointError, CosyH3Error, nearest
from mlx_cosyh3.int8 import quantize_int8

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
QUANTIZE = ("int8", "4", "8")
BLOCK = 1 << 22  # weights that are handled at once: 16 MB in fp32
LARGEST = {"F32": 3.4028235e38, "F16": 65504.0, "BF16": 3.3895314e38}
HALF_ULP = {"F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}  # relative, of a rounded normal number
HALF_TINY = {"F32": 2.0**-150, "F16": 2.0**-25, "BF16": 2.0**-134}  # absolute, of a subnormal one


class Format:
    """`dtype`: float32, float16 or bfloat16. `quantize`: None, "int8", 4 or 8."""

    def __init__(self, dtype="float32", quantize=None):
        if dtype not in DTYPES:
            raise CosyH3Error(
                f"unknown --dtype {dtype!r}{nearest(str(dtype), DTYPES)} (one of {', '.join(DTYPES)})"
            )
        self.quantize = None if quantize is None else str(quantize)
        if self.quantize is not None and self.quantize not in QUANTIZE:
            raise CosyH3Error(f"unknown -q {quantize!r} (one of {', '.join(QUANTIZE)})")
        if self.quantize == "int8" and dtype != "float32":
            raise CosyH3Error(f"-q int8 keeps all else in float32: leave out --dtype {dtype}")
        self.dtype = dtype
        self.bits = int(self.quantize) if self.quantize in ("4", "8") else None

    @classmethod
    def of_model(cls, config):
        """The format of a converted model, from its config.json."""
        q = config.get("quantization")
        return cls(config["dtype"], None if q is None else "int8" if q["mode"] == "int8" else q["bits"])

    def group_size(self, width):
        """Weights that share a scale in affine quantisation; None where no size divides the width."""
        return next((g for g in (64, 32) if width % g == 0), None)

    def is_linear(self, name):
        """Whether -q quantises this weight."""
        return is_matrix(name)

    def stored_dtype(self, name):
        """The dtype of a tensor that is not quantised."""
        return "F32" if is_ssm(name) or self.quantize == "int8" else DTYPES[self.dtype]

    def kind(self, name, shape):
        """One of "plain", "int8" and "affine"."""
        if self.quantize is None or not self.is_linear(name):
            return "plain"
        if self.bits:
            return "affine" if self.group_size(shape[1]) else "plain"
        return "int8"

    def entries(self, name, shape):
        """The stored tensors of weight `name`: always the weight first."""
        kind, path = self.kind(name, shape), name.removesuffix("weight")
        if kind == "plain":
            return [Entry(name, self.stored_dtype(name), shape)]
        if kind == "int8":
            return [Entry(name, "I8", shape), Entry(path + "scale", "F32", shape[:1])]
        rows, width = shape
        groups, dtype = (rows, width // self.group_size(width)), self.stored_dtype(name)
        packed = Entry(name, "U32", (rows, width * self.bits // 32))
        return [packed, Entry(path + "scales", dtype, groups), Entry(path + "biases", dtype, groups)]

    def blocks(self, name, tensor):
        """Yield (stored name, numpy block of rows) of all stored tensors of a weight, as `entries` lists them."""
        kind, path = self.kind(name, tensor.shape), name.removesuffix("weight")
        dtype = self.stored_dtype(name)
        for block in float_blocks(name, tensor):
            if kind == "int8":
                weight, scale = quantize_int8(block)
                yield name, weight
                yield path + "scale", scale
                continue
            block = cast(name, block, dtype)
            if kind == "plain":
                yield name, block
                continue
            block = mx.array(block)
            block = block.view(mx.bfloat16) if dtype == "BF16" else block
            stored = mx.quantize(block, group_size=self.group_size(tensor.shape[1]), bits=self.bits)
            for part, array in zip(("weight", "scales", "biases"), stored):
                yield path + part, np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)

    def quantization(self, shapes):
        """config.json's `quantization`, or None. `shapes`: {name: shape} of all weights before quantisation."""
        if self.quantize is None:
            return None
        if not self.bits:
            return {"mode": "int8", "bits": 8}
        config = {"mode": "affine", "bits": self.bits, "group_size": 64}
        for name, shape in shapes.items():
            size = self.group_size(shape[-1])
            if self.is_linear(name) and size != 64:
                config[name.removesuffix(".weight")] = {"group_size": size, "bits": self.bits} if size else False
        return config

    def unquantized(self, shapes):
        """Names of the layers that stay as they are because no group size divides their width."""
        names = [n for n, s in shapes.items() if self.bits and self.is_linear(n) and not self.group_size(s[1])]
        return [n.removesuffix(".weight") for n in names]

    def restore(self, name, rows):
        """(float64 values, allowed absolute error given the original) of a block of a stored weight.

        `rows(stored name)` -> (numpy block, dtype) of the same rows. The second result is a function of the
        original block, in float64.

        int8: q is w / scale rounded, so the error is scale / 2, and 127 units of fp32 rounding of that quotient.

        affine: with n = 2^bits - 1, R the range of a group and e its end farther from zero, MLX starts from the
        step R / n, rounds e / step to a whole number q0 and takes s = e / q0 and bias e, so that zero is exact. If
        the step grew, codes cover the group and the error is |s| / 2. If it shrank, the far end is clipped and is
        off by R - n |s|, which is at most |s|: a group on both sides of zero has |e| >= R / 2, so |q0| >= n / 2 +
        1/2 and R / (n |s|) <= q0 / (q0 - 1/2); a group on one side has |e| >= R and half that. On top come the
        roundings of s (n times), of the bias, and of the weight itself to the stored dtype.
        """
        path = name.removesuffix("weight")
        weight, dtype = rows(name)
        if dtype == "I8":
            scale = rows(path + "scale")[0].astype(np.float64)[:, None]
            return weight * scale, lambda w: np.broadcast_to(scale * (0.5 + 127 * 2.0**-23), w.shape)
        if dtype != "U32":
            ulp, tiny = HALF_ULP[dtype], HALF_TINY[dtype]
            return as_float32(weight, dtype).astype(np.float64), lambda w: np.abs(w) * ulp + tiny

        (scales, dtype), (biases, _) = rows(path + "scales"), rows(path + "biases")
        s = as_float32(scales, dtype).astype(np.float64)[..., None]  # [rows, groups, 1]
        b = as_float32(biases, dtype).astype(np.float64)[..., None]
        per_word = 32 // self.bits
        codes = weight[..., None] >> (np.arange(per_word, dtype=np.uint32) * self.bits) & (2**self.bits - 1)
        codes = codes.reshape(*s.shape[:2], -1)
        n, ulp, tiny = 2**self.bits - 1, HALF_ULP[dtype], HALF_TINY[dtype]

        def allowed(w):
            w = w.reshape(codes.shape)
            clipped = np.ptp(w, axis=-1, keepdims=True) - n * np.abs(s)
            step = np.clip(clipped, np.abs(s) / 2, np.abs(s))
            peak = np.abs(w).max(axis=-1, keepdims=True)  # R itself may have moved by twice its rounding
            rounding = ulp * (2 * n * np.abs(s) + np.abs(b) + 3 * peak) + (n + 2) * tiny
            # Arithmetic in fp32: w - b, / s, each to half an ulp of at most n steps.
            bound = step + rounding + 4 * n * np.abs(s) * HALF_ULP["F32"]  # [rows, groups, 1]
            return np.broadcast_to(bound, codes.shape).reshape(w.shape[0], -1)

        return (codes * s + b).reshape(weight.shape[0], -1), allowed


class PartFormat(Format):
    """How one part of a speech model is stored.

    quantizes   says of a module's path whether -q takes it; None: nothing is quantised
    dtype       of all floats that are stored, but for int8's scales, which stay fp32
    quantize    None, "int8", 4 or 8; groups are of 64, and layers that these do not divide stay floats"""

    def __init__(self, quantizes=None, dtype="float32", quantize=None):
        super().__init__("float32", quantize)
        self.dtype, self.quantizes = dtype, quantizes

    def group_size(self, width):
        return 64 if width % 64 == 0 else None

    def is_linear(self, name):
        path, _, kind = name.rpartition(".")
        return kind == "weight" and self.quantizes is not None and self.quantizes(path)

    def stored_dtype(self, name):
        return DTYPES[self.dtype]

    def quantization(self):
        """What config.json says of this part, or None."""
        if self.quantize is None:
            return None
        return {"mode": "affine", "bits": self.bits, "group_size": 64} if self.bits else {"mode": "int8"}


def float_blocks(name, tensor, size=BLOCK):
    """A lazy tensor as fp32 blocks of about `size` values; every value is checked to be finite."""
    rows = tensor.shape[0]
    step = max(1, size * rows // max(1, int(np.prod(tensor.shape))))
    for start in range(0, rows, step):
        with np.errstate(over="ignore"):  # of float64 sources; found below
            block = as_float32(tensor.rows(start, min(start + step, rows)), tensor.dtype)
        if not np.isfinite(block).all():
            at = np.argwhere(~np.isfinite(block))[0].tolist()
            value = block[tuple(at)]
            at[0] += start
            raise CheckpointError(f"tensor {name!r} holds {value} at {at}: the checkpoint is damaged")
        yield block


def cast(name, block, dtype):
    """fp32 -> the stored dtype (numpy; BF16 as uint16 bits), to nearest even. Overflow is an error, never inf."""
    if dtype == "F32":
        return block
    peak = float(np.abs(block).max(initial=0))
    if peak > LARGEST[dtype]:
        raise CheckpointError(
            f"tensor {name!r} holds {peak:g}, beyond {LARGEST[dtype]:g}, the largest {dtype} number: "
            "use another --dtype (or --store)"
        )
    if dtype == "F16":
        return block.astype(np.float16)
    bits = np.ascontiguousarray(block).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
