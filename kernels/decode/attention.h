/* Attention over the KV cache. */
#ifndef PENSTOCK_DECODE_ATTENTION_H
#define PENSTOCK_DECODE_ATTENTION_H
#include "matmul.h"
#include "shapes.h"

#define TILE 16
#define GROUP_MAX 4 /* maximum number of query heads that share one pass over the keys */

/* Computes the softmax of G query heads over positions 0 .. count-1: numerators go to `scores`, and
 * inverse denominators to `inverse`. */
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
            if (t + TILE > count) /* mask the rest of the last tile */
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

/* Multiplies scores by values [count, D] -> out [G, D], for 16 * `vectors` columns. Even and odd
 * positions have separate sums. */
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

/* Attention of G query heads with shared keys and values, over positions 0 .. count-1 -> [G, D]. */
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

/* Attention of normed [N, hidden] -> attended [N, heads * D]; `qkv` is scratch. All tokens are
 * stored before any attends, because tokens of a prefill attend to one another. */
static void attention(const shape_t *s, const weights_t *w, const step_t *b, long index,
                      const float *normed, float *qkv, float *attended, float *scores) {
    const layer_t *layer = &w->layers[index];
    long D = s->head_dim, q = s->heads * D, kv = s->kv_heads * D, width = q + 2 * kv;
    long group = s->heads / s->kv_heads;
    matmul(normed, b->num_tokens, s->hidden, layer->qkv, width, qkv);
    for (long t = 0; t < b->num_tokens; t++) {
        float *row = qkv + t * width;
        if (layer->qkv_bias)
            for (long i = 0; i < width; i++) row[i] += layer->qkv_bias[i];
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

#endif
