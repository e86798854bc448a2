"""Training on preferences: DPO for pairs, KTO for labels, before RL from files and live.

`losses.py` has the formulas, `examples.py` token ids and their form in the store, `objective.py`
forward passes and gradients, `phase.py` the phase before RL; `waiting.py` and `reading.py` are the
live side: what waits for a step, and its content from the log.
"""
