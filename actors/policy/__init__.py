"""The policy: MoE transformer, checkpoints, tokenizer, chat and tool-call format.

Import from the modules: `config`, `model`, `checkpoint`, `tokenizer`, `chat`, `parse`. To give a
tool or an argument a token of its own, add it in `special_tokens.py` and train the tokenizer again.
"""
