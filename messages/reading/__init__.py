"""Readers of bytes, claims and turns, which report every fault in their input as a typed error.

`parsing.py` decodes bytes from any source, `claims.py` reads the objects that events name, and
`trajectories.py` reads turns; `sealed.py` has the encrypted form of users' turns. Code that reads
a new format calls `parse_json`, `parse_msgpack` or `parse_toml` and never the decoder itself.
`asyncapi.py` describes the messages to other programs.
"""
