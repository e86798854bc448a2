// Update of a flat array in place, from positions and new values.

typedef unsigned char u8;
typedef unsigned short u16;

#define DELTA(NAME, T)                                                                            \
    extern "C" __global__ void __launch_bounds__(256) delta_apply_##NAME(                         \
        T *bits, const int *positions, const T *values, long long count, long long num_bits) {    \
        long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;              \
        if (i >= count || positions[i] < 0 || positions[i] >= num_bits) return;                   \
        bits[positions[i]] = values[i];                                                           \
    }

DELTA(1, u8)
DELTA(2, u16)
DELTA(4, unsigned)
