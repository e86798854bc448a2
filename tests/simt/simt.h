// Runs CUDA C++ on a CPU: every thread of a block is a fiber, blocks run one after another.
//
// A kernel's source is included after this header and compiled by a C++ compiler. Fibers switch
// only at barriers and shuffles, so a run is deterministic. Shared memory is filled with 0xAA before
// every block. A barrier that not all threads reach is reported instead of hanging.
// Left out: clusters, asynchronous copies (they happen at once), atomics, textures, warp votes other
// than ballot. GCC puts no static of a template into a section: declare shared memory in the kernel.
#pragma once

#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ __attribute__((section("simt_shared"))) static

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

static dim3 threadIdx, blockIdx, blockDim, gridDim;
// The linker's bounds of all shared memory; absent if a source has none.
extern "C" __attribute__((weak)) unsigned char __start_simt_shared[], __stop_simt_shared[];

namespace simt {
constexpr int WARP = 32;
constexpr size_t STACK_BYTES = 64 * 1024;

struct Barrier {
    unsigned arrived = 0, passed = 0;
};
struct Exchange {
    Barrier barrier;
    uint32_t words[WARP][8];
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
    bool done = false;
};

static ucontext_t scheduler;
static std::vector<Fiber> fibers;
static std::vector<Exchange> warps;
static Barrier block_barrier;
static unsigned current;
static bool progressed;
static void (*body)(void *);
static void *body_arguments;

static void enter() {
    body(body_arguments);
    fibers[current].done = progressed = true;
}

static void wait(Barrier &barrier, unsigned count) {
    unsigned before = barrier.passed;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        barrier.passed++;
        progressed = true;
    }
    while (barrier.passed == before)
        swapcontext(&fibers[current].context, &scheduler);
}

static Exchange &warp() { return warps[current / WARP]; }
static unsigned lane() { return current % WARP; }
static void warp_wait() { wait(warp().barrier, WARP); }

// Every lane of the warp gives `value` and sees what all gave.
template <class T> void gather(T value, T (&all)[WARP]) {
    static_assert(sizeof(T) <= 32, "a lane passes at most 8 words");
    Exchange &own = warp();
    memcpy(own.words[lane()], &value, sizeof(T));
    warp_wait();
    for (int from = 0; from < WARP; from++) memcpy(&all[from], own.words[from], sizeof(T));
    warp_wait();
}
template <class T> T exchange(T value, unsigned from) {
    T all[WARP];
    gather(value, all);
    return all[from];
}

static bool run_block() {
    memset(__start_simt_shared, 0xAA, __stop_simt_shared - __start_simt_shared);
    warps.assign(fibers.size() / WARP, Exchange());
    block_barrier = Barrier();
    for (Fiber &fiber : fibers) {
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &scheduler;
        fiber.done = false;
        makecontext(&fiber.context, enter, 0);
    }
    for (size_t alive = fibers.size(); alive;) {
        progressed = false;
        alive = 0;
        for (current = 0; current < fibers.size(); current++) {
            if (fibers[current].done) continue;
            threadIdx = {current, 0, 0};
            swapcontext(&scheduler, &fibers[current].context);
            alive += !fibers[current].done;
        }
        if (!progressed) return false;
    }
    return true;
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), const void *const *arguments, std::index_sequence<I...>) {
    kernel(*static_cast<const A *>(arguments[I])...);
}

// Returns 0, or 1 if threads waited for a barrier that others never reached.
template <class... A>
int launch(void (*kernel)(A...), const unsigned *grid, unsigned threads,
           const void *const *arguments) {
    std::tuple<void (*)(A...), const void *const *> packed(kernel, arguments);
    body_arguments = &packed;
    body = [](void *pointer) {
        auto &[kernel, arguments] = *static_cast<decltype(packed) *>(pointer);
        call(kernel, arguments, std::index_sequence_for<A...>());
    };
    blockDim = {threads, 1, 1};
    gridDim = {grid[0], grid[1], 1};
    fibers.resize(threads);
    for (blockIdx.y = 0; blockIdx.y < grid[1]; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++)
            if (!run_block()) return 1;
    return 0;
}
}  // namespace simt

#define SIMT_ENTRY(KERNEL)                                                                        \
    extern "C" int simt_##KERNEL(const unsigned *grid, unsigned threads,                          \
                                 const void *const *arguments) {                                  \
        return simt::launch(KERNEL, grid, threads, arguments);                                    \
    }

inline void __syncthreads() { simt::wait(simt::block_barrier, blockDim.x); }
template <class T> T __shfl_up_sync(unsigned, T value, unsigned delta) {
    return simt::exchange(value, simt::lane() < delta ? simt::lane() : simt::lane() - delta);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
