"""Replicas of generators, as their clients see them.

`table.py` knows which replicas there are, how loaded they are, and which one a session's requests
go to; `client.py` sends a request.
"""
