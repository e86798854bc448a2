"""Models as Hugging Face folders: the configuration, the weights in one or several files.

`config.py` reads `config.json` strictly, `weights.py` reads and writes the tensors. Another
architecture is a table of keys in `config.py` and the names of its tensors in
`actors/policy/checkpoint.py`.
"""
