"""Objects in a JetStream bucket, over core NATS, in the layout of the NATS object store.

It replaces nats-py's own client of that layout, which requests chunk after chunk: here one request
brings many chunks, and chunks are sent ahead of their acknowledgements. `penstock bench bus`
compares both (24 MB objects on loopback, alternating): get 99 to 214 MB/s against 12 to 24; put is
about equal where a round trip costs nothing, and was 28 against 14 MB/s on a loaded machine. Puts
are also conditional: an object is never overwritten. To add an operation: a method of
`JetStreamStore`, and a check in the stores' contract suite.
"""
