"""Writes a model folder whole or not at all, and reads it back before it gets its name."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from penstock.actors.policy.adapter import PREFIX, merge, module_of
from penstock.actors.policy.checkpoint import as_torch, tensor_shapes
from penstock.actors.policy.config import AdapterConfig
from penstock.actors.policy.hf.config import CONFIG_FILE, read_hf_config
from penstock.actors.policy.hf.peft import PEFT_CONFIG, PEFT_WEIGHTS, adapter_json
from penstock.actors.policy.hf.weights import (
    SHARD_BYTES_MAX,
    find_weights,
    serialized,
    write_weights,
)
from penstock.actors.runtime.files import sync_folder, write_atomic
from penstock.infra.export.tokenizer_files import TokenizerFiles
from penstock.messages.errors import ConfigError


def check_target(folder: Path) -> None:
    """Refuse what an export must not write to.

    Raises:
        ConfigError: It is a file or within one, or a folder that is not empty.

    """
    above = next(path for path in folder.absolute().parents if path.exists())
    if not above.is_dir():
        raise ConfigError(
            f"--output: {above} is not a folder, in which {folder.name} could be made"
        )
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"--output: {folder} is not a folder")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--output: {folder} is not empty; name a new folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an unfinished folder that gets its name, new or an empty one's, at the block's end.

    Raises:
        ConfigError: There is something at `folder`.

    """
    check_target(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        yield unfinished
        unfinished.chmod(0o755)
        unfinished.replace(folder)  # takes the place of an empty folder, of no other
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_model(  # noqa: PLR0913 - what a folder holds
    folder: Path,
    config_text: str,
    tensors: Mapping[str, np.ndarray],
    tokenizer: TokenizerFiles,
    adapter: AdapterConfig | None,
    *,
    shard_bytes_max: int = SHARD_BYTES_MAX,
) -> None:
    """Write a folder that holds a bfloat16 model and its tokenizer.

    Args:
        folder: new or empty.
        config_text: its config.json.
        tensors: under the format's names; of bfloat16 the bits (uint16).
        tokenizer: its files.
        adapter: settings of the adapters among the tensors, which are merged; their matrices
            become float32, in which nothing of them is rounded away.
        shard_bytes_max: of one weight file.

    Raises:
        ConfigError: The folder is not empty.
        ModelFormatError: The tensors are not those of the shape; nothing is left behind.

    """
    with new_folder(folder) as unfinished:
        for name, data in tokenizer.files.items():
            write_atomic(unfinished / name, data)
        write_atomic(unfinished / CONFIG_FILE, config_text.encode())
        state = merged_state(tensors, adapter)
        write_weights(unfinished, state, shard_bytes_max)
        config = read_hf_config(unfinished)
        # Which tensors another architecture has, transformers knows, which loaded and trained it.
        own = {name: tuple(tensor.shape) for name, tensor in state.items()}
        find_weights(unfinished, own if config.is_foreign else tensor_shapes(config))


def write_adapter(
    folder: Path, tensors: Mapping[str, np.ndarray], adapter: AdapterConfig, base: str
) -> None:
    """Write the adapters among a version's tensors as a folder of PEFT.

    Raises:
        ConfigError: The folder is not empty.

    """
    state = {name: as_torch(each) for name, each in tensors.items() if name.startswith(PREFIX)}
    with new_folder(folder) as unfinished:
        write_atomic(unfinished / PEFT_CONFIG, adapter_json(adapter, base).encode())
        # PEFT's own files are float32, and this says what was published exactly.
        whole = {name: tensor.float() for name, tensor in state.items()}
        write_atomic(unfinished / PEFT_WEIGHTS, serialized(whole))


def merged_state(
    tensors: Mapping[str, np.ndarray], adapter: AdapterConfig | None
) -> dict[str, torch.Tensor]:
    """Return a version's tensors with its adapters merged, and without them."""
    state = {name: as_torch(array) for name, array in tensors.items()}
    if adapter is None:
        return state
    for name in [name for name in state if name.startswith(PREFIX)]:
        weight = f"{module_of(name)}.weight"
        state[weight] = state[weight].float()
    merge(state, adapter.scale)
    return {name: each for name, each in state.items() if not name.startswith(PREFIX)}
