"""The bus on NATS JetStream.

`connection.py` is the one connection; `bus.py` composes what publishes, reads, consumes and serves
over it. To add an operation: a method of `NatsBus` and one of `MemoryBus`, with a check in the
contract suite of the bus.
"""
