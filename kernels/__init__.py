"""Numeric kernels: GPU operations with frozen references, the decoding step, deltas, digests.

- `ops/` is the interface of the operations, `reference/` its frozen arithmetic, `cuda/` the GPU.
- `decode/` is the CPU's decoding step; `route_segments.py` seals the routes that it records.
- `delta/` codes what changed between two versions of the weights; `digest.py` hashes them.
- `native.py` compiles and caches C; `arrays.py` packs arrays for messages.

To add an operation, see `ops/__init__.py`.
"""
