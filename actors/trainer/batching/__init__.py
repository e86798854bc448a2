"""Selects the samples of a batch: pending groups, deadlines, live samples, the manifest.

`batcher.py` decides; `audit.py` checks what a manifest claims.

"""
