"""Semantic code search: words (BM25) and meaning (embeddings), fused by rank.

`index.py` splits files into chunks and keeps an index of one machine's files on the host;
`ranking.py` ranks chunks; `embeddings.py` requests embeddings from an endpoint.
"""
