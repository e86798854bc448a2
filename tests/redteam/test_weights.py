"""Weight files that unpack to far more than they are."""

import msgspec
import numpy as np
import pytest
import zstandard
from blake3 import blake3
from safetensors.numpy import save

from penstock.infra.weights.actions import apply_delta
from penstock.infra.weights.diff import write_delta
from penstock.infra.weights.files import delta_file
from penstock.infra.weights.files.checkpoint import CheckpointFiles
from penstock.infra.weights.files.delta_file import DeltaFile
from penstock.messages.errors import CorruptDataError

DONE = {"num_threads": 1, "advance": lambda _: None}


def sealed(payloads, plain):
    """Return a delta file whose digests are right, whatever its manifest says."""
    stored = zstandard.ZstdCompressor(level=9).compress(plain)
    offset = len(delta_file.MAGIC) + len(payloads)
    numbers = delta_file._NUMBERS.pack(offset, len(stored), len(plain), 1)
    digest = blake3(delta_file.MAGIC + stored + numbers).digest()
    return delta_file.MAGIC + payloads + stored + numbers + digest + delta_file.END_MAGIC


@pytest.fixture
def pair(tmp_path):
    state = {"w": np.arange(512, dtype=np.float32)}
    (tmp_path / "a").write_bytes(save(state))
    (tmp_path / "b").write_bytes(save({"w": state["w"] * np.float32(1.001)}))
    with CheckpointFiles(tmp_path / "a") as base, CheckpointFiles(tmp_path / "b") as target:
        write_delta(base, target, tmp_path / "d", **DONE)
    return tmp_path


def test_a_manifest_of_a_million_rows_in_a_few_kilobytes_is_refused(pair):
    with DeltaFile(pair / "d") as patch:
        tree = msgspec.msgpack.decode(msgspec.msgpack.encode(patch.manifest))
        payloads = (pair / "d").read_bytes()[len(delta_file.MAGIC) :][
            : patch.manifest.offsets()[-1]
        ]
    tree["base"] = [tree["base"][0]] * 1_000_000
    bomb = sealed(payloads, msgspec.msgpack.encode(tree))
    assert len(bomb) < 20_000
    (pair / "d").write_bytes(bomb)
    with pytest.raises(CorruptDataError, match="unpack to"):
        DeltaFile(pair / "d")


def test_a_delta_that_fills_the_disk_with_zeros_is_refused(pair):
    """Honest digests throughout: the target really has 128 MiB of zeros."""
    with (pair / "b").open("wb") as file:
        head = b'{"z":{"dtype":"U8","shape":[134217728],"data_offsets":[0,134217728]}}'
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + (128 << 20))
    with CheckpointFiles(pair / "a") as base, CheckpointFiles(pair / "b") as target:
        write_delta(base, target, pair / "d", **DONE)
    assert (pair / "d").stat().st_size < 50_000
    refused = pytest.raises(CorruptDataError, match="no checkpoint grows like that")
    with CheckpointFiles(pair / "a") as base, DeltaFile(pair / "d") as patch, refused:
        apply_delta(base, patch, pair / "out", **DONE)
    assert not (pair / "out").exists()


def test_a_header_that_claims_more_than_the_file_is_refused(pair):
    for length in (1 << 62, 100_000_000, 99_999_999):
        (pair / "a").write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(CorruptDataError, match="cut short in its header"):
            CheckpointFiles(pair / "a")
