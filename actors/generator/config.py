"""Settings of a generator. Imports no torch."""

import msgspec


class GeneratorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Capacity of one replica."""

    num_running_max: int = 48
    """Requests decoded together."""
    num_waiting_max: int = 256
    """Further ones are refused as busy."""
    num_tokens_max: int = 1024
    """Longest context, prompt and sampled tokens together."""
    num_threads: int = 1
    """Of torch; trainer and generators share the machine's cores."""

    def __post_init__(self) -> None:
        """Refuse values that leave nothing to serve with."""
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if value <= 0:
                raise ValueError(f"generator.{field}: expected > 0, got {value}")
