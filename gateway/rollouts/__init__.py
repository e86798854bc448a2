"""Rollouts that programs outside of the run play: any language, any harness, any machine.

A client takes an attempt at a task, points its agent to a model route that belongs to this attempt,
and posts a reward at the end. What the policy sampled is recorded token by token, so that attempts
train in groups like those of the run's own harness.
"""
