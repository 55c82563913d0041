// Scalar types, type traits, limits.
#pragma once
typedef signed char int8_t;
typedef unsigned char uint8_t, uchar;
typedef short int16_t;
typedef unsigned short uint16_t, ushort;
typedef int int32_t;
typedef unsigned int uint32_t, uint;
typedef long int64_t;
typedef unsigned long uint64_t, ulong, size_t, uintptr_t;
typedef long ptrdiff_t, intptr_t;
typedef _Float16 half;  // rounded after each operation (-fexcess-precision=16)

// bfloat converts to float by itself, from float only when asked: as in Metal.
struct bfloat {
    uint16_t bits;
    bfloat() = default;
    static constexpr uint16_t round(float x) {
        uint32_t u = __builtin_bit_cast(uint32_t, x);
        if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40u);  // NaN stays one
        return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
    constexpr bfloat(float x, int) : bits(round(x)) {}
    explicit constexpr bfloat(float x) : bits(round(x)) {}
    explicit constexpr bfloat(half x) : bits(round(float(x))) {}
    explicit constexpr bfloat(bool x) : bits(round(float(x))) {}
    explicit constexpr bfloat(uint64_t x) : bits(round(float(x))) {}
    constexpr bfloat(int x) : bits(round(float(x))) {}
    constexpr bfloat(uint x) : bits(round(float(x))) {}
    explicit constexpr bfloat(int64_t x) : bits(round(float(x))) {}
    constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
};
#define MSL_BF(op)                                                                            \
    constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); } \
    constexpr float operator op(bfloat a, float b) { return float(a) op b; }                  \
    constexpr float operator op(float a, bfloat b) { return a op float(b); }                  \
    constexpr float operator op(bfloat a, half b) { return float(a) op float(b); }            \
    constexpr float operator op(half a, bfloat b) { return float(a) op float(b); }            \
    constexpr bfloat operator op(bfloat a, int b) { return bfloat(float(a) op float(b)); }    \
    constexpr bfloat operator op(int a, bfloat b) { return bfloat(float(a) op float(b)); }    \
    constexpr bfloat operator op(bfloat a, uint b) { return bfloat(float(a) op float(b)); }   \
    constexpr bfloat operator op(uint a, bfloat b) { return bfloat(float(a) op float(b)); }   \
    template <typename T>                                                                     \
    inline bfloat& operator op##=(bfloat& a, T b) {                                           \
        return a = bfloat(float(a) op float(b));                                              \
    }
MSL_BF(+)
MSL_BF(-) MSL_BF(*) MSL_BF(/)
#undef MSL_BF
    constexpr bfloat
    operator-(bfloat a) {
    return bfloat(-float(a));
}
constexpr half operator""h(long double x) { return half(x); }
constexpr half operator"" H(long double x) { return half(x); }
constexpr bfloat operator"" bf(long double x) { return bfloat(float(x)); }

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX half(65504)
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX (__INT_MAX__ * 2u + 1u)
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.318309886183790671538f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_LN10_F 2.30258509299404568402f
#define M_E_F 2.71828182845904523536f

namespace metal {
template <typename T, T v>
struct integral_constant {
    static constexpr T value = v;
    constexpr operator T() const { return v; }
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <typename A, typename B>
struct is_same : false_type {};
template <typename A>
struct is_same<A, A> : true_type {};
template <typename A, typename B>
constexpr bool is_same_v = is_same<A, B>::value;
template <bool c, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
    typedef T type;
};
template <bool c, typename T = void>
using enable_if_t = typename enable_if<c, T>::type;
template <bool c, typename A, typename B>
struct conditional {
    typedef A type;
};
template <typename A, typename B>
struct conditional<false, A, B> {
    typedef B type;
};
template <bool c, typename A, typename B>
using conditional_t = typename conditional<c, A, B>::type;
template <typename T>
struct remove_cv {
    typedef T type;
};
template <typename T>
struct remove_cv<const T> {
    typedef T type;
};
template <typename T>
struct remove_cv<volatile T> {
    typedef T type;
};
template <typename T>
struct remove_reference {
    typedef T type;
};
template <typename T>
struct remove_reference<T&> {
    typedef T type;
};
template <typename T>
struct remove_reference<T&&> {
    typedef T type;
};
template <typename T>
using remove_cv_t = typename remove_cv<T>::type;
template <typename T>
using remove_reference_t = typename remove_reference<T>::type;
template <typename T>
T declval();
template <typename A, typename B>
struct is_convertible {
    static void take(B);
    template <typename X>
    static auto test(int) -> decltype(take(declval<X>()), true_type());
    template <typename X>
    static false_type test(...);
    static constexpr bool value = decltype(test<A>(0))::value;
};
template <typename A, typename B>
constexpr bool is_convertible_v = is_convertible<A, B>::value;
template <typename T>
constexpr bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <typename T>
constexpr bool is_signed_int =
    is_same_v<T, int8_t> || is_same_v<T, char> || is_same_v<T, short> || is_same_v<T, int> || is_same_v<T, long>;
template <typename T>
constexpr bool is_unsigned_int =
    is_same_v<T, bool> || is_same_v<T, uchar> || is_same_v<T, ushort> || is_same_v<T, uint> || is_same_v<T, ulong>;
template <typename T>
constexpr bool is_integral_v = is_signed_int<T> || is_unsigned_int<T>;
template <typename T>
constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <typename T>
constexpr bool is_signed_v = is_signed_int<T> || is_floating_point_v<T>;
template <typename T>
constexpr bool is_unsigned_v = is_unsigned_int<T>;
template <typename T>
struct is_floating_point : integral_constant<bool, is_floating_point_v<T>> {};
template <typename T>
struct is_integral : integral_constant<bool, is_integral_v<T>> {};
template <typename T>
struct is_arithmetic : integral_constant<bool, is_arithmetic_v<T>> {};
template <typename T>
struct is_signed : integral_constant<bool, is_signed_v<T>> {};
template <typename T>
struct is_unsigned : integral_constant<bool, is_unsigned_v<T>> {};

template <typename T>
struct numeric_limits {
    static constexpr bool is_signed = is_signed_v<T>;
    static constexpr T max() { return is_signed_v<T> ? T((1ull << (sizeof(T) * 8 - 1)) - 1) : T(~0ull); }
    static constexpr T min() { return is_signed_v<T> ? T(-(long)((1ull << (sizeof(T) * 8 - 1)) - 1) - 1) : T(0); }
    static constexpr T lowest() { return min(); }
};
#define MSL_LIMITS(T, MAX, MIN, EPS, DIGITS)                             \
    template <>                                                          \
    struct numeric_limits<T> {                                           \
        static constexpr bool is_signed = true;                          \
        static constexpr int digits = DIGITS;                            \
        static constexpr T max() { return T(MAX); }                      \
        static constexpr T min() { return T(MIN); }                      \
        static constexpr T lowest() { return T(-(MAX)); }                \
        static constexpr T epsilon() { return T(EPS); }                  \
        static constexpr T infinity() { return T(__builtin_inff()); }    \
        static constexpr T quiet_NaN() { return T(__builtin_nanf("")); } \
    };
MSL_LIMITS(float, __FLT_MAX__, __FLT_MIN__, __FLT_EPSILON__, 24)
MSL_LIMITS(half, 65504.0f, 6.103515625e-05f, 9.765625e-04f, 11)
MSL_LIMITS(bfloat, 3.38953139e38f, __FLT_MIN__, 7.8125e-03f, 8)
#undef MSL_LIMITS

template <typename T, size_t N>
struct array {
    T __v[N];
    constexpr T& operator[](size_t i) { return __v[i]; }
    constexpr const T& operator[](size_t i) const { return __v[i]; }
    constexpr size_t size() const { return N; }
};
}  // namespace metal

template <typename To, typename From>
inline __attribute__((always_inline)) To as_type(From x) {
    static_assert(sizeof(To) == sizeof(From), "as_type between types of different size");
    To to;
    __builtin_memcpy((void*)&to, (const void*)&x, sizeof(To));
    return to;
}
