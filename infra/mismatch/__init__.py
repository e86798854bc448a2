"""`penstock mismatch`: trainer against sampler, token by token, with each remedy and without it.

`subject.py` loads a run's policies and prompts, `rollouts.py` samples, `trainers.py` perturbs,
`figures.py` measures, `report.py` adds what remedies cost, `recording.py` what recording routes
costs, `formatting.py` prints.
To add a kind of kernels: a line in `KERNELS`.
"""
