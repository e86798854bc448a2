"""Processes that hold the weights together and take steps with one another, on torch.distributed.

Any number of ranks gives the bits of the one process that `engines/local.py` is.
"""
