"""`penstock export`: a version of a run's policy as a folder for transformers, vLLM and Penstock.

`command.py` is the command, `folder.py` writes the folder, `tokenizer_files.py` makes the files of
its tokenizer, and `chat_template.py` says in Jinja what the run's chat format is.
"""
