"""A model of the package transformers in the place of the own policy.

`TransformersPolicy` is called as `actors/policy/model.Policy` is, so that one forward pass over
packed trees, one objective and one learner serve both. A tree is one row of tokens, with positions
of their own and a mask by which each token sees its ancestors.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy, PolicyOutput, ancestors_of
from penstock.actors.trainer.ranks.hf.routing import RouteReplay


class TransformersPolicy(Policy):
    """The model, whole or sharded over ranks, and its routers."""

    def __init__(self, model: PreTrainedModel, config: PolicyConfig) -> None:
        """Take over a model.

        Args:
            model: for causal language modeling, of one of `routing.ROUTERS`; changed.
            config: its shape, and how it is computed.

        """
        nn.Module.__init__(self)  # The tensors are the model's, not the own policy's.
        self.config = config
        self.checkpoints_activations = self._has_checkpointing = False
        self.model = model
        self._routes = RouteReplay(model, model.config.model_type)
        head = model.get_submodule("lm_head")
        assert isinstance(head, nn.Linear)
        self._head = head
        # `logits` applies the head, to the tokens that matter. Its module is called all the same,
        # so that FSDP2 gathers the head's weight, and keeps it until the backward pass.
        head.forward = _same

    @property
    def device(self) -> torch.device:
        """Where it computes; its inputs must be there."""
        return self._head.weight.device

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters, all of which train, under transformers' names."""
        return self.model.named_parameters(prefix, recurse, remove_duplicate)

    def forward(
        self,
        input_ids: torch.Tensor,
        lengths: Sequence[int],
        routed_experts: torch.Tensor | None = None,
        parents: Sequence[int] | None = None,
        states: torch.Tensor | None = None,
    ) -> PolicyOutput:
        """Run T packed tokens; arguments and errors are those of `Policy.forward`."""
        assert states is None, "exact mode is refused with the configuration"
        chains = ancestors_of(len(lengths), parents)
        positions = _positions(lengths, chains).to(input_ids.device)
        longest = int(positions.max()) + 1
        if longest > self.config.max_position_embeddings:
            raise ValueError(
                f"a sequence of {longest} tokens exceeds max_position_embeddings "
                f"{self.config.max_position_embeddings}"
            )
        recorded = None if routed_experts is None else routed_experts.to(torch.int64)
        self._routes.start(recorded)
        if self.checkpoints_activations != self._has_checkpointing:
            self._set_checkpointing()
        output = self.model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            attention_mask=_mask(lengths, chains).to(input_ids.device)[None, None],
            use_cache=False,
        )
        layers = self._routes.layers
        return PolicyOutput(
            hidden=output.logits[0],
            routed_experts=self._routes.used().to(torch.int16),
            flips=self._routes.flips(),
            num_recorded=0 if recorded is None else int((recorded[:, layers] >= 0).sum()),
            balance_loss=output.logits.new_zeros(()),
        )

    def _set_checkpointing(self) -> None:
        self._has_checkpointing = self.checkpoints_activations
        if self.checkpoints_activations:
            self.model.gradient_checkpointing_enable()
        else:
            self.model.gradient_checkpointing_disable()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, d] -> [N, vocab_size]; after a forward pass, before the next."""
        return F.linear(hidden, self._head.weight)


def load_policy(
    folder: Path,
    config: PolicyConfig,
    device: torch.device,
    num_ranks: int = 1,
    num_expert_ranks: int = 1,
) -> TransformersPolicy:
    """Load a Hugging Face folder in float32, each rank its part of it.

    Args:
        folder: of the model.
        config: what `read_hf_config` says of it.
        device: where it computes.
        num_ranks: all of `torch.distributed`'s, or 1: the whole model in this process.
        num_expert_ranks: ranks that divide the experts among them, a divisor of `num_ranks`.

    Raises:
        ValueError: The model cannot be divided so.

    """
    divided = DistributedConfig(fsdp_size=num_ranks, ep_size=num_expert_ranks)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
        distributed_config=divided if num_ranks > 1 else None,
    )
    nn.Module.to(model, device)
    # Nothing is dropped out; activations are checkpointed in training mode alone.
    return TransformersPolicy(model.train(), config)


def _same(input: torch.Tensor) -> torch.Tensor:
    return input


def _positions(lengths: Sequence[int], chains: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """[T]: of each token in its own sequence."""
    starts = [sum(lengths[i] for i in chain) for chain in chains]
    parts = [torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    return torch.cat(parts)


def _mask(lengths: Sequence[int], chains: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Bool [T, T]: what each token sees of the batch."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    pieces = [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]
    mask = torch.zeros(ends[-1], ends[-1], dtype=torch.bool)
    for own, chain in zip(pieces, chains, strict=True):
        mask[own, own] = torch.ones(own.stop - own.start, own.stop - own.start).tril().bool()
        for i in chain:
            mask[own, pieces[i]] = True
    return mask
