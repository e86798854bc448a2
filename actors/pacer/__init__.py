"""The pacer grants rollouts within the staleness budget and picks their tasks.

`staleness_budget.py` computes the bound and `curriculum.py` picks tasks; both are pure. `actor.py`
connects them to the log and issues the commands of a group. To change how tasks are picked, change
`Curriculum.pick`: grants are on the log, so a restarted pacer knows its earlier picks.
"""
