"""Trainers that differ from the sampler in known ways, to measure what each remedy removes."""

from collections.abc import Callable, Sequence

import msgspec
import torch

from penstock.actors.policy.config import NumericsConfig
from penstock.actors.policy.layers import TransformerLayer
from penstock.actors.policy.model import Policy
from penstock.actors.trainer.forward import ForwardOutput, SequenceForward
from penstock.actors.trainer.sequences import TrainingSequence

TrainerForward = Callable[[Sequence[TrainingSequence]], ForwardOutput]


def trainer(policy: Policy, mode: str) -> TrainerForward:
    """Return the forward pass of a run's trainer in a mode."""
    return SequenceForward(with_mode(policy, mode)).run


def perturbed(policy: Policy, kernels: str, *, gate: bool, replay: bool) -> TrainerForward:
    """Return a trainer with other kernels and some remedies.

    Args:
        kernels: Name in `KERNELS`.
        gate: Whether scores are in float32 instead of bfloat16.
        replay: Whether recorded routes are used.

    """
    other = with_mode(policy, "fast" if gate else "off")
    KERNELS[kernels](other)
    return SequenceForward(other, replays=replay).run


def with_mode(policy: Policy, mode: str) -> Policy:
    """Return a copy of a policy that computes in another mode."""
    numerics: NumericsConfig = msgspec.structs.replace(policy.config.numerics, mode=mode)
    other = Policy(msgspec.structs.replace(policy.config, numerics=numerics))
    other.load_state_dict(policy.state_dict())
    return other


def _torch_kernels(policy: Policy) -> None:
    """Keep torch's kernels: float32, sums in torch's order."""


@torch.no_grad()
def _other_order(policy: Policy) -> None:
    """Permute the hidden units: the same function, with every sum in another order."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(policy.config.hidden_size, generator=generator)
    inner = torch.randperm(policy.config.ffn_width, generator=generator)
    # `gate_up` holds both halves of the gated unit one after the other.
    halves = torch.cat((inner, inner + len(inner)))
    tied = policy.config.tie_word_embeddings
    for table in [policy.embedding, *([] if tied else [policy.head])]:
        table.copy_(table[:, order].clone())
    policy.final_norm.copy_(policy.final_norm[order].clone())
    for layer in policy.layers:
        assert isinstance(layer, TransformerLayer)
        attention, experts = layer.attention, layer.experts
        for norm in (layer.attention_norm, layer.expert_norm):
            norm.copy_(norm[order].clone())
        for matrix in (attention.qkv, *([] if layer.router is None else [layer.router.weight])):
            matrix.copy_(matrix[:, order].clone())
        attention.output.copy_(attention.output[order].clone())
        experts.gate_up.copy_(experts.gate_up[:, halves][..., order].clone())
        experts.down.copy_(experts.down[:, order][..., inner].clone())


def _bf16_states(policy: Policy) -> None:
    """Round every layer's output to bfloat16, as in mixed-precision training."""

    def rounded(_layer: torch.nn.Module, _args: object, output: tuple[torch.Tensor, ...]) -> object:
        return (output[0].bfloat16().float(), *output[1:])

    for layer in policy.layers:
        layer.register_forward_hook(rounded)


KERNELS: dict[str, Callable[[Policy], None]] = {
    "torch, float32": _torch_kernels,
    "other order of sums": _other_order,
    "bfloat16 between layers": _bf16_states,
}
"""Functions that make a trainer's kernels differ from the sampler's, by name."""
