"""Adapters in training over one base, whose matrices they share."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
import numpy as np
import safetensors.torch
import torch

from penstock.actors.policy.adapter import initial_adapters, is_adapter, tensor_name
from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE, hf_views
from penstock.actors.policy.config import AdapterConfig
from penstock.actors.policy.hf.weights import serialized
from penstock.actors.policy.model import Policy
from penstock.actors.trainer.config import OptimizerConfig
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.objective.token_scores import token_scores
from penstock.infra.tinker.losses import LOSSES, flat_inputs
from penstock.infra.tinker.requests import AdamBody
from penstock.infra.tinker.settings import TinkerConfig
from penstock.infra.tinker.wire import Datum, ForwardBackward, forward_backward_reply
from penstock.messages.errors import CorruptDataError

_OPTIMIZER = "optimizer."
_NUM_LOGITS_MAX = 1 << 24
"""Logits of a pass that are in memory at once: 64 MiB in float32."""
_NUM_THREADS = 1
"""Torch threads of one pass, on which its bits depend."""


def with_adapters(base: Policy, adapter: AdapterConfig) -> Policy:
    """Return a policy that shares the base's tensors, with adapters that have no values yet."""
    with torch.device("meta"):
        policy = Policy(msgspec.structs.replace(base.config, adapter=adapter))
    shared = {name: value.detach() for name, value in base.named_parameters()}
    own = {
        name: torch.zeros(value.shape, device="cpu")
        for name, value in policy.named_parameters()
        if is_adapter(name)
    }
    policy.load_state_dict(shared | own, assign=True)
    policy.cos, policy.sin = base.cos, base.sin
    policy.num_logits_max = _NUM_LOGITS_MAX
    return policy


def score(policy: Policy, data: Sequence[Datum]) -> torch.Tensor:
    """Return the logprobs of all targets, [N], N the targets of all positions of all sequences."""
    tokens = np.concatenate([each.tokens for each in data])
    targets = [each.inputs["target_tokens"] for each in data]
    output = policy(torch.as_tensor(tokens.astype(np.int64)), [each.tokens.size for each in data])
    counts = [
        np.full(len(each.tokens), t.size // len(t)) for each, t in zip(data, targets, strict=True)
    ]
    per_token = np.concatenate(counts)
    rows = torch.as_tensor(np.arange(tokens.size).repeat(per_token))
    flat = torch.as_tensor(np.concatenate([t.reshape(-1) for t in targets]).astype(np.int64))
    return token_scores(policy, output.hidden.index_select(0, rows), flat).logprobs


class TrainedModel:
    """One adapter, its gradients and its optimizer. Used by one thread at a time."""

    def __init__(
        self, base: Policy, adapter: AdapterConfig, config: TinkerConfig, seed: int = 0
    ) -> None:
        """Begin with an adapter that has no effect yet.

        Args:
            base: Shared with others, never changed.
            adapter: Rank and targets.
            config: Of the server.
            seed: Of the first values of A.

        """
        self.adapter = adapter
        self.num_steps = 0
        """Optimizer steps since the model was kept."""
        self._config = config
        policy = with_adapters(base, adapter)
        own = {tensor_name(name): p for name, p in policy.named_parameters() if is_adapter(name)}
        with torch.no_grad():
            for name, value in initial_adapters({n: tuple(p.shape) for n, p in own.items()}, seed):
                own[name].copy_(value)
        self._learner = Learner(policy, OptimizerConfig())
        self._learner.set_threads(_NUM_THREADS)

    @property
    def has_gradients(self) -> bool:
        """Whether a forward_backward waits for its step."""
        return any(each.grad is not None for each in self._learner.parameters.values())

    def digests(self) -> tuple[str, str]:
        """Return the digests of the master weights and of the optimizer."""
        return self._learner.weights_digest(), self._learner.optimizer_digest()

    def forward_backward(self, request: ForwardBackward) -> bytes:
        """Add the gradients of a request, unless it is forward only; return the answer.

        The weights are those that samplers have, rounded as they are saved for them.
        """
        passes = _passes(request.data, self._config.pass_tokens)
        options = {"num_workers": self._config.num_workers, "num_threads": _NUM_THREADS}

        def run(data: Sequence[Datum]) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
            loss, settings = LOSSES[request.loss_fn], LOSSES[request.loss_fn].settings
            logprobs = score(self._learner.policy, data)
            each = [flat_inputs(request.loss_fn, one.inputs) for one in data]
            inputs = {name: torch.cat([one[name] for one in each]) for name in loss.inputs}
            losses = loss.function(logprobs, inputs, {**settings, **request.settings})
            return losses.sum(), (logprobs.detach(), losses.detach())

        def scored(data: Sequence[Datum]) -> tuple[torch.Tensor, torch.Tensor]:
            return run(data)[1]

        with self._learner.published_weights():
            if request.forward_only:
                tasks = [partial(scored, data) for data in passes]
                found = self._learner.run_all(tasks, **options)
            else:
                found = self._learner.accumulate([partial(run, d) for d in passes], **options)
        return _reply(request, found)

    def optim_step(self, params: AdamBody) -> dict[str, float]:
        """Take a step with the gradients so far, and clear them.

        Raises:
            NonFiniteError: The gradient is not finite; it is cleared, and nothing else changed.

        """
        config = OptimizerConfig(
            learning_rate=params.learning_rate,
            warmup_steps=0,
            beta1=params.beta1,
            beta2=params.beta2,
            eps=params.eps,
            weight_decay=params.weight_decay,
            grad_clip=params.grad_clip_norm or math.inf,
        )
        self.num_steps += 1
        norm = self._learner.apply(1, config, 1)
        return {"unclipped_grad_l2:mean": norm}

    def clear(self) -> None:
        """Forget the gradients, as a step that fails does."""
        self._learner.clear()

    def state(self) -> bytes:
        """Return weights and moments as safetensors."""
        return serialized(self._learner.state())

    def load(self, data: bytes, *, with_optimizer: bool) -> None:
        """Replace the weights; load the moments too, or start without any.

        Raises:
            CorruptDataError: It is not the state of an adapter of this shape.

        """
        try:
            state = safetensors.torch.load(data)
        except (safetensors.SafetensorError, ValueError) as error:
            raise CorruptDataError(f"saved weights: {error}") from error
        if not with_optimizer:
            state = {k: v for k, v in state.items() if not k.startswith(_OPTIMIZER)}
        self._learner.clear()
        self._learner.load_state(state)

    def published(self) -> bytes:
        """Return the adapters as samplers take them, as safetensors."""
        views = hf_views(self._learner.policy)
        own = [tensor_name(name) for name in self._learner.parameters]
        return serialized({name: views[name].to(PUBLISHED_DTYPE) for name in own})


def _passes(data: Sequence[Datum], tokens_max: int) -> list[list[Datum]]:
    found: list[list[Datum]] = []
    room = 0
    for each in data:
        if each.tokens.size > room or not found:
            found.append([])
            room = tokens_max
        found[-1].append(each)
        room -= each.tokens.size
    return found


def _reply(request: ForwardBackward, found: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bytes:
    shapes = [each.inputs["target_tokens"].shape for each in request.data]
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]

    def split(index: int) -> list[np.ndarray]:
        flat = torch.cat([each[index] for each in found]).numpy()
        return [a.reshape(s) for a, s in zip(np.split(flat, ends), shapes, strict=True)]

    losses = split(1)
    total = math.fsum(float(value) for each in losses for value in each.reshape(-1))
    outputs: Mapping[str, list[np.ndarray]] = {"logprobs": split(0), "elementwise_loss": losses}
    return forward_backward_reply(outputs, {"loss:sum": total})
