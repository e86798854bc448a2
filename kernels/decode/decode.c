/* Inference step of a transformer on a CPU, in float32: Qwen3, Qwen3-MoE, Llama, Mistral, Qwen2.
 *
 * The order of every sum depends only on its length, so a token's results have the same bits alone
 * or in any batch, prefilled in any chunks, with or without a cached prefix.
 *
 * Matrices are packed in panels: row-major W [N, K] becomes [ceil(N/32)][K][32], zero-padded. Keys
 * are stored in tiles of 16 positions, [T/16][D][16], and values by position, [T][D]. D and T must
 * be multiples of 16. Vector code uses GCC's portable vector extension; build with -O3
 * -march=native.
 *
 * `matmul.h` has matrix products and norms, `attention.h` and `experts.h` the two halves of a
 * layer, and `sampling.h` sampling and log probabilities. */
#include "attention.h"
#include "experts.h"
#include "sampling.h"

/* Returns the number of scratch floats that a step over n tokens needs. */
int64_t penstock_scratch(const shape_t *s, int64_t n) {
    int64_t qkv = (int64_t)(s->heads + 2 * s->kv_heads) * s->head_dim;
    int64_t attended = (int64_t)s->heads * s->head_dim;
    int64_t mixture = s->experts + 3 * (int64_t)s->chosen + s->hidden + 3 * (int64_t)s->width +
                      (int64_t)s->chosen * s->hidden;
    /* Attention and experts use the same scratch, one after the other. */
    int64_t larger = qkv + attended > mixture ? qkv + attended : mixture;
    return n * (3 * (int64_t)s->hidden + larger) + GROUP_MAX * (int64_t)s->positions;
}

/* Runs all tokens through all layers; tokens of one row must be in order of position. */
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

/* Rounds the experts' operands, for training in PyTorch. */
void penstock_round_mxfp8(float *x, int64_t n) { round_mxfp8(x, n); }
