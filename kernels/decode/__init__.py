"""The CPU's inference step: one call runs a batch of tokens through a Qwen3-MoE transformer.

`decode.c` says how it computes, `layout.py` packs weights for it, `kernel.py` calls it.
A token's results are the same bits in any batch, so a trainer that
runs its tokens through the same step has the sampler's numbers, exactly.

To add to the step: a header with the function, its call in `decode.c`, and what it needs in
`shapes.h` and `layout.py` alike.
"""
