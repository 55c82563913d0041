// Declarations only, for clang's OpenCL C++ front end, which has what g++ lacks: real address spaces. Metal's
// spaces are mapped to OpenCL's. bfloat is OpenCL's double: a type of its own is all that is needed here (Metal
// has no double).
#define device __global
#define threadgroup __local
#define thread __private
#undef constant
#define constant __constant
#define global msl_global
#define local msl_local
#define generic msl_generic
#define METAL_FUNC inline
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t, size_t;
typedef long ptrdiff_t;
typedef half float16_t;
typedef double bfloat;
typedef bfloat bfloat16_t;
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX (__INT_MAX__ * 2u + 1u)
#define M_PI_F 3.14159265f
#define M_LOG2E_F 1.44269504f
#define M_LN2_F 0.69314718f
#define M_SQRT2_F 1.41421356f
#define M_SQRT1_2_F 0.70710678f
#define M_2_SQRTPI_F 1.12837916f
#define M_1_PI_F 0.31830988f
constexpr half operator""h(long double x) { return (half)x; }
constexpr bfloat operator"" bf(long double x) { return (bfloat)x; }

template <class T>
T msl_any();
template <class V, class... A>
V msl_make(A...);
template <class To, class From>
To as_type(From);
#define MSL_NAMES(T)                                    \
    typedef T T##2 __attribute__((ext_vector_type(2))); \
    typedef T T##3 __attribute__((ext_vector_type(3))); \
    typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_NAMES(char)
MSL_NAMES(uchar) MSL_NAMES(short) MSL_NAMES(ushort) MSL_NAMES(int) MSL_NAMES(uint) MSL_NAMES(long) MSL_NAMES(ulong)
    MSL_NAMES(half) MSL_NAMES(float) MSL_NAMES(bfloat) typedef int2 bool2;
typedef int3 bool3;
typedef int4 bool4;

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
template <class A, class B>
struct is_same {
    static constexpr __constant bool value = false;
};
template <class A>
struct is_same<A, A> {
    static constexpr __constant bool value = true;
};
template <class A, class B>
constexpr __constant bool is_same_v = is_same<A, B>::value;
template <bool c, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
    typedef T type;
};
template <bool c, class T = void>
using enable_if_t = typename enable_if<c, T>::type;
template <bool c, class A, class B>
struct conditional {
    typedef A type;
};
template <class A, class B>
struct conditional<false, A, B> {
    typedef B type;
};
template <bool c, class A, class B>
using conditional_t = typename conditional<c, A, B>::type;
template <class T>
struct numeric_limits {
    static constexpr T max() { return T(1); }
    static constexpr T min() { return T(1); }
    static constexpr T lowest() { return T(1); }
    static constexpr T infinity() { return T(1); }
    static constexpr T quiet_NaN() { return T(1); }
    static constexpr T epsilon() { return T(1); }
};
struct complex64_t {
    float real, imag;
    complex64_t(float re, float im = 0);
    complex64_t();
};
enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture, mem_device_and_threadgroup };
constexpr mem_flags operator|(mem_flags a, mem_flags) { return a; }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

#define F1(f)          \
    template <class T> \
    T f(T);
#define F2(f)                 \
    template <class T>        \
    T f(T, T);                \
    template <class T, int N> \
    vec<T, N> f(vec<T, N>, T);
#define MATH                                                                                                  \
    F1(exp)                                                                                                   \
    F1(exp2) F1(exp10) F1(log) F1(log2) F1(log10) F1(sin) F1(cos) F1(tan) F1(asin) F1(acos) F1(atan) F1(sinh) \
        F1(cosh) F1(tanh) F1(asinh) F1(acosh) F1(atanh) F1(sinpi) F1(cospi) F1(sqrt) F1(rsqrt) float          \
        pow(float, float);                                                                                    \
    half pow(half, half);                                                                                     \
    float powr(float, float);                                                                                 \
    float atan2(float, float);                                                                                \
    float divide(float, float);                                                                               \
    half divide(half, half);
namespace fast {
MATH
}
namespace precise {
MATH
}
using namespace precise;
F1(floor)
F1(ceil) F1(trunc) F1(rint) F1(round) F1(fabs) F1(fract) F1(saturate) F1(sign) F1(abs) F1(popcount) F1(clz) F1(ctz)
    F1(normalize) F1(reverse_bits) float fmod(float, float);
float copysign(float, float);
float step(float, float);
float ldexp(float, int);
#define OVERLOADS(f)                     \
    F2(f##_vec_only) char f(char, char); \
    int8_t f(int8_t, int8_t);            \
    uchar f(uchar, uchar);               \
    short f(short, short);               \
    ushort f(ushort, ushort);            \
    int f(int, int);                     \
    uint f(uint, uint);                  \
    long f(long, long);                  \
    ulong f(ulong, ulong);               \
    half f(half, half);                  \
    float f(float, float);               \
    bfloat f(bfloat, bfloat);            \
    template <class T, int N>            \
    vec<T, N> f(vec<T, N>, vec<T, N>);
OVERLOADS(min) OVERLOADS(max) float fmin(float, float);
half fmin(half, half);
float fmax(float, float);
half fmax(half, half);
template <class T>
T clamp(T, T, T);
template <class T>
T fma(T, T, T);
template <class T>
T mix(T, T, T);
template <class T>
T min3(T, T, T);
template <class T>
T max3(T, T, T);
template <class T, class C>
T select(T, T, C);
template <class T>
bool isnan(T);
template <class T>
bool isinf(T);
template <class T>
bool isfinite(T);
template <class T>
bool any(T);
template <class T>
bool all(T);
template <class T, int N>
T dot(vec<T, N>, vec<T, N>);
template <class T, int N>
T length(vec<T, N>);
int mulhi(int, int);
uint mulhi(uint, uint);
int mad24(int, int, int);
int mul24(int, int);
template <class T>
T extract_bits(T, uint, uint);

#define S1(f)          \
    template <class T> \
    T simd_##f(T);     \
    template <class T> \
    T quad_##f(T);
#define S2(f)              \
    template <class T>     \
    T simd_##f(T, ushort); \
    template <class T>     \
    T quad_##f(T, ushort);
S1(sum)
S1(product) S1(min) S1(max) S1(and) S1(or) S1(xor) S1(broadcast_first) S1(prefix_inclusive_sum)
    S1(prefix_exclusive_sum) S1(prefix_inclusive_product) S1(prefix_exclusive_product) S2(shuffle) S2(shuffle_xor)
        S2(shuffle_up) S2(shuffle_down) S2(broadcast) S2(shuffle_rotate_up)
            S2(shuffle_rotate_down) template <class T>
            T simd_shuffle_and_fill_up(T, T, ushort);
template <class T>
T simd_shuffle_and_fill_down(T, T, ushort);
struct simd_vote {
    typedef ulong vote_t;
    explicit operator vote_t() const;
    bool all() const;
    bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
    T value;
};
// these three are types of OpenCL
#define atomic_int metal::atomic<int>
#define atomic_uint metal::atomic<uint>
#define atomic_float metal::atomic<float>
#define A(space)                                                                                      \
    template <class T>                                                                                \
    T atomic_load_explicit(const volatile space atomic<T>*, memory_order);                            \
    template <class T, class U>                                                                       \
    void atomic_store_explicit(volatile space atomic<T>*, U, memory_order);                           \
    template <class T, class U>                                                                       \
    T atomic_exchange_explicit(volatile space atomic<T>*, U, memory_order);                           \
    template <class T, class U>                                                                       \
    bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, thread T*, U, memory_order, \
                                               memory_order);
#define AF(space, f)            \
    template <class T, class U> \
    T atomic_fetch_##f##_explicit(volatile space atomic<T>*, U, memory_order);
A(__global)
A(__local) AF(__global, add) AF(__local, add) AF(__global, sub) AF(__local, sub) AF(__global, min) AF(__local, min)
    AF(__global, max) AF(__local, max) AF(__global, and) AF(__local, and) AF(__global, or) AF(__local, or)
        AF(__global, xor) AF(__local, xor)

            template <class T, int R, int C>
            struct simdgroup_matrix {
    simdgroup_matrix();
    explicit simdgroup_matrix(T);
    thread vec<T, 2>& thread_elements();
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int R, int C>
simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);
#define M(space)                                                                                                 \
    template <class T, int R, int C>                                                                             \
    void simdgroup_load(thread simdgroup_matrix<T, R, C>&, const space T*, ulong = 8, ulong2 = 0, bool = false); \
    template <class T, int R, int C>                                                                             \
    void simdgroup_store(simdgroup_matrix<T, R, C>, space T*, ulong = 8, ulong2 = 0, bool = false);
M(__global)
M(__local) template <class D, class X, class Y, class Z, int R, int C>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, R, C>&, simdgroup_matrix<X, R, C>,
                                   simdgroup_matrix<Y, R, C>, simdgroup_matrix<Z, R, C>);
template <class D, class X, class Y, int R, int C>
void simdgroup_multiply(thread simdgroup_matrix<D, R, C>&, simdgroup_matrix<X, R, C>, simdgroup_matrix<Y, R, C>);
}  // namespace metal
using namespace metal;

// MLX's own helpers, those a kernel body may use.
template <class T>
struct Limits {
    static constexpr __constant T max = T(1);
    static constexpr __constant T min = T(1);
    static constexpr __constant T finite_max = T(1);
    static constexpr __constant T finite_min = T(1);
};
template <class I = long>
I elem_to_loc(I, constant const int*, constant const long*, int);
template <class I = long>
I elem_to_loc_1(uint, constant const long&);
template <class T, class U>
T ceildiv(T, U);
float log1p(float);

#define MAKE(T) msl_make<T>
#define char2(...) MAKE(char2)(__VA_ARGS__)
#define char3(...) MAKE(char3)(__VA_ARGS__)
#define char4(...) MAKE(char4)(__VA_ARGS__)
#define uchar2(...) MAKE(uchar2)(__VA_ARGS__)
#define uchar4(...) MAKE(uchar4)(__VA_ARGS__)
#define short2(...) MAKE(short2)(__VA_ARGS__)
#define short4(...) MAKE(short4)(__VA_ARGS__)
#define ushort2(...) MAKE(ushort2)(__VA_ARGS__)
#define ushort4(...) MAKE(ushort4)(__VA_ARGS__)
#define int2(...) MAKE(int2)(__VA_ARGS__)
#define int3(...) MAKE(int3)(__VA_ARGS__)
#define int4(...) MAKE(int4)(__VA_ARGS__)
#define uint2(...) MAKE(uint2)(__VA_ARGS__)
#define uint3(...) MAKE(uint3)(__VA_ARGS__)
#define uint4(...) MAKE(uint4)(__VA_ARGS__)
#define ulong2(...) MAKE(ulong2)(__VA_ARGS__)
#define half2(...) MAKE(half2)(__VA_ARGS__)
#define half3(...) MAKE(half3)(__VA_ARGS__)
#define half4(...) MAKE(half4)(__VA_ARGS__)
#define float2(...) MAKE(float2)(__VA_ARGS__)
#define float3(...) MAKE(float3)(__VA_ARGS__)
#define float4(...) MAKE(float4)(__VA_ARGS__)
#define bfloat2(...) MAKE(bfloat2)(__VA_ARGS__)
#define bfloat4(...) MAKE(bfloat4)(__VA_ARGS__)
