"""A model of the package transformers in the place of the own policy.

`TransformersPolicy` is called as `actors/policy/model.Policy` is, so that one forward pass over
packed trees, one objective and one learner serve both. A tree is one row of tokens, with positions
of their own, and attention that knows the pieces (`attention.py`). A model with layers that keep a
state from token to token, such as linear attention, has no trees: its sequences are the rows of a
batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.config import ModelFormatError
from penstock.actors.policy.model import Policy, PolicyOutput, ancestors_of
from penstock.actors.trainer.engines.config import RanksConfig
from penstock.actors.trainer.ranks.hf.adapter import add_adapter, set_adapter_scale
from penstock.actors.trainer.ranks.hf.attention import NAME, PackedLayout, watch
from penstock.actors.trainer.ranks.hf.checks import check_policy, reference_logprobs
from penstock.actors.trainer.ranks.hf.routing import RouteReplay
from penstock.actors.trainer.ranks.models import release
from penstock.actors.trainer.ranks.world import World

_ATTENTION = ("full_attention", "sliding_attention")
"""Values of `layer_types` that keep no state from token to token."""


class TransformersPolicy(Policy):
    """The model, whole or sharded over ranks, and its routers."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: PolicyConfig,
        ranks: RanksConfig,
        device: torch.device,
    ) -> None:
        """Take over a model.

        Args:
            model: for causal language modeling, its attention that of `attention.NAME`; changed.
            config: its shape.
            ranks: how it is computed.
            device: where it computes.

        Raises:
            ModelFormatError: It has no output head of one matrix.

        """
        nn.Module.__init__(self)  # The tensors are the model's, not the own policy's.
        self.config = config
        self.checkpoints_activations = self._has_checkpointing = False
        self.model = model
        self.num_logits_max = ranks.logits_bytes_max // torch.float32.itemsize
        self._offloads = ranks.offload_activations
        # An adapter's float32 beside a base in bfloat16.
        self._mixes = config.adapter is not None and ranks.dtype == "bfloat16"
        self._device = device
        self._routes = RouteReplay(model, model.config.model_type)
        self._layouts = watch(model)
        kinds = getattr(model.config, "layer_types", None) or ()
        self._has_state = any(kind not in _ATTENTION for kind in kinds)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            kind = model.config.model_type
            raise ModelFormatError(f"model_type {kind}: expected an output head of one matrix")
        self._head = head
        # A tied head's own reference may stay sharded where FSDP gathers the embedding's.
        tied = model.config.tie_word_embeddings
        embedding = model.get_input_embeddings() if tied else head
        assert isinstance(embedding, nn.Embedding | nn.Linear)
        self._embedding = embedding
        # `logits` applies the head, to the tokens that matter. Its module is called all the same,
        # so that FSDP2 gathers the head's weight, and keeps it until the backward pass.
        head.forward = self._take_hidden

    @property
    def device(self) -> torch.device:
        """Where it computes; its inputs must be there."""
        return self._device

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under transformers' names, or PEFT's."""
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
        layout = PackedLayout(tuple(lengths), chains, input_ids.device)
        longest = max(end for _, end in layout.spans)
        if longest > self.config.max_position_embeddings:
            raise ValueError(
                f"a sequence of {longest} tokens exceeds max_position_embeddings "
                f"{self.config.max_position_embeddings}"
            )
        recorded = None if routed_experts is None else routed_experts.to(torch.int64)
        if self.checkpoints_activations != self._has_checkpointing:
            self._set_checkpointing()
        if self._has_state:
            hidden, used = self._run_rows(input_ids, layout, recorded)
        else:
            hidden, used = self._run_model(
                input_ids[None], layout.positions[None], layout, recorded
            )
        # Without routes nothing waits for the device here.
        num_recorded = 0
        if recorded is not None and recorded.numel():
            num_recorded = int((recorded[:, self._routes.layers] >= 0).sum())
        return PolicyOutput(
            hidden=hidden,
            routed_experts=used.to(torch.int16),
            flips=self._routes.flips(),
            num_recorded=num_recorded,
            balance_loss=hidden.new_zeros(()),
        )

    def _run_model(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        layout: PackedLayout,
        recorded: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run [B, S] tokens; return hidden states [B * S, d] and experts [B * S, L, K]."""
        self._routes.start(recorded)
        self._layouts.current = layout
        kind = self._device.type
        with (
            save_on_cpu(kind == "cuda") if self._offloads else nullcontext(),
            torch.autocast(kind, torch.bfloat16, enabled=self._mixes),
        ):
            self.model(
                input_ids=input_ids, position_ids=positions, attention_mask=None, use_cache=False
            )
        hidden, self._hidden = self._hidden.flatten(0, 1), torch.empty(0)
        return hidden, self._routes.used(input_ids.numel())

    def _run_rows(
        self, input_ids: torch.Tensor, layout: PackedLayout, recorded: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run every sequence as a row of its own; return what `_run_model` does.

        Rows are filled up behind their end, where nothing reads.
        """
        continued = {i for chain in layout.chains for i in chain}
        leaves = [i for i in range(len(layout.lengths)) if i not in continued]
        whole = torch.arange(input_ids.numel())
        rows = [
            torch.cat([whole[layout.pieces[i]] for i in (*layout.chains[leaf], leaf)])
            for leaf in leaves
        ]
        packed = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        num_rows, width = packed.shape
        place = torch.empty_like(whole)
        for number, row in enumerate(rows):
            place[row] = torch.arange(len(row)) + number * width
        index, place = packed.to(input_ids.device), place.to(input_ids.device)
        positions = torch.arange(width, device=input_ids.device).expand(num_rows, width)
        flat = PackedLayout((width,) * num_rows, ((),) * num_rows, input_ids.device)
        given = None if recorded is None else recorded[index.flatten()]
        hidden, used = self._run_model(input_ids[index], positions, flat, given)
        return hidden[place], used[place]

    def _set_checkpointing(self) -> None:
        self._has_checkpointing = self.checkpoints_activations
        if self.checkpoints_activations:
            self.model.gradient_checkpointing_enable()
        else:
            self.model.gradient_checkpointing_disable()

    def set_adapter_scale(self, scale: float) -> None:
        """Set the factor of all adapters' products; see `Policy.set_adapter_scale`."""
        set_adapter_scale(self.model, scale)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, d] -> [N, vocab_size]; after a forward pass, before the next."""
        logits = F.linear(hidden, self._embedding.weight, self._head.bias)
        config = self.model.config
        if scale := getattr(config, "logit_scale", None):
            logits = logits * scale
        if divisor := getattr(config, "logits_scaling", None):
            logits = logits / divisor
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else (logits / cap).tanh() * cap

    def head_weights(self) -> list[torch.Tensor]:
        """Return the tensors whose gradients `logits` has, as the forward pass gathered them."""
        found = [self._embedding.weight, self._head.bias]
        return [each for each in found if each is not None]

    def _take_hidden(self, input: torch.Tensor) -> torch.Tensor:
        self._hidden = input
        return input


def load_policy(
    folder: Path, config: PolicyConfig, ranks: RanksConfig, world: World, seed: int
) -> TransformersPolicy:
    """Load a Hugging Face folder, each rank its part of it.

    It is float32; the base of an adapter has the dtype that it is computed in.

    Args:
        folder: of the model.
        config: what `read_hf_config` says of it.
        ranks: how it is computed.
        world: all ranks; one that is alone has the whole model.
        seed: of an adapter's first values.

    Raises:
        ModelFormatError: transformers does not load it, or its layers are not computed so.
        ValueError: The model cannot be divided so.

    """
    mixes = config.adapter is not None and ranks.dtype == "bfloat16"
    divided = DistributedConfig(
        fsdp_size=world.num_ranks,
        ep_size=ranks.num_expert_ranks,
        fsdp_mixed_precision=ranks.dtype == "bfloat16",
        fsdp_cpu_offload=ranks.offload_optimizer,
    )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16 if mixes else torch.float32,
            attn_implementation=NAME,
            local_files_only=True,
            trust_remote_code=False,
            distributed_config=divided if world.num_ranks > 1 else None,
        )
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelFormatError(f"{folder}: transformers cannot load it: {error}") from error
    if world.num_ranks == 1:
        nn.Module.to(model, world.device)
        if not config.adapter and (ranks.dtype == "bfloat16" or ranks.offload_optimizer):
            _shard_alone(model, ranks, world)
    if config.adapter:
        add_adapter(model, config.adapter, seed, folder)
    expected = reference_logprobs(model, world.device)
    # Nothing is dropped out; activations are checkpointed in training mode alone.
    policy = TransformersPolicy(model.train(), config, ranks, world.device)
    check_policy(policy, expected, model.config.model_type)
    release(policy)
    if ranks.compile:
        for layer in model.get_submodule("model.layers").children():
            layer.compile()
    return policy


def _shard_alone(model: PreTrainedModel, ranks: RanksConfig, world: World) -> None:
    """Have FSDP2 keep the weights of a process that is alone, as it does those of several."""
    dtype = torch.bfloat16 if ranks.dtype == "bfloat16" else None
    policies: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    }
    if ranks.offload_optimizer:
        policies["offload_policy"] = CPUOffloadPolicy()
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=world.mesh, **policies)
    fully_shard(model, mesh=world.mesh, **policies)
