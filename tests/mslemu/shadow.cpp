// The hooks that the compiler's -fsanitize=thread and -fsanitize=... calls go to. They see each load and store of
// the kernel before it is made: whether it may be made, whether what it reads was written, who else touched it.
#include "runtime.h"

#include <cstdio>
#include <cstring>

namespace rt {

static bool conflict(Stamp a, Stamp now) {
    if (!a || (a & ~(1ull << 63)) == INITIAL) return false;
    if (stamp_atomic(a) && stamp_atomic(now)) return false;
    if (stamp_group(a) != stamp_group(now)) return true;  // only device memory outlives a threadgroup
    if (stamp_thread(a) == stamp_thread(now) || stamp_epoch(a) != stamp_epoch(now)) return false;
    return stamp_thread(a) / SIMD != stamp_thread(now) / SIMD || stamp_sg_epoch(a) == stamp_sg_epoch(now);
}

// Of two readers that are kept, one that the new one makes superfluous: itself, or one before the last barrier.
static bool outdated(Stamp old, Stamp now) {
    return stamp_group(old) == stamp_group(now) &&
           (stamp_thread(old) == stamp_thread(now) || stamp_epoch(old) != stamp_epoch(now));
}

static bool near(Stamp a, Stamp b) {
    return stamp_group(a) == stamp_group(b) && stamp_thread(a) / SIMD == stamp_thread(b) / SIMD;
}

static void where(u32 group, u32 thread, u32* group_out, u32* thread_out) {
    u32 groups[3];
    for (int d = 0; d < 3; d++) groups[d] = (D->grid[d] + D->threadgroup[d] - 1) / D->threadgroup[d];
    group_out[0] = group % groups[0];
    group_out[1] = group / groups[0] % groups[1];
    group_out[2] = group / groups[0] / groups[1];
    u32 size[2];
    for (int d = 0; d < 2; d++) {
        u32 rest = D->grid[d] - group_out[d] * D->threadgroup[d];
        size[d] = rest < D->threadgroup[d] ? rest : D->threadgroup[d];
    }
    thread_out[0] = thread % size[0];
    thread_out[1] = thread / size[0] % size[1];
    thread_out[2] = thread / size[0] / size[1];
}

static void report_race(const Region& r, u64 offset, Stamp other, u32 other_pc, Stamp now, u64 pc,
                        const char* what) {
    const char* kind = r.buffer >= 0 ? "race-device" : "race-threadgroup";
    if (stamp_group(other) == stamp_group(now) && stamp_thread(other) / SIMD == stamp_thread(now) / SIMD)
        kind = r.buffer >= 0 ? "race-device" : "race-simdgroup";
    Finding* f =
        report(kind, pc - D->image, 0, r.buffer >= 0 ? "%s, parameter %d byte %llu" : "%s, variable %d byte %llu",
               what, r.buffer >= 0 ? r.buffer : (int)(&r - tg_region), (unsigned long long)offset);
    if (!f) return;
    f->has_other = 1;
    f->other_pc = other_pc;
    where(stamp_group(other) - 1, stamp_thread(other), f->other_group, f->other_thread);
}

[[noreturn]] static void out_of_bounds(const char* kind, u64 pc, bool write, u32 size, const char* of, int number,
                                       long long offset, u64 bytes) {
    report(kind, pc - D->image, 0, "%s of %u bytes at byte %lld of %s %d, which has %llu bytes",
           write ? "write" : "read", size, offset, of, number, (unsigned long long)bytes);
    abort_dispatch();
}

static void misaligned(u64 addr, u32 size, u64 pc) {
    report("misaligned", pc - D->image, 0, "access of %u bytes at an address that is no multiple of it (mod %llu)",
           size, (unsigned long long)(addr % size));
}

enum Mode { READ, WRITE, ATOMIC };

static void touch(const Region& r, u64 addr, u32 size, Mode mode, u64 pc) {
    u64 offset = addr - r.start;
    bool tg = r.buffer < 0;
    Stamp now = tg ? current->tg_stamp : current->dev_stamp;
    u32 here = (u32)(pc - D->image);
    if (mode == ATOMIC) now |= 1ull << 63;
    // Lanes that meet in a simd operation have made their earlier reads: a later write cannot overtake those. It
    // says nothing about earlier writes, which only a barrier makes visible.
    Stamp reading = (now & ~(0x3fffull << 10)) | (Stamp)(sg_meetings[current->index / SIMD] & 0x3fff) << 10;
    if (size < r.granule || offset % r.granule) {  // no exact answer with these cells: once more with finer ones
        D->finer = 1;
        abort_dispatch();
    }
    for (u64 k = offset / r.granule, end = (offset + size + r.granule - 1) / r.granule; k < end; k++) {
        Cell& c = r.cells[k];
        if (tg && stamp_group(c.write ? c.write : c.read1) != stamp_group(now))
            c = Cell{};  // left by an earlier threadgroup
        if (mode != WRITE && !c.write)
            report(tg ? "uninit-threadgroup-read" : "uninit-device-read", here, 0,
                   tg ? "variable %d byte %llu was not written before"
                      : "parameter %d byte %llu was not written before",
                   tg ? (int)(&r - tg_region) : r.buffer, (unsigned long long)offset);
        if (conflict(c.write, now))
            report_race(r, offset, c.write, c.write_pc, now, pc,
                        mode == READ ? "read after write" : "write after write");
        if (mode == READ) {
            if (!c.read1 || outdated(c.read1, reading)) {
                c.read1 = reading;
                c.read_pc = here;
            } else if (!c.read2 || outdated(c.read2, reading) || near(c.read1, c.read2)) {
                c.read2 = reading;
            }
        } else {
            Stamp reader = conflict(c.read1, reading) ? c.read1 : conflict(c.read2, reading) ? c.read2 : 0;
            if (reader) report_race(r, offset, reader, c.read_pc, now, pc, "write after read");
            c.write = now;
            c.write_pc = here;
        }
    }
}

static void access(u64 addr, u32 size, Mode mode, u64 pc) {
    if (!current || addr - stacks < stacks_end - stacks) {
        if (!current) return;
        if ((addr - stacks) / STACK == current->index) return;  // thread memory: its own affair
        Inside guard;
        report("wild-access", pc - D->image, 0, "%s of another thread's private memory",
               mode == READ ? "read" : "write");
        abort_dispatch();
    }
    Inside guard;
    u64 slot = (addr - space) / SLOT;
    if (addr < space || slot >= (u64)SLOTS) {
        if (addr >= D->image && addr < D->image_end) {
            if (mode == READ) return;
            report("write-to-constant", pc - D->image, 0, "write to program memory");
            abort_dispatch();
        }
        report("wild-access", pc - D->image, 0, "%s of %u bytes at %s", mode == READ ? "read" : "write", size,
               addr < 4096 ? "a null pointer" : "an address that belongs to no buffer");
        abort_dispatch();
    }
    if (slot == 0) {
        int nearest = -1;
        long long best = 1ll << 40;
        for (int i = 0; i < tg_regions; i++) {
            Region& r = tg_region[i];
            long long offset = (long long)(addr - r.start);
            if (offset >= 0 && (u64)offset + size <= r.bytes) {
                (mode == READ ? D->tg_read : D->tg_written) += size;
                if (size <= 16 && addr & (size - 1)) misaligned(addr, size, pc);
                return touch(r, addr, size, mode, pc);
            }
            long long distance = offset < 0 ? -offset : offset - (long long)r.bytes + 1;
            if (distance < best) best = distance, nearest = i;
        }
        out_of_bounds("oob-threadgroup", pc, mode != READ, size, "variable", nearest,
                      nearest < 0 ? 0 : (long long)(addr - tg_region[nearest].start),
                      nearest < 0 ? 0 : tg_region[nearest].bytes);
    }
    Region& r = region[slot];
    if (!r.start) {
        report("wild-access", pc - D->image, 0, "an address that belongs to no buffer");
        abort_dispatch();
    }
    u64 offset = addr - r.start;
    if (offset >= r.bytes || offset + size > r.bytes)
        out_of_bounds("oob-device", pc, mode != READ, size, "parameter", r.buffer, (long long)offset, r.bytes);
    Buffer& b = D->buffer[r.buffer];
    if (size <= 16 && addr & (size - 1)) misaligned(addr, size, pc);
    if (mode != WRITE) b.read += size;
    if (mode != READ) b.written += size;
    if (!b.writable) {
        if (mode != READ) report("write-to-input", pc - D->image, 0, "parameter %d is an input", r.buffer);
        return;
    }
    touch(r, addr, size, mode, pc);
}

static void undefined(u64 pc, u32, const char* what) {
    if (!current) return;
    Inside guard;
    report("undefined-behaviour", pc - D->image, 0, "%s", what);
}

}  // namespace rt

using namespace rt;
#define PC ((u64)__builtin_return_address(0))

extern "C" {

void __sanitizer_cov_trace_pc() {
    u64 at = PC - D->image;
    if (D->hits && at < D->image_end - D->image) D->hits[at]++;
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define SIZE(n)                                                               \
    void __tsan_read##n(void* p) { access((u64)p, n, READ, PC); }             \
    void __tsan_write##n(void* p) { access((u64)p, n, WRITE, PC); }           \
    void __tsan_unaligned_read##n(void* p) { access((u64)p, n, READ, PC); }   \
    void __tsan_unaligned_write##n(void* p) { access((u64)p, n, WRITE, PC); } \
    void __tsan_volatile_read##n(void* p) { access((u64)p, n, READ, PC); }    \
    void __tsan_volatile_write##n(void* p) { access((u64)p, n, WRITE, PC); }
SIZE(1)
SIZE(2) SIZE(4) SIZE(8) SIZE(16)

    static void range(u64 p, u64 n, Mode mode, u64 pc) {  // struct copies: in pieces that no granule can split
    u64 step = p % 4 == 0 && n % 4 == 0 ? 4 : p % 2 == 0 && n % 2 == 0 ? 2 : 1;
    for (u64 i = 0; i < n; i += step) access(p + i, (u32)step, mode, pc);
}
void __tsan_read_range(void* p, u64 n) { range((u64)p, n, READ, PC); }
void __tsan_write_range(void* p, u64 n) { range((u64)p, n, WRITE, PC); }
void msl_copy_hook(const void* to, const void* from, u64 n, u64 pc) {
    if (from) range((u64)from, n, READ, pc);
    range((u64)to, n, WRITE, pc);
}
void msl_atomic_hook(void* p, u32 size, u64 pc) { access((u64)p, size, ATOMIC, pc); }

void __ubsan_handle_type_mismatch_v1(void* data, u64 addr) {
    struct Data {
        const char* file;
        u32 line, column;
        void* type;
        u8 log_align, check;
    }* d = (Data*)data;
    if (!current) return;
    if (!addr) return undefined(PC, 0, "null pointer");
    if (addr & ((1ull << d->log_align) - 1)) {
        Inside guard;
        misaligned(addr, 1u << d->log_align, PC);
    }
}
void __ubsan_handle_out_of_bounds(void*, u64 index) {
    if (!current) return;
    Inside guard;
    report("oob-array", PC - D->image, 0, "index %lld is outside of the array", (long long)index);
}
#define UB(name, what) \
    void __ubsan_handle_##name(void*, u64, u64) { undefined(PC, 0, what); }
UB(shift_out_of_bounds, "shift by a negative amount or by the width of the type or more")
UB(float_cast_overflow, "a float outside of the range of the integer type it is cast to")
UB(add_overflow, "signed overflow in an addition")
UB(sub_overflow, "signed overflow in a subtraction")
UB(mul_overflow, "signed overflow in a multiplication")
UB(negate_overflow, "signed overflow in a negation")
UB(missing_return, "end of a function that should return a value")
UB(load_invalid_value, "a bool that is neither 0 nor 1")
void __ubsan_handle_divrem_overflow(void*, u64, u64) {  // the processor would trap
    undefined(PC, 0, "integer division by zero or overflow");
    if (current) abort_dispatch();
}
void __ubsan_handle_builtin_unreachable(void*) { undefined(PC, 0, "code that cannot be reached"); }
}
