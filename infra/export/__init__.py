"""`penstock export`: a run's policy as a folder for transformers, vLLM and Penstock, or its traces.

`command.py` is the command, `traces.py` writes solved rollouts, `folder.py` writes the folder,
`tokenizer_files.py` makes the files of its tokenizer, and `chat_template.py` says in Jinja what the
built-in chat format is.
"""
