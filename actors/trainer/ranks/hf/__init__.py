"""Models of the package transformers on ranks: loading, routes, the forward pass, tensor names.

Another architecture is a line in `routing.py`, which says how its router weighs experts, and, where
transformers fuses its tensors in another way, in `tensors.py`. Needs the extra `ranks`.
"""
