"""Corpora for mid-training: documents as token ids with a weight for each token.

`builder.py` collects documents, `text.py` reads texts for continued pre-training, `traces.py` reads
conversations for supervised fine-tuning, and `own.py` makes corpora of both. `rows.py` reads JSON
lines and Parquet. `request.py` is the request to custom code (`[prepare.corpora]`), whose result
`kept.py` keeps in the user's cache.
"""
