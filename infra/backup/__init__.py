"""Backups of a run, even while it is up, and moves between servers.

`streams.py` copies JetStream's streams as the server stores them, and `folder.py` a whole run.
"""
