"""Machines for sandboxes: their kernels, images, guest agent, and the pool that lends them.

    recipe/   builds kernels, images, layers and agent into the cache
    kernel/   the user-mode kernel's configuration and patches
    initramfs/  what a QEMU or Firecracker machine runs before the agent
    guest/    the agent, C, PID 1 of every machine
    protocol  framed requests to the agent, over one socket
    machine   a guest's host process, and the `Sandbox` it gives
    uml, process, qemu, firecracker   the backends: how a machine is confined and started
    checkpoint  a saved machine on disk
    layers, images    what lies above the base image, and which of it a host has
    pool, lease    pre-warmed machines, lent for a time
    stock, stocks, machines, cpus, keeper, restores    the pool's parts
    probe     what works on this host, found out by running it

To add a backend: a class with `name`, `isolation_class`, `capabilities` and `start`, which gives
`start_machine` a command line; a line in `envs/backends.py`; `check_sandbox` green. To add a
guest operation: a field in `guest/request.h` and `protocol.GuestRequest`, a line in `guest/main.c`.
"""
