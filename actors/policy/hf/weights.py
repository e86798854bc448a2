"""The tensors of a Hugging Face folder: one `model.safetensors`, or shards and their index.

What a folder claims is checked before anything is allocated: the index names files of the folder
and nothing else, and every expected tensor is in its file with its shape and a known dtype.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from penstock.actors.policy.hf.config import ModelFormatError, read_json
from penstock.actors.runtime.files import write_atomic

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES_MAX = 4 << 30
"""Tensors of one file of a folder that is written; safetensors are serialized in memory."""
_INDEX_BYTES_MAX = 64 << 20
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""All of them widen to float32 exactly."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class WeightFiles:
    """Where each tensor of a folder lies; its head was checked."""

    files: Mapping[Path, list[str]]
    """Names of the tensors of each file."""
    has_tied_head: bool
    """Whether the output head is stored although it is tied to the embedding."""

    @torch.no_grad()
    def read_into(self, views: Mapping[str, torch.Tensor]) -> None:
        """Copy every tensor into the view of its name.

        Raises:
            ModelFormatError: A tensor that holds a NaN or an infinity, or a stored head that is
                not the embedding it is tied to.

        """
        for path, names in self.files.items():
            with _opened(path) as file:
                for name in names:
                    view = views[name]
                    view.copy_(_tensor(path, file, name))
                    if not bool(view.isfinite().all()):
                        raise ModelFormatError(f"{path}: tensor {name} holds numbers not finite")
        if self.has_tied_head:
            self._check_tied_head(views[_EMBEDDING])

    def _check_tied_head(self, embedding: torch.Tensor) -> None:
        for path in self.files:
            with _opened(path) as file:
                if _HEAD in file.keys() and not torch.equal(  # noqa: SIM118 - not a mapping
                    _tensor(path, file, _HEAD).to(embedding), embedding
                ):
                    raise ModelFormatError(
                        f"{path}: tensor {_HEAD} differs from {_EMBEDDING}, and "
                        "tie_word_embeddings is true"
                    )


def find_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> WeightFiles:
    """Find the tensors of these names and shapes, and nothing else, in a folder.

    Raises:
        ModelFormatError: A file, a tensor or an index that is missing or not as expected; the text
            names it.

    """
    index = folder / INDEX_FILE
    found = _by_index(index) if index.exists() else {folder / SINGLE_FILE: None}
    if index.exists() and (folder / SINGLE_FILE).exists() and folder / SINGLE_FILE not in found:
        raise ModelFormatError(f"{folder}: expected either {SINGLE_FILE} or {INDEX_FILE}, not both")
    files: dict[Path, list[str]] = {}
    seen: set[str] = set()
    has_tied_head = False
    for path, announced in found.items():
        names = _check_file(path, announced, shapes, seen)
        files[path] = [name for name in names if name in shapes]
        has_tied_head |= len(files[path]) < len(names)
    missing = sorted(shapes.keys() - seen)
    if missing:
        raise ModelFormatError(
            f"{folder}: {len(missing)} tensors are missing, among them {', '.join(missing[:3])}"
        )
    return WeightFiles(files, has_tied_head)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of whatever tensors a folder has, by name, from the heads of its files.

    Raises:
        ModelFormatError: A file or an index that is missing or not of the format.

    """
    index = folder / INDEX_FILE
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _by_index(index) if index.exists() else (folder / SINGLE_FILE,):
        with _opened(path) as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return shapes


def write_weights(
    folder: Path, state: Mapping[str, torch.Tensor], shard_bytes_max: int = SHARD_BYTES_MAX
) -> None:
    """Write tensors as one file, or as shards of at most `shard_bytes_max` with an index.

    A tensor that is larger than that has a file of its own.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = shard_bytes_max
    for name, tensor in state.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = shard_bytes_max
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        write_atomic(folder / SINGLE_FILE, _serialized(shards[0]))
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_atomic(folder / file, _serialized(shard))
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_atomic(folder / INDEX_FILE, json.dumps(index, indent=2, sort_keys=True).encode())


def _serialized(state: Mapping[str, torch.Tensor]) -> bytes:
    return save({name: tensor.contiguous() for name, tensor in state.items()}, {"format": "pt"})


def _by_index(path: Path) -> dict[Path, set[str] | None]:
    """Return the tensors that an index announces for each file of its folder."""
    weight_map = read_json(path, _INDEX_BYTES_MAX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{path}: weight_map: expected an object of tensors and files")
    files: dict[Path, set[str] | None] = {}
    for name, file in weight_map.items():
        plain = isinstance(file, str) and file == Path(file).name and "\0" not in file
        if not plain or not file.endswith(".safetensors") or file.startswith("."):
            raise ModelFormatError(
                f"{path}: weight_map: tensor {name!r:.100} lies in {file!r:.100}, expected the "
                "name of a .safetensors file of the same folder"
            )
        announced = files.setdefault(path.parent / file, set())
        assert announced is not None
        announced.add(name)
    return files


def _check_file(
    path: Path,
    announced: set[str] | None,
    shapes: Mapping[str, tuple[int, ...]],
    seen: set[str],
) -> list[str]:
    """Check the heads of one file; return its tensors and add those expected to `seen`."""
    if not path.exists():
        holds = f"which {INDEX_FILE} puts {min(announced)} into" if announced else "or an index"
        raise ModelFormatError(f"{path}: no such file, {holds}")
    with _opened(path) as file:
        names = list(file.keys())
        if announced is not None and announced != set(names):
            odd = sorted(announced.symmetric_difference(names))[:3]
            raise ModelFormatError(
                f"{path}: its tensors are not those of {INDEX_FILE}: {', '.join(odd)}"
            )
        for name in names:
            is_tied_head = name == _HEAD and _HEAD not in shapes
            expected = shapes.get(_EMBEDDING if is_tied_head else name)
            if expected is None:
                raise ModelFormatError(f"{path}: tensor {name!r:.100} is no tensor of the model")
            head = file.get_slice(name)
            if tuple(head.get_shape()) != expected:
                raise ModelFormatError(
                    f"{path}: tensor {name} has shape {list(head.get_shape())!s:.100}, expected "
                    f"{list(expected)}"
                )
            if head.get_dtype() not in _DTYPES:
                raise ModelFormatError(
                    f"{path}: tensor {name} is {head.get_dtype()}, expected one of "
                    f"{', '.join(_DTYPES)}"
                )
            seen.add(name)
    return names


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise ModelFormatError(f"{path}: expected a file")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ModelFormatError(f"{path}: not a safetensors file: {error}") from error


def _tensor(path: Path, file: Any, name: str) -> torch.Tensor:
    try:
        return file.get_tensor(name)
    except SafetensorError as error:
        raise ModelFormatError(f"{path}: tensor {name}: {error}") from error
