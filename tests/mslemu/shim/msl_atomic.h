// Atomics, memory order relaxed only. Two atomic accesses never race with one another; an atomic and a plain one
// do.
#pragma once
extern "C" void msl_atomic_hook(const volatile void* p, uint size, ulong pc);

namespace metal {
enum memory_order { memory_order_relaxed };
template <typename T>
struct atomic {
    T value;
    atomic() = default;
    atomic(const atomic&) = delete;
    atomic& operator=(const atomic&) = delete;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

#define MSL_ATOMIC_CHECK msl_atomic_hook(p, sizeof(T), (ulong)__builtin_return_address(0))
template <typename T>
MSL_HIDDEN T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
    MSL_ATOMIC_CHECK;
    return p->value;
}
template <typename T, typename U>
MSL_HIDDEN void atomic_store_explicit(volatile atomic<T>* p, U x, memory_order) {
    MSL_ATOMIC_CHECK;
    p->value = T(x);
}
template <typename T, typename U>
MSL_HIDDEN T atomic_exchange_explicit(volatile atomic<T>* p, U x, memory_order) {
    MSL_ATOMIC_CHECK;
    T old = p->value;
    p->value = T(x);
    return old;
}
template <typename T, typename U>
MSL_HIDDEN bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, thread T* expected, U x, memory_order,
                                                      memory_order) {
    MSL_ATOMIC_CHECK;
    T old = p->value;
    if (old == *expected) {
        p->value = T(x);
        return true;
    }
    *expected = old;
    return false;
}
#define MSL_FETCH(name, expr)                                                               \
    template <typename T, typename U>                                                       \
    MSL_HIDDEN T atomic_fetch_##name##_explicit(volatile atomic<T>* p, U y, memory_order) { \
        MSL_ATOMIC_CHECK;                                                                   \
        T a = p->value, b = T(y);                                                           \
        p->value = T(expr);                                                                 \
        return a;                                                                           \
    }
MSL_FETCH(add, a + b)
MSL_FETCH(sub, a - b) MSL_FETCH(and, a& b) MSL_FETCH(or, a | b) MSL_FETCH(xor, a ^ b) MSL_FETCH(min, b < a ? b : a)
    MSL_FETCH(max, a < b ? b : a)
#undef MSL_FETCH
#undef MSL_ATOMIC_CHECK
}  // namespace metal
