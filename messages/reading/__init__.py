"""From bytes and names to values: every fault of what is read is a typed error.

`parsing.py` decodes bytes of any origin, `claims.py` reads the objects that events name, and
`trajectories.py` the turns; `sealed.py` is what users' turns are until their keys open them.
Readers of a new format call `parse_json`, `parse_msgpack` or `parse_toml` and never the decoder
itself. `asyncapi.py` describes messages to other readers.
"""
