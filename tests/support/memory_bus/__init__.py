"""The bus in memory: a seeded simulation of JetStream, with faults, for simulations and tests.

To add a fault: a probability in `Faults` (server.py), and the place that draws it.
"""
