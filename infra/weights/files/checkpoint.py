"""A checkpoint on disk: one safetensors file, or a folder.

In a folder, all regular files except for hidden ones belong to the checkpoint. Tensors are in the
safetensors files at its top that `model.safetensors.index.json` names, or in all of them without an
index. Every other file (configuration, tokenizer, files of subfolders) is plain bytes.
"""

import os
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from penstock.infra.weights.files.paths import FILES_MAX, is_portable, require_file
from penstock.infra.weights.files.tensors import FileLayout, Key, Tensor
from penstock.kernels.element_types import BYTES
from penstock.messages.errors import CodecError, ConfigError, CorruptDataError, NotFoundError
from penstock.messages.reading.parsing import parse_json

SINGLE_NAME = "model.safetensors"
"""Name of a single file in deltas, whatever its real name."""
INDEX_NAME = "model.safetensors.index.json"
_INDEX_BYTES_MAX = 1 << 28


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class CheckpointFiles:
    """Tensors read from files."""

    def __init__(self, path: Path) -> None:
        """Open all files and read their headers.

        Raises:
            NotFoundError: The path, or a file that the index names, does not exist.
            CorruptDataError: A file does not have the format of its name.

        """
        if not path.exists():
            raise NotFoundError(f"{path}: there is no such checkpoint")
        self.path = path
        self.is_folder = path.is_dir()
        self.tensors: dict[Key, Tensor] = {}
        self._places: dict[Key, tuple[int, int]] = {}
        self._descriptors: list[int] = []
        paths = _files_of(path) if self.is_folder else {SINGLE_NAME: path}
        holders = _tensor_files(path, paths) if self.is_folder else set(paths)
        try:
            self.files = tuple(self._open(n, p, n in holders) for n, p in sorted(paths.items()))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def read(self, key: Key, first: int, num_words: int) -> np.ndarray:
        """Read some words [num_words] of a tensor; called from several threads.

        Raises:
            CorruptDataError: The file was truncated in the meantime.

        """
        tensor = self.tensors[key]
        descriptor, offset = self._places[key]
        words = np.empty(num_words, tensor.word_dtype)
        view = words.data.cast("B") if num_words else memoryview(b"")
        offset += first * tensor.element_type.word_bytes
        # `pread` and not a memory map: a file that is truncated meanwhile gives an error here,
        # where a map would end the process by SIGBUS.
        while view:
            count = os.preadv(descriptor, [view], offset)
            if count == 0:
                raise CorruptDataError(f"{self.path}: cut short in {tensor.name!r}")
            view, offset = view[count:], offset + count
        return words

    def _open(self, name: str, path: Path, is_tensor_file: bool) -> FileLayout:
        head_bytes, tensors = read_head(path) if is_tensor_file else (path.stat().st_size, [])
        descriptor = os.open(path, os.O_RDONLY)
        self._descriptors.append(descriptor)
        offset = 0
        members = [Tensor(name, BYTES, (head_bytes,)), *tensors]
        for tensor in members:
            if tensor.key in self.tensors:
                raise CorruptDataError(f"{path}: tensor {tensor.name!r} is in another file, too")
            self.tensors[tensor.key] = tensor
            self._places[tensor.key] = (descriptor, offset)
            offset += tensor.num_bytes
        return FileLayout(name, tuple(tensor.key for tensor in members))


def _files_of(folder: Path) -> dict[str, Path]:
    paths: dict[str, Path] = {}
    for root, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(root, name)
            if not name.startswith(".") and path.is_file():
                paths[_relative(folder, path)] = path
        if len(paths) > FILES_MAX:
            raise ConfigError(f"{folder}: more than {FILES_MAX} files; is it a checkpoint?")
    return paths


def _raise(error: OSError) -> None:
    # `os.walk` would silently skip a subfolder that cannot be read.
    raise error


def _relative(folder: Path, path: Path) -> str:
    name = path.relative_to(folder).as_posix()
    if not is_portable(name):
        raise ConfigError(f"{folder}: a delta cannot name its file {name!r}; rename it")
    return name


def _tensor_files(folder: Path, paths: dict[str, Path]) -> set[str]:
    if INDEX_NAME in paths:
        return _indexed_files(folder, paths)
    holders = {name for name in paths if name.endswith(".safetensors") and "/" not in name}
    if not holders:
        raise NotFoundError(f"{folder}: holds no *.safetensors file")
    return holders


def _indexed_files(folder: Path, paths: dict[str, Path]) -> set[str]:
    path = paths[INDEX_NAME]
    if path.stat().st_size > _INDEX_BYTES_MAX:
        raise CorruptDataError(f"{path}: more than {_INDEX_BYTES_MAX} bytes")
    try:
        holders = set(parse_json(path.read_bytes(), _Index, "index").weight_map.values())
    except CodecError as error:
        raise CorruptDataError(f"{path}: not an index of safetensors files: {error}") from error
    if missing := sorted(holders - paths.keys()):
        raise NotFoundError(f"{folder}: its index names files that are missing: {missing[:5]}")
    return holders


HEADER_BYTES_MAX = 100_000_000
_LENGTH_BYTES = 8


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_head(path: Path) -> tuple[int, list[Tensor]]:
    """Return the size of the header and the tensors in the order of their bytes.

    Raises:
        ConfigError: The path is not a regular file.
        CorruptDataError: The file is not a safetensors file, is truncated, or has gaps.

    """
    require_file(path)
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        head_bytes = _LENGTH_BYTES + length
        if num_bytes < _LENGTH_BYTES or head_bytes > num_bytes or length > HEADER_BYTES_MAX:
            raise CorruptDataError(f"{path}: not a safetensors file, or cut short in its header")
        header = file.read(length)
    return head_bytes, _tensors(path, header, num_bytes - head_bytes)


def _tensors(path: Path, header: bytes, data_bytes: int) -> list[Tensor]:
    try:
        fields = parse_json(header, dict[str, msgspec.Raw], "header")
        # Not a tensor; as part of the header it is among the plain bytes.
        fields.pop("__metadata__", None)
        entries = {name: parse_json(raw, _Entry, name) for name, raw in fields.items()}
    except CodecError as error:
        raise CorruptDataError(f"{path}: its header is not that of safetensors: {error}") from error
    tensors: list[Tensor] = []
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        tensor = Tensor(name, entry.dtype, entry.shape)
        num_bytes = _num_bytes(path, tensor)
        begin, end = entry.data_offsets
        # Without gaps or overlaps, a file is only its header and its tensors.
        if entry.dtype == BYTES or begin != reached or end - begin != num_bytes:
            raise CorruptDataError(
                f"{path}: tensor {name!r}: {entry.dtype}{list(entry.shape)} does not fill bytes"
                f" {begin} to {end}, or there is a gap before it"
            )
        reached = end
        tensors.append(tensor)
    if reached != data_bytes:
        text = f"its tensors have {reached} bytes, the file {data_bytes}"
        raise CorruptDataError(f"{path}: {text}")
    return tensors


def _num_bytes(path: Path, tensor: Tensor) -> int:
    try:
        return tensor.num_bytes
    except ValueError as error:
        raise CorruptDataError(f"{path}: tensor {tensor.name!r}: {error}") from error
