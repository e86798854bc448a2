/* Mixture of experts, or without a router a dense feed-forward layer. */
#ifndef PENSTOCK_DECODE_EXPERTS_H
#define PENSTOCK_DECODE_EXPERTS_H
#include "matmul.h"
#include "mxfp8.h"
#include "routing.h"

/* Adds the experts' output for normed [N, hidden] to x [N, hidden]. Results are kept per slot and
 * added in slot order at the end, so that the order of the sum does not depend on the batch. */
static void experts(const shape_t *s, const weights_t *w, const step_t *b, long index,
                    const float *normed, float *x, float *scratch) {
    const layer_t *layer = &w->layers[index];
    long N = b->num_tokens, d = s->hidden, f = s->width, K = s->chosen, E = s->experts;
    long gate_up_size = (2 * f + PANEL - 1) / PANEL * PANEL * d;
    long down_size = (d + PANEL - 1) / PANEL * PANEL * f;
    float *scores = scratch, *weights = scores + N * E, *gathered = weights + N * K;
    float *both = gathered + N * d, *active = both + N * 2 * f, *results = active + N * f;
    int32_t *ids = (int32_t *)(results + N * K * d), *slots = ids + N * K;
    if (layer->gate) matmul(normed, N, d, layer->gate, E, scores);
    int32_t *flips = b->flips ? b->flips + 2 * index : 0;
    for (long t = 0; t < N; t++) {
        if (!layer->gate) { /* dense model: experts = chosen = 1 */
            ids[t] = 0;
            weights[t] = 1.0f;
            continue;
        }
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

#endif
