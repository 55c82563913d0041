// Functions on scalars and, element by element, on vectors. Those that Metal does not round correctly pass through
// `noise`, which moves the result by up to the error that Metal's specification allows (chapter "Numerical
// Compliance").
#pragma once
extern "C" {
int msl_noise_on();
unsigned long msl_noise_bits(unsigned long salt);
}

// The C library under names of our own: a kernel that says expf must not compile.
#define MSL_C(name, ...) float c_##name(__VA_ARGS__) __asm__(#name "f");
namespace msl {
MSL_C(exp, float)
MSL_C(exp2, float) MSL_C(log, float) MSL_C(log2, float) MSL_C(log10, float) MSL_C(sin, float) MSL_C(cos, float)
    MSL_C(tan, float) MSL_C(asin, float) MSL_C(acos, float) MSL_C(atan, float) MSL_C(sinh, float)
        MSL_C(cosh, float) MSL_C(tanh, float) MSL_C(asinh, float) MSL_C(acosh, float) MSL_C(atanh, float)
            MSL_C(floor, float) MSL_C(ceil, float) MSL_C(trunc, float) MSL_C(rint, float) MSL_C(round, float)
                MSL_C(pow, float, float) MSL_C(atan2, float, float) MSL_C(fmod, float, float)
                    MSL_C(nextafter, float, float) MSL_C(fma, float, float, float) MSL_C(ldexp, float, int)
                        MSL_C(frexp, float, int*)
}  // namespace msl
#undef MSL_C

namespace msl {
// r moved by a random part of `ulps` units in the last place, the part a function of the arguments and the seed.
MSL_HIDDEN inline float noise(float r, float ulps, float x, float y = 0) {
    if (!msl_noise_on() || !(__builtin_fabsf(r) < __FLT_MAX__) || r == 0) return r;
    unsigned long bits =
        msl_noise_bits((unsigned long)__builtin_bit_cast(uint, x) << 32 | __builtin_bit_cast(uint, y));
    float part = float(int(bits >> 40) - (1 << 23)) / float(1 << 23);  // -1 .. 1
    int steps = int(part * (ulps + 1)), limit = int(ulps);
    steps = steps > limit ? limit : steps < -limit ? -limit : steps;
    for (int i = 0; i < (steps < 0 ? -steps : steps) && i < 100000; i++)
        r = msl::c_nextafter(r, steps < 0 ? -__FLT_MAX__ : __FLT_MAX__);
    return r;
}
MSL_HIDDEN inline float noise_absolute(float r, float bound, float x) {  // r moved by up to `bound`
    if (!msl_noise_on()) return r;
    return r +
           bound * (float(int(msl_noise_bits(__builtin_bit_cast(uint, x)) >> 40) - (1 << 23)) / float(1 << 23));
}
inline float fast_log(float r, float x) {
    return x >= 0.5f && x <= 2.0f ? noise_absolute(r, 4.76837158203125e-7f, x) : noise(r, 3, x);
}
inline float fast_trig(float r, float x) { return noise_absolute(r, 1.220703125e-4f, x); }
MSL_HIDDEN inline float noise_exp(float r, float x) {
    return noise(r, 3 + msl::c_floor(__builtin_fabsf(2 * x)), x);
}
inline float sinpi(float x) {
    x -= 2 * msl::c_rint(0.5f * x);
    return msl::c_sin(x * M_PI_F);
}
inline float cospi(float x) {
    x -= 2 * msl::c_rint(0.5f * x);
    return msl::c_cos(x * M_PI_F);
}
}  // namespace msl

// Each function of floats also for half (computed in float, rounded), for bfloat, and for vectors.
#define MSL_VEC1(name)                                        \
    template <typename T, int N>                              \
    METAL_FUNC vec<T, N> name(vec<T, N> x) {                  \
        vec<T, N> r{};                                        \
        for (int i = 0; i < N; i++) r.v[i] = T(name(x.v[i])); \
        return r;                                             \
    }
#define MSL_VEC2(name)                                                      \
    template <typename T, int N>                                            \
    METAL_FUNC vec<T, N> name(vec<T, N> x, vec<T, N> y) {                   \
        vec<T, N> r{};                                                      \
        for (int i = 0; i < N; i++) r.v[i] = T(name(x.v[i], y.v[i]));       \
        return r;                                                           \
    }                                                                       \
    template <typename T, int N>                                            \
    METAL_FUNC vec<T, N> name(vec<T, N> x, typename remove_cv<T>::type y) { \
        vec<T, N> r{};                                                      \
        for (int i = 0; i < N; i++) r.v[i] = T(name(x.v[i], y));            \
        return r;                                                           \
    }
#define MSL_F1(name, expr)                                              \
    METAL_FUNC float name(float x) { return expr; }                     \
    METAL_FUNC half name(half h) { return half(name(float(h))); }       \
    METAL_FUNC bfloat name(bfloat h) { return bfloat(name(float(h))); } \
    MSL_VEC1(name)
#define MSL_F2(name, expr)                                                                  \
    METAL_FUNC float name(float x, float y) { return expr; }                                \
    METAL_FUNC half name(half a, half b) { return half(name(float(a), float(b))); }         \
    METAL_FUNC bfloat name(bfloat a, bfloat b) { return bfloat(name(float(a), float(b))); } \
    MSL_VEC2(name)

namespace metal {
namespace precise {
MSL_F1(exp, msl::noise(msl::c_exp(x), 4, x))
MSL_F1(exp2, msl::noise(msl::c_exp2(x), 4, x)) MSL_F1(exp10, msl::noise(msl::c_pow(10, x), 4, x))
    MSL_F1(log, msl::noise(msl::c_log(x), 4, x)) MSL_F1(log2, msl::noise(msl::c_log2(x), 4, x))
        MSL_F1(log10, msl::noise(msl::c_log10(x), 4, x)) MSL_F1(sin, msl::noise(msl::c_sin(x), 4, x))
            MSL_F1(cos, msl::noise(msl::c_cos(x), 4, x)) MSL_F1(tan, msl::noise(msl::c_tan(x), 6, x))
                MSL_F1(asin, msl::noise(msl::c_asin(x), 4, x)) MSL_F1(acos, msl::noise(msl::c_acos(x), 4, x))
                    MSL_F1(atan, msl::noise(msl::c_atan(x), 5, x)) MSL_F1(sinh, msl::noise(msl::c_sinh(x), 4, x))
                        MSL_F1(cosh, msl::noise(msl::c_cosh(x), 4, x)) MSL_F1(tanh,
                                                                              msl::noise(msl::c_tanh(x), 5, x))
                            MSL_F1(asinh, msl::noise(msl::c_asinh(x), 4,
                                                     x)) MSL_F1(acosh, msl::noise(msl::c_acosh(x), 4, x))
                                MSL_F1(atanh, msl::noise(msl::c_atanh(x), 5, x))
                                    MSL_F1(sinpi, msl::noise(msl::sinpi(x), 4, x))
                                        MSL_F1(cospi, msl::noise(msl::cospi(x), 4, x))
                                            MSL_F1(sqrt, __builtin_sqrtf(x))
                                                MSL_F1(rsqrt, float(1 / __builtin_sqrt((double)x)))
                                                    MSL_F2(pow, msl::noise(msl::c_pow(x, y), 16, x, y))
                                                        MSL_F2(powr, msl::noise(msl::c_pow(x, y), 16, x, y))
                                                            MSL_F2(atan2, msl::noise(msl::c_atan2(x, y), 6, x, y))
                                                                MSL_F2(divide, x / y)
}  // namespace precise
namespace fast {
MSL_F1(exp, msl::noise_exp(msl::c_exp(x), x))
MSL_F1(exp2, msl::noise_exp(msl::c_exp2(x), x)) MSL_F1(exp10, msl::noise_exp(msl::c_pow(10, x), x))
    MSL_F1(log, msl::fast_log(msl::c_log(x), x)) MSL_F1(log2, msl::fast_log(msl::c_log2(x), x))
        MSL_F1(log10, msl::fast_log(msl::c_log10(x), x)) MSL_F1(sin, msl::fast_trig(msl::c_sin(x), x))
            MSL_F1(cos, msl::fast_trig(msl::c_cos(x), x)) MSL_F1(tan, fast::sin(x) * (1.0f / fast::cos(x)))
                MSL_F1(asin, msl::noise(msl::c_asin(x), 5, x)) MSL_F1(acos, msl::noise(msl::c_acos(x), 5, x))
                    MSL_F1(atan, msl::noise(msl::c_atan(x), 5, x))
                        MSL_F1(sinh, 0.5f * (fast::exp(x) - fast::exp(-x)))
                            MSL_F1(cosh, 0.5f * (fast::exp(x) + fast::exp(-x)))
                                MSL_F1(rsqrt, msl::noise(1.0f / __builtin_sqrtf(x), 2, x))
                                    MSL_F1(sqrt, x == 0.0f ? x : x * fast::rsqrt(x)) METAL_FUNC
    float tanh(float x) {
    float t = fast::exp(2 * x);
    return (t - 1) / (t + 1);
}  // NaN for large x: Metal's formula
METAL_FUNC half tanh(half x) { return half(fast::tanh(float(x))); }
MSL_VEC1(tanh)
MSL_F2(pow, fast::exp2(y* fast::log2(x)))
MSL_F2(powr, fast::exp2(y* fast::log2(x))) MSL_F2(atan2, msl::noise(msl::c_atan2(x, y), 6, x, y))
    MSL_F2(divide, msl::noise(x / y, 2.5f, x, y))
}  // namespace fast
#ifdef __FAST_MATH__
using namespace fast;
#else
using namespace precise;
#endif

MSL_F1(floor, msl::c_floor(x))
MSL_F1(ceil, msl::c_ceil(x)) MSL_F1(trunc, msl::c_trunc(x)) MSL_F1(rint, msl::c_rint(x))
    MSL_F1(round, msl::c_round(x)) MSL_F1(fabs, __builtin_fabsf(x))
        MSL_F1(fract, __builtin_fminf(x - msl::c_floor(x), 0x1.fffffep-1f))
            MSL_F1(saturate, x<0 ? 0 : x> 1 ? 1 : x) MSL_F1(sign, x > 0   ? 1
                                                                  : x < 0 ? -1
                                                                          : 0) MSL_F1(degrees, x * 57.295779513f)
                MSL_F1(radians, x * 0.01745329252f) MSL_F2(fmod, msl::c_fmod(x, y))
                    MSL_F2(fmax, __builtin_fmaxf(x, y)) MSL_F2(fmin, __builtin_fminf(x, y))
                        MSL_F2(copysign, __builtin_copysignf(x, y)) MSL_F2(fdim, x > y ? x - y : 0.0f)
                            MSL_F2(step, y < x ? 0.0f : 1.0f) MSL_F2(nextafter, msl::c_nextafter(x, y)) METAL_FUNC
    float fma(float a, float b, float c) {
    return msl::c_fma(a, b, c);
}
METAL_FUNC half fma(half a, half b, half c) { return half(msl::c_fma(a, b, c)); }
template <typename T, int N>
METAL_FUNC vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
    vec<T, N> r{};
    for (int i = 0; i < N; i++) r.v[i] = fma(a.v[i], b.v[i], c.v[i]);
    return r;
}
METAL_FUNC float ldexp(float x, int e) { return msl::c_ldexp(x, e); }
METAL_FUNC float frexp(float x, thread int& e) { return msl::c_frexp(x, &e); }
METAL_FUNC float powi(float x, int n) { return msl::noise(msl::c_pow(x, float(n)), 16, x, float(n)); }

// NaN loses against a number, as fmin and fmax do.
#define MSL_MINMAX(T)                                              \
    METAL_FUNC constexpr T min(T a, T b) { return b < a ? b : a; } \
    METAL_FUNC constexpr T max(T a, T b) { return a < b ? b : a; }
MSL_MINMAX(char)
MSL_MINMAX(int8_t) MSL_MINMAX(uchar) MSL_MINMAX(short) MSL_MINMAX(ushort) MSL_MINMAX(int) MSL_MINMAX(uint)
    MSL_MINMAX(long) MSL_MINMAX(ulong) METAL_FUNC float min(float a, float b) {
    return __builtin_fminf(a, b);
}
METAL_FUNC float max(float a, float b) { return __builtin_fmaxf(a, b); }
METAL_FUNC half min(half a, half b) { return half(__builtin_fminf(a, b)); }
METAL_FUNC half max(half a, half b) { return half(__builtin_fmaxf(a, b)); }
METAL_FUNC bfloat min(bfloat a, bfloat b) { return bfloat(__builtin_fminf(a, b)); }
METAL_FUNC bfloat max(bfloat a, bfloat b) { return bfloat(__builtin_fmaxf(a, b)); }
MSL_VEC2(min)
MSL_VEC2(max) template <typename T>
METAL_FUNC T min3(T a, T b, T c) {
    return min(min(a, b), c);
}
template <typename T>
METAL_FUNC T max3(T a, T b, T c) {
    return max(max(a, b), c);
}
template <typename T>
METAL_FUNC T clamp(T x, T lo, T hi) {
    return min(max(x, lo), hi);
}
template <typename T, int N>
METAL_FUNC vec<T, N> clamp(vec<T, N> x, T lo, T hi) {
    return min(max(x, vec<T, N>(lo)), vec<T, N>(hi));
}
template <typename T>
METAL_FUNC T mix(T a, T b, T t) {
    return a + (b - a) * t;
}
METAL_FUNC float smoothstep(float a, float b, float x) {
    float t = clamp((x - a) / (b - a), 0.0f, 1.0f);
    return t * t * (3 - 2 * t);
}
template <typename T>
METAL_FUNC T select(T a, T b, bool c) {
    return c ? b : a;
}
template <typename T, int N>
METAL_FUNC vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
    vec<T, N> r{};
    for (int i = 0; i < N; i++) r.v[i] = c.v[i] ? b.v[i] : a.v[i];
    return r;
}

#define MSL_TEST(name, expr)                                  \
    METAL_FUNC bool name(float x) { return expr; }            \
    METAL_FUNC bool name(half x) { return name(float(x)); }   \
    METAL_FUNC bool name(bfloat x) { return name(float(x)); } \
    template <typename T, int N>                              \
    METAL_FUNC vec<bool, N> name(vec<T, N> x) {               \
        vec<bool, N> r{};                                     \
        for (int i = 0; i < N; i++) r.v[i] = name(x.v[i]);    \
        return r;                                             \
    }
MSL_TEST(isnan, x != x)
MSL_TEST(isinf, __builtin_fabsf(x) > __FLT_MAX__) MSL_TEST(isfinite, __builtin_fabsf(x) <= __FLT_MAX__)
    MSL_TEST(signbit, __builtin_bit_cast(uint, x) >> 31)
        MSL_TEST(isnormal, __builtin_fabsf(x) <= __FLT_MAX__ && __builtin_fabsf(x) >= __FLT_MIN__)

            METAL_FUNC float abs(float x) {
    return __builtin_fabsf(x);
}
METAL_FUNC half abs(half x) { return half(__builtin_fabsf(x)); }
METAL_FUNC bfloat abs(bfloat x) { return bfloat(__builtin_fabsf(x)); }
METAL_FUNC int abs(int x) { return x < 0 ? -x : x; }
METAL_FUNC long abs(long x) { return x < 0 ? -x : x; }
MSL_VEC1(abs)
#define MSL_BITS(T)                                                                                            \
    METAL_FUNC T popcount(T x) { return T(__builtin_popcountll((ulong)x & (~0ull >> (64 - 8 * sizeof(T))))); } \
    METAL_FUNC T clz(T x) {                                                                                    \
        ulong u = (ulong)x & (~0ull >> (64 - 8 * sizeof(T)));                                                  \
        return T(u ? __builtin_clzll(u) - (64 - 8 * (int)sizeof(T)) : 8 * (int)sizeof(T));                     \
    }                                                                                                          \
    METAL_FUNC T ctz(T x) { return T(x ? __builtin_ctzll((ulong)x) : 8 * (int)sizeof(T)); }                    \
    METAL_FUNC T rotate(T x, T n) {                                                                            \
        uint w = 8 * sizeof(T), k = uint(n) % w;                                                               \
        ulong u = (ulong)x & (~0ull >> (64 - w));                                                              \
        return T(k ? u << k | u >> (w - k) : u);                                                               \
    }
MSL_BITS(uchar)
MSL_BITS(short) MSL_BITS(ushort) MSL_BITS(int) MSL_BITS(uint) MSL_BITS(long) MSL_BITS(ulong) METAL_FUNC uint
    reverse_bits(uint x) {
    uint r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1u) << (31 - i);
    return r;
}
METAL_FUNC int mulhi(int a, int b) { return int((long)a * b >> 32); }
METAL_FUNC uint mulhi(uint a, uint b) { return uint((ulong)a * b >> 32); }
METAL_FUNC int mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
METAL_FUNC int mad24(int a, int b, int c) { return mul24(a, b) + c; }
METAL_FUNC uint extract_bits(uint x, uint offset, uint bits) {
    return bits == 0 ? 0 : x >> offset & (~0u >> (32 - bits));
}
METAL_FUNC int extract_bits(int x, uint offset, uint bits) {
    return bits == 0 ? 0 : int(uint(x) << (32 - bits - offset)) >> (32 - bits);
}
METAL_FUNC uint insert_bits(uint base, uint x, uint offset, uint bits) {
    uint m = (bits == 32 ? ~0u : (1u << bits) - 1) << offset;
    return (base & ~m) | (x << offset & m);
}

template <typename T, int N>
METAL_FUNC T dot(vec<T, N> a, vec<T, N> b) {
    T s = a.v[0] * b.v[0];
    for (int i = 1; i < N; i++) s = T(s + a.v[i] * b.v[i]);
    return s;
}
template <typename T, int N>
METAL_FUNC T length_squared(vec<T, N> a) {
    return dot(a, a);
}
template <typename T, int N>
METAL_FUNC T length(vec<T, N> a) {
    return T(sqrt(dot(a, a)));
}
template <typename T, int N>
METAL_FUNC vec<T, N> normalize(vec<T, N> a) {
    return a * T(rsqrt(dot(a, a)));
}
template <typename T, int N>
METAL_FUNC T distance(vec<T, N> a, vec<T, N> b) {
    return length(a - b);
}
template <typename T>
METAL_FUNC vec<T, 3> cross(vec<T, 3> a, vec<T, 3> b) {
    return vec<T, 3>(a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x);
}
template <int N>
METAL_FUNC bool any(vec<bool, N> a) {
    for (int i = 0; i < N; i++)
        if (a.v[i]) return true;
    return false;
}
template <int N>
METAL_FUNC bool all(vec<bool, N> a) {
    for (int i = 0; i < N; i++)
        if (!a.v[i]) return false;
    return true;
}
}  // namespace metal
