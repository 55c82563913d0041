// Runs one dispatch: threads are fibers, threadgroups follow one another, simdgroups have 32 lanes that meet at
// barriers and simd operations. Everything happens on one OS thread, in an order the caller chooses.
#include "runtime.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifndef __x86_64__
#error "the fiber switch below is written for x86-64"
#endif

namespace rt {

Thread* current;
u32 group_id, group_position[3], group_size[3];
volatile int inside, stop_wanted;
u32 sg_meetings[MAX_THREADS / SIMD];

struct Attributes {  // the same order as msl::Ids
    u32 values[64];
};

static Thread threads[MAX_THREADS];
static Attributes attributes[MAX_THREADS];
static u64 snapshot[MAX_THREADS][8];  // what each lane handed to the simd operation that was released last
static u32 snapshot_mask[MAX_THREADS / SIMD];
static void* main_sp;
static u32 live, tg_epoch, dev_epoch, sg_tg_epoch[MAX_THREADS / SIMD], sg_dev_epoch[MAX_THREADS / SIMD];

u64 mix(u64 x) {  // splitmix64
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Saves the callee-saved registers and the stack pointer in *from, continues at `to`.
extern "C" void msl_switch(void** from, void* to);
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
msl_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

static void enter(Thread* t) {
    inside = 1;  // until the fiber has the word: an interrupted switch cannot be left
    current = t;
    msl_switch(&main_sp, t->sp);
    current = nullptr;
    if (stop_wanted) D->aborted = 1;
}

static void leave() {
    Thread* t = current;
    msl_switch(&t->sp, main_sp);
    inside = 1;  // whoever calls leave() holds an Inside
}

void abort_dispatch() {
    D->aborted = 1;
    void* nowhere;
    msl_switch(&nowhere, main_sp);
    __builtin_unreachable();
}

static void fiber_main() {
    inside = 0;
    if (stop_wanted) abort_dispatch();
    D->entry(arguments, &attributes[current->index]);
    Inside guard;
    current->state = DONE;
    leave();
    abort();
}

// Thread k's stack starts at another offset in its page: equal offsets would share cache sets.
static void prepare(Thread* t) {
    u64* top = (u64*)(stacks + (t->index + 1) * STACK - 64 * ((t->index * 7) % 61) - 64);
    *--top = 0;  // keeps the stack aligned as after a call
    *--top = (u64)fiber_main;
    for (int i = 0; i < 6; i++) *--top = 0;
    t->sp = top;
    t->state = READY;
}

Finding* report(const char* kind, u64 pc, u32 line, const char* format, ...) {
    for (u32 i = 0; i < D->finding_count; i++) {
        Finding& f = D->finding[i];
        if (f.pc == pc && f.line == line && !strcmp(f.kind, kind)) {
            f.count++;
            return nullptr;
        }
    }
    if (D->finding_count == MAX_FINDINGS) return nullptr;
    Finding& f = D->finding[D->finding_count++];
    memset(&f, 0, sizeof f);
    snprintf(f.kind, sizeof f.kind, "%s", kind);
    va_list args;
    va_start(args, format);
    vsnprintf(f.message, sizeof f.message, format, args);
    va_end(args);
    f.pc = pc;
    f.line = line;
    f.count = 1;
    memcpy(f.group, group_position, sizeof f.group);
    if (current) {
        f.has_thread = 1;
        memcpy(f.thread, current->position, sizeof f.thread);
    }
    return &f;
}

static Finding* report_at(const char* kind, Thread* t, Thread* other, const char* format, const char* detail) {
    current = t;
    Finding* f = report(kind, 0, t->site ? t->site->line : 0, format, detail);
    current = nullptr;
    if (f && other) {
        f->has_other = 1;
        f->other_line = other->state != DONE && other->site ? other->site->line : 0;
        memcpy(f->other_thread, other->position, sizeof f->other_thread);
        memcpy(f->other_group, group_position, sizeof f->other_group);
    }
    return f;
}

void restamp() {
    for (u32 i = 0; i < live; i++) {
        Stamp base = (Stamp)(group_id + 1) << 40 | i;
        threads[i].tg_stamp =
            base | (Stamp)(tg_epoch & 0xffff) << 24 | (Stamp)(sg_tg_epoch[i / SIMD] & 0x3fff) << 10;
        threads[i].dev_stamp =
            base | (Stamp)(dev_epoch & 0xffff) << 24 | (Stamp)(sg_dev_epoch[i / SIMD] & 0x3fff) << 10;
    }
}

static bool same_site(const Thread& a, const Thread& b) {
    return a.state == b.state && a.site->line == b.site->line && a.site->column == b.site->column && a.op == b.op;
}

static bool earlier(const Thread& a, const Thread& b) {
    return a.site->line != b.site->line ? a.site->line < b.site->line : a.site->column < b.site->column;
}

// The order in which n things are visited.
static void arrange(u16* order, u32 n, u64 salt) {
    for (u32 i = 0; i < n; i++) order[i] = D->order == 1 ? n - 1 - i : i;
    if (D->order == 2)
        for (u32 i = n; i-- > 1;) {
            u32 j = mix(D->seed ^ mix(salt * 1315423911u + i)) % (i + 1);
            u16 x = order[i];
            order[i] = order[j];
            order[j] = x;
        }
}

static bool matrix_op(u8 op) { return op == 2; }

// Lanes of simdgroup s run until each is done or waits for the whole threadgroup.
static void run_simdgroup(u32 s, u64 salt) {
    u32 first = s * SIMD, n = live - first < (u32)SIMD ? live - first : SIMD;
    for (u64 turn = 0; !D->aborted; turn++) {
        u16 order[SIMD];
        arrange(order, n, salt + 977 * turn);
        for (u32 i = 0; i < n; i++)
            if (threads[first + order[i]].state == READY) {
                enter(&threads[first + order[i]]);
                if (D->aborted) return;
            }
        Thread* chosen =
            nullptr;  // lanes that wait at different places reconverge: the first in the text goes first
        for (u32 i = 0; i < n; i++) {
            Thread& t = threads[first + i];
            if ((t.state == SIMD_OP || t.state == SG_BARRIER) && (!chosen || earlier(t, *chosen))) chosen = &t;
        }
        if (!chosen) return;
        u32 mask = 0, done = 0, flags = 0xff;
        Thread* elsewhere = nullptr;
        for (u32 i = 0; i < n; i++) {
            Thread& t = threads[first + i];
            if (t.state == DONE) done++;
            else if (same_site(t, *chosen)) mask |= 1u << i, flags &= t.flags;
            else elsewhere = &t;
        }
        if (chosen->state == SG_BARRIER) {
            if (elsewhere || done)
                report_at("barrier-divergence", chosen, elsewhere, "simdgroup_barrier: %s",
                          elsewhere ? "other lanes of the simdgroup are elsewhere" : "other lanes have returned");
            if (flags & 2) sg_tg_epoch[s]++;
            if (flags & 1) sg_dev_epoch[s]++;
            sg_meetings[s]++;
            D->barriers++;
            restamp();
        } else {
            bool matrix = matrix_op(chosen->op);
            if (elsewhere || done || (matrix && n < (u32)SIMD))
                report_at(matrix      ? "simdgroup-matrix-partial"
                          : elsewhere ? "simd-op-divergent"
                                      : "simd-op-exited-lanes",
                          chosen, elsewhere, "%s",
                          elsewhere ? "some lanes of the simdgroup do not take part, they are elsewhere"
                          : done    ? "some lanes of the simdgroup have returned"
                                    : "the simdgroup has fewer than 32 lanes");
            for (u32 i = 0; i < n; i++)
                if (mask >> i & 1) memcpy(snapshot[first + i], threads[first + i].value, threads[first + i].size);
            snapshot_mask[s] = mask;
            sg_meetings[s]++;
            D->simd_ops++;
        }
        for (u32 i = 0; i < n; i++)
            if (mask >> i & 1) threads[first + i].state = READY;
    }
}

// All threads are done or wait at a threadgroup barrier: may they go on?
static bool release_barrier() {
    Thread *waiting = nullptr, *other = nullptr, *gone = nullptr;
    u32 flags = 0xff;
    for (u32 i = 0; i < live; i++) {
        Thread& t = threads[i];
        if (t.state == DONE) gone = &t;
        else if (!waiting) waiting = &t, flags = t.flags;
        else if (!same_site(t, *waiting)) other = &t;
        else flags &= t.flags;
    }
    if (!waiting) return false;
    if (other || gone) {
        report_at("barrier-divergence", waiting, other ? other : gone, "threadgroup_barrier: %s",
                  other ? "another thread waits at another barrier" : "another thread has returned");
        D->aborted = 1;
        return false;
    }
    if (flags & 2) tg_epoch++;
    if (flags & 1) dev_epoch++;
    D->barriers++;
    restamp();
    for (u32 i = 0; i < live; i++) threads[i].state = READY;
    return true;
}

static void run_group() {
    u8* arena = (u8*)region[0].start;
    if (tg_used) memset(arena, 0xff, tg_used);  // NaN; cells of earlier groups are told apart by their stamps
    tg_epoch = dev_epoch = 0;
    memset(sg_tg_epoch, 0, sizeof sg_tg_epoch);
    memset(sg_dev_epoch, 0, sizeof sg_dev_epoch);
    memset(sg_meetings, 0, sizeof sg_meetings);
    for (u32 i = 0; i < live; i++) prepare(&threads[i]);
    restamp();
    u32 groups = (live + SIMD - 1) / SIMD;
    do {
        u16 order[MAX_THREADS / SIMD];
        arrange(order, groups, group_id * 31 + tg_epoch);
        for (u32 i = 0; i < groups && !D->aborted; i++)
            run_simdgroup(order[i], group_id * 7919ull + order[i] * 104729ull + tg_epoch * 31ull);
    } while (!D->aborted && release_barrier());
}

static void set_attributes(const u32* groups) {
    u32 nominal[3], n = 0;
    for (int d = 0; d < 3; d++) nominal[d] = D->threadgroup[d];
    live = group_size[0] * group_size[1] * group_size[2];
    u32 all = nominal[0] * nominal[1] * nominal[2];
    for (u32 z = 0; z < group_size[2]; z++)
        for (u32 y = 0; y < group_size[1]; y++)
            for (u32 x = 0; x < group_size[0]; x++, n++) {
                u32 p[3] = {x, y, z};
                threads[n].index = n;
                memcpy(threads[n].position, p, sizeof p);
                u32* v = attributes[n].values;
                auto put3 = [&](const u32* a) {
                    for (int d = 0; d < 3; d++) *v++ = a[d];
                    *v++ = 0;
                };
                u32 zero[3] = {0, 0, 0}, in_grid[3];
                for (int d = 0; d < 3; d++) in_grid[d] = group_position[d] * nominal[d] + p[d];
                put3(nominal);
                put3(zero);
                put3(D->grid);
                put3(in_grid);
                put3(p);
                put3(group_position);
                put3(groups);
                put3(D->grid);
                put3(group_size);
                *v++ = (all + 3) / 4;             // dispatch_quadgroups_per_threadgroup
                *v++ = (all + SIMD - 1) / SIMD;   // dispatch_simdgroups_per_threadgroup
                *v++ = n / 4;                     // quadgroup_index_in_threadgroup
                *v++ = (live + 3) / 4;            // quadgroups_per_threadgroup
                *v++ = n / SIMD;                  // simdgroup_index_in_threadgroup
                *v++ = (live + SIMD - 1) / SIMD;  // simdgroups_per_threadgroup
                *v++ = SIMD;                      // thread_execution_width
                *v++ = n % 4;                     // thread_index_in_quadgroup
                *v++ = n % SIMD;                  // thread_index_in_simdgroup
                *v++ = n;                         // thread_index_in_threadgroup
                *v++ = SIMD;                      // threads_per_simdgroup
            }
}

static u32 gcd(u32 a, u32 b) { return b ? gcd(b, a % b) : a; }

void run_groups() {
    u32 groups[3];
    for (int d = 0; d < 3; d++) groups[d] = (D->grid[d] + D->threadgroup[d] - 1) / D->threadgroup[d];
    u32 total = groups[0] * groups[1] * groups[2];
    u32 stride =
        1 + mix(D->seed) % total;  // random order: a stride that has no factor in common with their number
    while (gcd(stride, total) != 1) stride = stride % total + 1;
    for (u32 i = 0; i < total && !D->aborted; i++) {
        u32 g = D->order == 1 ? total - 1 - i : i;
        if (D->order == 2) g = (u32)(((u64)i * stride + mix(D->seed + 1)) % total);
        group_id = g;
        group_position[0] = g % groups[0];
        group_position[1] = g / groups[0] % groups[1];
        group_position[2] = g / groups[0] / groups[1];
        for (int d = 0; d < 3; d++) {
            u32 rest = D->grid[d] - group_position[d] * D->threadgroup[d];
            group_size[d] = rest < D->threadgroup[d] ? rest : D->threadgroup[d];
        }
        set_attributes(groups);
        run_group();
    }
}

}  // namespace rt

using namespace rt;

extern "C" {  // called by the shim
void msl_barrier(u8 flags, const Site* site, bool simdgroup) {
    Inside guard;
    current->state = simdgroup ? SG_BARRIER : TG_BARRIER;
    current->flags = flags;
    current->op = 0;
    current->site = site;
    leave();
}

// Hands in `size` bytes, waits for the other lanes, returns what all of them handed in (64 bytes a lane) and who
// they are.
const void* msl_exchange(const void* value, u32 size, u32 op, const Site* site, u32* mask, u32 flops) {
    Inside guard;
    Thread* t = current;
    t->state = SIMD_OP;
    t->value = value;
    t->size = size;
    t->op = op;
    t->site = site;
    leave();
    (matrix_op(op) ? D->matrix_flops : D->simd_flops) += flops;
    *mask = snapshot_mask[t->index / SIMD];
    return snapshot[t->index / SIMD * SIMD];
}

u32 msl_lane() { return current->index % SIMD; }

void msl_bad_lane(const Site* site, u32 lane) {
    Inside guard;
    report("shuffle-inactive-lane", 0, site->line, "lane %u takes no part in this operation", lane);
}

}  // extern "C"
