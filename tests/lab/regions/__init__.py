"""Regions far apart, on one machine: a shaped link to each, and a NATS leaf node at its end.

```
 trainer, pacer, gateway ...                          region "asia": relay, generator, receiver
        │                                                       │ nats://127.0.0.1
   nats-server (JetStream) ◀── leaf node over the link ── nats-server (no JetStream)
        └──── tunnel.py: 20 Mbit/s, 180 ms, 0.1% loss ────┘
```
Where the machine allows it (`links.py` tries), a region is a network namespace and the link two TUN
devices with a process between them that delays, queues and drops packets: TCP meets the loss
itself, and nothing in the region has another way out. Elsewhere the leaf node dials a proxy that
shapes the stream (`proxy.py`). Both use `shaping.py` for when a packet arrives. `tc netem` would do
the same in the kernel, but is not used: kernels of small virtual machines are often built without
it (`CONFIG_NET_SCH_NETEM`), as are those on which the figures of SPECIFICATION.md were taken.

`command.py` starts a run whose links are in a file (`settings.py`), through the launcher's hook,
`infra.run.launcher.OpenServer`.

JetStream stays at the hub. There is one log, whose order and compare-and-swap are what training
and replay rest on; a JetStream domain in each region would need mirrors of it and would keep them
only as far behind as the link does anyway. The hub's JetStream has a domain of its own, and a leaf
node maps the plain API subjects to it: an actor does not know on which side it is.

Nothing has to be cleaned up: devices and namespaces belong to the link's process and end with it,
and it ends with the launcher, however that ends. To add a kind of link: an `open_...` in
`links.py`, whose process asks `shaping.Shaper`.
"""
