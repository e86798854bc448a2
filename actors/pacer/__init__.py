"""The gate: grants rollouts within the staleness budget, and picks their tasks.

`budget.py` is the arithmetic, `curriculum.py` the choice of tasks; `actor.py` wires them to the log
and makes the commands. To add a curriculum: one class with `pick` and its line in
`curriculum.CURRICULA`.
"""
