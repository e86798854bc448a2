"""The generator: one inference engine behind `generate.<purpose>`, with weight updates in flight.

`engine.py` is what a generator expects of any engine and `actor.py` serves it. `torch_engine.py` is
the embedded engine: `core.py` batches, one of `decoders/` steps, `staging.py` swaps weights,
`worker.py` is its thread. To add an engine, pass `tests/contract/check_engine.py` with it.
"""
