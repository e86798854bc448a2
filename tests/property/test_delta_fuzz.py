"""The compiled decoder on damaged input, under the sanitizers of memory and undefined behavior."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("delta_fuzz.c")
FLAGS = ["-std=gnu11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.fixture(scope="module", params=["", "-march=native"], ids=["portable lanes", "own lanes"])
def fuzzer(request, tmp_path_factory):
    """Built for the oldest processors of the kind, and for this machine's own."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing: apt-get install gcc")
    binary = tmp_path_factory.mktemp("fuzz") / "delta_fuzz"
    flags = [*FLAGS, *filter(None, [request.param])]
    subprocess.run(["gcc", *flags, "-o", binary, SOURCE], check=True, timeout=280)
    return binary


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_no_damaged_string_leads_out_of_bounds(fuzzer, seed):
    done = subprocess.run([fuzzer, str(seed), "5000"], capture_output=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
