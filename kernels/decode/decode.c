/* One inference step of a Qwen3-MoE transformer on the CPU, in float32.
 *
 * Every sum runs in an order that depends on nothing but its own length, so a token's result is the
 * same bits alone or in any batch, prefilled in any chunks, with or without a cached prefix.
 *
 * Matrices come packed in panels: W [N, K] row-major becomes [ceil(N/32)][K][32], zero-padded.
 * Keys lie in tiles of 16 positions, [T/16][D][16]; values row by row, [T][D]. D must be a multiple
 * of 16, T of 16. Vector code is GCC's portable vector extension; build with -O3 -march=native.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4), may_alias));

#define PANEL 32
#define TILE 16
#define GROUP_MAX 4 /* query heads that go over the keys together */
#ifdef __AVX512F__
#define ROWS_MAX 12
#else
#define ROWS_MAX 4
#endif

typedef struct {
    int32_t layers, hidden, heads, kv_heads, head_dim, experts, chosen, width, vocab;
    int32_t rows, positions, normalize, wide_routes, mxfp8;
    float eps;
} shape_t;

typedef struct {
    const float *attention_norm, *qkv, *output, *query_norm, *key_norm;
    const float *expert_norm, *gate, *gate_up, *down;
} layer_t;

typedef struct {
    const layer_t *layers;
    const float *embedding, *head, *final_norm, *cos, *sin;
} weights_t;

typedef struct {
    int32_t num_tokens, num_outputs;
    const int32_t *token_ids, *rows, *positions, *outputs;
    float *kv, *logits, *scratch;
    void *routes;           /* [rows, positions, layers, chosen], or NULL: record none */
    const int16_t *replay;  /* [num_tokens, layers, chosen], negative where free; or NULL */
    float *states;          /* [layers, num_tokens, hidden]: what each layer gave; or NULL */
    int32_t *flips;         /* [layers, 2]: see replay_route; or NULL */
    float plausible;
} step_t;

static inline v16 select16(i16 mask, v16 yes, v16 no) {
    return (v16)((mask & (i16)yes) | (~mask & (i16)no));
}

static inline v16 splat(float x) { return (v16){0} + x; }

static inline float sum16(v16 a) {
    float s[16];
    memcpy(s, &a, sizeof s);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) s[i] += s[i + width];
    return s[0];
}

static inline float max16(v16 a) {
    float m = a[0];
    for (int i = 1; i < 16; i++) m = a[i] > m ? a[i] : m;
    return m;
}

/* e^x to about one ulp: split off the power of two, then a degree-6 polynomial. */
static inline v16 exp16(v16 x) {
    const v16 low = splat(-87.0f), high = splat(88.0f);
    x = select16(x < low, low, x);
    x = select16(x > high, high, x);
    const v16 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    v16 shifted = x * 1.44269504088896341f + magic;
    v16 n = shifted - magic;
    v16 r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    v16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    i16 power = ((i16)shifted - (i16)magic + 127) << 23;
    return p * (v16)power;
}

static inline v16 exp_or_zero(v16 x) {
    return select16(x == splat(-INFINITY), splat(0.0f), exp16(x));
}

/* rows x [.., K] times one panel -> out rows. The constant `rows` keeps sums in registers. */
static inline __attribute__((always_inline)) void panel_rows(
    const int rows, const float *x, long x_stride, const float *panel, long K, float *out,
    long out_stride, int columns) {
    v16 sum[ROWS_MAX][2];
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = splat(0.0f);
    for (long k = 0; k < K; k++) {
        v16 w0 = *(const v16 *)(panel + k * PANEL), w1 = *(const v16 *)(panel + k * PANEL + 16);
        for (int r = 0; r < rows; r++) {
            float value = x[r * x_stride + k];
            sum[r][0] += value * w0;
            sum[r][1] += value * w1;
        }
    }
    for (int r = 0; r < rows; r++) {
        if (columns == PANEL) {
            *(v16 *)(out + r * out_stride) = sum[r][0];
            *(v16 *)(out + r * out_stride + 16) = sum[r][1];
        } else {
            memcpy(out + r * out_stride, sum[r], (size_t)columns * sizeof(float));
        }
    }
}

/* x [M, K] times W^T (packed, N columns) -> out [M, N]. */
static void matmul(const float *x, long M, long K, const float *packed, long N, float *out) {
    for (long n = 0; n < N; n += PANEL) {
        const float *panel = packed + n * K;
        int columns = N - n < PANEL ? (int)(N - n) : PANEL;
        long m = 0;
        for (; m + ROWS_MAX <= M; m += ROWS_MAX)
            panel_rows(ROWS_MAX, x + m * K, K, panel, K, out + m * N + n, N, columns);
        const float *rest = x + m * K;
        float *to = out + m * N + n;
        switch (M - m) {
#define CASE(R) case R: panel_rows(R, rest, K, panel, K, to, N, columns); break;
#if ROWS_MAX > 4
            CASE(11) CASE(10) CASE(9) CASE(8) CASE(7) CASE(6) CASE(5) CASE(4)
#endif
            CASE(3) CASE(2) CASE(1)
        }
    }
}

static void rms_norm(const float *x, const float *weight, float eps, long n, float *out) {
    v16 squares = splat(0.0f);
    for (long i = 0; i < n; i += 16) squares += *(const v16 *)(x + i) * *(const v16 *)(x + i);
    float scale = 1.0f / sqrtf(sum16(squares) / (float)n + eps);
    for (long i = 0; i < n; i += 16)
        *(v16 *)(out + i) = *(const v16 *)(x + i) * scale * *(const v16 *)(weight + i);
}

static void norm_and_rotate(float *x, const float *weight, float eps, long D, const float *cos,
                            const float *sin) {
    rms_norm(x, weight, eps, D, x);
    long half = D / 2;
    for (long i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cos[i] - second * sin[i];
        x[i + half] = second * cos[i] + first * sin[i];
    }
}

/* Scores of G query heads against positions 0 .. count-1, softmax numerators left in `scores`. */
static inline __attribute__((always_inline)) void score_group(
    const int G, const float *query, const float *keys, long count, long D, float *scores,
    long stride, float *inverse) {
    const float scale = 1.0f / sqrtf((float)D);
    v16 highest[GROUP_MAX], total[GROUP_MAX];
    for (int g = 0; g < G; g++) highest[g] = splat(-INFINITY), total[g] = splat(0.0f);
    for (long t = 0; t < count; t += TILE) {
        const float *tile = keys + t * D;
        v16 even[GROUP_MAX], odd[GROUP_MAX];
        for (int g = 0; g < G; g++) even[g] = odd[g] = splat(0.0f);
        for (long d = 0; d < D; d += 2) {
            v16 first = *(const v16 *)(tile + d * TILE), second = *(const v16 *)(tile + (d + 1) * TILE);
            for (int g = 0; g < G; g++) {
                even[g] += query[g * D + d] * first;
                odd[g] += query[g * D + d + 1] * second;
            }
        }
        for (int g = 0; g < G; g++) {
            v16 score = (even[g] + odd[g]) * scale;
            if (t + TILE > count) /* beyond the last position lies nothing that counts */
                for (long i = count - t; i < TILE; i++) score[i] = -INFINITY;
            *(v16 *)(scores + g * stride + t) = score;
            highest[g] = select16(score > highest[g], score, highest[g]);
        }
    }
    for (int g = 0; g < G; g++) {
        float top = max16(highest[g]);
        for (long t = 0; t < count; t += TILE) {
            v16 *at = (v16 *)(scores + g * stride + t), score = *at;
            *at = exp_or_zero(score - top);
            total[g] += *at;
        }
        inverse[g] = 1.0f / sum16(total[g]);
    }
}

/* Scores times values [count, D] -> out [G, D], 32 columns at a time (16 where D has no more). */
static inline __attribute__((always_inline)) void mix_group(
    const int G, const int vectors, const float *scores, long stride, const float *values,
    long count, long D, const float *inverse, float *out) {
    v16 even[GROUP_MAX][2], odd[GROUP_MAX][2];
    for (int g = 0; g < G; g++)
        for (int v = 0; v < vectors; v++) even[g][v] = odd[g][v] = splat(0.0f);
    long t = 0;
    for (; t + 1 < count; t += 2)
        for (int v = 0; v < vectors; v++) {
            const float *at = values + t * D + v * 16;
            v16 first = *(const v16 *)at, second = *(const v16 *)(at + D);
            for (int g = 0; g < G; g++) {
                even[g][v] += scores[g * stride + t] * first;
                odd[g][v] += scores[g * stride + t + 1] * second;
            }
        }
    for (int g = 0; g < G; g++)
        for (int v = 0; v < vectors; v++) {
            if (t < count) even[g][v] += scores[g * stride + t] * *(const v16 *)(values + t * D + v * 16);
            *(v16 *)(out + g * D + v * 16) = (even[g][v] + odd[g][v]) * inverse[g];
        }
}

/* G query heads that share keys and values, over positions 0 .. count-1 -> out [G, D]. */
static inline __attribute__((always_inline)) void attend_group(
    const int G, const float *query, const float *keys, const float *values, long count, long D,
    float *scores, long stride, float *out) {
    float inverse[GROUP_MAX];
    score_group(G, query, keys, count, D, scores, stride, inverse);
    long d = 0;
    for (; d + 32 <= D; d += 32)
        mix_group(G, 2, scores, stride, values + d, count, D, inverse, out + d);
    if (d < D) mix_group(G, 1, scores, stride, values + d, count, D, inverse, out + d);
}

static void attend(int heads, const float *query, const float *keys, const float *values,
                   long count, long D, float *scores, long stride, float *out) {
    int head = 0;
    for (; head + 4 <= heads; head += 4)
        attend_group(4, query + head * D, keys, values, count, D, scores, stride, out + head * D);
    for (; head + 2 <= heads; head += 2)
        attend_group(2, query + head * D, keys, values, count, D, scores, stride, out + head * D);
    for (; head < heads; head++)
        attend_group(1, query + head * D, keys, values, count, D, scores, stride, out + head * D);
}

static float *kv_head(const shape_t *s, const step_t *b, long layer, long row, long head) {
    long heads = 2 * s->kv_heads;
    return b->kv + ((layer * s->rows + row) * heads + head) * s->positions * (long)s->head_dim;
}

static void store_kv(const shape_t *s, const step_t *b, long layer, long token, const float *key,
                     const float *value) {
    long D = s->head_dim, at = b->positions[token], row = b->rows[token];
    for (long h = 0; h < s->kv_heads; h++) {
        float *keys = kv_head(s, b, layer, row, h) + at / TILE * TILE * D + at % TILE;
        for (long d = 0; d < D; d++) keys[d * TILE] = key[h * D + d];
        memcpy(kv_head(s, b, layer, row, s->kv_heads + h) + at * D, value + h * D, D * sizeof(float));
    }
}

/* normed [N, hidden] -> attended [N, heads * D]; qkv is scratch. */
static void attention(const shape_t *s, const weights_t *w, const step_t *b, long index,
                      const float *normed, float *qkv, float *attended, float *scores) {
    const layer_t *layer = &w->layers[index];
    long D = s->head_dim, q = s->heads * D, kv = s->kv_heads * D, width = q + 2 * kv;
    long group = s->heads / s->kv_heads;
    matmul(normed, b->num_tokens, s->hidden, layer->qkv, width, qkv);
    for (long t = 0; t < b->num_tokens; t++) {
        float *row = qkv + t * width;
        const float *cos = w->cos + b->positions[t] * D / 2, *sin = w->sin + b->positions[t] * D / 2;
        for (long h = 0; h < s->heads; h++)
            norm_and_rotate(row + h * D, layer->query_norm, s->eps, D, cos, sin);
        for (long h = 0; h < s->kv_heads; h++)
            norm_and_rotate(row + q + h * D, layer->key_norm, s->eps, D, cos, sin);
        store_kv(s, b, index, t, row + q, row + q + kv);
    }
    for (long t = 0; t < b->num_tokens; t++)
        for (long h = 0; h < s->kv_heads; h++) {
            const float *keys = kv_head(s, b, index, b->rows[t], h);
            const float *values = kv_head(s, b, index, b->rows[t], s->kv_heads + h);
            long at = h * group * D;
            attend((int)group, qkv + t * width + at, keys, values, b->positions[t] + 1, D, scores,
                   s->positions, attended + t * q + at);
        }
}

/* Puts recorded experts in the place of the router's own, which have negated scores. One whose
 * probability is below `plausible` gives way to the best expert that is not among the others.
 * Counts in flips the recorded slots that the router would not have chosen, and those replaced. */
static void replay_route(const shape_t *s, const float *scores, float total, const int16_t *recorded,
                         float plausible, int32_t *ids, float *weights, int32_t *flips) {
    for (int k = 0; k < s->chosen; k++) {
        ids[k] = recorded[k];
        weights[k] = fabsf(scores[ids[k]]) / total;
        if (flips) flips[0] += scores[ids[k]] > 0.0f;
        if (weights[k] < plausible) ids[k] = -1;
    }
    for (int k = 0; k < s->chosen; k++) {
        if (ids[k] >= 0) continue;
        int best = -1;
        for (int e = 0; e < s->experts; e++) {
            int taken = 0;
            for (int j = 0; j < s->chosen; j++) taken |= ids[j] == e;
            if (!taken && (best < 0 || fabsf(scores[e]) > fabsf(scores[best]))) best = e;
        }
        ids[k] = best;
        weights[k] = fabsf(scores[best]) / total;
        if (flips) flips[1] += best != recorded[k];
    }
}

/* Scores of one token -> its experts and their weights, best first, ties to the lower id; or the
 * recorded experts in their order. */
static void route(const shape_t *s, float *scores, const int16_t *recorded, float plausible,
                  int32_t *ids, float *weights, int32_t *flips) {
    float top = scores[0], total = 0.0f, kept = 0.0f;
    for (int e = 1; e < s->experts; e++) top = scores[e] > top ? scores[e] : top;
    for (int e = 0; e < s->experts; e++) total += scores[e] = exp16(splat(scores[e] - top))[0];
    for (int k = 0; k < s->chosen; k++) {
        int best = -1;
        for (int e = 0; e < s->experts; e++)
            if (scores[e] >= 0.0f && (best < 0 || scores[e] > scores[best])) best = e;
        ids[k] = best;
        weights[k] = scores[best] / total;
        scores[best] = -scores[best];
    }
    if (recorded && recorded[0] >= 0)
        replay_route(s, scores, total, recorded, plausible, ids, weights, flips);
    for (int k = 0; k < s->chosen; k++) kept += weights[k];
    for (int k = 0; k < s->chosen && s->normalize; k++) weights[k] /= kept;
}

static void record(const shape_t *s, const step_t *b, long layer, long token, const int32_t *ids) {
    if (!b->routes) return;
    long place = (long)b->rows[token] * s->positions + b->positions[token];
    long at = (place * s->layers + layer) * s->chosen;
    for (int k = 0; k < s->chosen; k++) {
        if (s->wide_routes) ((int16_t *)b->routes)[at + k] = (int16_t)ids[k];
        else ((uint8_t *)b->routes)[at + k] = (uint8_t)ids[k];
    }
}

static inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* 2^(code - 127). */
static inline float e8m0_value(uint32_t code) {
    return from_bits(code ? code << 23 : 0x00400000u);
}

/* The code of the power of two at or above largest / 448. */
static inline uint32_t e8m0_scale(uint32_t largest) {
    uint32_t bits = to_bits(from_bits(largest) / 448.0f);
    uint32_t exponent = bits >> 23, mantissa = bits & 0x7FFFFFu;
    uint32_t code = exponent + (mantissa > (exponent ? 0u : 0x400000u));
    return code < 254u ? code : 254u;
}

/* Rounds 32s of n floats to what MXFP8 can hold, by the rules of kernels/reference/formats.py. */
static void round_mxfp8(float *x, long n) {
    for (float *block = x; block < x + n; block += 32) {
        uint32_t largest = 0;
        for (int i = 0; i < 32; i++) {
            uint32_t size = to_bits(block[i]) & 0x7FFFFFFFu;
            largest = size > largest ? size : largest;
        }
        int is_nan = largest > 0x7F800000u;
        uint32_t code = e8m0_scale(largest);
        float scale = is_nan ? NAN : e8m0_value(code), inverse = e8m0_value(254u - code);
        for (int i = 0; i < 32; i++) {
            float value = block[i] * inverse;
            uint32_t bits = to_bits(value), size = bits & 0x7FFFFFFFu;
            size = size < 0x43E00000u ? size : 0x43E00000u; /* 448 */
            uint32_t normal = (size + 0x7FFFFu + (size >> 20 & 1u)) & 0xFFF00000u;
            /* Below 2^-6 the steps are 2^-9: adding 1.5 * 2^14 rounds to them. */
            float small = (from_bits(size) + 24576.0f) - 24576.0f;
            float rounded = size < 0x3C800000u ? small : from_bits(normal);
            block[i] = from_bits(to_bits(rounded) | (bits & 0x80000000u)) * scale;
        }
    }
}

/* Adds the experts' output for normed [N, hidden] to x [N, hidden]. */
static void experts(const shape_t *s, const weights_t *w, const step_t *b, long index,
                    const float *normed, float *x, float *scratch) {
    const layer_t *layer = &w->layers[index];
    long N = b->num_tokens, d = s->hidden, f = s->width, K = s->chosen, E = s->experts;
    long gate_up_size = (2 * f + PANEL - 1) / PANEL * PANEL * d;
    long down_size = (d + PANEL - 1) / PANEL * PANEL * f;
    float *scores = scratch, *weights = scores + N * E, *gathered = weights + N * K;
    float *both = gathered + N * d, *active = both + N * 2 * f, *results = active + N * f;
    int32_t *ids = (int32_t *)(results + N * K * d), *slots = ids + N * K;
    matmul(normed, N, d, layer->gate, E, scores);
    int32_t *flips = b->flips ? b->flips + 2 * index : 0;
    for (long t = 0; t < N; t++) {
        const int16_t *recorded = b->replay ? b->replay + (t * s->layers + index) * K : 0;
        route(s, scores + t * E, recorded, b->plausible, ids + t * K, weights + t * K, flips);
        record(s, b, index, t, ids + t * K);
    }
    for (long e = 0; e < E; e++) {
        long count = 0;
        for (long slot = 0; slot < N * K; slot++)
            if (ids[slot] == e) {
                memcpy(gathered + count * d, normed + slot / K * d, d * sizeof(float));
                slots[count++] = (int32_t)slot;
            }
        if (!count) continue;
        if (s->mxfp8) round_mxfp8(gathered, count * d);
        matmul(gathered, count, d, layer->gate_up + e * gate_up_size, 2 * f, both);
        for (long r = 0; r < count; r++)
            for (long i = 0; i < f; i += 16) {
                v16 gate = *(v16 *)(both + r * 2 * f + i), up = *(v16 *)(both + r * 2 * f + f + i);
                *(v16 *)(active + r * f + i) = gate / (1.0f + exp16(-gate)) * up;
            }
        if (s->mxfp8) round_mxfp8(active, count * f);
        matmul(active, count, f, layer->down + e * down_size, d, gathered);
        for (long r = 0; r < count; r++)
            memcpy(results + slots[r] * d, gathered + r * d, d * sizeof(float));
    }
    for (long t = 0; t < N; t++)
        for (long i = 0; i < d; i += 16) {
            v16 sum = weights[t * K] * *(v16 *)(results + t * K * d + i);
            for (long k = 1; k < K; k++)
                sum += weights[t * K + k] * *(v16 *)(results + (t * K + k) * d + i);
            *(v16 *)(x + t * d + i) += sum;
        }
}

/* Floats of scratch that a step over n tokens needs. */
int64_t penstock_scratch(const shape_t *s, int64_t n) {
    int64_t qkv = (int64_t)(s->heads + 2 * s->kv_heads) * s->head_dim;
    int64_t attended = (int64_t)s->heads * s->head_dim;
    int64_t mixture = s->experts + 3 * (int64_t)s->chosen + s->hidden + 3 * (int64_t)s->width +
                      (int64_t)s->chosen * s->hidden;
    int64_t larger = qkv + attended > mixture ? qkv + attended : mixture;
    return n * (3 * (int64_t)s->hidden + larger) + GROUP_MAX * (int64_t)s->positions;
}

/* Runs all tokens through all layers; a row's tokens must come in the order of their positions. */
void penstock_step(const shape_t *s, const weights_t *w, const step_t *b) {
    long N = b->num_tokens, d = s->hidden, q = (long)s->heads * s->head_dim;
    long width = q + 2L * s->kv_heads * s->head_dim;
    float *x = b->scratch, *normed = x + N * d, *mixed = normed + N * d, *work = mixed + N * d;
    float *scores = b->scratch + penstock_scratch(s, N) - GROUP_MAX * (int64_t)s->positions;
    for (long t = 0; t < N; t++)
        memcpy(x + t * d, w->embedding + (long)b->token_ids[t] * d, d * sizeof(float));
    for (long index = 0; index < s->layers; index++) {
        const layer_t *layer = &w->layers[index];
        for (long t = 0; t < N; t++)
            rms_norm(x + t * d, layer->attention_norm, s->eps, d, normed + t * d);
        attention(s, w, b, index, normed, work, work + N * width, scores);
        matmul(work + N * width, N, q, layer->output, d, mixed);
        for (long i = 0; i < N * d; i += 16) *(v16 *)(x + i) += *(v16 *)(mixed + i);
        for (long t = 0; t < N; t++)
            rms_norm(x + t * d, layer->expert_norm, s->eps, d, normed + t * d);
        experts(s, w, b, index, normed, x, work);
        if (b->states) memcpy(b->states + index * N * d, x, (size_t)(N * d) * sizeof(float));
    }
    for (long o = 0; o < b->num_outputs; o++)
        rms_norm(x + b->outputs[o] * d, w->final_norm, s->eps, d, normed + o * d);
    matmul(normed, b->num_outputs, d, w->head, s->vocab, b->logits);
}

/* Sixteen of a row's logits, tempered; past the row's end -inf. */
static inline v16 tempered(const float *logits, long i, long V, float inverse_temperature) {
    v16 values = splat(-INFINITY);
    if (i + 16 <= V) values = *(const v16 *)(logits + i);
    else memcpy(&values, logits + i, (size_t)(V - i) * sizeof(float));
    return values * inverse_temperature;
}

static long best(const float *logits, long V) {
    long chosen = 0;
    for (long i = 1; i < V; i++)
        if (logits[i] > logits[chosen]) chosen = i;
    return chosen;
}

/* The first token at which the running mass exceeds the target. */
static long draw(const float *logits, long V, float factor, float top, double target) {
    double passed = 0.0;
    for (long i = 0; i < V; i += 16) {
        v16 mass = exp_or_zero(tempered(logits, i, V, factor) - top);
        double block = sum16(mass);
        if (passed + block <= target) {
            passed += block;
            continue;
        }
        for (long k = 0; k < 16 && i + k < V; k++) {
            passed += mass[k];
            if (mass[k] > 0.0f && passed > target) return i + k;
        }
    }
    long last = V - 1; /* rounding carried the target past the end */
    while (last > 0 && logits[last] == -INFINITY) last--;
    return last;
}

/* The largest tempered logit of a row, and the sum of e^(logit - largest) over it. */
static __attribute__((noinline)) float row_mass(const float *logits, long V, float factor,
                                                double *total) {
    v16 highest = splat(-INFINITY);
    for (long i = 0; i < V; i += 16) {
        v16 block = tempered(logits, i, V, factor);
        highest = select16(block > highest, block, highest);
    }
    float top = max16(highest);
    *total = 0.0;
    for (long i = 0; i < V; i += 16)
        *total += sum16(exp_or_zero(tempered(logits, i, V, factor) - top));
    return top;
}

static __attribute__((noinline)) float log_probability(float logit, float factor, float top,
                                                       double total) {
    return (float)(logit * factor - top - log(total));
}

/* Draws one token a row; an inverse temperature of 0 takes the best, its log-probability being that
 * at temperature 1. Uniforms lie in [0, 1). */
void penstock_sample(const float *logits, int64_t rows, int64_t V, const float *inverse_temperatures,
                     const float *uniforms, int32_t *tokens, float *logprobs) {
    for (int64_t r = 0; r < rows; r++, logits += V) {
        int greedy = inverse_temperatures[r] == 0.0f;
        float factor = greedy ? 1.0f : inverse_temperatures[r];
        double total;
        float top = row_mass(logits, V, factor, &total);
        long token = greedy ? best(logits, V) : draw(logits, V, factor, top, uniforms[r] * total);
        tokens[r] = (int32_t)token;
        logprobs[r] = log_probability(logits[token], factor, top, total);
    }
}

/* What `penstock_sample` would have said of given tokens. */
void penstock_logprobs(const float *logits, int64_t rows, int64_t V, float inverse_temperature,
                       const int32_t *tokens, float *logprobs) {
    for (int64_t r = 0; r < rows; r++, logits += V) {
        double total;
        float top = row_mass(logits, V, inverse_temperature, &total);
        logprobs[r] = log_probability(logits[tokens[r]], inverse_temperature, top, total);
    }
}

/* `round_mxfp8`, for whoever compares it. */
void penstock_round_mxfp8(float *x, int64_t n) { round_mxfp8(x, n); }
