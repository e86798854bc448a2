/* Which experts a token takes, and their record. */
#ifndef PENSTOCK_DECODE_ROUTING_H
#define PENSTOCK_DECODE_ROUTING_H
#include "shapes.h"
#include "vectors.h"

/* Puts recorded experts in the place of the router's own, which have negated scores. One whose
 * probability is below `least` gives way to the best expert that is not among the others.
 * Counts in flips the recorded slots that the router would not have chosen, and those replaced. */
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

/* Scores of one token -> its experts and their weights, best first, ties to the lower id; or the
 * recorded experts in their order, those that have at least `plausible` times the probability of the
 * weakest of its own. */
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
