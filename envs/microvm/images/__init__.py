"""What machines are made of, found in the cache.

`assets.py` finds kernels, images and programs; `layers.py` finds the layers above the base image
and opens backends of them. To add a file to a set: a field and its kind in `assets.py`; to add a
layer: `penstock images build`.
"""
