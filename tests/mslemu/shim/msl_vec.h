// vec<T, N> with swizzles. A swizzle that is not listed here is a compile error, never a wrong value.
#pragma once
namespace metal {
template <typename T, int N>
struct vec;

// Some components of a vector: V = the vector they make, E = the number of elements of the one they are taken
// from.
template <typename V, typename T, int E, int... I>
struct swizzle {
    T v[E];
    constexpr operator V() const { return V(v[I]...); }
    swizzle& operator=(V x) {
        int k = 0;
        ((v[I] = x[k++]), ...);
        return *this;
    }
    swizzle& operator=(const swizzle& x) { return *this = V(x); }
    swizzle& operator+=(V x) { return *this = V(*this) + x; }
    swizzle& operator-=(V x) { return *this = V(*this) - x; }
    swizzle& operator*=(V x) { return *this = V(*this) * x; }
};

template <typename T, int N>
struct vec_data;
#define MSL_S2(E, n, i, j) swizzle<vec<T, 2>, T, E, i, j> n;
#define MSL_S3(E, n, i, j, k) swizzle<vec<T, 3>, T, E, i, j, k> n;
#define MSL_S4(E, n, i, j, k, l) swizzle<vec<T, 4>, T, E, i, j, k, l> n;
#define MSL_PAIRS2(E) \
    MSL_S2(E, xx, 0, 0) MSL_S2(E, xy, 0, 1) MSL_S2(E, yx, 1, 0) MSL_S2(E, yy, 1, 1) MSL_S2(E, rg, 0, 1)
#define MSL_PAIRS3(E)                                                                                       \
    MSL_PAIRS2(E)                                                                                           \
    MSL_S2(E, xz, 0, 2) MSL_S2(E, zx, 2, 0) MSL_S2(E, yz, 1, 2) MSL_S2(E, zy, 2, 1) MSL_S2(E, zz, 2, 2)     \
        MSL_S2(E, gb, 1, 2) MSL_S3(E, xyz, 0, 1, 2) MSL_S3(E, rgb, 0, 1, 2) MSL_S3(E, zyx, 2, 1, 0)         \
            MSL_S3(E, yzx, 1, 2, 0) MSL_S3(E, zxy, 2, 0, 1) MSL_S3(E, xxx, 0, 0, 0) MSL_S3(E, yyy, 1, 1, 1) \
                MSL_S3(E, zzz, 2, 2, 2)
#define MSL_PAIRS4(E)                                                                                   \
    MSL_PAIRS3(E)                                                                                       \
    MSL_S2(E, xw, 0, 3) MSL_S2(E, wx, 3, 0) MSL_S2(E, yw, 1, 3) MSL_S2(E, wy, 3, 1) MSL_S2(E, zw, 2, 3) \
        MSL_S2(E, wz, 3, 2) MSL_S2(E, ww, 3, 3) MSL_S2(E, ba, 2, 3) MSL_S3(E, yzw, 1, 2, 3)             \
            MSL_S4(E, xyzw, 0, 1, 2, 3) MSL_S4(E, rgba, 0, 1, 2, 3) MSL_S4(E, wzyx, 3, 2, 1, 0)         \
                MSL_S4(E, xxxx, 0, 0, 0, 0) MSL_S4(E, yyyy, 1, 1, 1, 1) MSL_S4(E, zzzz, 2, 2, 2, 2)     \
                    MSL_S4(E, wwww, 3, 3, 3, 3) MSL_S4(E, yxwz, 1, 0, 3, 2) MSL_S4(E, zwxy, 2, 3, 0, 1) \
                        MSL_S4(E, yzwx, 1, 2, 3, 0) MSL_S4(E, xyxy, 0, 1, 0, 1) MSL_S4(E, zwzw, 2, 3, 2, 3)
template <typename T>
struct vec_data<T, 2> {
    union {
        T v[2];
        struct {
            T x, y;
        };
        struct {
            T r, g;
        };
        MSL_PAIRS2(2)
    };
    constexpr vec_data() = default;
    constexpr vec_data(T a, T b) : v{a, b} {}
};
template <typename T>
struct vec_data<T, 3> {
    union {
        T v[4];
        struct {
            T x, y, z;
        };
        struct {
            T r, g, b;
        };
        MSL_PAIRS3(4)
    };
    constexpr vec_data() = default;
    constexpr vec_data(T a, T b, T c) : v{a, b, c, T(0)} {}
};
template <typename T>
struct vec_data<T, 4> {
    union {
        T v[4];
        struct {
            T x, y, z, w;
        };
        struct {
            T r, g, b, a;
        };
        MSL_PAIRS4(4)
    };
    constexpr vec_data() = default;
    constexpr vec_data(T p, T q, T s, T t) : v{p, q, s, t} {}
};

template <typename T, int N>
struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec : vec_data<T, N> {
    using base = vec_data<T, N>;
    using base::base;
    using base::v;
    typedef T element;
    constexpr vec() = default;
    constexpr vec(const vec& o) : base(o) {}
    constexpr vec(T s) : base(make(s)) {}
    template <typename U>
    explicit constexpr vec(vec<U, N> o) : base(convert(o)) {}
    template <typename A, typename B, typename C, typename = enable_if_t<N == 4 && (sizeof(A) > 0)>>
    constexpr vec(vec<A, 2> p, B q, C r) : base(T(p.v[0]), T(p.v[1]), T(q), T(r)) {}
    template <int M = N, typename = enable_if_t<M == 4>>
    constexpr vec(vec<T, 2> p, vec<T, 2> q) : base(p.v[0], p.v[1], q.v[0], q.v[1]) {}
    template <int M = N, typename = enable_if_t<M == 4>>
    constexpr vec(vec<T, 3> p, T q) : base(p.v[0], p.v[1], p.v[2], q) {}
    template <int M = N, typename = enable_if_t<M == 4>>
    constexpr vec(T p, vec<T, 3> q) : base(p, q.v[0], q.v[1], q.v[2]) {}
    template <int M = N, typename = enable_if_t<M == 3>>
    constexpr vec(vec<T, 2> p, T q) : base(p.v[0], p.v[1], q) {}
    constexpr vec& operator=(const vec& o) {
        for (int i = 0; i < N; i++) v[i] = o.v[i];
        return *this;
    }
    constexpr T& operator[](int i) { return v[i]; }
    constexpr const T& operator[](int i) const { return v[i]; }
    static constexpr base make(T s) {
        if constexpr (N == 2) return base(s, s);
        else if constexpr (N == 3) return base(s, s, s);
        else return base(s, s, s, s);
    }
    template <typename U>
    static constexpr base convert(vec<U, N> o) {
        if constexpr (N == 2) return base(T(o.v[0]), T(o.v[1]));
        else if constexpr (N == 3) return base(T(o.v[0]), T(o.v[1]), T(o.v[2]));
        else return base(T(o.v[0]), T(o.v[1]), T(o.v[2]), T(o.v[3]));
    }
#define MSL_OP(op)                                                \
    friend constexpr vec operator op(vec a, vec b) {              \
        vec r{};                                                  \
        for (int i = 0; i < N; i++) r.v[i] = T(a.v[i] op b.v[i]); \
        return r;                                                 \
    }                                                             \
    friend constexpr vec operator op(vec a, T b) {                \
        vec r{};                                                  \
        for (int i = 0; i < N; i++) r.v[i] = T(a.v[i] op b);      \
        return r;                                                 \
    }                                                             \
    friend constexpr vec operator op(T a, vec b) {                \
        vec r{};                                                  \
        for (int i = 0; i < N; i++) r.v[i] = T(a op b.v[i]);      \
        return r;                                                 \
    }                                                             \
    constexpr vec& operator op##=(vec b) { return *this = *this op b; }
    MSL_OP(+)
    MSL_OP(-) MSL_OP(*) MSL_OP(/) MSL_OP(%) MSL_OP(&) MSL_OP(|) MSL_OP(^) MSL_OP(<<) MSL_OP(>>)
#undef MSL_OP
#define MSL_CMP(op)                                            \
    friend constexpr vec<bool, N> operator op(vec a, vec b) {  \
        vec<bool, N> r{};                                      \
        for (int i = 0; i < N; i++) r.v[i] = a.v[i] op b.v[i]; \
        return r;                                              \
    }
        MSL_CMP(<) MSL_CMP(>) MSL_CMP(<=) MSL_CMP(>=) MSL_CMP(==) MSL_CMP(!=) MSL_CMP(&&) MSL_CMP(||)
#undef MSL_CMP
            friend constexpr vec
            operator-(vec a) {
        vec r{};
        for (int i = 0; i < N; i++) r.v[i] = T(-a.v[i]);
        return r;
    }
    friend constexpr vec operator~(vec a) {
        vec r{};
        for (int i = 0; i < N; i++) r.v[i] = T(~a.v[i]);
        return r;
    }
    friend constexpr vec<bool, N> operator!(vec a) {
        vec<bool, N> r{};
        for (int i = 0; i < N; i++) r.v[i] = !a.v[i];
        return r;
    }
};

template <typename T, int N>
struct packed_vec {
    T v[N];
    constexpr packed_vec() = default;
    constexpr packed_vec(vec<T, N> o) {
        for (int i = 0; i < N; i++) v[i] = o.v[i];
    }
    constexpr operator vec<T, N>() const {
        vec<T, N> r{};
        for (int i = 0; i < N; i++) r.v[i] = v[i];
        return r;
    }
    constexpr T& operator[](int i) { return v[i]; }
    constexpr const T& operator[](int i) const { return v[i]; }
};

#define MSL_NAMES(T)                        \
    typedef vec<T, 2> T##2;                 \
    typedef vec<T, 3> T##3;                 \
    typedef vec<T, 4> T##4;                 \
    typedef packed_vec<T, 2> packed_##T##2; \
    typedef packed_vec<T, 3> packed_##T##3; \
    typedef packed_vec<T, 4> packed_##T##4;
MSL_NAMES(bool)
MSL_NAMES(char) MSL_NAMES(uchar) MSL_NAMES(short) MSL_NAMES(ushort) MSL_NAMES(int) MSL_NAMES(uint) MSL_NAMES(long)
    MSL_NAMES(ulong) MSL_NAMES(half) MSL_NAMES(float) MSL_NAMES(bfloat)
#undef MSL_NAMES
}  // namespace metal
