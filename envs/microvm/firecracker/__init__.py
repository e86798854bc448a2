"""The experimental Firecracker backend: microVMs driven over its HTTP API on a Unix socket.

`api.py` sends requests and connects to the guest, `machine.py` saves a machine, `backend.py` jails
and starts one. To add an API call: a `put` in `backend.py`, and its check in
`tests/contract/sandbox/firecracker_contract.py`.
"""
