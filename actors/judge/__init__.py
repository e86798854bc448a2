"""Judges grade finished rollouts.

`task_steps.py` grades each step of a task by its hidden tests, which `hidden_tests.py` runs in a
fresh machine, once per distinct result; `audit.py` looks for cheating, `set_ups.py` records the
files that a task's set-up creates, `reward.py` turns findings into a reward, and `actor.py`
publishes the verdict.
To add a judge, write a class with `name`, `version` and `judge`, and add it to `judges.JUDGES`.
"""
