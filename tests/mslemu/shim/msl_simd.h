// Thread attributes, threadgroup variables, barriers, and the operations of a simdgroup: a meeting of its lanes.
#pragma once
namespace std {
struct source_location {  // what __builtin_source_location() asks for
    struct __impl {
        const char* _M_file_name;
        const char* _M_function_name;
        unsigned _M_line, _M_column;
    };
};
}  // namespace std

namespace msl {
typedef const void* Site;  // a source_location::__impl: line and column of the call
struct Ids {
    struct alignas(16) Three {
        uint x, y, z, pad;
        MSL_HIDDEN operator metal::uint3() const { return metal::uint3(x, y, z); }
    };
    Three dispatch_threads_per_threadgroup, grid_origin, grid_size, thread_position_in_grid,
        thread_position_in_threadgroup, threadgroup_position_in_grid, threadgroups_per_grid, threads_per_grid,
        threads_per_threadgroup;
    uint dispatch_quadgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup, quadgroup_index_in_threadgroup,
        quadgroups_per_threadgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup,
        thread_execution_width, thread_index_in_quadgroup, thread_index_in_simdgroup, thread_index_in_threadgroup,
        threads_per_simdgroup;
};
}  // namespace msl

extern "C" {
void msl_barrier(uint8_t flags, msl::Site site, bool simdgroup);
const void* msl_exchange(const void* value, uint size, uint op, msl::Site site, uint* mask, uint flops);
uint msl_lane();
void msl_bad_lane(msl::Site site, uint lane);
void* msl_tg_variable(uint number, ulong size, ulong align, uint granule);
void msl_copy_hook(const void* to, const void* from, ulong n, ulong pc);
// Copies that the compiler makes by a call: checked like the loads and stores they stand for.
__attribute__((visibility("hidden"), no_sanitize("thread"),
               optimize("no-tree-loop-distribute-patterns"))) inline void*
memcpy(void* to, const void* from, size_t n);
__attribute__((visibility("hidden"), no_sanitize("thread"),
               optimize("no-tree-loop-distribute-patterns"))) inline void*
memset(void* to, int c, size_t n);
}

namespace msl {
template <typename T>
struct scalar {
    typedef T type;
};
template <typename T, size_t N>
struct scalar<T[N]> : scalar<T> {};
template <typename T, int N>
struct scalar<metal::vec<T, N>> : scalar<T> {};
template <typename T>
METAL_FUNC T& tg_var(uint number) {
    constexpr uint s = sizeof(typename scalar<T>::type), granule = s == 1 || s == 2 ? s : s % 4 == 0 ? 4 : 1;
    return *(T*)msl_tg_variable(number, sizeof(T), alignof(T), granule);
}

struct Lane {
    ulong word[8];
};
template <typename T>
struct Lanes {  // what the lanes of the simdgroup handed in
    const Lane* lane;
    uint mask;
    bool has(uint i) const { return i < 32 && (mask >> i & 1); }
    MSL_HIDDEN T operator[](uint i) const {
        T x;
        __builtin_memcpy((void*)&x, &lane[i], sizeof(T));
        return x;
    }
};
enum Op : uint { REDUCE = 0, SHUFFLE = 1, MATRIX = 2 };
template <typename T>
MSL_HIDDEN Lanes<T> exchange(T x, Site site, Op op = SHUFFLE, uint flops = 0) {
    Lanes<T> all;
    all.lane = (const Lane*)msl_exchange(&x, sizeof(T), op, site, &all.mask, flops);
    return all;
}
// Butterfly over 32 lanes, as Apple's GPUs are seen to do it; lanes that take no part add nothing.
template <typename T, typename F>
MSL_HIDDEN T reduce(T x, F f, Site site, uint first = 0, uint count = 32) {
    Lanes<T> all = exchange(x, site, REDUCE, 1);
    T v[32];
    bool has[32];
    for (uint i = 0; i < count; i++)
        if ((has[i] = all.has(first + i))) v[i] = all[first + i];
    for (uint step = 1; step < count; step *= 2)
        for (uint i = 0; i < count; i += 2 * step) {
            if (has[i] && has[i + step]) v[i] = f(v[i], v[i + step]);
            else if (has[i + step]) v[i] = v[i + step], has[i] = true;
        }
    return v[0];
}
template <typename T, typename F>
MSL_HIDDEN T prefix(T x, F f, T neutral, bool inclusive, Site site) {
    Lanes<T> all = exchange(x, site, REDUCE, 1);
    T sum = neutral;
    for (uint i = 0, me = msl_lane(); i < me + (inclusive ? 1 : 0); i++)
        if (all.has(i)) sum = f(sum, all[i]);
    return sum;
}
template <typename T>
MSL_HIDDEN T take(T x, uint lane, Site site, const Lanes<T>& all) {
    if (all.has(lane)) return all[lane];
    msl_bad_lane(site, lane);
    T nonsense;
    __builtin_memset((void*)&nonsense, 0xff, sizeof(T));
    return nonsense;
}
}  // namespace msl

namespace metal {
enum class mem_flags : uint8_t {
    mem_none = 0,
    mem_device = 1,
    mem_threadgroup = 2,
    mem_texture = 4,
    mem_device_and_threadgroup = 3
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint8_t(a) | uint8_t(b)); }
#define MSL_SITE msl::Site site = __builtin_source_location()
MSL_HIDDEN inline void threadgroup_barrier(mem_flags flags, MSL_SITE) { msl_barrier(uint8_t(flags), site, false); }
MSL_HIDDEN inline void simdgroup_barrier(mem_flags flags, MSL_SITE) { msl_barrier(uint8_t(flags), site, true); }

#define MSL_REDUCE(name, expr)                                                          \
    template <typename T>                                                               \
    METAL_FUNC T simd_##name(T x, MSL_SITE) {                                           \
        return msl::reduce(                                                             \
            x, [](T a, T b) MSL_LAMBDA { return T(expr); }, site);                      \
    }                                                                                   \
    template <typename T>                                                               \
    METAL_FUNC T quad_##name(T x, MSL_SITE) {                                           \
        return msl::reduce(                                                             \
            x, [](T a, T b) MSL_LAMBDA { return T(expr); }, site, msl_lane() & ~3u, 4); \
    }
#define MSL_LAMBDA __attribute__((no_sanitize("thread"), no_sanitize_coverage))
MSL_REDUCE(sum, a + b)
MSL_REDUCE(product, a* b) MSL_REDUCE(min, min(a, b)) MSL_REDUCE(max, max(a, b)) MSL_REDUCE(and, a& b)
    MSL_REDUCE(or, a | b) MSL_REDUCE(xor, a ^ b)
#undef MSL_REDUCE
#define MSL_PREFIX(name, expr, neutral)                                               \
    template <typename T>                                                             \
    METAL_FUNC T simd_prefix_inclusive_##name(T x, MSL_SITE) {                        \
        return msl::prefix(                                                           \
            x, [](T a, T b) MSL_LAMBDA { return T(expr); }, T(neutral), true, site);  \
    }                                                                                 \
    template <typename T>                                                             \
    METAL_FUNC T simd_prefix_exclusive_##name(T x, MSL_SITE) {                        \
        return msl::prefix(                                                           \
            x, [](T a, T b) MSL_LAMBDA { return T(expr); }, T(neutral), false, site); \
    }
        MSL_PREFIX(sum, a + b, 0) MSL_PREFIX(product, a* b, 1)
#undef MSL_PREFIX

    // Shuffles. A lane that would have to come from outside of the simdgroup is the caller's own value (or the
    // filling).
    template <typename T>
    METAL_FUNC T simd_shuffle(T x, ushort lane, MSL_SITE) {
    return msl::take(x, lane, site, msl::exchange(x, site));
}
template <typename T>
METAL_FUNC T simd_shuffle_xor(T x, ushort mask, MSL_SITE) {
    return msl::take(x, msl_lane() ^ mask, site, msl::exchange(x, site));
}
template <typename T>
METAL_FUNC T simd_broadcast(T x, ushort lane, MSL_SITE) {
    return msl::take(x, lane, site, msl::exchange(x, site));
}
template <typename T>
METAL_FUNC T simd_broadcast_first(T x, MSL_SITE) {
    auto all = msl::exchange(x, site);
    return msl::take(x, __builtin_ctz(all.mask), site, all);
}
#define MSL_SHIFT(name, inside, from)                                                \
    template <typename T>                                                            \
    METAL_FUNC T simd_shuffle_##name(T x, ushort delta, MSL_SITE) {                  \
        auto all = msl::exchange(x, site);                                           \
        uint me = msl_lane();                                                        \
        return inside ? msl::take(x, from, site, all) : x;                           \
    }                                                                                \
    template <typename T>                                                            \
    METAL_FUNC T simd_shuffle_and_fill_##name(T x, T fill, ushort delta, MSL_SITE) { \
        auto all = msl::exchange(x, site);                                           \
        uint me = msl_lane();                                                        \
        return inside ? msl::take(x, from, site, all) : fill;                        \
    }
MSL_SHIFT(up, me >= delta, me - delta)
MSL_SHIFT(down, me + delta < 32u, me + delta)
#undef MSL_SHIFT
    template <typename T>
    METAL_FUNC T simd_shuffle_rotate_up(T x, ushort delta, MSL_SITE) {
    return msl::take(x, (msl_lane() - delta) & 31u, site, msl::exchange(x, site));
}
template <typename T>
METAL_FUNC T simd_shuffle_rotate_down(T x, ushort delta, MSL_SITE) {
    return msl::take(x, (msl_lane() + delta) & 31u, site, msl::exchange(x, site));
}
template <typename T>
METAL_FUNC T quad_shuffle(T x, ushort lane, MSL_SITE) {
    return msl::take(x, (msl_lane() & ~3u) + lane, site, msl::exchange(x, site));
}
template <typename T>
METAL_FUNC T quad_shuffle_xor(T x, ushort mask, MSL_SITE) {
    return msl::take(x, msl_lane() ^ (mask & 3u), site, msl::exchange(x, site));
}
template <typename T>
METAL_FUNC T quad_broadcast(T x, ushort lane, MSL_SITE) {
    return msl::take(x, (msl_lane() & ~3u) + lane, site, msl::exchange(x, site));
}

struct simd_vote {
    typedef ulong vote_t;
    vote_t v;
    explicit constexpr simd_vote(vote_t x = 0) : v(x) {}
    explicit constexpr operator vote_t() const { return v; }
    constexpr bool all() const { return (v & 0xffffffffu) == 0xffffffffu; }
    constexpr bool any() const { return v != 0; }
};
MSL_HIDDEN inline uint msl_votes(bool x, msl::Site site, uint& mask) {
    auto all = msl::exchange<uint>(x, site);
    uint votes = 0;
    for (uint i = 0; i < 32; i++)
        if (all.has(i) && all[i]) votes |= 1u << i;
    mask = all.mask;
    return votes;
}
METAL_FUNC simd_vote simd_ballot(bool x, MSL_SITE) {
    uint mask;
    return simd_vote(msl_votes(x, site, mask));
}
METAL_FUNC simd_vote simd_active_threads_mask(MSL_SITE) {
    uint mask;
    msl_votes(true, site, mask);
    return simd_vote(mask);
}
METAL_FUNC bool simd_all(bool x, MSL_SITE) {
    uint mask, v = msl_votes(x, site, mask);
    return v == mask;
}
METAL_FUNC bool simd_any(bool x, MSL_SITE) {
    uint mask;
    return msl_votes(x, site, mask) != 0;
}
METAL_FUNC bool simd_is_first(MSL_SITE) {
    uint mask;
    msl_votes(true, site, mask);
    return msl_lane() == uint(__builtin_ctz(mask));
}
}  // namespace metal

inline void* memcpy(void* to, const void* from, size_t n) {
    msl_copy_hook(to, from, n, (ulong)__builtin_return_address(0));
    for (size_t i = 0; i < n; i++) ((volatile char*)to)[i] = ((const char*)from)[i];
    return to;
}
inline void* memset(void* to, int c, size_t n) {
    msl_copy_hook(to, nullptr, n, (ulong)__builtin_return_address(0));
    for (size_t i = 0; i < n; i++) ((volatile char*)to)[i] = (char)c;
    return to;
}
