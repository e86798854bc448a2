"""The two buses behind `messages.bus.Bus`, and the embedded nats-server.

`jetstream.bus.NatsBus` is the real one; `memory.bus.MemoryBus` is a seeded simulation of it. To add
one: a class that passes `tests/contract/bus/check_bus.py`; it needs that and nothing else.
"""
