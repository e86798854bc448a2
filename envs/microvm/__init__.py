"""Machines for sandboxes: their kernels, images and guest agent, and the pool that leases them.

    recipe/       builds kernels, images, layers and the agent into the cache
    kernel/       configuration and patches of the user-mode kernel
    qemu_source/  device list and patch of the QEMU that the recipe builds
    initramfs/    program that machines with Debian's kernels run before the agent
    guest/        the guest agent in C, PID 1 of every machine
    images/       finds what was built: sets of assets, image layers
    pool/         pre-warmed machines, leased for a limited time
    confinement/  restricts the host process of a machine
    uml, process, qemu/, firecracker/   backends: how a machine is confined and started
    protocol, connection   framed requests to the agent over one socket
    machine, host_process  the host process of a guest, and the `Sandbox` on top of it
    checkpoint    format of a saved machine on disk
    probe         tests which backends work on this host by booting them

To add a backend, write a class with `name`, `isolation_class`, `capabilities` and `start` that
gives `start_machine` a command line, add its line to `envs/backends.py`, and pass `check_sandbox`.
To add a guest operation, add its fields to `guest/request.h` and `protocol.GuestRequest` and serve
it in `guest/main.c`.
"""
