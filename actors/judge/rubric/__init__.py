"""Rubric judges: a model answers one multiple-choice question per criterion.

`config.py` declares them, `submission.py` is what they see of an episode, `fence.py` keeps its
texts apart from the question, `question.py` writes the question and reads the letter, `judge.py`
asks, repeats and counts. Who answers: `endpoint.py` any OpenAI-compatible service,
`generators.py` the run's own replicas at one version.
"""
