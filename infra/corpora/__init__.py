"""Corpora of mid-training: documents as token ids with a weight for each token.

`builder.py` collects documents, `text.py` reads folders of text and JSON lines for continued
pre-training, `traces.py` conversations for supervised fine-tuning, `outside.py` makes of both the
corpora of a run that starts from a checkpoint.
"""
