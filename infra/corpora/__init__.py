"""Corpora of mid-training: documents as token ids with a weight for each token.

`builder.py` collects documents, `text.py` reads texts for continued pre-training, `traces.py`
conversations for supervised fine-tuning; `own.py` makes corpora of both. `rows.py` reads JSON
lines and Parquet. `request.py` is what own code is asked for
(`[prepare.corpora]`), and `kept.py` keeps its answer in the user's cache.
"""
