/* One inference step of a Qwen3-MoE or Qwen3 transformer on the CPU, in float32.
 *
 * Every sum runs in an order that depends on nothing but its own length, so a token's result is the
 * same bits alone or in any batch, prefilled in any chunks, with or without a cached prefix.
 *
 * Matrices come packed in panels: W [N, K] row-major becomes [ceil(N/32)][K][32], zero-padded.
 * Keys lie in tiles of 16 positions, [T/16][D][16]; values row by row, [T][D]. D must be a multiple
 * of 16, T of 16. Vector code is GCC's portable vector extension; build with -O3 -march=native.
 *
 * `matmul.h` has products and norms, `attention.h` and `experts.h` the two halves of a layer,
 * `sampling.h` what is made of the logits. */
#include "attention.h"
#include "experts.h"
#include "sampling.h"

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

/* The rounding of the experts' operands, for training in torch. */
void penstock_round_mxfp8(float *x, int64_t n) { round_mxfp8(x, n); }
