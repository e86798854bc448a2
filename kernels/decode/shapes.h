/* Structures for the model, its weights and a step, filled in by `layout.py`. */
#ifndef PENSTOCK_DECODE_SHAPES_H
#define PENSTOCK_DECODE_SHAPES_H
#include <stdint.h>

typedef struct {
    int32_t layers, hidden, heads, kv_heads, head_dim, experts, chosen, width, vocab;
    int32_t rows, positions, normalize, wide_routes, mxfp8;
    float eps;
} shape_t;

typedef struct {
    const float *attention_norm, *qkv, *qkv_bias, *output, *query_norm, *key_norm;
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
    void *routes;           /* [rows, positions, layers, chosen], or NULL to record none */
    const int16_t *replay;  /* [num_tokens, layers, chosen], negative for free tokens, or NULL */
    float *states;          /* [layers, num_tokens, hidden]: output of each layer, or NULL */
    int32_t *flips;         /* [layers, 2]: see replay_route, or NULL */
    float plausible;
} step_t;

#endif
