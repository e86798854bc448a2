"""What publishers, relays and replicas share: objects, manifests, digests, the head, leases.

Nothing here depends on the side it runs on. `objects.py` has the keys and the coding of versions,
`flat_snapshot.py` the tensors in flat coordinates, `store_io.py` the transfers. To add an element
type: a row in `kernels/element_types.py`.
"""
