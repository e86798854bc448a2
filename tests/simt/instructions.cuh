// The twin of `kernels/cuda/src/instructions.cuh` on a CPU. Conversions give the same bits. The
// products add in an order of their own: inputs whose sums are exact check the indexing; the rounding
// of the chip's sums can only be seen on the chip.
#pragma once

__device__ __forceinline__ bf16 to_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    if (abs_bits(x) > 0x7F800000u) return 0x7FFF;
    return static_cast<bf16>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Two E4M3 codes, saturating, from two floats and back.
static inline unsigned e4m3_encode1(float x) {
    unsigned bits = abs_bits(x), sign = (__float_as_uint(x) >> 24) & 0x80u;
    if (bits > 0x7F800000u) return 0x7Fu;
    unsigned clamped = min(bits, 0x43E00000u);
    if (clamped < (121u << 23))
        return sign | static_cast<unsigned>(nearbyintf(__uint_as_float(clamped) * 512.0f));
    return sign | (((clamped + 0x7FFFFu + ((clamped >> 20) & 1u)) >> 20) - (120u << 3));
}
static inline unsigned e4m3_encode2(float low, float high) {
    return e4m3_encode1(low) | e4m3_encode1(high) << 8;
}
static inline float e4m3_decode1(unsigned code) {
    unsigned exponent = (code >> 3) & 15u, mantissa = code & 7u;
    float size = exponent ? ldexpf(8.0f + mantissa, static_cast<int>(exponent) - 10)
                          : ldexpf(static_cast<float>(mantissa), -9);
    if ((code & 0x7Fu) == 0x7Fu) size = NAN;
    return code & 0x80u ? -size : size;
}
static inline void e4m3_decode2(unsigned pair, float &low, float &high) {
    low = e4m3_decode1(pair & 0xFFu);
    high = e4m3_decode1((pair >> 8) & 0xFFu);
}

// Copies 16 bytes to shared memory, or clears them, without waiting.
__device__ __forceinline__ void copy16_async(void *shared, const void *global, bool is_inside) {
    if (is_inside) memcpy(shared, global, 16);
    else memset(shared, 0, 16);
}
__device__ __forceinline__ void commit_copies() {
}
// Waits until at most PENDING of this thread's committed groups are under way.
template <int PENDING> __device__ __forceinline__ void wait_copies() {
}

// sum[16x8] += a[16x16] * b[16x8]. With g = lane / 4 and t = lane % 4 a lane holds, two a register,
// a: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8); b: (2t, g), (2t + 8, g);
// sum: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
__device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]) {
    struct Fragments {
        unsigned a[4], b[2];
    } own = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, of[32];
    simt::gather(own, of);
    auto half = [](unsigned pair, int i) {
        return to_float(static_cast<bf16>(i ? pair >> 16 : pair));
    };
    unsigned g = simt::lane() / 4, t = simt::lane() % 4;
    for (int i = 0; i < 4; i++) {
        unsigned row = g, column = 2 * t + i % 2, upper = i / 2;
        for (int k = 0; k < 16; k++) {
            unsigned pair = k % 8 / 2, high = k / 8;
            sum[i] += half(of[row * 4 + pair].a[2 * high + upper], k % 2) *
                      half(of[column * 4 + pair].b[high], k % 2);
        }
    }
}

// A warpgroup's 64 x 64 sums, 32 a thread: with g = lane / 4 and t = lane % 4, sums[n] holds
// (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of the warp's 16 rows and of columns 8n to 8n + 7.
typedef float GroupSums[8][4];

// Makes what this thread wrote to shared memory seen by wgmma, after the next barrier.
__device__ __forceinline__ void publish_to_tensor_cores() {
}

// Where the swizzle puts 16-byte chunks: address bits 4..6 are xored with bits 7..9.
inline float swizzled(const void *panel, unsigned row, unsigned k) {
    unsigned place = row * 128 + k * 2;
    bf16 value;
    memcpy(&value, static_cast<const char *>(panel) + (place ^ (place >> 7 & 7) << 4), 2);
    return to_float(value);
}

// Starts sums += left [64 rows of K = 64] * right [64 columns of K = 64]; both panels lie as
// `describe` says. Four warps together.
__device__ __forceinline__ void multiply_group(const void *left, const void *right,
                                               GroupSums &sums) {
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (unsigned n = 0; n < 8; n++)
        for (unsigned i = 0; i < 4; i++)
            for (unsigned k = 0; k < 64; k++)
                sums[n][i] += swizzled(left, warp * 16 + lane / 4 + i / 2 * 8, k) *
                              swizzled(right, n * 8 + lane % 4 * 2 + i % 2, k);
}

// Waits for all products that were started.
__device__ __forceinline__ void wait_group(GroupSums &sums) {
}
