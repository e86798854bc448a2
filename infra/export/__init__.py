"""`penstock export`: a run's policy as a folder for transformers and vLLM, or a run's traces.

`command.py` is the command, `traces.py` writes solved rollouts, `folder.py` writes the model
folder, `tokenizer_files.py` its tokenizer files and the chat format as a Jinja template.
"""
