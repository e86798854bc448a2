"""The head of a safetensors file, read strictly: nothing in it is trusted.

```
 0  8 bytes  length of the JSON, little-endian
 8  JSON     {"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}
    data     the tensors, without a gap
```
"""

from pathlib import Path

import msgspec

from penstock.infra.weights.files.paths import require_file
from penstock.infra.weights.files.tensors import Tensor
from penstock.kernels.element_types import BYTES
from penstock.messages.errors import CorruptDataError

HEADER_BYTES_MAX = 100_000_000
_LENGTH_BYTES = 8


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_head(path: Path) -> tuple[int, list[Tensor]]:
    """Return the size of the head and the tensors in the order of their bytes.

    Raises:
        ConfigError: not a regular file.
        CorruptDataError: not a safetensors file, cut short, or tensors that do not fill it.

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
        fields = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in fields.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptDataError(f"{path}: its header is not that of safetensors: {error}") from error
    tensors: list[Tensor] = []
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        tensor = Tensor(name, entry.dtype, entry.shape)
        num_bytes = _num_bytes(path, tensor)
        begin, end = entry.data_offsets
        if entry.dtype == BYTES or begin != reached or end - begin != num_bytes:
            raise CorruptDataError(
                f"{path}: tensor {name!r}: {entry.dtype}{list(entry.shape)} does not fill bytes"
                f" {begin} to {end}, or another lies between"
            )
        reached = end
        tensors.append(tensor)
    if reached != data_bytes:
        raise CorruptDataError(f"{path}: its tensors take {reached} bytes, it holds {data_bytes}")
    return tensors


def _num_bytes(path: Path, tensor: Tensor) -> int:
    try:
        return tensor.num_bytes
    except ValueError as error:
        raise CorruptDataError(f"{path}: tensor {tensor.name!r}: {error}") from error
