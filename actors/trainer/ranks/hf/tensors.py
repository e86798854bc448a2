"""Which tensors of a model's folder a parameter of a transformers model holds.

transformers stacks the experts of a layer, may fuse two of their matrices, and renames tensors;
how it undoes that for each architecture (`revert_weight_conversion`) says what a row of a parameter
is in the folder. A range of rows (of dim 0), which is what a rank holds under FSDP2 and under
expert parallelism alike, is some whole runs of the folder's tensors:

    a stack of experts [E, ...]   row e: one tensor, or equal parts of it two tensors
    anything else [n, ...]        rows a to b of one tensor
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from penstock.actors.policy.adapter import PREFIX as ADAPTER_PREFIX
from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE, as_numpy
from penstock.actors.policy.hf.config import ModelFormatError
from penstock.actors.policy.snapshot import TensorRun
from penstock.actors.trainer.ranks.hf.adapter import folder_name

RowNames = Sequence[Sequence[str]]
"""Tensors of each row of a parameter; a single row: the whole parameter is one tensor."""


class TensorNames:
    """Names of the folder's tensors, by parameter or buffer."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Ask transformers.

        Args:
            model: as loaded from the folder.

        Raises:
            ModelFormatError: A parameter is stored in another way than rows of tensors.

        """
        self.model = model
        persistent = model.state_dict().keys()
        self._buffers = [name for name, _ in model.named_buffers() if name in persistent]
        self._rows = {
            name: self._row_names(name, tensor.shape)
            for name, tensor in (*model.named_parameters(), *self.buffers(whole=True).items())
        }

    def buffers(self, *, whole: bool = False) -> dict[str, torch.Tensor]:
        """Return the buffers that are tensors of the folder, biases of routers, say.

        They do not train, and are published as they are, in float32.

        Args:
            whole: by the model's own names instead of the folder's.

        """
        found = {name: self.model.get_buffer(name) for name in self._buffers}
        return found if whole else {self._rows[name][0][0]: each for name, each in found.items()}

    def runs(
        self, name: str, rows: torch.Tensor, first: int
    ) -> list[tuple[str, int, torch.Tensor]]:
        """Return what rows of a parameter hold: (tensor, first flat element in it, views of them).

        Args:
            name: of the parameter.
            rows: [n, ...] those rows, contiguous.
            first: the number of the first of them.

        """
        names = self._rows[name]
        if len(names) == 1:
            return [(names[0][0], first * rows[:1].numel(), rows)] if rows.numel() else []
        return [
            (tensor, 0, part)
            for row, matrix in enumerate(rows, first)
            for tensor, part in zip(names[row], matrix.chunk(len(names[row])), strict=True)
        ]

    def shapes(self) -> dict[str, list[int]]:
        """Return the shapes of the tensors that are published, by name."""
        found: dict[str, list[int]] = {}
        for name, parameter in self.model.named_parameters():
            whole = torch.empty(parameter.shape, device="meta")
            found |= {each: list(part.shape) for each, _, part in self.runs(name, whole, 0)}
        return found | {name: list(buffer.shape) for name, buffer in self.buffers().items()}

    def held_runs(self, *, is_first: bool) -> list[TensorRun]:
        """Return copies of what this rank holds, rounded: over all ranks, everything once.

        Args:
            is_first: whether this rank publishes what every rank has: buffers and adapters.

        Raises:
            ValueError: A parameter is not cut over the ranks by rows.

        """
        runs: list[TensorRun] = []
        for name, parameter in self.model.named_parameters():
            if not (is_first or isinstance(parameter, DTensor)):
                continue
            for each, start, values in self.runs(name, *_held_rows(parameter)):
                rounded = values.to(PUBLISHED_DTYPE, copy=True)
                runs.append(TensorRun(each, start, as_numpy(rounded).reshape(-1)))
        if is_first:
            for name, buffer in self.buffers().items():
                bits = as_numpy(buffer.to(torch.float32, copy=True)).reshape(-1)
                runs.append(TensorRun(name, 0, bits.view(np.uint32)))
        return runs

    def _row_names(self, name: str, shape: torch.Size) -> RowNames:
        plain = folder_name(name)
        if plain.startswith(ADAPTER_PREFIX):
            return [[plain]]
        # Values that say which row, and which half of it, each stored tensor begins with.
        is_stack = len(shape) == 3
        marks = torch.arange(2.0 * shape[0]).view(-1, 2, 1) if is_stack else torch.zeros(1)
        stored = {
            key: value.flatten()
            for key, value in revert_weight_conversion(self.model, {plain: marks}).items()
        }
        if len(stored) == 1:
            (key,) = stored
            if torch.equal(stored[key], marks.flatten()):
                return [[key]]
        per_row = len(stored) // shape[0]
        ordered = sorted(stored, key=lambda key: float(stored[key][0]))
        expected = marks.view(shape[0], -1) if is_stack else marks
        if is_stack and per_row in (1, 2) and per_row * shape[0] == len(stored):
            parts = expected.view(per_row * shape[0], -1)
            if all(torch.equal(stored[k], part) for k, part in zip(ordered, parts, strict=True)):
                return [ordered[i : i + per_row] for i in range(0, len(ordered), per_row)]
        text = "expected whole tensors, or one or two for each row"
        raise ModelFormatError(
            f"{self.model.config.model_type}: parameter {name} is stored as "
            f"{', '.join(sorted(stored)[:3])}: {text}"
        )


def _held_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this rank's rows of a parameter, and the number of the first of them."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), 0
    mesh, placements = parameter.device_mesh, parameter.placements
    if any(placement.is_replicate() for placement in placements):
        raise ValueError(f"expected every row on one rank, got {placements}")
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    if tuple(shape[1:]) != tuple(parameter.shape[1:]):
        raise ValueError(f"expected shards along dim 0, got {placements}")
    return parameter.to_local().detach(), offset[0]
