"""In-flight weight updates: two policies, one sampling, one being written.

    begin: standby <- copy of live    apply: write standby    commit: verify, then swap the two

Only the swap keeps a step from running; it exchanges two references.
"""

from collections.abc import Mapping

import numpy as np
import torch

from penstock.actors.generator.engine import InvalidRequestError
from penstock.actors.generator.updates import check_patch
from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE, hf_views, state_digest
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.operations import has_kernels
from penstock.kernels.delta import Patch
from penstock.kernels.ops import delta_apply
from penstock.messages.errors import CorruptDataError


class StagedWeights:
    """The double buffer. Not thread-safe: its owner runs one method at a time."""

    def __init__(self, config: PolicyConfig, device: torch.device) -> None:
        self._live = _empty_policy(config, device)
        self._standby = _empty_policy(config, device)
        self._views: dict[str, torch.Tensor] | None = None
        """Views of the standby, while an update is open."""

    def begin(self) -> None:
        """Open an update that starts from the live weights."""
        live, standby = hf_views(self._live), hf_views(self._standby)
        for name, view in standby.items():
            view.copy_(live[name])
        self._views = standby

    def apply(self, patches: Mapping[str, np.ndarray | Patch]) -> None:
        """Write into the standby."""
        views = self._open_views()
        for name, patch in patches.items():
            view = views.get(name)
            check_patch(name, patch, None if view is None else view.shape)
            assert view is not None, "checked"
            if isinstance(patch, np.ndarray):
                view.copy_(_from_bits(patch))
            else:
                _write_patch(view, patch)

    def verify(self, root_digest: str) -> None:
        """Check the standby against the digest that its publisher announced."""
        found = _published_digest(self._open_views())
        if found != root_digest:
            raise CorruptDataError(f"staged weights have root digest {found}, not {root_digest}")

    @property
    def standby(self) -> Policy:
        """The policy that is being written."""
        self._open_views()
        return self._standby

    def swap(self) -> None:
        """Close the update: the standby is live."""
        self._open_views()
        self._live, self._standby, self._views = self._standby, self._live, None

    def digest(self) -> str:
        """Return the root digest of the live weights."""
        return _published_digest(hf_views(self._live))

    def _open_views(self) -> dict[str, torch.Tensor]:
        if self._views is None:
            raise InvalidRequestError("no weight update is open; call begin_update first")
        return self._views


def _empty_policy(config: PolicyConfig, device: torch.device) -> Policy:
    policy = Policy(config).to(device)
    for parameter in policy.parameters():
        parameter.detach().zero_()
    return policy.requires_grad_(False).eval()


def _published_digest(views: Mapping[str, torch.Tensor]) -> str:
    return state_digest({name: view.to(PUBLISHED_DTYPE) for name, view in views.items()})


def _write_patch(view: torch.Tensor, patch: Patch) -> None:
    indices, values = patch.flat_indices, patch.values
    flat, places, written = view.view(-1), torch.from_numpy(indices), _from_bits(values)
    if has_kernels(flat):
        delta_apply(flat, places.to(flat.device, torch.int32), written.to(flat.device))
    else:
        flat[places] = written


def _from_bits(values: np.ndarray) -> torch.Tensor:
    """Widen bfloat16 bit patterns to float32, exactly."""
    return torch.from_numpy((values.astype(np.uint32) << 16).view(np.float32))
