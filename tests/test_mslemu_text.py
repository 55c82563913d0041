"""The text the emulator compiles is the text MLX would compile, byte for byte."""

import itertools

import mlx.core as mx
import pytest

from . import mslemu
from .mslemu import wrapper

A, B = mx.zeros((8, 2)), mx.zeros((4,), mx.int8)
TEMPLATES = [None, [("T", mx.float16), ("N", -3), ("B", True)], [("T", mx.bfloat16)]]
BODIES = [
    "\n  uint i = thread_position_in_grid.x;\n  // a_shape b_ndim a_strides only in a comment\n",
    "uint i = dispatch_threads_per_threadgroup.x; // x_shape s_shape a_ndim data_shape",
    "int nothing = 0;",
    "b_strides; a_shape[0];",
    " ".join(wrapper.ATTRIBUTES),
]
INPUTS = [
    [A, B, mx.array(1)],
    [B, A.astype(mx.bfloat16), 2.5],
    [A.astype(mx.complex64), A.astype(mx.uint64)[0], True],
    [mx.zeros((7,), mx.uint8), mx.zeros((2, 4), mx.int16), 3],
    [mx.zeros((1, 1), mx.bool_), mx.zeros((3, 3), mx.float16), mx.array(1, mx.uint16)],
]
HEADERS = [
    "",
    "// thread_index_in_simdgroup\ninline float f(float x) { return x; }",
    "struct S { int a_shape; };\n",
]


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("template", TEMPLATES, ids=["none", "three", "one"])
def test_golden(template, atomic):
    for body, inputs, header, name in itertools.product(BODIES, INPUTS, HEADERS, ["plain", "with-dash"]):
        kernel = dict(name=name, input_names=["a", "b", "s"], output_names=["o", "p"], source=body, header=header,
                      atomic_outputs=atomic)  # fmt: skip
        dtypes = [mx.float32, mx.bfloat16]
        call = dict(
            template=template,
            grid=(8, 1, 1),
            threadgroup=(4, 1, 1),
            output_shapes=[(8,), (8,)],
            output_dtypes=dtypes,
        )
        want = mslemu.mlx_text(mx.fast.metal_kernel(**kernel), inputs, **call)
        got = mslemu.metal_kernel(**kernel).text(inputs, dtypes, template)
        assert got.text == want
        assert (
            body.splitlines()[-1]
            in got.text.splitlines()[got.body_line - 1 + body.count("\n") - body.endswith("\n")]
        )


@pytest.mark.parametrize("dtype", list(wrapper.TYPES), ids=str)
def test_golden_types(dtype):
    kernel = dict(
        name="types", input_names=["a"], output_names=["o"], source="uint i = thread_position_in_grid.x;"
    )
    call = dict(
        template=[("T", dtype)], grid=(8, 1, 1), threadgroup=(4, 1, 1), output_shapes=[(8,)], output_dtypes=[dtype]
    )
    inputs = [mx.zeros((9,), dtype)]
    want = mslemu.mlx_text(mx.fast.metal_kernel(**kernel), inputs, **call)
    assert mslemu.metal_kernel(**kernel).text(inputs, [dtype], [("T", dtype)]).text == want


def test_threadgroup_variables():
    text = """
    threadgroup float a[(N + 1) * 2][8], b;  // threadgroup int no[4];
    threadgroup half4 c[2];
    threadgroup float* p = a[0];
    threadgroup
        vec<float, 4> d[3];
    f((threadgroup char*)c); threadgroup atomic<int> e[BM * BK];
    """
    code, variables = wrapper.rewrite_threadgroup(text)
    assert variables == [("a", 2), ("b", 2), ("c", 3), ("d", 5), ("e", 7)]
    assert code.count("\n") == text.count("\n")
    assert "typedef vec<float, 4> msl_tg_d_t[3]" in code and "threadgroup float* p = a[0];" in code


def test_signature_is_that_of_mlx():
    with pytest.raises(ValueError, match="output"):
        mslemu.metal_kernel("k", ["a"], [], "")
    with pytest.raises(TypeError):
        mslemu.metal_kernel("k", ["a"], ["o"], "", unknown=1)
    kernel = mslemu.metal_kernel("k", ["a"], ["o"], "")
    with pytest.raises(TypeError):
        kernel([A])
    with pytest.raises(ValueError, match="size 1 but got 2"):
        kernel(
            inputs=[A, A], output_shapes=[(1,)], output_dtypes=[mx.float32], grid=(1, 1, 1), threadgroup=(1, 1, 1)
        )
