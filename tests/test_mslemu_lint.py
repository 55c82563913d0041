"""Rules of Metal that a C++ compiler does not know: each breach is named, and sound text passes."""

import mlx.core as mx
import pytest

from . import mslemu
from .test_mslemu_bugs import BASES

needs_clang = pytest.mark.skipif(
    not mslemu.clang(), reason="clang is not installed (Debian: apt-get install --no-install-recommends clang)"
)

HEADER = """
constant float weights[3] = {1, 2, 3};
struct Pair { float a, b; float sum() const { return a + b; } };
template <typename T> METAL_FUNC float twice(const device T* p, uint i) { return 2 * static_cast<float>(p[i]); }
inline float first(threadgroup const float* p) { return p[0] + weights[1]; }
inline void swap_in(thread float& a, thread float* b) { a = *b; }
"""
BODY = """
    uint i = thread_position_in_grid.x;
    threadgroup float t[64];
    threadgroup atomic_uint n;
    auto p = x + i;                       // device, or constant for fewer than 8 elements
    Pair pair = {1.0f, 2.0f};
    float v[4], total = pair.sum();
    float4 f = float4(1, 2, 3, 4) * 2.0f;
    const device float4* four = (const device float4*)w;
    for (int k = 0; k < 4; ++k) v[k] = f[k] + four[0].x;
    swap_in(total, v);
    t[thread_index_in_threadgroup] = *p + twice(w, i) + max(f.x, 0.0f) + float(min(i, 3u));
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    device T* out = y;
    out[i] = T(first(t) + simd_sum(total) * s + metal::fast::exp(v[0]) + as_type<float>(x_shape[0]));
"""


def lint(body=BODY, header=HEADER, size=16, name="k", names=("x", "w", "s"), outputs=("y",)):
    kernel = mslemu.metal_kernel(name, list(names), list(outputs), body, header=header)
    inputs = [mx.zeros((size,)), mx.zeros((16,)), 1.0, *[mx.zeros((9,))] * (len(names) - 3)]
    return mslemu.lint(
        kernel, inputs=inputs, output_dtypes=[mx.float16] * len(outputs), template=[("T", mx.float16), ("N", 4)]
    )


@needs_clang
def test_sound_text_passes():
    assert lint() == []
    assert lint(size=4) == []
    for base in BASES.values():
        kernel = base.kernel(base.source)
        assert (
            mslemu.lint(kernel, inputs=[mx.array(base.x)], output_dtypes=[base.dtype], template=[("N", 100)]) == []
        )


FIRST = "inline float first"
# kind, where, old, new
CLANG = [
    ("address-space", "body", "auto p = x + i;", "device const float* p = x + i;"),  # only wrong for a small x
    ("address-space", "body", "auto p = x + i;", "threadgroup const float* p = w + i;"),
    ("address-space", "body", "swap_in(total, v);", "swap_in(total, t);"),
    ("address-space", "body", "first(t)", "first(v)"),
    ("address-space", "body", "twice(w, i)", "twice(t, i)"),
    (
        "address-space",
        "body",
        "device T* out = y;",
        "device T* out = y; { threadgroup float inner[2]; inner[0] = 1; }",
    ),
    ("address-space", "header", "return p[0]", "threadgroup float q[4]; return p[0] + q[0]"),
    ("address-space", "body", "threadgroup atomic_uint n;", "threadgroup uint n = 0;"),
    ("address-space", "body", "(const device float4*)w;", "(const device float4*)t;"),
    ("ambiguous-call", "body", "max(f.x, 0.0f)", "max(f.x, 0)"),
    ("ambiguous-call", "body", "min(i, 3u)", "min(i, 3)"),
    ("variable-length-array", "body", "float v[4],", "float z[i + 1]; z[0] = 1; float v[4],"),
    (
        "function-pointer",
        "header",
        FIRST,
        "typedef float (*F)(float); inline float call(F f) { return f(1); } " + FIRST,
    ),
    ("write-to-constant", "header", "return p[0]", "weights[0] = 1; return p[0]"),
    ("write-to-constant", "body", "device T* out = y;", "device T* out = y; w[0] = 1;"),
]
TOKENS = [
    ("double", "body", "total = pair.sum();", "total = pair.sum(); double d = 1; total += d;"),
    ("double", "body", "2.0f;", "2.0L;"),
    ("no-address-space", "header", "thread float* b", "float* b"),
    ("no-address-space", "header", "thread float& a", "float& a"),
    ("no-address-space", "body", "device T* out = y;", "T* out = y;"),
    ("no-address-space", "header", "const device T* p", "const T* p"),
    ("recursion", "header", FIRST, "inline int down(int k) { return k ? down(k - 1) : 0; } " + FIRST),
    (
        "recursion",
        "header",
        FIRST,
        "int odd(int k); int even(int k) { return k ? odd(k - 1) : 1; } int odd(int k) { return even(k - 1); } "
        + FIRST,
    ),
    ("keyword-as-name", "body", "uint i =", "float thread = 1; uint i ="),
    ("keyword-as-name", "body", "uint i =", "auto kernel = 1; uint i ="),
    ("keyword-as-name", "header", FIRST, "inline float g(float half) { return half; } " + FIRST),
    ("attribute-in-header", "header", FIRST, "#define TG threadgroup_position_in_grid.x\n" + FIRST),
    ("program-scope", "header", "constant float weights[3]", "const float weights[3]"),
    ("program-scope", "header", "struct Pair", "static int counter; struct Pair"),
    ("std", "body", "max(f.x", "std::max(f.x"),
    ("goto", "body", "uint i =", "goto end; end: uint i ="),
    ("lambda", "body", "uint i =", "auto f2 = [&](int k) { return k; }; uint i ="),
    ("new-delete", "header", FIRST, "inline void leak() { thread float* p = new float[2]; } " + FIRST),
    ("virtual", "header", "float sum() const", "virtual float sum() const"),
    ("static-variable", "body", "uint i =", "static int calls = 0; uint i ="),
    ("c-library", "body", "metal::fast::exp(v[0])", "expf(v[0])"),
]


def _breach(kind, where, old, new):
    parts = {"body": BODY, "header": HEADER}
    assert parts[where].count(old) == 1
    parts[where] = parts[where].replace(old, new)
    found = lint(**parts, size=4 if old.startswith("auto p") else 16)
    assert kind in {f.kind for f in found}, [str(f) for f in found]
    line = next(f for f in found if f.kind == kind)
    assert line.line > 0 and line.source.strip()


@needs_clang
@pytest.mark.parametrize("breach", CLANG, ids=lambda b: b[0])
def test_clang_rules(breach):
    _breach(*breach)


@pytest.mark.parametrize("breach", TOKENS, ids=lambda b: b[0])
def test_token_rules(breach):
    _breach(*breach)


def test_names_and_counts():
    kinds = lambda **kw: {f.kind for f in lint(**kw)}  # noqa: E731
    assert "bad-name" in kinds(name="my-kernel")
    assert "keyword-as-name" in kinds(outputs=("device",), body=BODY.replace("= y;", "= device;"))
    assert "buffer-limit" in kinds(names=["x", "w", "s", *(f"a{i}" for i in range(29))])
    assert "buffer-limit" not in kinds(names=["x", "w", "s", *(f"a{i}" for i in range(24))])
    two = "y[0] = x_shape[0]; z[0] = 1;"
    assert "no-attribute" in kinds(body=two, outputs=("y", "z"))
    assert "no-attribute" not in kinds(body=two + "// thread_position_in_grid", outputs=("y", "z"))
