"""The learner: the policy, its float32 master weights, its optimizer and earlier versions.

Gradients of several passes are computed concurrently with the bits of a sequential run: each pass
runs on its own thread with a fixed number of torch threads, and gradients are added in pass order.
So the number of workers changes the time and no bit: a run that shares its cores with generators
and a replay that has them all give the same weights.

The gradient norm does not depend on how tensors are cut into rows, nor on the device: squares of a
row are added in float64 by halving, which is elementwise and has one order; row sums are added
exactly, in any order.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from penstock.actors.policy.checkpoint import (
    PUBLISHED_DTYPE,
    adapter_shapes,
    as_numpy,
    hf_views,
    tensor_shapes,
)
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.device import copied_to, fix_threads
from penstock.actors.policy.hf.peft import PEFT_WEIGHTS
from penstock.actors.policy.hf.weights import find_adapters, find_weights
from penstock.actors.policy.model import Policy
from penstock.actors.trainer.config import DECAYED_RATE, OptimizerConfig
from penstock.actors.trainer.forward import SequenceForward
from penstock.kernels.digest import root_digest
from penstock.messages.errors import CorruptDataError, PenstockError

Result = TypeVar("Result")
PassFigures = TypeVar("PassFigures")
Pass = Callable[[], tuple[torch.Tensor, PassFigures]]
"""Computes a 0-dim loss and the caller's metrics of the pass."""


def accumulate(
    parameters: Sequence[torch.Tensor],
    passes: Sequence[Pass[PassFigures]],
    *,
    num_workers: int,
    num_threads: int,
) -> list[PassFigures]:
    """Set the parameters' gradients to the sum over all passes; unused parameters get none.

    Args:
        parameters: Tensors to differentiate by; not to be changed meanwhile.
        passes: Passes, of which at most `num_workers` hold their activations at once.
        num_workers: Threads that run passes.
        num_threads: Torch threads inside one pass.

    Returns:
        The metrics of each pass, in order.

    """

    def run(one: Pass[PassFigures]) -> tuple[tuple[torch.Tensor | None, ...], PassFigures]:
        fix_threads(num_threads)
        loss, figures = one()
        return torch.autograd.grad(loss, parameters, allow_unused=True), figures

    found = []
    with ThreadPoolExecutor(num_workers, thread_name_prefix="gradients") as pool:
        # `map` yields in pass order whatever finishes first: the order of additions decides the
        # bits.
        for gradients, figures in pool.map(run, passes):
            _add(parameters, gradients)
            found.append(figures)
    return found


def run_all(
    tasks: Sequence[Callable[[], Result]], *, num_workers: int, num_threads: int
) -> list[Result]:
    """Run tasks concurrently without gradients; return their results in order.

    Args:
        tasks: Forward passes.
        num_workers: Threads that run them.
        num_threads: Torch threads inside one task.

    """

    def run(task: Callable[[], Result]) -> Result:
        fix_threads(num_threads)
        with torch.no_grad():
            return task()

    with ThreadPoolExecutor(num_workers, thread_name_prefix="forward") as pool:
        return list(pool.map(run, tasks))


def _add(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


# Bounds the float64 copy of a row block to 8 MiB.
_CHUNK_ELEMENTS = 1 << 20


def row_squares(gradient: torch.Tensor) -> list[float]:
    """Return the sum of squares of each row of the first dimension; of a scalar, its square."""
    if not gradient.dim():
        gradient = gradient.unsqueeze(0)
    rows = gradient.flatten(1) if gradient.dim() > 1 else gradient.unsqueeze(1)
    if not rows.numel():
        return []
    parts = rows.split(max(1, _CHUNK_ELEMENTS // rows.shape[1]))
    return [value for part in parts for value in _halved(part.double().square_()).tolist()]


def norm(squares: Iterable[float]) -> float:
    """Return the gradient's norm from the squares of its rows, in any order."""
    # `fsum` is exact, so ranks may contribute rows in any order.
    return math.sqrt(math.fsum(squares))


def _halved(values: torch.Tensor) -> torch.Tensor:
    """Add up each row of [R, C] by halving; return [R]."""
    while (width := values.shape[1]) > 1:
        half = width // 2
        folded = values[:, :half] + values[:, half : 2 * half]
        if width % 2:
            folded[:, 0] += values[:, -1]
        values = folded
    return values[:, 0]


Weights = Mapping[str, torch.Tensor]
"""Weights by parameter name, without those that only mid-training uses."""

_PREFIX = "version."


def published(weights: Weights) -> Weights:
    """Return a copy rounded to the dtype in which versions are published."""
    return {name: value.detach().to(PUBLISHED_DTYPE, copy=True) for name, value in weights.items()}


class EarlierVersions:
    """Weights of earlier versions: the reference, and the newest before the current one."""

    def __init__(self) -> None:
        """Start without any."""
        self.reference: Weights | None = None
        """Weights of version 0, if a loss compares with them."""
        self.recent: dict[int, Weights] = {}
        """Weights by version, oldest first."""
        self.have_sampled = True
        """Whether the log's tokens were sampled by these versions. False where training leaves the
        run's own path, so that the engine's share of a ratio is unknown."""

    def keep(self, version: int, weights: Weights, num_kept: int) -> None:
        """Add the version that a step has just replaced, and drop the oldest beyond `num_kept`."""
        self.recent[version] = weights
        for old in sorted(self.recent)[: len(self.recent) - num_kept]:
            del self.recent[old]

    def state(self) -> dict[str, torch.Tensor]:
        """Return the recent versions' tensors, for a checkpoint."""
        return {
            f"{_PREFIX}{version}.{name}": value
            for version, weights in self.recent.items()
            for name, value in weights.items()
        }

    def load_state(
        self, state: Weights, placed: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> None:
        """Replace the recent versions by those of a checkpoint; `placed` copies a tensor."""
        found: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            if key.startswith(_PREFIX):
                version, _, name = key.removeprefix(_PREFIX).partition(".")
                found.setdefault(int(version), {})[name] = placed(name, value)
        self.recent = {version: found[version] for version in sorted(found)}


_WEIGHTS = "weights."
_OPTIMIZER = "optimizer."
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class NonFiniteError(PenstockError, ArithmeticError):
    """A loss or a gradient is not finite; it changed nothing."""


class Learner:
    """State that a checkpoint keeps and a step changes, in one process.

    The learner of several ranks overrides `forward`, `run_all`, `accumulate`, `gather`, `squares`,
    `digest` and `placed`. The multi-token-prediction head is part of the weights, but only
    mid-training uses it.

    """

    rank: int = 0
    """Number of this process among those that hold the weights."""
    is_ranked: bool = False
    """Whether this process may hold some rows of each tensor alone."""

    def __init__(self, policy: Policy, config: OptimizerConfig) -> None:
        self.config = config
        self.policy = policy
        self.trained = {
            name: parameter
            for name, parameter in self.policy.named_parameters()
            if parameter.requires_grad
        }
        """Parameters that change, by name: all, or those of adapters."""
        self.parameters = {
            name: parameter
            for name, parameter in self.trained.items()
            if not name.startswith("mtp.")
        }
        """Those of RL: without the second head."""
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=False,
            fused=policy.device.type == "cuda",
        )
        self.versions = EarlierVersions()

    @classmethod
    def initialized(
        cls, policy_config: PolicyConfig, config: OptimizerConfig, seed: int
    ) -> "Learner":
        """Return a learner with random weights."""
        return cls(Policy(policy_config, seed=seed), config)

    def forward(self) -> SequenceForward:
        """Return forward passes over the current weights, which must not change meanwhile."""
        return SequenceForward(self.policy)

    def run_all(
        self, tasks: Sequence[Callable[[], Result]], *, num_workers: int, num_threads: int
    ) -> list[Result]:
        """Run forward passes concurrently; return their results in order (see `run_all`)."""
        return run_all(tasks, num_workers=num_workers, num_threads=num_threads)

    def accumulate(
        self, passes: Sequence[Pass[Result]], *, num_workers: int, num_threads: int
    ) -> list[Result]:
        """Add the gradients of passes in order (see `accumulate`).

        Returns:
            The metrics of each pass, in order.

        """
        parameters = list(self.trained.values())
        return accumulate(parameters, passes, num_workers=num_workers, num_threads=num_threads)

    def gather(self, value: Result) -> list[Result]:
        """Return the values of all processes that hold the weights; here, of this one."""
        return [value]

    def squares(self) -> list[float]:
        """Return the sum of squares of every row of the gradient, in any order."""
        gradients = [each.grad for each in self.parameters.values() if each.grad is not None]
        return [square for gradient in gradients for square in row_squares(gradient)]

    def digest(self, tensors: Weights) -> str:
        """Return the digest of whole tensors by name."""
        return root_digest({name: as_numpy(tensor) for name, tensor in tensors.items()})

    def placed(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of a parameter's value, or a moment of it, as this process holds it.

        Args:
            name: Name of the parameter.
            value: Whole tensor, or one that `state` returned.

        """
        return copied_to(self.policy.device, value)

    def load_model(self, folder: Path) -> None:
        """Load the weights of a Hugging Face folder, and the adapters in it, if any.

        The optimizer stays as it is.

        Raises:
            ModelFormatError: Files or tensors are missing or do not fit this policy.

        """
        views = hf_views(self.policy)
        find_weights(folder, tensor_shapes(self.policy.config)).read_into(views)
        if (folder / PEFT_WEIGHTS).is_file():
            find_adapters(folder, adapter_shapes(self.policy.config)).read_into(views)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                if not parameter.requires_grad:  # An adapter's base is what is published of it.
                    parameter.copy_(parameter.to(PUBLISHED_DTYPE))

    def set_threads(self, num_threads: int) -> None:
        """Fix torch's thread count in this process: the bits depend on it."""
        fix_threads(num_threads)

    def weights_digest(self) -> str:
        """Digest the float32 master weights."""
        return self.digest(self._weights())

    def optimizer_digest(self) -> str:
        """Digest the optimizer's moments and step counts."""
        return self.digest(self._moments())

    def state(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, sharing memory with the learner."""
        return self._weights() | self._moments() | self.versions.state()

    def take_reference(self, state: dict[str, torch.Tensor]) -> None:
        """Use the weights in `state`, those of version 0, as the reference.

        Raises:
            CorruptDataError: Tensors do not fit this policy.

        """
        if any(_WEIGHTS + name not in state for name in self.parameters):
            raise CorruptDataError("checkpoint: expected the tensors of this policy's shape")
        weights = {name: self.placed(name, state[_WEIGHTS + name]) for name in self.parameters}
        self.versions.reference = published(weights)

    @torch.no_grad()
    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Load the tensors of `state`.

        Raises:
            CorruptDataError: Tensors do not fit this policy.

        """
        weights = self._weights()
        given = {name for name in state if name.startswith(_WEIGHTS)}
        if given != set(weights) or any(state[name].shape != weights[name].shape for name in given):
            raise CorruptDataError("checkpoint: expected the tensors of this policy's shape")
        for name, weight in weights.items():
            weight.copy_(self.placed(name.removeprefix(_WEIGHTS), state[name]))
        self.optimizer.state.clear()
        for name, parameter in self.parameters.items():
            moments = {moment: state.get(_moment_name(name, moment)) for moment in _MOMENTS}
            if moments["step"] is not None:
                self.optimizer.state[parameter] = {
                    moment: self.placed(name, value)
                    for moment, value in moments.items()
                    if value is not None
                }
        self.versions.load_state(state, self.placed)

    @contextmanager
    def published_weights(self) -> Iterator[None]:
        """Compute with the weights that generators have, rounded as published, inside the block.

        Gradients taken there are applied to the masters afterwards. The trainer's logprobs are thus
        those
        of the very policy that samples, and the remaining mismatch comes from staleness and the
        order of
        sums, not from rounding.

        """
        with self.computing_with(published(self.parameters)):
            yield

    @contextmanager
    def computing_with(self, weights: Weights) -> Iterator[None]:
        """Compute with other weights inside the block, such as those of an earlier version."""
        masters = {name: value.detach().clone() for name, value in self.parameters.items()}
        self._copy(weights)
        try:
            yield
        finally:
            self._copy(masters)

    def apply(self, step: int, config: OptimizerConfig, steps_max: int) -> float:
        """Clip the gradients, take optimizer step `step` (from 1) of `steps_max`, and clear them.

        Returns:
            The gradient norm before clipping.

        Raises:
            NonFiniteError: The norm is not finite; the gradients are cleared.

        """
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * rate(config, step, steps_max)
            group["betas"] = (config.beta1, config.beta2)
            group["eps"], group["weight_decay"] = config.eps, config.weight_decay
        total = self.clip(config.grad_clip)
        self.optimizer.step()
        self.clear()
        return total

    def clip(self, norm_max: float) -> float:
        """Scale the gradients down to a norm of at most `norm_max`.

        Returns:
            The norm before clipping.

        Raises:
            NonFiniteError: The norm is not finite.

        """
        total = norm(self.squares())
        if not math.isfinite(total):
            self.clear()
            raise NonFiniteError(f"the gradient's norm is {total}")
        factor = norm_max / (total + 1e-6)
        if factor < 1.0:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return total

    def clear(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _copy(self, values: Weights) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])

    def _weights(self) -> dict[str, torch.Tensor]:
        return {_WEIGHTS + name: parameter.detach() for name, parameter in self.trained.items()}

    def _moments(self) -> dict[str, torch.Tensor]:
        return {
            _moment_name(name, moment): self.optimizer.state[parameter][moment]
            for name, parameter in self.parameters.items()
            if parameter in self.optimizer.state
            for moment in _MOMENTS
        }


def rate(config: OptimizerConfig, step: int, steps_max: int) -> float:
    """Return the learning rate's factor at step 1 .. `steps_max`."""
    warmup = min(1.0, step / max(config.warmup_steps, 1))
    num_decaying = max(config.decay_fraction * steps_max, 1e-9)
    left = min(1.0, max(0.0, (steps_max - step) / num_decaying))
    decayed = DECAYED_RATE + (1 - DECAYED_RATE) * left
    return warmup * (decayed if config.decay_fraction else 1.0)


def _moment_name(parameter_name: str, moment: str) -> str:
    return f"{_OPTIMIZER}{moment}.{parameter_name}"
