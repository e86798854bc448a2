"""Checkpoints and deltas on disk, as tensors that can be read slice by slice.

`tensors.py` has the `Weights` protocol, which `checkpoint.py` implements for safetensors files and
folders; `delta_file.py` reads and writes deltas, with the table of contents in `manifest.py`;
`output.py` writes files atomically. To read another format, implement `Weights`.
"""
