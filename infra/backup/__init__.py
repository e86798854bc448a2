"""Backups of a run, also of one that is up, and the way from one server to several.

`streams.py` copies JetStream's streams as the server stores them, `folder.py` a whole run.
"""
