"""Numeric kernels: tensor operations, the CPU decoding step, weight deltas and digests.

- `ops/` is the public interface of the operations. `reference/` defines their results bit for bit;
  `cuda/` implements them on GPUs.
- `decode/` is the decoding step on CPUs; `route_segments.py` seals the routes that it records.
- `delta/` encodes the difference of two versions of weights; `digest.py` hashes weights.
- `native.py` compiles C and CUDA sources and caches the results; `arrays.py` converts arrays for
  messages.

To add an operation, see `ops/__init__.py`.
"""
