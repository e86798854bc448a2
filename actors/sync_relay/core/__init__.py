"""What publishers, relays and replicas share: objects, manifests, digests, the head, leases.

Nothing here knows which side it runs on. To add an element kind: a row in `kinds.py`.
"""
