"""Reader and writer for the tensors of a Hugging Face folder, in one file or in indexed shards.

All claims of a folder are checked before anything is allocated: the index only names files in the
folder, and every expected tensor is in its file with its shape and a known dtype.
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
from penstock.actors.policy.hf.peft import PEFT_WEIGHTS
from penstock.actors.runtime.files import write_atomic

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES_MAX = 4 << 30
"""Maximum size of the tensors in one written file, which is serialized in memory."""
_INDEX_BYTES_MAX = 64 << 20
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Supported dtypes; all of them convert to float32 exactly."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class WeightFiles:
    """Checked tensor locations of a folder."""

    files: Mapping[Path, list[str]]
    """Names of the tensors in each file."""
    has_tied_head: bool
    """Whether the output head is stored even though it is tied to the embedding."""

    @torch.no_grad()
    def read_into(self, views: Mapping[str, torch.Tensor]) -> None:
        """Copy every tensor into the view with its name.

        Raises:
            ModelFormatError: A tensor has NaN or infinite values, or the stored head differs from
                the embedding that it is tied to.

        """
        for path, names in self.files.items():
            with _opened(path) as file:
                for name in names:
                    view = views[name]
                    view.copy_(_tensor(path, file, name))
                    # A NaN here would otherwise only show up in the logits.
                    if not bool(view.isfinite().all()):
                        raise ModelFormatError(f"{path}: tensor {name} has NaN or infinite values")
        if self.has_tied_head:
            self._check_tied_head(views[_EMBEDDING])

    def _check_tied_head(self, embedding: torch.Tensor) -> None:
        for path in self.files:
            with _opened(path) as file:
                if _HEAD in file.keys() and not torch.equal(  # noqa: SIM118 - not a mapping
                    _tensor(path, file, _HEAD).to(embedding), embedding
                ):
                    raise ModelFormatError(
                        f"{path}: tensor {_HEAD} differs from {_EMBEDDING}, although "
                        "tie_word_embeddings is true"
                    )


def find_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> WeightFiles:
    """Locate the tensors of a folder, which must have exactly these names and shapes.

    Raises:
        ModelFormatError: A file, tensor or index is missing or not as expected; the text names it.

    """
    index = folder / INDEX_FILE
    found = _by_index(index) if index.exists() else {folder / SINGLE_FILE: None}
    # With both, nobody can know which one is current.
    if index.exists() and (folder / SINGLE_FILE).exists() and folder / SINGLE_FILE not in found:
        raise ModelFormatError(f"{folder}: expected either {SINGLE_FILE} or {INDEX_FILE}, not both")
    files: dict[Path, list[str]] = {}
    seen: set[str] = set()
    has_tied_head = False
    for path, announced in found.items():
        names = _check_file(path, announced, shapes, seen)
        files[path] = [name for name in names if name in shapes]
        has_tied_head |= len(files[path]) < len(names)
    _check_missing(folder, shapes, seen)
    return WeightFiles(files, has_tied_head)


def find_adapters(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> WeightFiles:
    """Locate the adapters of a PEFT folder, which must have exactly these names and shapes.

    Raises:
        ModelFormatError: The file or a tensor is missing or not as expected; the text names it.

    """
    path, seen = folder / PEFT_WEIGHTS, set[str]()
    if not path.is_file():
        raise ModelFormatError(f"{path}: no such file; expected the folder of an adapter of PEFT")
    names = _check_file(path, None, shapes, seen)
    _check_missing(folder, shapes, seen)
    return WeightFiles({path: names}, has_tied_head=False)


def _check_missing(folder: Path, shapes: Mapping[str, tuple[int, ...]], seen: set[str]) -> None:
    missing = sorted(shapes.keys() - seen)
    if missing:
        raise ModelFormatError(
            f"{folder}: {len(missing)} tensors are missing, e.g. {', '.join(missing[:3])}"
        )


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors in a folder by name, read from the file headers.

    Raises:
        ModelFormatError: A file or an index is missing or malformed.

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
    """Write tensors to one file, or to shards of at most `shard_bytes_max` bytes with an index.

    A larger tensor gets a shard of its own.
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
        write_atomic(folder / SINGLE_FILE, serialized(shards[0]))
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_atomic(folder / file, serialized(shard))
        weight_map |= dict.fromkeys(shard, file)
    # The index comes last: until then a reader finds no folder, rather than half of one.
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_atomic(folder / INDEX_FILE, json.dumps(index, indent=2, sort_keys=True).encode())


def serialized(state: Mapping[str, torch.Tensor]) -> bytes:
    """Return the bytes of a safetensors file."""
    return save({name: tensor.contiguous() for name, tensor in state.items()}, {"format": "pt"})


def _by_index(path: Path) -> dict[Path, set[str] | None]:
    """Return the tensors that an index assigns to each file of its folder."""
    weight_map = read_json(path, _INDEX_BYTES_MAX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(
            f"{path}: weight_map: expected an object from tensor names to file names"
        )
    files: dict[Path, set[str] | None] = {}
    for name, file in weight_map.items():
        # A name in the index must not lead out of the folder.
        plain = isinstance(file, str) and file == Path(file).name and "\0" not in file
        if not plain or not file.endswith(".safetensors") or file.startswith("."):
            raise ModelFormatError(
                f"{path}: weight_map: expected tensor {name!r:.100} in a .safetensors file of the "
                f"same folder, got {file!r:.100}"
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
    """Check the header of one file; return its tensor names and add the expected ones to `seen`."""
    if not path.exists():
        why = f"but {INDEX_FILE} assigns {min(announced)} to it" if announced else "and no index"
        raise ModelFormatError(f"{path}: no such file, {why}")
    with _opened(path) as file:
        names = list(file.keys())
        if announced is not None and announced != set(names):
            odd = sorted(announced.symmetric_difference(names))[:3]
            raise ModelFormatError(
                f"{path}: the tensors differ from those in {INDEX_FILE}: {', '.join(odd)}"
            )
        for name in names:
            # Some tools store a tied head; `read_into` compares it with the embedding.
            is_tied_head = name == _HEAD and _HEAD not in shapes
            expected = shapes.get(_EMBEDDING if is_tied_head else name)
            if expected is None:
                raise ModelFormatError(f"{path}: the model has no tensor {name!r:.100}")
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
