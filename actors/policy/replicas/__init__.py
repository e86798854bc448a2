"""Client side of the generator replicas.

`table.py` tracks which replicas exist and how loaded they are, and chooses one for each request;
`client.py` sends the request.
"""
