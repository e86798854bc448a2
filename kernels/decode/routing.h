/* Choice of experts per token, and its record. */
#ifndef PENSTOCK_DECODE_ROUTING_H
#define PENSTOCK_DECODE_ROUTING_H
#include "shapes.h"
#include "vectors.h"

/* Replaces the router's own experts, whose scores are negated, by recorded ones. A recorded expert
 * with a probability below `least` is replaced by the best expert that the token does not use yet.
 * `flips` counts recorded slots that the router would not have chosen, and those replaced. */
static void replay_route(const shape_t *s, const float *scores, float total, const int16_t *recorded,
                         float least, int32_t *ids, float *weights, int32_t *flips) {
    for (int k = 0; k < s->chosen; k++) {
        ids[k] = recorded[k];
        weights[k] = fabsf(scores[ids[k]]) / total;
        if (flips) flips[0] += scores[ids[k]] > 0.0f;
        if (weights[k] < least) ids[k] = -1;
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

/* Chooses the experts of one token and their weights from its scores: best first with ties going to
 * the lower id, or the recorded experts in their order. A recorded expert needs at least
 * `plausible` times the probability of the weakest expert that the router would choose. */
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
        scores[best] = -scores[best]; /* marks it as chosen; the magnitude is still needed */
    }
    if (recorded && recorded[0] >= 0)
        replay_route(s, scores, total, recorded, plausible * weights[s->chosen - 1], ids, weights,
                     flips);
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

#endif
