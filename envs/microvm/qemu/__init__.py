"""The QEMU backends (`qemu-kvm`, `qemu-tcg`): machines that can be copied and saved while they run.

`command.py` starts the process, `machine.py` controls it over QMP (`qmp.py`), `memory.py` holds
what a checkpoint needs, `backend.py` combines them. To add a device: an option in `command.py`.
"""
