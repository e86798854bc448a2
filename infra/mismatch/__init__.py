"""`penstock mismatch`: compares trainer and sampler token by token, with and without each remedy.

`subject.py` loads a run's policies and prompts, `rollouts.py` samples, `trainers.py` perturbs,
`figures.py` measures, `report.py` adds the cost of remedies, `recording.py` the cost of recording
routes, and `formatting.py` prints. To add a kind of kernels, add a line to `KERNELS`.
"""
