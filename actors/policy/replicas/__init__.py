"""The replicas of generators as those who ask them see them.

`affinity.py` says which replica a session belongs to, `table.py` which are there, how loaded they
are and which one is asked, and `client.py` asks it.
"""
