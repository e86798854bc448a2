"""The generator: one inference engine behind `generate.<purpose>`, with weight updates in flight.

`engine.py` is what a generator expects of any engine and `actor.py` serves it. `torch_engine.py` is
the embedded engine: `core.py` batches, a decoder steps (`native_decoder.py`, or `decoder.py` where
nothing can be compiled), `staging.py` swaps weights, `worker.py` is its thread. To add an engine,
pass `tests/contract/check_engine.py` with it.
"""
