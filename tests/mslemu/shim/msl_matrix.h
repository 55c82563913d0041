// simdgroup_matrix<T, 8, 8>: two elements a lane. Which lane holds which is not documented by Apple; this is the
// layout that MLX's own kernels rely on: lane -> row (q & 4) + (lane / 2) % 4, column (q & 2) * 2 + (lane % 2) *
// 2, q = lane / 4.
#pragma once
namespace metal {
template <typename T, int R, int C>
struct simdgroup_matrix {
    static_assert(R == 8 && C == 8, "Metal has 8 x 8 matrices only");
    typedef vec<T, 2> storage_type;
    storage_type elements;
    simdgroup_matrix() = default;
    explicit simdgroup_matrix(T diagonal) {
        uint r = row(msl_lane()), c = column(msl_lane());
        elements = storage_type(r == c ? diagonal : T(0), r == c + 1 ? diagonal : T(0));
    }
    storage_type& thread_elements() { return elements; }
    const storage_type& thread_elements() const { return elements; }
    static constexpr uint row(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
    static constexpr uint column(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }
    static constexpr uint lane_of(uint r, uint c) { return ((r & 4) | (c & 4) / 2) * 4 + r % 4 * 2 + c / 2 % 2; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int R, int C>
METAL_FUNC simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T x) {
    simdgroup_matrix<T, R, C> m;
    m.elements = vec<T, 2>(x);
    return m;
}

#define MSL_WALK                                                                         \
    msl::exchange<uint>(0, site, msl::MATRIX);                                           \
    using M = simdgroup_matrix<T, R, C>;                                                 \
    uint lane = msl_lane(), r = M::row(lane) + origin.y, c = M::column(lane) + origin.x; \
    ulong at = transpose ? c * stride + r : r * stride + c, next = transpose ? stride : 1;
template <typename T, int R, int C, typename P>
METAL_FUNC void simdgroup_load(thread simdgroup_matrix<T, R, C>& m, const P* p, ulong stride = C,
                               ulong2 origin = ulong2(0), bool transpose = false, MSL_SITE) {
    static_assert(is_same_v<typename remove_cv<P>::type, T>,
                  "simdgroup_load: the memory must hold the matrix's element type");
    MSL_WALK
    T a = p[at], b = p[at + next];
    m.elements.v[0] = a;
    m.elements.v[1] = b;
}
template <typename T, int R, int C>
METAL_FUNC void simdgroup_store(simdgroup_matrix<T, R, C> m, T* p, ulong stride = C, ulong2 origin = ulong2(0),
                                bool transpose = false, MSL_SITE) {
    MSL_WALK
    p[at] = m.elements.v[0];
    p[at + next] = m.elements.v[1];
}
#undef MSL_WALK

struct msl_pair {
    float a[2], b[2];
};
template <typename D, typename A, typename B, typename T>
MSL_HIDDEN void msl_multiply(vec<D, 2>& d, vec<A, 2> a, vec<B, 2> b, vec<T, 2> c, msl::Site site, bool add) {
    using M = simdgroup_matrix<float, 8, 8>;
    auto all = msl::exchange(msl_pair{{float(a.v[0]), float(a.v[1])}, {float(b.v[0]), float(b.v[1])}}, site,
                             msl::MATRIX, 32);
    uint me = msl_lane(), row = M::row(me), col = M::column(me);
    float s[2] = {add ? float(c.v[0]) : 0, add ? float(c.v[1]) : 0};
    for (uint k = 0; k < 8; k++) {
        float x = ((const msl_pair*)&all.lane[M::lane_of(row, k)])->a[k % 2];
        const float* y = ((const msl_pair*)&all.lane[M::lane_of(k, col)])->b;
        for (int j = 0; j < 2; j++) s[j] = msl::c_fma(x, y[j], s[j]);
    }
    d = vec<D, 2>(D(s[0]), D(s[1]));
}
template <typename D, typename A, typename B, typename T, int R, int C>
METAL_FUNC void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, R, C>& d, simdgroup_matrix<A, R, C> a,
                                              simdgroup_matrix<B, R, C> b, simdgroup_matrix<T, R, C> c, MSL_SITE) {
    msl_multiply(d.elements, a.elements, b.elements, c.elements, site, true);
}
template <typename D, typename A, typename B, int R, int C>
METAL_FUNC void simdgroup_multiply(thread simdgroup_matrix<D, R, C>& d, simdgroup_matrix<A, R, C> a,
                                   simdgroup_matrix<B, R, C> b, MSL_SITE) {
    msl_multiply(d.elements, a.elements, b.elements, d.elements, site, false);
}
}  // namespace metal
