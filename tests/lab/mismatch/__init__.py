"""Trainer against sampler without a run's policy: fresh weights, and the experts' formats.

`penstock mismatch RUN` measures a run with the same code, `infra/mismatch/`. `fresh.py` makes
weights and prompts, `formats.py` mid-trains a run's corpus in each expert format.
"""
