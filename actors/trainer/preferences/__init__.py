"""Training on preferences: DPO for pairs, KTO for labels, from files before RL and from users live.

`examples.py` holds token ids and their form in the store; `objective.py` the formulas, forward
passes and gradients; `phase.py` the phase before RL. On the live side, `waiting.py` keeps what
waits for a step, and `reading.py` reads its content from the log.
"""
