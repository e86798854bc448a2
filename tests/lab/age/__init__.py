"""A service of any age: what its log holds, and how long each role takes to catch up with it.

`aged_log.py` makes valid events through the join's and the batcher's own code, `roles.py` builds
the roles that read them, `command.py` measures.
"""
