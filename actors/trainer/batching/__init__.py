"""Which samples make a batch: groups as they come in, their deadlines, live samples, the manifest.

`batcher.py` decides, `audit.py` checks what a manifest claims.
"""
