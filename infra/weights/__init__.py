"""`penstock weights`: lossless deltas between two checkpoints, as files.

It works on safetensors files and folders of them, whatever trained them, without any other part of
Penstock. `docs/weight-format.md` documents the format.

```
 files/checkpoint.py  files and folders as tensors  ┐             ┌─▶ diff.py ─▶ DELTA
 patched.py           a checkpoint behind a delta   ┴─▶ `Weights` ┼─▶ actions.py ─▶ OUT
                                                                  └─▶ inspect.py
```
`Weights` (files/tensors.py) is anything whose tensors can be read slice by slice. So a merge is a
diff against a checkpoint behind several deltas, and nothing ever holds a whole model. To add a
command, add its arguments to `command.py` and a function to `actions.py`.
"""
