"""The policy sharded over ranks, so that no rank holds all of it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.layers import rotary_table
from penstock.actors.policy.model import Policy
from penstock.actors.trainer.ranks.world import World


def own_policy(config: PolicyConfig, world: World, seed: int) -> Policy:
    """Return the policy of a seed, sharded by rows, layer by layer.

    Weights are drawn one whole tensor at a time, with the random numbers of one process.
    """
    with torch.device("meta"):
        policy = Policy(config)
    for layer in policy.layers:
        fully_shard(layer, mesh=world.mesh)
    fully_shard(policy, mesh=world.mesh)
    policy.to_empty(device=world.device)
    parameters = dict(policy.named_parameters())
    with torch.no_grad():
        for table, values in zip((policy.cos, policy.sin), rotary_table(config), strict=True):
            table.copy_(values)
        for name, value in policy.initial_weights(seed):
            parameters[name].copy_(cut_like(parameters[name], value))
    return policy


def cut_like(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return a copy of a whole tensor, sharded as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return whole.to(tensor.device, copy=True)
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    rows = tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
    local = whole[rows].to(tensor.device, copy=True).contiguous()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather the whole weights on every rank inside the block."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        release(model)


def release(model: nn.Module) -> None:
    """Free gathered weights, so that the next pass gathers the weights as they are then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
