"""A model larger than the memory that the tool may use."""

import json
import subprocess
import sys

import pytest

DATA_BYTES = 256 << 20
MEMORY_BYTES = 160 << 20
"""Of private memory, the interpreter's and its libraries' share of about 60 MiB included."""
SCRIPT = """
import resource, sys
from penstock.infra.cli import main
from penstock.infra.weights import actions
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
sys.exit(main(["weights", *sys.argv[2:]]))
"""


def make_model(path, changed_every):
    """Write two large tensors, of zeros but for some bytes; the file is sparse."""
    half = DATA_BYTES // 2
    header = json.dumps(
        {
            "a": {"dtype": "BF16", "shape": [half // 2], "data_offsets": [0, half]},
            "b": {"dtype": "F32", "shape": [half // 4], "data_offsets": [half, DATA_BYTES]},
        }
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        start = file.tell()
        for place in range(0, DATA_BYTES, changed_every):
            file.seek(start + place)
            file.write(b"\1")
        file.truncate(start + DATA_BYTES)


def run(*arguments):
    command = [sys.executable, "-c", SCRIPT, str(MEMORY_BYTES), *map(str, arguments)]
    environment = {"OPENBLAS_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, check=False
    )


@pytest.mark.slow
def test_a_model_is_never_in_memory(tmp_path):
    base, target, delta = tmp_path / "a", tmp_path / "b", tmp_path / "d"
    make_model(base, 1 << 22)
    make_model(target, 1 << 19)
    for arguments in (
        ("diff", base, target, "-o", delta, "--threads", 1),
        ("apply", base, delta, "-o", tmp_path / "out", "--threads", 1),
        ("verify", tmp_path / "out", delta, "--threads", 1),
        ("merge", base, delta, "-o", tmp_path / "merged", "--threads", 1),
        ("inspect", delta, "--base", base, "--threads", 1),
    ):
        done = run(*arguments)
        assert done.returncode == 0, done.stderr[-600:]
    assert delta.stat().st_size < 100_000
    with (tmp_path / "out").open("rb") as out, target.open("rb") as expected:
        while chunk := out.read(1 << 24):
            assert chunk == expected.read(len(chunk))
        assert not expected.read(1)
