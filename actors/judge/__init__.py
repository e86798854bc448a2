"""Judges: what a finished rollout is worth.

`task_steps.py` grades each step of a task by its hidden tests, which `hidden_tests.py` runs in a
fresh machine, once per distinct result; `audit.py` looks for cheating, `set_ups.py` records what a
task's own set-up makes, `reward.py` turns findings into a reward, `actor.py` publishes it as a
verdict.
To add a judge: one file with a class that has `name`, `version` and `judge`, and one line in
`judges.JUDGES`.
"""
