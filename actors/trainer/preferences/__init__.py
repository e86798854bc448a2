"""Training on preferences: DPO for pairs, KTO for labels, from files before RL and from live users.

`examples.py` defines examples as token ids and their form in the store, `objective.py` the losses
and gradients, and `phase.py` the phase before RL. For live users, `waiting.py` queues preferences
for a step, and `reading.py` reads their content from the log.
"""
