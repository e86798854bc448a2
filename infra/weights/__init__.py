"""`penstock weights`: lossless deltas between two checkpoints, as files.

Works on safetensors files and on folders of them, whatever they were trained with; no other part of
Penstock has to run. The format is documented in `docs/weight-format.md`.

```
 files/checkpoint.py  files and folders as tensors ┐             ┌─▶ diff.py ─▶ DELTA
 patched.py           one seen through a delta     ┴─▶ `Weights` ┼─▶ actions.py ─▶ OUT
                                                                 └─▶ inspect.py
```
`Weights` (files/tensors.py) is anything whose tensors can be read slice by slice. So a merge is a
diff against a checkpoint that is seen through several deltas, and nothing ever holds a whole model.
To add a command: its arguments in `command.py`, and a function in `actions.py`.
"""
