"""Models as Hugging Face folders: a configuration, and weights in one or more files.

`config.py` reads `config.json` strictly, `weights.py` reads and writes the tensors, and `stored.py`
copies a folder to a run's object store. To support another architecture, add a table of keys to
`config.py` and the names of its tensors to `actors/policy/checkpoint.py`.
"""
