"""LoRA on a model of transformers, by PEFT: the base is frozen, and adapters alone train.

Each rank has whole adapters, which are small beside the base that FSDP2 may divide. So all ranks
take the same optimizer step, once they have added up the gradients of all passes in pass order:
one rank or many give the same bits.
"""

from collections.abc import Iterable

import torch
from peft import LoraConfig
from peft.functional import inject_adapter_in_model
from transformers import PreTrainedModel

from penstock.actors.policy.adapter import initial_a, tensor_names
from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE
from penstock.actors.policy.config import AdapterConfig
from penstock.actors.policy.hf.config import ModelFormatError

_NAME = "default"
"""PEFT's name of an adapter that is alone."""
_BASE = ".base_layer."
"""In the names of an adapted module's own tensors."""


def add_adapter(model: PreTrainedModel, config: AdapterConfig, seed: int) -> None:
    """Freeze a model, rounded as it is published, and put adapters beside its matrices, in place.

    Args:
        model: Whole or divided by FSDP2.
        config: Rank, factor and targets.
        seed: Of A's initial values; B begins at 0.

    Raises:
        ModelFormatError: A target is no matrix of this model.

    """
    _check_targets(model, config.targets)
    model.requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(PUBLISHED_DTYPE))
    inject_adapter_in_model(_peft_config(config), model, adapter_name=_NAME)
    _start(model, seed)


def set_adapter_scale(model: PreTrainedModel, scale: float) -> None:
    """Set the factor of all adapters' products; 0 leaves the base alone."""
    for module in model.modules():
        if scaling := getattr(module, "scaling", None):
            scaling[_NAME] = scale


def folder_name(name: str) -> str:
    """Return a parameter's name in its model's folder; of an adapter's, in a folder of PEFT."""
    for end, index in ((f".lora_A.{_NAME}.weight", 0), (f".lora_B.{_NAME}.weight", 1)):
        if name.endswith(end):
            return tensor_names(name.removesuffix(end))[index]
    return name.replace(_BASE, ".")


def _peft_config(config: AdapterConfig) -> LoraConfig:
    # As a pattern: PEFT matches plain names by their ends, and warns of several that it finds.
    names = "|".join(config.targets)
    return LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=rf"(?:.*\.)?(?:{names})"
    )


def _start(model: PreTrainedModel, seed: int) -> None:
    """Set initial values, in float32 on every rank."""
    ends = {0: f".lora_A.{_NAME}.weight", 1: f".lora_B.{_NAME}.weight"}
    found = {}
    for name, parameter in model.named_parameters():
        if name.endswith(tuple(ends.values())):
            parameter.data = torch.zeros_like(parameter, dtype=torch.float32)
            found[name] = parameter
    shapes = {folder_name(n): tuple(p.shape) for n, p in found.items() if n.endswith(ends[0])}
    values = dict(initial_a(shapes, seed))
    with torch.no_grad():
        for name, parameter in found.items():
            if name.endswith(ends[0]):
                parameter.copy_(values[folder_name(name)])


def _check_targets(model: PreTrainedModel, targets: Iterable[str]) -> None:
    kind = model.config.model_type
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    for target in targets:
        if target not in linear:
            raise ModelFormatError(
                f"trainer.adapter.targets: {target!r} is no matrix of model_type {kind}; expected "
                f"some of {', '.join(sorted(linear))}"
            )
