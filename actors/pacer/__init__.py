"""The gate: grants rollouts within the staleness budget, and picks their tasks.

`budget.py` is the arithmetic, `curriculum.py` the choice of tasks, `commands.py` makes the
commands; `actor.py` wires them to the log. Another curriculum is one class with `pick` and its line
in `curriculum.CURRICULA`.
"""
