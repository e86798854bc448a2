"""Finds the files that machines are made of in the cache.

`assets.py` finds kernels, images and programs; `layers.py` finds the layers above the base image
and opens backends with them. To add a file to a set, add its fields and its kind in `assets.py`.
Layers are built by `penstock images build`.
"""
