"""The two buses behind `messages.bus.Bus`, and the embedded nats-server.

`nats_bus.NatsBus` is the real one; `memory_bus.MemoryBus` is a seeded simulation of it. Both pass
`tests/contract/bus/check_bus.py`; a third one needs that and nothing else.
"""
