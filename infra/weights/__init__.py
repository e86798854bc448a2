"""`penstock weights`: lossless deltas between two checkpoints, as files.

Works on safetensors files and on folders of them, whatever they were trained with; needs nothing
else of Penstock running. The format is documented in `docs/weight-format.md`.

```
 files/         files and folders as tensors      ┐                     ┌─▶ apply.py   OUT
 patched.py     a checkpoint seen through a delta ┴─▶ `Weights` ─▶ diff.py ─▶ delta_file.py
                                                                        └─▶ verify.py, inspection.py
```
`Weights` (tensors.py) is anything whose tensors can be read piece by piece: so a merge is a diff
against a checkpoint that is seen through several deltas, and nothing ever holds a whole model.
To add a command: a function in a file of its own, and a row in `command.py`.
"""
