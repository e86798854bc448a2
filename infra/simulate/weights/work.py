"""Work on the stand-in's arrays: done at once, while the time of the large model's passes."""

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.actors.sync_relay.core.objects import encode_shard
from penstock.actors.sync_relay.publish.verifier import prove_tensor, write_over
from penstock.infra.simulate.weights.settings import GB, Scenario
from penstock.infra.simulate.weights.sized_store import SizedBytes
from penstock.infra.simulate.weights.stand_in import ROW_ELEMENTS
from penstock.infra.simulate.weights.wires import Wire, carry

_ITEM_BYTES = 2


class RankWork:
    """One rank's `offload`: what it encodes takes the time and the size of its large part."""

    def __init__(self, scenario: Scenario, num_bytes: Callable[[], int]) -> None:
        """Args: `num_bytes` tells the size of its object of the version in hand."""
        self._num_bytes = num_bytes
        self._part_bytes = scenario.model_bytes // scenario.num_ranks
        self._processor = Wire(scenario.encode_gb_s * GB)

    async def offload(self, function: Callable[..., Any], *args: Any) -> Any:
        """Do it; see `shipping.Offload`."""
        made = function(*args)
        if function is not encode_shard:
            return made
        await carry([self._processor], self._part_bytes)
        data = SizedBytes(made.data, self._num_bytes())
        ref = msgspec.structs.replace(made.ref, num_bytes=len(data))
        return msgspec.structs.replace(made, ref=ref, data=data)


class ProverWork:
    """One prover's `offload`: decoding and digesting take the large tensors' time."""

    def __init__(self, scenario: Scenario) -> None:
        self._scale = scenario.model_bytes / (scenario.num_ranks * ROW_ELEMENTS * _ITEM_BYTES)
        self._decoder = Wire(scenario.prover_decode_gb_s * GB)
        self._digester = Wire(scenario.prover_digest_gb_s * GB)

    async def offload(self, function: Callable[..., Any], *args: Any) -> Any:
        """Do it; see `shipping.Offload`."""
        if function is write_over:
            image, runs, data, undo = args
            num_elements = sum(run.num_elements for run in runs)
            await self._pass(self._decoder, num_elements * _ITEM_BYTES)
            return function(image, runs, bytes(memoryview(data)), undo)
        if function is prove_tensor:
            await self._pass(self._digester, args[1].nbytes)
        return function(*args)

    async def _pass(self, processor: Wire, num_bytes: int) -> None:
        await carry([processor], round(num_bytes * self._scale))
