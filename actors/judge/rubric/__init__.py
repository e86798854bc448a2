"""Rubric judges: a model answers one multiple-choice question per criterion.

`config.py` declares the judges, `fence.py` separates an episode's untrusted texts
(`actors/judge/submission.py`) from the question, `question.py` writes the question and reads the
letter, and `judge.py` asks, repeats and aggregates. Answers come from an OpenAI-compatible service
(`endpoint.py`) or from the run's own replicas at a fixed version (`generators.py`). `contrast.py`
asks which of a group's attempts cheat (`penstock judge audit`).
"""
