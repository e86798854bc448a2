"""Checkpoints and deltas on disk, as tensors that can be read piece by piece.

A checkpoint (`checkpoint.py`) and a checkpoint seen through a delta (`patched.py`) are both
`Weights` (`tensors.py`); `delta_file.py` reads and writes deltas, `manifest.py` is their head.
"""
