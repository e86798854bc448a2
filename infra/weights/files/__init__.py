"""Checkpoints and deltas on disk, as tensors that can be read slice by slice.

`tensors.py` has the `Weights` protocol, `checkpoint.py` safetensors files and folders as such;
`delta_file.py` reads and writes deltas, `manifest.py` is their table of contents; `output.py`
writes files that appear whole or not at all. To read another format: a class with the members of
`Weights`.
"""
