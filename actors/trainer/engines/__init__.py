"""Where the weights are trained: `TrainingEngine`, and the engine of one process.

```
 RlPhase, Replay ──▶ TrainingEngine ─┬▶ LocalEngine: a learner in this process
                                     └▶ RankedEngine (`ranks/`): processes that share the weights
```
"""
