"""The gate: grants rollouts within the staleness budget, and picks their tasks.

`staleness_budget.py` is the arithmetic, `curriculum.py` the choice of tasks; `actor.py` wires them
to the log and makes the commands. To choose tasks in another way, change
`Curriculum.pick`: its grants are on the log, so that a restart knows what was chosen.
"""
