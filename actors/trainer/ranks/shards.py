"""What a rank publishes: its rows of the policy's parameters, as runs of the format's tensors.

Every tensor of the format is a contiguous part of one parameter (`policy/checkpoint.py`), and a
rank holds a range of each parameter's rows. So what it holds of a tensor is one run.
"""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE, as_numpy, hf_views
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.snapshot import TensorRun


def published_shapes(config: PolicyConfig) -> dict[str, list[int]]:
    """Return the shapes of the tensors that are published of a policy, by name."""
    with torch.device("meta"):
        return {name: list(view.shape) for name, view in hf_views(Policy(config)).items()}


def held_runs(policy: Policy) -> list[TensorRun]:
    """Return copies of what this rank holds, rounded as published: over all ranks, everything once.

    Args:
        policy: Cut over the ranks by rows.

    """
    with torch.device("meta"):
        whole = Policy(policy.config)
    names = {p.untyped_storage()._cdata: name for name, p in whole.named_parameters()}
    parameters = dict(policy.named_parameters())
    runs: list[TensorRun] = []
    for name, view in hf_views(whole).items():
        parameter = parameters[names[view.untyped_storage()._cdata]]
        first, values = _held(parameter)
        offset = int(view.storage_offset())
        begin = max(offset, first)
        end = min(offset + view.numel(), first + values.numel())
        if begin < end:
            rounded = values[begin - first : end - first].to(PUBLISHED_DTYPE, copy=True)
            runs.append(TensorRun(name, begin - offset, as_numpy(rounded)))
    return runs


def _held(parameter: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return the first element that this rank holds of a flattened parameter, and all of them."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.detach().reshape(-1)
    mesh, placements = parameter.device_mesh, parameter.placements
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    row = parameter[:1].numel() if parameter.dim() > 1 else 1
    return int(offset[0]) * row, parameter.to_local().detach().reshape(-1)
