"""The quickstart's own data: what the small policy learns from first, and its sample users.

`config.py` is the `[prepare]` section, `midtrain_data.py` builds tokenizer and corpora of
mid-training from the standard library and from demonstrations on `envs/ladder`, `sample_users.py`
sends requests with feedback to the gateway. A product with data of its own replaces this folder:
`infra/run/prepare.py` is the only caller of the first two. To add a kind of document, add a method
to `midtrain_data.CorpusBuilder` and its call in `midtrain_objects`.
"""
