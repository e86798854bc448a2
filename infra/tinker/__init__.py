"""`penstock tinker`: serves the API of the `tinker` SDK, adapters over one base; docs/tinker.md.

```
 SDK ──HTTP──▶ routes ──TinkerCalled──▶ log ─┬─▶ executor: model, sampler ──▶ TinkerAnswered ──▶ SDK
                                             ├─▶ a restart: calls since the model's TinkerKept
                                             └─▶ replay: every call again, every digest compared
```
What a call does depends on the log before it alone, so that a restart and a replay give its bits.
"""
