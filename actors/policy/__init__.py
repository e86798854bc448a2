"""No actor: the model, tokenizer and chat formats that trainer, generators and workers share.

`config.py` has the settings, `model.py` the mixture-of-experts transformer, `checkpoint.py` its
weights in files, `tokenizer.py` text to token ids, `chat/` messages to token ids and sampled ids to
tool calls, `replicas/` the generators as those who ask them see them. To give a tool or an argument
a token of its own, add it in `special_tokens.py` and train the tokenizer again.
"""
