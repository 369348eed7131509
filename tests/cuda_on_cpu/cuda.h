// CUDA on a CPU, for tests: a kernel's file compiled by g++ with ON_CPU includes this instead of its PTX.
//
// The threads of a block are fibers of one OS thread. Each runs until it waits (__syncthreads, a warp collective) or
// ends; a collective is done for the whole warp once its 32 lanes have arrived. Blocks, warps and lanes run in an order
// drawn from a seed, and copy16 copies at once or only at copies_done, as drawn, so that a missing barrier shows.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <utility>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define SHARED(type, name) type *name = reinterpret_cast<type *>(emulator::shared)

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint3 { unsigned x, y, z; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define MIN_AND_MAX(result, a, b)                                                              \
    static inline result min(a x, b y) { return (result)x < (result)y ? (result)x : (result)y; } \
    static inline result max(a x, b y) { return (result)x > (result)y ? (result)x : (result)y; }
MIN_AND_MAX(int, int, int)
MIN_AND_MAX(unsigned, unsigned, unsigned)
MIN_AND_MAX(unsigned, int, unsigned)
MIN_AND_MAX(unsigned, unsigned, int)
MIN_AND_MAX(long, long, long)
MIN_AND_MAX(unsigned long, unsigned long, unsigned long)
MIN_AND_MAX(long long, long long, long long)
MIN_AND_MAX(unsigned long long, unsigned long long, unsigned long long)
#undef MIN_AND_MAX
static inline float min(float x, float y) { return fminf(x, y); }
static inline float max(float x, float y) { return fmaxf(x, y); }
static inline double min(double x, double y) { return fmin(x, y); }
static inline double max(double x, double y) { return fmax(x, y); }

// One operation, rounded by itself: never part of a fused multiply-add.
static inline float __fmul_rn(float x, float y) { volatile float z = x * y; return z; }
static inline float __fadd_rn(float x, float y) { volatile float z = x + y; return z; }
static inline float __fsub_rn(float x, float y) { volatile float z = x - y; return z; }
static inline float __fdiv_rn(float x, float y) { volatile float z = x / y; return z; }

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }

static uint3 threadIdx, blockIdx, blockDim, gridDim;

static inline float low(unsigned pair) { return __uint_as_float(pair << 16); }
static inline float high(unsigned pair) { return __uint_as_float(pair & 0xFFFF0000u); }

static inline unsigned pack(float low, float high) {  // cvt.rn.bf16x2.f32: to nearest, ties to even; NaN is 0x7FFF
    auto rounded = [](float x) -> unsigned {
        unsigned u = __float_as_uint(x);
        return x != x ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
    };
    return rounded(low) | rounded(high) << 16;
}

static inline unsigned pack_relu(float low, float high) {  // cvt.rn.relu.bf16x2.f32: NaN stays NaN
    return pack(low < 0 ? 0 : low, high < 0 ? 0 : high);
}

namespace emulator {

constexpr int WARP = 32, MOST_THREADS = 512, MOST_SHARED = 227 * 1024, STACK = 64 * 1024;

enum Wait { NOTHING, BARRIER, SHUFFLE, LDMATRIX, LDMATRIX_T, MMA, THE_END };
static const char *const NAMES[] = {"nothing", "__syncthreads", "__shfl_xor_sync", "ldmatrix4", "ldmatrix4t", "mma",
                                    "the kernel's end"};

struct Fiber {
    jmp_buf context;
    ucontext_t start;
    bool started;
    Wait waits;
    const void *row;              // ldmatrix: what this lane gives
    unsigned a[4], b[2], r[4];    // mma: its fragments; ldmatrix: what it gets; shuffle: r[0]
    int from;                     // shuffle: the lane that it reads
    float d[4];
    std::vector<std::pair<void *, const void *>> copies;  // begun and not yet done
};

static Fiber fibers[MOST_THREADS];
static Fiber *current;
static jmp_buf scheduler, failure;
static char message[1024];
static unsigned char *shared, *shared_area, *stacks;
static int shared_bytes;
static unsigned chance;
struct Arrival { void *to; const void *from; size_t bytes; };
static std::vector<Arrival> arrivals;  // what a kernel that is still running writes: there once this one has waited
static size_t page, stack_bytes;

static unsigned drawn() {
    chance ^= chance << 13, chance ^= chance >> 17, chance ^= chance << 5;
    return chance * 2654435761u >> 8;
}

template <class T> static void shuffle(T *first, unsigned count) {
    for (unsigned i = count; i > 1; i--) std::swap(first[i - 1], first[drawn() % i]);
}

[[noreturn]] __attribute__((noinline, format(printf, 1, 2))) static void fail(const char *format, ...) {
    int used = snprintf(message, sizeof message, "block (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z);
    if (current) used += snprintf(message + used, sizeof message - used, ", thread %u", threadIdx.x);
    used += snprintf(message + used, sizeof message - used, ": ");
    va_list values;
    va_start(values, format);
    vsnprintf(message + used, sizeof message - used, format, values);
    va_end(values);
    _longjmp(failure, 1);
}

static void on_signal(int number, siginfo_t *info, void *) {
    if (number == SIGFPE) fail("division of an integer by zero");
    fail("access outside of memory (shared memory, a guarded tensor or the stack), or misaligned, at %p", info->si_addr);
}

__attribute__((noinline)) static void wait(Wait what) {
    current->waits = what;
    if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}

static void (*body)();

static void enter() {
    body();
    current->waits = THE_END;
    _longjmp(scheduler, 1);
}

__attribute__((noinline)) static void resume(int thread) {
    current = &fibers[thread];
    threadIdx = {(unsigned)thread, 0, 0};
    if (!_setjmp(scheduler)) {
        if (current->started) _longjmp(current->context, 1);
        current->started = true;
        setcontext(&current->start);
    }
    current = nullptr;
}

static void check_shared(const void *p, const char *who) {
    if ((uintptr_t)p % 16) fail("%s: shared address %p is not a multiple of 16", who, p);
    if (p < shared || (const unsigned char *)p + 16 > shared + shared_bytes)
        fail("%s: address is %td bytes from the start of shared memory, which has %d", who,
             (const unsigned char *)p - shared, shared_bytes);
}

__attribute__((no_sanitize("undefined"), optimize("O2"))) static void do_ldmatrix(Fiber *lanes, bool transposed) {
    for (int matrix = 0; matrix < 4; matrix++) {
        uint16_t m[8][8];
        for (int row = 0; row < 8; row++) memcpy(m[row], lanes[8 * matrix + row].row, 16);
        for (int t = 0; t < WARP; t++) {
            int i = t / 4, j = 2 * (t % 4);
            lanes[t].r[matrix] = transposed ? m[j][i] | (unsigned)m[j + 1][i] << 16 : m[i][j] | (unsigned)m[i][j + 1] << 16;
        }
    }
}

__attribute__((no_sanitize("undefined"), optimize("O2"))) static void do_mma(Fiber *lanes) {
    typedef float Row __attribute__((vector_size(32), aligned(4)));
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < WARP; lane++) {
        const Fiber &f = lanes[lane];
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            float *to = &a[g + 8 * (i % 2)][2 * t + 8 * (i / 2)];
            to[0] = low(f.a[i]), to[1] = high(f.a[i]);
        }
        for (int i = 0; i < 2; i++) b[2 * t + 8 * i][g] = low(f.b[i]), b[2 * t + 8 * i + 1][g] = high(f.b[i]);
    }
    for (int i = 0; i < 16; i++) {
        Row sum = {};
        for (int k = 0; k < 16; k++) sum += a[i][k] * *(const Row *)b[k];
        memcpy(d[i], &sum, sizeof sum);
    }
    for (int lane = 0; lane < WARP; lane++)
        for (int i = 0; i < 4; i++) lanes[lane].d[i] += d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
}

static void do_shuffle(Fiber *lanes) {
    for (int lane = 0; lane < WARP; lane++) lanes[lane].r[0] = lanes[lanes[lane].from].a[0];
}

// Runs a warp until all of its lanes wait at the barrier or all have ended; says which.
static Wait run_warp(int warp) {
    Fiber *lanes = fibers + WARP * warp;
    for (;;) {
        int flip = drawn() % 2 ? WARP - 1 : 0;
        for (int lane = 0; lane < WARP; lane++) resume(WARP * warp + (lane ^ flip));
        Wait what = lanes[0].waits;
        for (int lane = 1; lane < WARP; lane++)
            if (lanes[lane].waits != what)
                fail("deadlock: thread %d is at %s, thread %d of the same warp at %s", WARP * warp, NAMES[what],
                     WARP * warp + lane, NAMES[lanes[lane].waits]);
        if (what == SHUFFLE) do_shuffle(lanes);
        else if (what == MMA) do_mma(lanes);
        else if (what == LDMATRIX || what == LDMATRIX_T) do_ldmatrix(lanes, what == LDMATRIX_T);
        else return what;
    }
}

static void run_block(int threads) {
    int warps = threads / WARP, order[MOST_THREADS / WARP];
    memset(shared_area + page, 0xFF, shared + shared_bytes - (shared_area + page));
    for (int i = 0; i < threads; i++) {
        Fiber &f = fibers[i];
        f.started = false;
        f.copies.clear();
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = stacks + i * (STACK + page) + page;
        f.start.uc_stack.ss_size = STACK;
        f.start.uc_link = nullptr;
        makecontext(&f.start, enter, 0);
    }
    for (int i = 0; i < warps; i++) order[i] = i;
    for (;;) {
        shuffle(order, warps);
        Wait what = NOTHING;
        for (int i = 0; i < warps; i++) {
            Wait now = run_warp(order[i]);
            if (what == NOTHING) what = now;
            else if (what != now)
                fail("deadlock: thread %d is at %s, thread %d at %s", WARP * order[0], NAMES[what], WARP * order[i],
                     NAMES[now]);
        }
        if (what == THE_END) break;
    }
    unsigned char *free = shared_area + page;  // all of it is still 0xFF, as it was
    if (free < shared && (*free != 0xFF || memcmp(free, free + 1, shared - free - 1)))
        for (unsigned char *p = free; p < shared; p++)
            if (*p != 0xFF) fail("shared memory was written %td bytes before its start", shared - p);
}

static unsigned char *reserved(size_t size) {
    void *p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fail("no memory");
    return (unsigned char *)p;
}

// A page that cannot be touched lies below every stack and on both sides of shared memory.
static void prepare(int threads, int bytes) {
    page = sysconf(_SC_PAGESIZE);
    stacks = reserved(stack_bytes = threads * (STACK + page));
    for (int i = 0; i < threads; i++) mprotect(stacks + i * (STACK + page), page, PROT_NONE);
    size_t most = (MOST_SHARED + page - 1) / page * page;
    if (!shared_area) {
        shared_area = reserved(page + most + page);
        mprotect(shared_area, page, PROT_NONE);
        mprotect(shared_area + page + most, page, PROT_NONE);
    }
    shared_bytes = (bytes + 15) / 16 * 16;
    shared = shared_area + page + most - shared_bytes;  // ends where the forbidden page begins
}

// A process may have 65,000 areas of memory: those of the stacks are too many to be kept by every kernel.
static void release() {
    if (stacks) munmap(stacks, stack_bytes);
    stacks = nullptr;
}

struct Launch { unsigned x, y, z; int threads, shared_bytes; unsigned seed; };

static void run_all(const Launch &launch) {
    static std::vector<unsigned> blocks;
    chance = launch.seed * 2654435761u | 1;
    blocks.resize(launch.x * launch.y * launch.z);
    for (unsigned i = 0; i < blocks.size(); i++) blocks[i] = i;
    shuffle(blocks.data(), blocks.size());
    for (unsigned block : blocks) {
        blockIdx = {block % launch.x, block / launch.x % launch.y, block / launch.x / launch.y};
        run_block(launch.threads);
    }
}

namespace {  // the loader would share these between libraries
template <class A> struct Call {
    static void (*kernel)(A);
    static const A *arguments;
    static void run() { kernel(*arguments); }
};
template <class A> void (*Call<A>::kernel)(A);
template <class A> const A *Call<A>::arguments;
}

// Null, or what went wrong.
template <class A>
static const char *run(void (*kernel)(A), const Launch &launch, const void *arguments, size_t bytes) {
    constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE};
    static struct sigaction action, before[3];
    static stack_t here, stack_before;
    static unsigned char signal_stack[64 * 1024];
    static A given;

    current = nullptr;
    blockIdx = {0, 0, 0};
    blockDim = {(unsigned)launch.threads, 1, 1};
    gridDim = {launch.x, launch.y, launch.z};
    here.ss_sp = signal_stack, here.ss_size = sizeof signal_stack;
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // on_signal leaves by a jump
    sigaltstack(&here, &stack_before);
    for (int i = 0; i < 3; i++) sigaction(SIGNALS[i], &action, &before[i]);

    message[0] = 0;
    if (!_setjmp(failure)) {
        if (sizeof(A) != bytes) fail("the kernel takes %zu bytes of arguments, not %zu", sizeof(A), bytes);
        if (launch.threads <= 0 || launch.threads > MOST_THREADS || launch.threads % WARP)
            fail("%d threads: whole warps, at most %d", launch.threads, MOST_THREADS);
        if (launch.shared_bytes < 0 || launch.shared_bytes > MOST_SHARED)
            fail("%d bytes of shared memory: at most %d", launch.shared_bytes, MOST_SHARED);
        if (!launch.x || !launch.y || !launch.z) fail("a grid of %u x %u x %u blocks", launch.x, launch.y, launch.z);
        memcpy((void *)&given, arguments, bytes);
        Call<A>::kernel = kernel;
        Call<A>::arguments = &given;
        body = Call<A>::run;
        prepare(launch.threads, launch.shared_bytes);
        run_all(launch);
        if (!arrivals.empty()) fail("began before the kernel before it had ended, and did not wait for it");
    }
    arrivals.clear();
    release();
    for (int i = 0; i < 3; i++) sigaction(SIGNALS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
    return message[0] ? message : nullptr;
}

}  // namespace emulator

// What g++ calls where -fsanitize=alignment,bounds finds a fault. Its data begins with the place in the source.
struct FaultPlace { const char *file; unsigned line, column; };
extern "C" __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_type_mismatch_v1_abort(
    FaultPlace *place, uintptr_t address) {
    emulator::fail("%s:%u: misaligned access at %#zx", place->file, place->line, (size_t)address);
}
extern "C" __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_out_of_bounds_abort(
    FaultPlace *place, uintptr_t index) {
    emulator::fail("%s:%u: index %td is outside of the array", place->file, place->line, (ptrdiff_t)index);
}

static inline void __syncthreads() { emulator::wait(emulator::BARRIER); }

static inline int __shfl_xor_sync(unsigned mask, int value, int lane_mask) {
    emulator::Fiber &me = *emulator::current;
    if (mask != 0xFFFFFFFFu) emulator::fail("__shfl_xor_sync: mask %#x; only the whole warp is emulated", mask);
    me.from = (threadIdx.x % emulator::WARP) ^ lane_mask;
    if (me.from < 0 || me.from >= emulator::WARP) emulator::fail("__shfl_xor_sync: lane mask %d", lane_mask);
    me.a[0] = (unsigned)value;
    emulator::wait(emulator::SHUFFLE);
    return (int)me.r[0];
}
static inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, int lane_mask) {
    return (unsigned)__shfl_xor_sync(mask, (int)value, lane_mask);
}
static inline float __shfl_xor_sync(unsigned mask, float value, int lane_mask) {
    return __uint_as_float((unsigned)__shfl_xor_sync(mask, (int)__float_as_uint(value), lane_mask));
}

// ldmatrix.sync.aligned.m8n8.x4.shared.b16
static inline void ldmatrix4(unsigned (&r)[4], const void *p) {
    emulator::Fiber &me = *emulator::current;
    emulator::check_shared(p, "ldmatrix4");
    me.row = p;
    emulator::wait(emulator::LDMATRIX);
    memcpy(r, me.r, sizeof r);
}

// ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16
static inline void ldmatrix4t(unsigned (&r)[4], const void *p) {
    emulator::Fiber &me = *emulator::current;
    emulator::check_shared(p, "ldmatrix4t");
    me.row = p;
    emulator::wait(emulator::LDMATRIX_T);
    memcpy(r, me.r, sizeof r);
}

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
static inline void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    emulator::Fiber &me = *emulator::current;
    memcpy(me.a, a, sizeof a);
    memcpy(me.d, d, sizeof d);
    me.b[0] = b0, me.b[1] = b1;
    emulator::wait(emulator::MMA);
    memcpy(d, me.d, sizeof d);
}

// griddepcontrol: the first thread to wait gets all of it, so that it shows what it read before
static inline void follow() {
    for (auto &arrival : emulator::arrivals) memcpy(arrival.to, arrival.from, arrival.bytes);
    emulator::arrivals.clear();
}
static inline void lead() {}

static inline uint4 load_if(const void *p, bool there) { return there ? *(const uint4 *)p : uint4{0, 0, 0, 0}; }

static inline void store_if(void *p, const uint4 &v, bool there) {
    if (there) *(uint4 *)p = v;
}

// cp.async of 16 bytes: done at any time before copies_done returns
static inline void copy16(void *shared, const void *global) {
    emulator::check_shared(shared, "copy16");
    if ((uintptr_t)global % 16) emulator::fail("copy16: global address %p is not a multiple of 16", global);
    if (emulator::drawn() % 2) memcpy(shared, global, 16);
    else emulator::current->copies.push_back({shared, global});
}

static inline void copy16_if(void *shared, const void *global, bool there) {
    if (there) copy16(shared, global);
}

// cp.async.wait_all: this thread's own copies
static inline void copies_done() {
    for (auto &copy : emulator::current->copies) memcpy(copy.first, copy.second, 16);
    emulator::current->copies.clear();
}
