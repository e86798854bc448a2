// Router top-k with replay, and packing of expert ids into as few bits as they need.

#include "numbers.cuh"

constexpr int ROUTER_WARPS = 4;
constexpr unsigned long long NEVER = 0;

// Returns an integer that ranks experts by logit, with ties going to the lower id and NaN as
// -infinity.
__device__ __forceinline__ unsigned long long rank_key(float logit, unsigned id) {
    unsigned bits = abs_bits(logit) > 0x7F800000u ? 0xFF800000u : __float_as_uint(logit);
    if (bits == 0x80000000u) bits = 0;
    unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<unsigned long long>(ordered) << 32 | (0xFFFFFFFFu - id);
}

// Removes the largest key of the warp and returns its expert.
template <int ROUNDS>
__device__ __forceinline__ unsigned take_best(unsigned long long (&keys)[ROUNDS][4]) {
    unsigned long long best = NEVER;
#pragma unroll
    for (int i = 0; i < ROUNDS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) best = keys[i][j] > best ? keys[i][j] : best;
#pragma unroll
    for (int mask = 16; mask; mask /= 2) {
        unsigned long long other = __shfl_xor_sync(FULL_WARP, best, mask);
        best = other > best ? other : best;
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (keys[i][j] == best) keys[i][j] = NEVER;
    return 0xFFFFFFFFu - static_cast<unsigned>(best);
}

// Returns the position of the set bit that has n set bits below it.
__device__ __forceinline__ int nth_set(unsigned bits, int n) {
    for (int i = 0; i < n; i++) bits &= bits - 1;
    return __ffs(bits) - 1;
}

struct Replayed {
    int id, num_mismatched, num_replaced;
};

// Lane s < num_chosen holds slot s of `own`, the router's choice, and of `recorded`.
__device__ __forceinline__ Replayed replay(int own, int recorded, bool is_kept, int num_chosen,
                                           unsigned lane) {
    bool is_own = false, is_in_use = false;
    for (int slot = 0; slot < num_chosen; slot++) {
        is_own |= __shfl_sync(FULL_WARP, own, slot) == recorded;
        int kept = __shfl_sync(FULL_WARP, is_kept ? recorded : -1, slot);
        is_in_use |= kept == own;
    }
    unsigned slots = num_chosen == 32 ? FULL_WARP : (1u << num_chosen) - 1;
    unsigned mismatched = __ballot_sync(FULL_WARP, !is_own) & slots;
    unsigned replaced = __ballot_sync(FULL_WARP, !is_kept) & slots;
    unsigned spare = __ballot_sync(FULL_WARP, !is_in_use) & slots;
    bool is_replaced = replaced >> lane & 1;
    int from = is_replaced ? nth_set(spare, __popc(replaced & ((1u << lane) - 1))) : 0;
    int next = __shfl_sync(FULL_WARP, own, from);
    return {is_replaced ? next : recorded, __popc(mismatched), __popc(replaced)};
}

// Each warp takes a token; ROUNDS * 128 >= E. recorded may be null.
template <int ROUNDS>
__device__ __forceinline__ void route(float (&scores)[ROUTER_WARPS][ROUNDS * 128],
                                      const float *logits, const int16_t *recorded, int16_t *ids,
                                      float *weights, int *num_mismatched, int *num_replaced,
                                      long long num_tokens, int num_experts, int num_chosen,
                                      int normalize, float plausibility_min) {
    unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    long long token = static_cast<long long>(blockIdx.x) * ROUTER_WARPS + warp;
    if (token >= num_tokens) return;
    float values[ROUNDS][4], top = -__uint_as_float(0x7F800000u);
    unsigned long long keys[ROUNDS][4];
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        unsigned first = i * 128 + lane * 4;
        load4(logits + token * num_experts, first, num_experts, values[i]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            bool is_expert = first + j < static_cast<unsigned>(num_experts);
            keys[i][j] = is_expert ? rank_key(values[i][j], first + j) : NEVER;
            if (is_expert) top = fmaxf(top, values[i][j]);
        }
    }
    top = warp_max(top);
    float lanes[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < ROUNDS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            unsigned expert = i * 128 + lane * 4 + j;
            bool is_expert = expert < static_cast<unsigned>(num_experts);
            float term = is_expert ? exp_frozen(values[i][j] - top) : 0.0f;
            scores[warp][expert] = term;
            lanes[j] += term;
        }
    float total = fold_lanes(lanes);
    __syncwarp();
    int own = 0;
    for (int slot = 0; slot < num_chosen; slot++) {
        int best = static_cast<int>(take_best(keys));
        if (lane == static_cast<unsigned>(slot)) own = best;
    }
    bool is_slot = lane < static_cast<unsigned>(num_chosen);
    int old = recorded && is_slot ? recorded[token * num_chosen + lane] : -1;
    bool is_free = __shfl_sync(FULL_WARP, old, 0) < 0;
    Replayed chosen = {own, 0, 0};
    if (!is_free) {
        bool is_expert = is_slot && old >= 0 && old < num_experts;
        int last = __shfl_sync(FULL_WARP, own, num_chosen - 1);
        float least = plausibility_min * __fdiv_rn(scores[warp][last], total);
        bool is_kept = is_expert && __fdiv_rn(scores[warp][old], total) >= least;
        chosen = replay(own, old, is_kept, num_chosen, lane);
    }
    float score = __fdiv_rn(scores[warp][is_slot ? chosen.id : 0], total);
    float sum = __shfl_sync(FULL_WARP, score, 0);
    for (int slot = 1; slot < num_chosen; slot++) sum += __shfl_sync(FULL_WARP, score, slot);
    if (is_slot) {
        ids[token * num_chosen + lane] = static_cast<int16_t>(chosen.id);
        weights[token * num_chosen + lane] = normalize ? __fdiv_rn(score, sum) : score;
    }
    if (lane == 0) {
        num_mismatched[token] = chosen.num_mismatched;
        num_replaced[token] = chosen.num_replaced;
    }
}

#define ROUTER(ROUNDS)                                                                            \
    extern "C" __global__ void __launch_bounds__(32 * ROUTER_WARPS) router_topk_##ROUNDS(         \
        const float *logits, const int16_t *recorded, int16_t *ids, float *weights,               \
        int *num_mismatched, int *num_replaced, long long num_tokens, int num_experts,            \
        int num_chosen, int normalize, float plausibility_min) {                                  \
        __shared__ float scores[ROUTER_WARPS][ROUNDS * 128];                                      \
        route<ROUNDS>(scores, logits, recorded, ids, weights, num_mismatched, num_replaced, num_tokens,   \
                      num_experts, num_chosen, normalize, plausibility_min);                      \
    }

ROUTER(1)
ROUTER(2)
ROUTER(4)
ROUTER(8)

// Each thread writes 32 bits of output. ids [T, num_ids], packed [T, num_bytes].
extern "C" __global__ void __launch_bounds__(256) routes_pack(const int16_t *ids, uint8_t *packed,
                                                              long long num_tokens, int num_ids,
                                                              int num_bytes, int width) {
    int num_words = (num_bytes + 3) / 4;
    long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    long long token = index / num_words;
    if (token >= num_tokens) return;
    int word = static_cast<int>(index % num_words), first_bit = word * 32;
    unsigned bits = 0;
    for (int i = first_bit / width; i < num_ids && i * width < first_bit + 32; i++) {
        unsigned id = static_cast<unsigned>(ids[token * num_ids + i]);
        int shift = i * width - first_bit;
        bits |= shift < 0 ? id >> -shift : id << shift;
    }
    uint8_t *to = packed + token * num_bytes + word * 4;
    if (num_bytes % 4 == 0) {
        *reinterpret_cast<unsigned *>(to) = bits;
    } else {
        for (int i = 0; i < 4 && word * 4 + i < num_bytes; i++)
            to[i] = static_cast<uint8_t>(bits >> (8 * i));
    }
}

// Each thread unpacks one id.
extern "C" __global__ void __launch_bounds__(256) routes_unpack(const uint8_t *packed, int16_t *ids,
                                                                long long num_tokens, int num_ids,
                                                                int num_bytes, int width) {
    long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    long long token = index / num_ids;
    if (token >= num_tokens) return;
    int first_bit = static_cast<int>(index % num_ids) * width, first = first_bit / 8;
    unsigned bits = 0;
    for (int i = 0; i < 3 && first + i < num_bytes; i++)
        bits |= static_cast<unsigned>(packed[token * num_bytes + first + i]) << (8 * i);
    ids[index] = static_cast<int16_t>(bits >> first_bit % 8 & ((1u << width) - 1));
}
