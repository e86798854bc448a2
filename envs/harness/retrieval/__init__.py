"""Semantic code search: words (BM25) and meaning (embeddings), fused by rank.

`chunks.py` cuts files, `ranking.py` ranks, `embeddings.py` asks an endpoint, `index.py` keeps the
index of one machine's files up to date, outside that machine.
"""
