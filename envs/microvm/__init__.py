"""Machines for sandboxes: their kernels, images, guest agent, and the pool that leases them.

    recipe/       builds kernels, images, layers and agent into the cache
    kernel/       the user-mode kernel's configuration and patches
    initramfs/    what a QEMU or Firecracker machine runs before the agent
    guest/        the agent, C, PID 1 of every machine
    images/       finds what was built: sets of assets, image layers
    pool/         pre-warmed machines, leased for a time
    uml, process, qemu/, firecracker/   the backends: how a machine is confined and started
    protocol, connection   framed requests to the agent, over one socket
    machine, host_process  a guest's host process, and the `Sandbox` over it
    checkpoint    a saved machine on disk
    probe         which backends work on this host, found out by running them

To add a backend: a class with `name`, `isolation_class`, `capabilities` and `start`, which gives
`start_machine` a command line; a line in `envs/backends.py`; `check_sandbox` green. To add a guest
operation: a field in `guest/request.h` and `protocol.GuestRequest`, a line in `guest/main.c`.
"""
