"""Inference step on CPUs: one call runs a batch of tokens through a Qwen3 or Qwen3-MoE transformer.

`decode.c` implements it, `layout.py` packs weights for it, and `kernel.py` calls it. A token's
results have the same bits in any batch, so a trainer that uses the same step reproduces the
sampler's numbers exactly.

To extend the step, write a header with the function and its call in `decode.c`, and add its data
to both `shapes.h` and `layout.py`.
"""
