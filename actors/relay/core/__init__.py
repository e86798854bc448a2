"""Code that publishers, relays and replicas share: objects, manifests, digests, the head, leases.

`objects.py` has the keys and the encoding of versions, `flat_snapshot.py` the tensors in flat
coordinates, `store_io.py` the transfers. To add an element type, add a row to
`kernels/element_types.py`.
"""
