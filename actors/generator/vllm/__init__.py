"""vLLM as the engine of a generator, in an environment of its own (`make vllm-env`).

```
 generator's process                               vLLM's engine process
 engine.py ── prompt, settings ──▶ AsyncLLM ─────▶ scheduler, cache, model
     ▲                                                 │ logits      │ experts of every token
     └── tokens, log-probabilities, versions ◀── sampler.py     routes.py, by cache slot
 mirror.py ── a mapped file ─────────────────────▶ worker.py: loads it whole, computes the probe
```
vLLM schedules, caches and computes; tokens are drawn by the sampler that the native engine uses, so
settings, seeds, grammars and supports mean the same. `options.py` holds what vLLM is started with.
Only `engine.py` and `worker.py` import vLLM, when they start.
"""
