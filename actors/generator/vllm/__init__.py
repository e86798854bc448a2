"""vLLM as the engine of a generator, in a separate environment (`make vllm-env`).

```
 generator's process                               vLLM's engine process
 engine.py ── prompt, settings ──▶ AsyncLLM ─────▶ scheduler, KV cache, model
     ▲                                                 │ logits      │ experts of every token
     └── tokens, log-probabilities, versions ◀── TurnSampler     RouteRecorder, by cache slot
 mirror.py ── a mapped file ─────────────────────▶ worker.py: loads it whole, computes the probe
```
vLLM schedules, caches and computes. Tokens are drawn by the same sampler that the native engine
uses, so settings, seeds, grammars and supports mean the same in both. `options.py` has the
arguments with which vLLM is started. vLLM is only imported (`library.py`) when an engine starts.
"""
