"""Pairs of neighboring checkpoints: really trained here, or read from files.

A small policy is trained on the standard library's source, then takes policy-gradient-like steps at
several learning rates: float32 masters, Adam, published in bfloat16. The pair is the last step's,
after a warm-up: the first steps of a fresh optimizer are denser.
"""

import sysconfig
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F

from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.infra.weights.diff import plan_runs
from penstock.infra.weights.files.checkpoint import CheckpointFiles
from penstock.infra.weights.files.tensors import Tensor
from penstock.kernels.delta import Dtype
from penstock.kernels.element_types import ELEMENT_TYPES
from penstock.messages.errors import ConfigError

LEARNING_RATES = (1e-6, 2e-6, 3e-6, 1e-5, 3e-5)
BYTES_MAX = 1 << 28
"""Bound of a pair that is read: whole tensors, in the order of their names."""
_CONFIG = PolicyConfig(vocab_size=256, hidden_size=256, moe_intermediate_size=256, mtp_num_heads=0)
_NUM_SEQUENCES, _SEQUENCE_TOKENS = 8, 128
_NUM_PRETRAIN_STEPS, _NUM_WARM_STEPS = 60, 8
_Batches = Callable[[], tuple[torch.Tensor, torch.Tensor]]
_State = dict[str, np.ndarray]


class ArrayPair(msgspec.Struct, frozen=True):
    """Words [N] of one element type, before and after."""

    kind: Dtype
    base: np.ndarray
    target: np.ndarray


class Pair(msgspec.Struct, frozen=True):
    """Two neighboring checkpoints, cut in two ways."""

    tensors: list[ArrayPair]
    """Tensors one by one, as peers take them."""
    extents: list[ArrayPair]
    """Arrays as delta files cut them: small neighbors together, large ones cut."""

    @property
    def num_bytes(self) -> int:
        """Return the size of the target."""
        return sum(arrays.target.nbytes for arrays in self.tensors)


def read_pair(base_path: Path, target_path: Path) -> Pair:
    """Read the tensors that both checkpoints have.

    Raises:
        ConfigError: they have no tensor in common.

    """
    with CheckpointFiles(base_path) as base, CheckpointFiles(target_path) as target:
        common: list[Tensor] = []
        num_bytes = 0
        for key, tensor in sorted(target.tensors.items()):
            own = base.tensors.get(key)
            is_common = not key[0] and own is not None and own.is_base_of(tensor)
            if is_common and tensor.num_words and num_bytes + tensor.num_bytes <= BYTES_MAX:
                common.append(tensor)
                num_bytes += tensor.num_bytes
        if not common:
            raise ConfigError(f"{base_path} and {target_path} have no tensor in common to measure")
        return make_pair(
            {t.name: base.read(t.key, 0, t.num_words) for t in common},
            {t.name: target.read(t.key, 0, t.num_words) for t in common},
            {t.name: t.dtype for t in common},
        )


def make_pair(base: _State, target: _State, dtypes: dict[str, str]) -> Pair:
    """Make a pair of flat words [N] by name; `dtypes` are those of safetensors."""
    tensors = sorted(
        (
            Tensor(name, dtype, (base[name].nbytes * 8 // ELEMENT_TYPES[dtype].num_bits,))
            for name, dtype in dtypes.items()
        ),
        key=lambda tensor: (tensor.dtype, tensor.name),
    )
    pieces = [ArrayPair(t.element_type.dtype, base[t.name], target[t.name]) for t in tensors]
    extents: list[ArrayPair] = []
    for run in plan_runs(tensors, lambda _: True):
        cuts = [(pieces[p.row], slice(p.first_word, p.first_word + p.num_words)) for p in run]
        old = np.concatenate([arrays.base[cut] for arrays, cut in cuts])
        new = np.concatenate([arrays.target[cut] for arrays, cut in cuts])
        extents.append(ArrayPair(pieces[run[0].row].kind, old, new))
    return Pair(pieces, extents)


def trained_pairs(seed: int = 0) -> dict[float, Pair]:
    """Train, and return a pair by learning rate."""
    policy = Policy(_CONFIG, seed=seed)
    batches = _batches(seed)
    _train(policy, batches, 1e-3, _NUM_PRETRAIN_STEPS, is_reinforced=False)
    trained = {name: value.clone() for name, value in policy.state_dict().items()}
    pairs: dict[float, Pair] = {}
    for rate in LEARNING_RATES:
        policy.load_state_dict(trained)
        before, after = _train(policy, batches, rate, _NUM_WARM_STEPS, is_reinforced=True)
        pairs[rate] = make_pair(before, after, dict.fromkeys(before, "BF16"))
    return pairs


def _batches(seed: int) -> _Batches:
    """Return a source of token ids [S, T + 1], bytes of real code, and of advantages [S]."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:40])
    tokens = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        high = len(tokens) - _SEQUENCE_TOKENS - 1
        starts = torch.randint(0, high, (_NUM_SEQUENCES,), generator=generator)
        places = starts[:, None] + torch.arange(_SEQUENCE_TOKENS + 1)
        return tokens[places], torch.randn(_NUM_SEQUENCES, generator=generator)

    return draw


def _train(
    policy: Policy, batches: _Batches, rate: float, num_steps: int, *, is_reinforced: bool
) -> tuple[_State, _State]:
    """Take steps; return the snapshots before and after the last."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=rate, betas=(0.9, 0.95))
    before = after = _published(policy)
    for _ in range(num_steps):
        batch, advantages = batches()
        output = policy(batch[:, :-1].reshape(-1), [_SEQUENCE_TOKENS] * _NUM_SEQUENCES)
        logits = policy.logits(output.hidden)
        losses = F.cross_entropy(logits, batch[:, 1:].reshape(-1), reduction="none")
        losses = losses.view(_NUM_SEQUENCES, -1).mean(1)
        weights = advantages if is_reinforced else torch.ones(_NUM_SEQUENCES)
        optimizer.zero_grad()
        (losses * weights).mean().backward()  # pyright: ignore[reportUnknownMemberType]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        before, after = after, _published(policy)
    return before, after


def _published(policy: Policy) -> _State:
    return {name: as_numpy(value).reshape(-1) for name, value in publishable_state(policy).items()}
