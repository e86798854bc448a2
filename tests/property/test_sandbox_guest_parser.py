"""The guest agent's parser under random and mutated requests, with sanitizers."""

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from penstock.envs.microvm.protocol import FilePiece, GuestRequest

HERE = Path(__file__).resolve().parent
GUEST = HERE.parents[1] / "envs/microvm/guest"
VALID = [
    GuestRequest(v=1, id=7, op="ping"),
    GuestRequest(
        v=1, id=1 << 40, op="exec", op_key="turn-3.call-1", deadline_ms=10_000, bytes_max=65536,
        path="/work", argv=["sh", "-c", "x" * 300], env=["PATH=/bin", "A="],
    ),
    GuestRequest(
        v=1, id=2, op="write", path="", offset=3, target=4,
        files=[FilePiece("/w/a", 0o644, False, bytes(range(256))), FilePiece("/b", 0, True, b"")],
    ),
    GuestRequest(
        v=1, id=3, op="thaw", epoch=1 << 33, clock_ns=1 << 60, entropy=bytes(range(32)),
        hostname=b"vm", machine_id=b"0" * 32,
    ),
    GuestRequest(v=1, id=9, op="send", target=1 << 20, data=bytes(range(256)) * 4),
]  # fmt: skip


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing: apt-get install gcc")
    binary = tmp_path_factory.mktemp("fuzz") / "guest_fuzz"
    sources = [HERE / "guest_fuzz.c", GUEST / "request.c", GUEST / "msgpack.c"]
    flags = ["-std=gnu11", "-g", "-O1", f"-I{GUEST}", "-fsanitize=address,undefined"]
    command = ["gcc", *flags, "-fno-sanitize-recover=all", "-o", binary, *sources]
    subprocess.run(command, check=True, timeout=120)
    return binary


def run(fuzzer, request, seed, cases):
    done = subprocess.run(
        [fuzzer, str(seed), str(cases)],
        input=msgspec.msgpack.encode(request),
        capture_output=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return int(done.stdout)


@pytest.mark.parametrize("request_", VALID, ids=lambda r: r.op)
def test_mutated_requests(fuzzer, request_):
    accepted = run(fuzzer, request_, seed=1, cases=20_000)
    assert 0 < accepted < 20_000  # it tells the two apart


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("request_", VALID, ids=lambda r: r.op)
def test_many_mutated_requests(fuzzer, request_, seed):
    run(fuzzer, request_, seed, cases=2_000_000)


def test_the_agent_refuses_to_run_on_a_host(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing: apt-get install gcc")
    agent = tmp_path / "agent"
    command = ["gcc", "-std=gnu11", "-o", agent, *sorted(GUEST.glob("*.c"))]
    subprocess.run(command, check=True, timeout=120)
    done = subprocess.run([agent], capture_output=True, timeout=10, check=False)
    assert done.returncode == 2
    assert b"only as PID 1" in done.stderr
