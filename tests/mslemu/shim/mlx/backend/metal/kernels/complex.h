// complex64_t as a pair of floats; MLX's own header overloads its constructors by address space, which C++ has
// not.
#pragma once
#include <metal_stdlib>

template <typename T>
struct complex_t {
    using value_type = T;
    T real, imag;
    constexpr complex_t(T re, T im) : real(re), imag(im) {}
    constexpr complex_t() : real(0), imag(0) {}
    template <typename U, typename = metal::enable_if_t<metal::is_convertible_v<U, T>>>
    constexpr complex_t(U x) : real(static_cast<T>(x)), imag(0) {}
    constexpr complex_t(metal::vec<T, 2> v) : real(v.x), imag(v.y) {}
    constexpr operator metal::vec<T, 2>() const { return metal::vec<T, 2>(real, imag); }
    constexpr complex_t operator-() const { return {-real, -imag}; }
};
typedef complex_t<float> complex64_t;

#define MSL_COMPLEX(op, re, im) \
    constexpr complex64_t operator op(complex64_t a, complex64_t b) { return {re, im}; }
MSL_COMPLEX(+, a.real + b.real, a.imag + b.imag)
MSL_COMPLEX(-, a.real - b.real, a.imag - b.imag)
MSL_COMPLEX(*, a.real* b.real - a.imag * b.imag, a.real* b.imag + a.imag * b.real)
MSL_COMPLEX(/, (a.real * b.real + a.imag * b.imag) / (b.real * b.real + b.imag * b.imag),
            (a.imag * b.real - a.real * b.imag) / (b.real * b.real + b.imag * b.imag))
#undef MSL_COMPLEX
constexpr bool operator==(complex64_t a, complex64_t b) { return a.real == b.real && a.imag == b.imag; }
constexpr bool operator!=(complex64_t a, complex64_t b) { return !(a == b); }
