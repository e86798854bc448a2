"""The experimental Firecracker backend, which drives microVMs over an HTTP API on a Unix socket.

`api.py` sends requests and connects to the guest; `backend.py` jails, starts and saves machines. To
add an API call, add a `put` in `backend.py` and its check in
`tests/contract/sandbox/firecracker_contract.py`.
"""
