"""Rubric judges: a model answers one multiple-choice question per criterion.

`config.py` declares them, `fence.py` keeps an episode's texts (`actors/judge/submission.py`)
apart from the question, `question.py` writes the question and reads the letter, `judge.py`
asks, repeats and counts. Who answers: `endpoint.py` any OpenAI-compatible service,
`generators.py` the run's own replicas at one version. `contrast.py` asks which of a group's
attempts cheat (`penstock judge audit`).
"""
