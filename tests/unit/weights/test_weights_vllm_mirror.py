"""The copy of the weights that vLLM's worker loads: who can read it, and what a kill leaves."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from penstock.actors.generator.vllm.mirror import WeightMirror

SHAPES = {"a": (3, 4), "b": (5,)}
READ = "import numpy, sys; print(numpy.memmap(sys.argv[1], numpy.uint16, 'r')[12:].tolist())"


def test_another_process_reads_what_is_staged():
    mirror = WeightMirror(SHAPES)
    mirror.begin()
    mirror.apply({"b": np.arange(5, dtype=np.uint16)})
    path = mirror.staged_file
    found = subprocess.run([sys.executable, "-c", READ, path], check=True, capture_output=True)
    assert found.stdout.split(b"\n")[0] == b"[0, 1, 2, 3, 4]"


def test_no_folder_has_the_weights_so_that_they_end_with_the_process():
    """A killed generator left two copies in /dev/shm, which in a pod has room for 64 MiB."""
    mirror = WeightMirror(SHAPES)
    mirror.begin()
    before = mirror.staged_file
    mirror.swap()
    mirror.begin()
    for path in (before, mirror.staged_file):
        assert Path(path).readlink().name.startswith("memfd:penstock-weights")
