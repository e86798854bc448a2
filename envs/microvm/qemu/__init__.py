"""The QEMU backends (`qemu-kvm`, `qemu-tcg`): machines that can be copied and saved while they run.

`command.py` builds the command line, `launch.py` starts it, `machine.py` controls it over QMP
(`qmp.py`), `memory.py` and `saved.py` hold what a checkpoint needs.
"""
