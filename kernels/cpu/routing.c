/* Router top-k with replay, expert ids in as few bits as they need, and the sum of experts. */
#include "numbers.h"

static int is_better(float a, int a_id, float b, int b_id) {
    return a > b || (a == b && a_id < b_id);
}

static void choose(const float *ranked, int experts, int chosen, int *own) {
    int count = 0;
    for (int id = 0; id < experts; id++) {
        if (count == chosen && !is_better(ranked[id], id, ranked[own[count - 1]], own[count - 1]))
            continue;
        int place = count < chosen ? count++ : chosen - 1;
        for (; place && is_better(ranked[id], id, ranked[own[place - 1]], own[place - 1]); place--)
            own[place] = own[place - 1];
        own[place] = id;
    }
}

static int is_among(int id, const int *ids, const uint8_t *counts, int n) {
    for (int i = 0; i < n; i++)
        if (ids[i] == id && (!counts || counts[i])) return 1;
    return 0;
}

/* Turns `own` into the replayed ids. */
static void replay(const int16_t *recorded, const float *scores, float plausibility_min, int chosen,
                   int *own, int32_t *mismatched, int32_t *replaced) {
    int ids[32], next = 0, result[32];
    uint8_t kept[32];
    for (int i = 0; i < chosen; i++) {
        ids[i] = recorded[i];
        kept[i] = scores[ids[i]] >= plausibility_min;
        *mismatched += !is_among(ids[i], own, NULL, chosen);
    }
    for (int i = 0; i < chosen; i++) {
        result[i] = ids[i];
        if (kept[i]) continue;
        while (is_among(own[next], ids, kept, chosen)) next++;
        result[i] = own[next++];
        ++*replaced;
    }
    memcpy(own, result, chosen * sizeof(int));
}

void penstock_router_topk(const float *logits, const int16_t *recorded, long tokens, int experts,
                          int chosen, int normalize, float plausibility_min, int16_t *ids,
                          float *weights, int32_t *mismatched, int32_t *replaced) {
    float ranked[CHUNK], scores[CHUNK];
    for (long t = 0; t < tokens; t++) {
        const float *row = logits + t * experts;
        const int16_t *old = recorded && recorded[t * chosen] >= 0 ? recorded + t * chosen : NULL;
        float top = -INFINITY, lanes[LANES] = {0.0f}, sum = 0.0f;
        int own[32];
        for (int e = 0; e < experts; e++) {
            ranked[e] = row[e] != row[e] ? -INFINITY : row[e];
            top = max_of(top, row[e]);
        }
        for (int e = 0; e < experts; e++) scores[e] = exp_frozen(row[e] - top);
        for (int e = 0; e < experts; e++) lanes[e % LANES] += scores[e];
        float total = fold_lanes(lanes);
        for (int e = 0; e < experts; e++) scores[e] /= total;
        choose(ranked, experts, chosen, own);
        mismatched[t] = replaced[t] = 0;
        if (old) replay(old, scores, plausibility_min, chosen, own, mismatched + t, replaced + t);
        for (int i = 0; i < chosen; i++) sum = i ? sum + scores[own[i]] : scores[own[i]];
        for (int i = 0; i < chosen; i++) {
            ids[t * chosen + i] = (int16_t)own[i];
            weights[t * chosen + i] = normalize ? scores[own[i]] / sum : scores[own[i]];
        }
    }
}

void penstock_routes_pack(const int16_t *ids, long tokens, long count, int width, long bytes,
                          uint8_t *packed) {
    for (long t = 0; t < tokens; t++) {
        uint8_t *to = packed + t * bytes;
        uint64_t bits = 0;
        int held = 0;
        for (long i = 0; i < count; i++) {
            bits |= (uint64_t)(uint16_t)ids[t * count + i] << held;
            for (held += width; held >= 8; held -= 8, bits >>= 8) *to++ = (uint8_t)bits;
        }
        if (held) *to = (uint8_t)bits;
    }
}

void penstock_routes_unpack(const uint8_t *packed, long tokens, long count, int width, long bytes,
                            int16_t *ids) {
    const uint32_t mask = (1u << width) - 1;
    for (long t = 0; t < tokens; t++) {
        const uint8_t *from = packed + t * bytes;
        uint64_t bits = 0;
        int held = 0;
        for (long i = 0; i < count; i++) {
            for (; held < width; held += 8) bits |= (uint64_t)*from++ << held;
            ids[t * count + i] = (int16_t)(bits & mask);
            bits >>= width;
            held -= width;
        }
    }
}

void penstock_moe_combine(const void *per_slot, const float *weights, int dtype, long tokens,
                          long chosen, long width, void *out) {
    for (long t = 0; t < tokens; t++)
        for (long first = 0; first < width; first += CHUNK) {
            long n = width - first < CHUNK ? width - first : CHUNK;
            float total[CHUNK], values[CHUNK];
            for (long slot = 0; slot < chosen; slot++) {
                float weight = weights[t * chosen + slot];
                load(per_slot, dtype, (t * chosen + slot) * width + first, n, values);
                if (slot)
                    for (long i = 0; i < n; i++)
                        total[i] = __builtin_fmaf(values[i], weight, total[i]);
                else
                    for (long i = 0; i < n; i++) total[i] = values[i] * weight;
            }
            store(out, dtype, t * width + first, n, total);
        }
}
