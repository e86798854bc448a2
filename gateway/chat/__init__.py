"""`POST /v1/chat/completions`: request, prompt, generation, reply, record.

To support another request field: a field of `ChatRequest` (schema.py), and its use where the
request is rendered (prompt.py), sampled (generation.py) or answered (chunks.py).
"""
