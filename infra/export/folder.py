"""Writes a model folder whole or not at all, and reads it back before it gets its name."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from penstock.actors.policy.checkpoint import as_torch, tensor_shapes
from penstock.actors.policy.hf.config import CONFIG_FILE, read_hf_config
from penstock.actors.policy.hf.weights import SHARD_BYTES_MAX, find_weights, write_weights
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


def write_model(
    folder: Path,
    config_text: str,
    tensors: Mapping[str, np.ndarray],
    tokenizer: TokenizerFiles,
    *,
    shard_bytes_max: int = SHARD_BYTES_MAX,
) -> None:
    """Write a folder that holds a bfloat16 model and its tokenizer.

    Args:
        folder: new or empty.
        config_text: its config.json.
        tensors: under the format's names; of bfloat16 the bits (uint16).
        tokenizer: its files.
        shard_bytes_max: of one weight file.

    Raises:
        ConfigError: The folder is not empty.
        ModelFormatError: The tensors are not those of the shape; nothing is left behind.

    """
    check_target(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        for name, data in tokenizer.files.items():
            write_atomic(unfinished / name, data)
        write_atomic(unfinished / CONFIG_FILE, config_text.encode())
        state = {name: as_torch(array) for name, array in tensors.items()}
        write_weights(unfinished, state, shard_bytes_max)
        config = read_hf_config(unfinished)
        # Which tensors another architecture has, transformers knows, which loaded and trained it.
        own = {name: tuple(tensor.shape) for name, tensor in state.items()}
        find_weights(unfinished, own if config.is_foreign else tensor_shapes(config))
        unfinished.chmod(0o755)
        unfinished.replace(folder)  # takes the place of an empty folder, of no other
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
