"""LoRA on a model of transformers, by PEFT: the base is frozen, and adapters alone train.

Each rank has whole adapters, which are small beside the base that FSDP2 may divide. So all ranks
take the same optimizer step, once they have added up the gradients of all passes in pass order:
one rank or many give the same bits.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from penstock.actors.policy.adapter import initial_adapters, tensor_names
from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE
from penstock.actors.policy.config import AdapterConfig
from penstock.actors.policy.hf.config import ModelFormatError
from penstock.actors.policy.hf.peft import PEFT_WEIGHTS
from penstock.actors.policy.hf.weights import find_adapters

_NAME = "default"
"""PEFT's name for a single adapter."""
_BASE = ".base_layer."
"""Part that PEFT inserts into the names of an adapted module's own tensors."""


def add_adapter(model: PreTrainedModel, config: AdapterConfig, seed: int, folder: Path) -> None:
    """Freeze a model, rounded as it is published, and put adapters beside its matrices, in place.

    Args:
        model: Whole or divided by FSDP2.
        config: Rank, factor and targets.
        seed: Of A's initial values; B begins at 0.
        folder: Of the model; adapters in it take the place of initial values.

    Raises:
        ModelFormatError: A target is not a matrix of this model, or the folder's adapters do not
        match.

    """
    # Only here: it takes a second, and most runs have no adapter.
    from peft import LoraConfig  # pyright: ignore[reportMissingImports]
    from peft.functional import inject_adapter_in_model  # pyright: ignore[reportMissingImports]

    _check_targets(model, config.targets)
    model.requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(PUBLISHED_DTYPE))
    # As a pattern, which is matched with whole names: PEFT takes a plain name for an end.
    targets = rf"(?:.*\.)?(?:{'|'.join(config.targets)})"
    settings = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets)
    inject_adapter_in_model(settings, model, adapter_name=_NAME)
    _start(model, seed, folder)


def set_adapter_scale(model: PreTrainedModel, scale: float) -> None:
    """Set the factor of all adapters' products; 0 leaves the base alone."""
    for module in model.modules():
        # Attention has a number of this name.
        if isinstance(scaling := getattr(module, "scaling", None), dict):
            scaling[_NAME] = scale


def folder_name(name: str) -> str:
    """Return a parameter's name in its model's folder; of an adapter's, in a folder of PEFT."""
    for end, index in ((f".lora_A.{_NAME}.weight", 0), (f".lora_B.{_NAME}.weight", 1)):
        if name.endswith(end):
            return tensor_names(name.removesuffix(end))[index]
    return name.replace(_BASE, ".")


def _start(model: PreTrainedModel, seed: int, folder: Path) -> None:
    """Set first values, in float32 on every rank."""
    found = {
        folder_name(name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    shapes = {name: tuple(each.shape) for name, each in found.items()}
    for name, value in initial_adapters(shapes, seed):
        found[name].data = value.to(found[name].device)
    if (folder / PEFT_WEIGHTS).is_file():
        find_adapters(folder, shapes).read_into(found)


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
