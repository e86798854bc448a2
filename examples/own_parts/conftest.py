"""Has tests find own.py beside it."""
