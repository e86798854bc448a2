"""The fleet that `penstock simulate sandboxes` assumes."""

import msgspec


class FleetScenario(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated, and with which assumptions."""

    seed: int = 0
    num_machines: int = 100_000
    group_size: int = 16
    num_hosts: int = 400
    num_cores: int = 64
    """Of a host; as many machines boot there at once."""
    num_slots: int = 320
    """Machines that a host has memory for."""
    num_images: int = 2000
    zipf_exponent: float = 1.1
    image_touched_mib: int = 48
    """What a boot and a first test page in of an image, lazily."""
    link_gbit_s: float = 25.0
    """Of a host, for pages of images."""
    boot_ms: float = 25.0
    boot_sigma: float = 0.25
    """Boot times are log-normal around their median."""
    network_ms_max: float = 0.5
    """Of one step between actors."""
