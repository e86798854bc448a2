// Differences between two versions of a flat array: count them per tile, then, after a running sum
// of the counts, write positions and values in order. Also the update of the old version in place.

typedef unsigned char u8;
typedef unsigned short u16;
constexpr unsigned FULL_WARP = 0xFFFFFFFFu;

constexpr int PER_THREAD = 16, CHANGE_THREADS = 256;

// Returns a mask whose bit i says that element first + i differs.
template <class T>
__device__ __forceinline__ unsigned compare16(const T *base, const T *target, long long first,
                                              long long count, T (&values)[PER_THREAD]) {
    constexpr int LOADS = PER_THREAD * sizeof(T) / 16, PER_LOAD = PER_THREAD / LOADS;
    unsigned changed = 0;
    if (first + PER_THREAD <= count) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            alignas(16) T old[PER_LOAD];
            alignas(16) T next[PER_LOAD];
            *reinterpret_cast<uint4 *>(old) = reinterpret_cast<const uint4 *>(base + first)[i];
            *reinterpret_cast<uint4 *>(next) = reinterpret_cast<const uint4 *>(target + first)[i];
#pragma unroll
            for (int j = 0; j < PER_LOAD; j++) {
                values[i * PER_LOAD + j] = next[j];
                changed |= static_cast<unsigned>(old[j] != next[j]) << (i * PER_LOAD + j);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++)
            if (first + i < count) {
                values[i] = target[first + i];
                changed |= static_cast<unsigned>(base[first + i] != values[i]) << i;
            }
    }
    return changed;
}

// Returns the sum over earlier threads of the block, and in `total` over all of them.
__device__ __forceinline__ int block_prefix(int count, int &total) {
    __shared__ int warp_totals[CHANGE_THREADS / 32];
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int running = count;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        int before = __shfl_up_sync(FULL_WARP, running, delta);
        if (lane >= static_cast<unsigned>(delta)) running += before;
    }
    if (lane == 31) warp_totals[warp] = running;
    __syncthreads();
    total = 0;
    int earlier = 0;
#pragma unroll
    for (int i = 0; i < CHANGE_THREADS / 32; i++) {
        if (i == static_cast<int>(warp)) earlier = total;
        total += warp_totals[i];
    }
    return earlier + running - count;
}

__device__ __forceinline__ long long thread_first() {
    return (static_cast<long long>(blockIdx.x) * CHANGE_THREADS + threadIdx.x) * PER_THREAD;
}

template <class T>
__device__ __forceinline__ void count_changes(const T *base, const T *target, int *counts,
                                              long long count) {
    T values[PER_THREAD];
    int total;
    block_prefix(__popc(compare16(base, target, thread_first(), count, values)), total);
    if (threadIdx.x == 0) counts[blockIdx.x] = total;
}

// starts: offset of each tile's changes in the output.
template <class T>
__device__ __forceinline__ void write_changes(const T *base, const T *target, const int *starts,
                                              int *positions, T *changed_values, long long count) {
    T values[PER_THREAD];
    long long first = thread_first();
    unsigned changed = compare16(base, target, first, count, values);
    int total, place = block_prefix(__popc(changed), total) + starts[blockIdx.x];
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++)
        if (changed >> i & 1) {
            positions[place] = static_cast<int>(first + i);
            changed_values[place++] = values[i];
        }
}

#define CHANGES(NAME, T)                                                                          \
    extern "C" __global__ void __launch_bounds__(CHANGE_THREADS) changes_count_##NAME(            \
        const T *base, const T *target, int *counts, long long count) {                           \
        count_changes(base, target, counts, count);                                               \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(CHANGE_THREADS) changes_write_##NAME(            \
        const T *base, const T *target, const int *starts, int *positions, T *values,             \
        long long count) {                                                                        \
        write_changes(base, target, starts, positions, values, count);                            \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) changes_apply_##NAME(                       \
        T *bits, const int *positions, const T *values, long long count, long long num_bits) {    \
        long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;              \
        if (i >= count || positions[i] < 0 || positions[i] >= num_bits) return;                   \
        bits[positions[i]] = values[i];                                                           \
    }

CHANGES(1, u8)
CHANGES(2, u16)
CHANGES(4, unsigned)
