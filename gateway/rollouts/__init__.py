"""Rollouts played by external programs, in any language, with any harness, on any machine.

A client takes an attempt at a task, points its agent to a model route that belongs to this attempt,
and posts a reward at the end. What the policy sampled is recorded token by token, so attempts train
in groups, like those of the run's own harness.
"""
