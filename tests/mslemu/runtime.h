// What the emulator's runtime (dispatch.cpp, scheduler.cpp, shadow.cpp) shares: the dispatch, its buffers, the
// threads, the findings.
#pragma once
#include <cstddef>
#include <cstdint>

namespace rt {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

constexpr u64 SLOT = 1ull << 36;    // every buffer has 64 GiB of address space of its own,
constexpr u64 MARGIN = 1ull << 35;  // and starts in its middle: a 32-bit index that went wrong still has a name
constexpr int SLOTS = 64;           // slot 0 is threadgroup memory
constexpr int MAX_THREADS = 1024;   // of one threadgroup
constexpr int SIMD = 32;
constexpr size_t STACK = 256 * 1024;
constexpr size_t TG_LIMIT = 32 * 1024;  // bytes of threadgroup memory
constexpr size_t TG_GAP = 64;           // red zone around a threadgroup variable
constexpr size_t MESSAGE = 256;
constexpr int MAX_FINDINGS = 64;

// One access, packed: atomic(1) group(23) epoch(16) simdgroup epoch(14) thread(10). 0 = never.
using Stamp = u64;
constexpr Stamp INITIAL = 0x7fffffull << 40;  // "written before the dispatch": conflicts with nothing
inline u32 stamp_group(Stamp s) { return (s >> 40) & 0x7fffff; }
inline u32 stamp_epoch(Stamp s) { return (s >> 24) & 0xffff; }
inline u32 stamp_sg_epoch(Stamp s) { return (s >> 10) & 0x3fff; }
inline u32 stamp_thread(Stamp s) { return s & 0x3ff; }
inline bool stamp_atomic(Stamp s) { return s >> 63; }

struct Cell {  // shadow of one granule of memory that can be written
    Stamp write, read1, read2;
    u32 write_pc, read_pc;
};

struct Buffer {  // set by the caller, in the order of the kernel's parameters
    u64 bytes;
    u32 granule;  // bytes per shadow cell: the element size
    u8 writable, initialised, pad[2];
    const void* data;   // copied in
    void* result;       // copied out, or null
    u64 read, written;  // counters, bytes
    u64 unwritten;      // elements of an output that no thread wrote
    u64 first_unwritten;
};

struct Finding {
    char kind[32];
    char message[MESSAGE];
    u64 pc, other_pc;  // offsets in the kernel's image, 0 = none
    u32 line;          // line in the kernel text where known without debug information, else 0
    u32 thread[3], group[3], other_thread[3], other_group[3];
    u32 has_thread, has_other, other_line, pad;
    u64 count;
};

struct Dispatch {
    void (*entry)(void**, const void*);
    u64 image, image_end;
    u32 grid[3], threadgroup[3];
    u32 buffers, order;  // order: 0 forward, 1 reverse, 2 random
    u64 seed;
    double watchdog;  // seconds of CPU time
    u32 noise;        // 1: perturb the functions that Metal does not round correctly
    u32 finding_count, aborted,
        finer;  // finer: an access smaller than a granule was seen, run again with granule 1
    u64 tg_read, tg_written, tg_bytes, matrix_flops, simd_flops, barriers, simd_ops;
    Buffer* buffer;
    Finding* finding;  // MAX_FINDINGS
    u64* hits;         // by offset in the image, or null: how often each basic block ran
};

struct Ids;  // the thread attributes, laid out as in shim/msl_simd.h

enum State : u8 { READY, TG_BARRIER, SG_BARRIER, SIMD_OP, DONE };

struct Site {  // laid out as std::source_location::__impl of libstdc++
    const char* file;
    const char* function;
    u32 line, column;
};

struct Thread {
    void* sp;
    State state;
    u8 flags;  // of the barrier it waits at
    u8 op;     // of the simd operation it waits at
    u8 size;   // bytes it hands in
    const Site* site;
    const void* value;
    u32 index;  // in the threadgroup
    u32 position[3];
    Stamp tg_stamp, dev_stamp;
};

struct Region {
    u64 start, bytes;
    u32 granule;
    int buffer;  // -1: threadgroup memory
    Cell* cells;
};

extern Dispatch* D;
extern Thread* current;
extern u32 group_id, group_position[3], group_size[3];
extern void** arguments;      // of the kernel function: addresses of the buffers
extern u64 tg_used;           // bytes of the arena of threadgroup memory, red zones included
extern u64 space;             // base of the slots
extern Region region[SLOTS];  // regions of the buffers by slot; slot 0 is cut into tg_region
extern Region tg_region[64];
extern int tg_regions;
extern u64 stacks, stacks_end;
extern volatile int inside, stop_wanted;
extern u32 sg_meetings[MAX_THREADS / SIMD];  // how often the lanes of each simdgroup have met

Finding* report(const char* kind, u64 pc, u32 line, const char* format, ...);
[[noreturn]] void abort_dispatch();
void restamp();
void run_groups();
u64 mix(u64 x);

struct Inside {  // while one is alive the watchdog only leaves a note
    Inside() { inside = inside + 1; }
    ~Inside() {
        inside = inside - 1;
        if (!inside && stop_wanted && current) abort_dispatch();
    }
};

}  // namespace rt
