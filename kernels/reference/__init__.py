"""Slow and plain: what the fast paths are checked against."""
