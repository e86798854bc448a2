"""The engine's step on a GPU."""
