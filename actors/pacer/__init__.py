"""The pacer: grants rollouts within the staleness budget and picks their tasks.

`staleness_budget.py` computes the bound, `curriculum.py` chooses tasks; both are pure. `actor.py`
connects them to the log and issues a group's commands. To choose tasks in another way, change
`Curriculum.pick`: grants are on the log, so a restarted pacer knows what was chosen.
"""
