// Memory of a dispatch, its watchdog, and the call that runs it.
#include "runtime.h"

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

namespace rt {

Dispatch* D;
void** arguments;
u64 space, stacks, stacks_end, tg_used;
Region region[SLOTS], tg_region[64];
int tg_regions;

static u64 tg_bytes;  // of threadgroup memory, without the red zones
static bool fine;     // shadow cells of one byte

// The watchdog: a timer on this thread's CPU time. A kernel that hangs is left where it is.
static void on_timer(int, siginfo_t*, void* context) {
    stop_wanted = 1;
    if (!current) return;
    u64 pc = ((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
    if (inside) return;
    inside = inside + 1;
    report("hang", pc >= D->image && pc < D->image_end ? pc - D->image + 1 : 0, 0,
           "no end after %.1f s of CPU time", D->watchdog);
    inside = inside - 1;
    abort_dispatch();
}

// A trap in the kernel: a stack that overflows, or, without checks, an address that belongs to no buffer.
const int TRAPS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static struct sigaction before[4];
static stack_t stack_before;

static void on_trap(int number, siginfo_t*, void* context) {
    if (!current || inside) {  // not the kernel's: whoever handled it before shall have it
        for (int i = 0; i < 4; i++) sigaction(TRAPS[i], &before[i], nullptr);
        return;
    }
    u64 pc = ((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
    inside = inside + 1;
    report("crash", pc >= D->image && pc < D->image_end ? pc - D->image + 1 : 0, 0, "%s",
           number == SIGFPE   ? "integer division by zero"
           : number == SIGILL ? "code that cannot be reached, or an instruction this processor lacks"
                              : "a stack overflow, or an address that belongs to no buffer");
    abort_dispatch();
}

static void catch_traps() {
    static char stack[64 * 1024];
    stack_t alternative{};
    alternative.ss_sp = stack;
    alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, &stack_before);
    struct sigaction action {};
    action.sa_sigaction = on_trap;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    for (int i = 0; i < 4; i++) sigaction(TRAPS[i], &action, &before[i]);
}

static void leave_traps() {
    for (int i = 0; i < 4; i++) sigaction(TRAPS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
}

static bool map_memory() {
    if (!space) {
        void* p = mmap(nullptr, SLOT * SLOTS, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return false;
        space = ((u64)p + 4095) & ~4095ull;
        p = mmap(nullptr, STACK * MAX_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
        if (p == MAP_FAILED) return false;
        stacks = (u64)p;
        stacks_end = stacks + STACK * MAX_THREADS;
        for (int i = 0; i < MAX_THREADS; i++) mprotect((void*)(stacks + i * STACK), 4096, PROT_NONE);  // guards
    }
    return true;
}

static u64 pages(u64 bytes) { return (bytes + 4095 + 64) & ~4095ull; }

static bool map_region(int slot, u64 bytes, u32 granule, int buffer, bool shadow) {
    Region& r = region[slot];
    r.start = space + slot * SLOT + MARGIN;
    r.bytes = bytes;
    r.granule = granule;
    r.buffer = buffer;
    r.cells = nullptr;
    if (mprotect((void*)r.start, pages(bytes), PROT_READ | PROT_WRITE)) return false;
    if (shadow) r.cells = (Cell*)calloc(bytes / granule + 8, sizeof(Cell));
    return !shadow || r.cells;
}

static void unmap_regions() {
    for (int s = 0; s < SLOTS; s++)
        if (region[s].start) {
            madvise((void*)region[s].start, pages(region[s].bytes), MADV_DONTNEED);
            mprotect((void*)region[s].start, pages(region[s].bytes), PROT_NONE);
            free(region[s].cells);
            region[s] = Region{};
        }
    for (int i = 0; i < tg_regions; i++) free(tg_region[i].cells);
    tg_regions = 0;
}

}  // namespace rt

using namespace rt;

extern "C" {

// Memory of the threadgroup variable that is the number-th in the text; all threads and threadgroups share the
// address.
void* msl_tg_variable(u32 number, u64 size, u64 align, u32 granule) {
    Inside guard;
    if (number < (u32)tg_regions && tg_region[number].start) return (void*)tg_region[number].start;
    if (number >= 64) abort_dispatch();
    align = align < 16 ? 16 : align;
    tg_used = (tg_used + TG_GAP + align - 1) / align * align;
    tg_bytes = (tg_bytes + align - 1) / align * align + size;
    if (tg_bytes > TG_LIMIT) {
        report("threadgroup-memory-limit", (u64)__builtin_return_address(0) - D->image, 0,
               "%llu bytes of threadgroup memory, the limit is 32768", (unsigned long long)tg_bytes);
        abort_dispatch();
    }
    Region& r = tg_region[number];
    r.start = region[0].start + tg_used;
    r.bytes = size;
    r.granule = fine ? 1 : granule;
    r.buffer = -1;
    r.cells = (Cell*)calloc(size / r.granule + 8, sizeof(Cell));
    if (number >= (u32)tg_regions) tg_regions = number + 1;
    memset((void*)r.start, 0xff, size);
    tg_used += size;
    D->tg_bytes = tg_bytes;
    return (void*)r.start;
}

u64 msl_noise_bits(u64 salt) { return D->noise ? mix(D->seed * 0x2545f4914f6cdd1dull + salt) : 0; }
int msl_noise_on() { return D->noise; }

// Runs a dispatch. 0, or 1 if the memory cannot be had; what went wrong in the kernel is in its findings.
int msl_run(Dispatch* dispatch) {
    D = dispatch;
    current = nullptr;
    inside = stop_wanted = 0;
    tg_used = tg_bytes = 0;
    fine = D->finer;
    D->finer = 0;
    if (!map_memory() || !map_region(0, 4 * TG_LIMIT, 1, -1, false)) return 1;
    void* pointers[SLOTS];
    for (u32 i = 0; i < D->buffers; i++) {
        Buffer& b = D->buffer[i];
        if (!map_region(i + 1, b.bytes, fine ? 1 : b.granule, i, b.writable)) return 1;
        Region& r = region[i + 1];
        if (b.data) memcpy((void*)r.start, b.data, b.bytes);
        else memset((void*)r.start, 0xff, b.bytes);
        if (b.writable && b.initialised)
            for (u64 k = 0; k < (b.bytes + r.granule - 1) / r.granule; k++) r.cells[k].write = INITIAL;
        pointers[i] = (void*)r.start;
    }
    arguments = pointers;
    struct sigaction action {};
    action.sa_sigaction = on_timer;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
    int signal_number = SIGRTMIN + 5;
    sigaction(signal_number, &action, nullptr);  // stays: a last signal may still be under way
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = signal_number;
    event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
    timer_t timer;
    if (timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer)) return 1;
    itimerspec when{};
    when.it_value.tv_sec = (time_t)D->watchdog;
    when.it_value.tv_nsec = (long)((D->watchdog - (time_t)D->watchdog) * 1e9) + 1;
    when.it_interval.tv_nsec = 50000000;  // again, in case the kernel was inside the runtime the first time
    timer_settime(timer, 0, &when, nullptr);
    catch_traps();
    run_groups();
    leave_traps();
    timer_delete(timer);
    current = nullptr;
    if (stop_wanted) {
        bool told = false;
        for (u32 i = 0; i < D->finding_count; i++) told |= !strcmp(D->finding[i].kind, "hang");
        if (!told) report("hang", 0, 0, "no end after %.1f s of CPU time", D->watchdog);
    }
    for (u32 i = 0; i < D->buffers; i++) {
        Buffer& b = D->buffer[i];
        Region& r = region[i + 1];
        if (b.result) memcpy(b.result, (void*)r.start, b.bytes);
        b.unwritten = 0;
        if (b.writable && !b.initialised)
            for (u64 k = (b.bytes + r.granule - 1) / r.granule; k-- > 0;)
                if (!r.cells[k].write) b.unwritten++, b.first_unwritten = k * r.granule;
    }
    unmap_regions();
    return 0;
}

}  // extern "C"
