/* Sampling of tokens and their log probabilities from logits. */
#ifndef PENSTOCK_DECODE_SAMPLING_H
#define PENSTOCK_DECODE_SAMPLING_H
#include "vectors.h"

/* Returns sixteen logits of a row divided by the temperature, with -inf past the end. */
static inline v16 tempered(const float *logits, long i, long V, float inverse_temperature) {
    v16 values = splat(-INFINITY);
    if (i + 16 <= V) values = *(const v16 *)(logits + i);
    else memcpy(&values, logits + i, (size_t)(V - i) * sizeof(float));
    return values * inverse_temperature;
}

/* Returns e^x, or 0 below x = -87, near the limit of float32: such a token has no probability. */
static inline v16 mass16(v16 x) { return select16(x < splat(-87.0f), splat(0.0f), exp16(x)); }

static long best(const float *logits, long V) {
    long chosen = 0;
    for (long i = 1; i < V; i++)
        if (logits[i] > logits[chosen]) chosen = i;
    return chosen;
}

/* Returns the first token at which the cumulative mass exceeds the target; it always has mass. */
static long draw(const float *logits, long V, float factor, float top, double target) {
    double passed = 0.0;
    long last = 0;
    for (long i = 0; i < V; i += 16) {
        v16 mass = mass16(tempered(logits, i, V, factor) - top);
        double block = sum16(mass);
        if (passed + block <= target) {
            passed += block;
            continue;
        }
        for (long k = 0; k < 16 && i + k < V; k++) {
            passed += mass[k];
            if (mass[k] > 0.0f) {
                last = i + k;
                if (passed > target) return last;
            }
        }
    }
    return last; /* rounding moved the target past the end */
}

/* Returns the largest tempered logit of a row, and in `total` the sum of e^(logit - largest). Not
 * inlined, so that sampling and `penstock_logprobs` run the same instructions. */
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
        *total += sum16(mass16(tempered(logits, i, V, factor) - top));
    return top;
}

static __attribute__((noinline)) float log_probability(float logit, float factor, float top,
                                                       double total) {
    float found = (float)(logit * factor - top - log(total));
    return found < 0.0f ? found : 0.0f; /* rounding may give a certain token more than 0 */
}

/* Samples one token per row. An inverse temperature of 0 takes the most likely token and gives its
 * log probability at temperature 1. Uniforms are in [0, 1). */
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

/* Returns the log probabilities that `penstock_sample` gives for tokens; temperatures are > 0. */
void penstock_logprobs(const float *logits, int64_t rows, int64_t V,
                       const float *inverse_temperatures, const int32_t *tokens, float *logprobs) {
    for (int64_t r = 0; r < rows; r++, logits += V) {
        double total;
        float top = row_mass(logits, V, inverse_temperatures[r], &total);
        logprobs[r] = log_probability(logits[tokens[r]], inverse_temperatures[r], top, total);
    }
}

#endif
