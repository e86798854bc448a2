"""The QEMU backends (`qemu-kvm`, `qemu-tcg`): machines that can be copied and saved while they run.

`command.py` starts the process, `machine.py` controls it over QMP, `memory.py` copies guest memory,
`backend.py` combines them. To add a device, add an option in `command.py`.
"""
