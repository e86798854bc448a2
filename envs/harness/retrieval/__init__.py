"""Semantic code search: words (BM25) and meaning (embeddings), fused by rank.

`index.py` cuts files into chunks and keeps the index of one machine's files up to date, outside
that machine; `ranking.py` ranks; `embeddings.py` requests embeddings from an endpoint.
"""
