"""The bus that runs use, and the embedded nats-server.

`jetstream.bus.NatsBus` implements `messages.bus.Bus`; tests and simulations use a seeded
simulation of it, `tests/support/memory_bus/`. To add a bus: a class that passes
`tests/contract/bus/check_bus.py`; it needs that and nothing else.
"""
