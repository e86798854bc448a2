"""The generator actor: serves an inference engine whose weights are updated while it samples.

`engine.py` defines the interface of an engine and `actor.py` serves one. `torch_engine.py` is the
embedded engine, with its worker thread and its double-buffered weights; `core.py` does continuous
batching, and `decoders/` computes the steps. `vllm/` runs vLLM behind the same interface. A new
engine must pass `tests/contract/check_engine.py`.
"""
