"""Machines for sandboxes: their kernel, image, guest agent, and the pool that lends them.

    recipe/   builds kernel, image and agent into the cache   (`python -m penstock.infra.vm_setup`)
    kernel/   the kernel's configuration and patches
    guest/    the agent, C, PID 1 of every machine
    protocol  framed requests to the agent, over one socket
    machine   a guest's host process, and the `Sandbox` it gives
    uml, process   the backends: how a host process is confined and started
    pool, lease    pre-warmed machines, lent for a time
    probe     what works on this host, found out by running it

To add a backend: a class with `name`, `isolation_class`, `capabilities` and `start`, which gives
`start_machine` a command line; a line in `envs.sandbox.backends`; `check_sandbox` green. To add a
guest operation: a field in `guest/request.h` and `protocol.Request`, a line in `guest/main.c`.
"""
