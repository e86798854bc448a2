"""Every decoder of bytes from outside, as a function that a fuzzer calls.

To add one: seeds that it reads well, a function of the bytes, and its line in `TARGETS`. Where
checksums would keep the fuzzer at the door, the target repairs them first.
"""

import asyncio
import contextlib
import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import torch
import zstandard
from blake3 import blake3
from safetensors.numpy import save
from tests.golden.write import FOLDER as GOLDEN
from tests.property.test_gateway_bodies import SEEDS
from tests.unit.tasks.test_tasks_harbor import ladder

from penstock.actors.policy.chat.builtin import parse_turn
from penstock.actors.policy.hf.config import read_hf_config
from penstock.actors.policy.tokenizer import Tokenizer, train_tokenizer
from penstock.envs.egress.proxy import check_hello, requested_target
from penstock.envs.egress.rules import parse_rules
from penstock.envs.factory.repository import GitRepository
from penstock.envs.microvm.connection import GuestConnection
from penstock.envs.microvm.protocol import REPLY_BYTES_MAX, GuestRequest
from penstock.envs.python_source import parse_python
from penstock.envs.tasks.dockerfile import start_files
from penstock.envs.tasks.harbor.folder import plain_tree
from penstock.envs.tasks.harbor.read import read_harbor
from penstock.envs.tasks.harbor.write import EXPECTED_FILE, write_harbor
from penstock.gateway.app import ROUTES
from penstock.gateway.page.labels import read_label
from penstock.infra.bus.claims import CLAIM_HEADER, Claims
from penstock.infra.commands.log import plain_map
from penstock.infra.commands.log_file import read_entries
from penstock.infra.corpora.lines import read_lines
from penstock.infra.corpora.traces import ChatTrace
from penstock.infra.stores.memory import MemoryStore
from penstock.infra.weights.actions import apply_delta
from penstock.infra.weights.diff import write_delta
from penstock.infra.weights.files import delta_file
from penstock.infra.weights.files.checkpoint import CheckpointFiles, read_head
from penstock.infra.weights.files.delta_file import DeltaFile
from penstock.kernels import delta
from penstock.kernels.delta.container import checksum
from penstock.kernels.route_segments import open_routes, seal_routes
from penstock.messages.base import FORMAT, Claim
from penstock.messages.codec import decode
from penstock.messages.errors import PenstockError
from penstock.messages.reading.claims import claim_key
from penstock.messages.streams import checked_event
from penstock.messages.task import Split


@dataclass(frozen=True)
class Target:
    """One decoder."""

    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]


@cache
def _folder() -> Path:
    holder = tempfile.TemporaryDirectory(prefix="penstock-fuzz-")
    _holders.append(holder)
    return Path(holder.name)


_holders: list[tempfile.TemporaryDirectory] = []


def _file(name: str, data: bytes) -> Path:
    path = _folder() / name
    path.write_bytes(data)
    return path


def messages() -> list[bytes]:
    """Return one encoded message of every type."""
    return [path.read_bytes() for path in sorted(GOLDEN.glob("*.msgpack"))]


BASE = np.linspace(-1, 1, 700, dtype=np.float32).view(np.uint32)


def _payloads() -> list[bytes]:
    rng = np.random.default_rng(0)
    near = BASE + rng.integers(0, 3, BASE.size, dtype=np.uint32)
    far = rng.integers(0, 2**32, BASE.size, dtype=np.uint32)
    return [delta.encode(BASE, target) for target in (BASE, near, far)]


def _apply_payload(data: bytes) -> None:
    body = data[:-8]
    delta.apply(BASE, body + checksum(body))


@cache
def _checkpoints() -> Path:
    state = {"w": np.arange(512, dtype=np.float32), "layers.0.v": np.zeros(3, np.int8)}
    path = _file("base", save(state))
    _file("target", save({"w": state["w"] * np.float32(1.001)}))
    return path


def _deltas() -> list[bytes]:
    base_path = _checkpoints()
    with CheckpointFiles(base_path) as base, CheckpointFiles(_folder() / "target") as target:
        write_delta(base, target, _folder() / "d", num_threads=1, advance=lambda _: None)
    with DeltaFile(_folder() / "d") as patch:
        return [msgspec.msgpack.encode(patch.manifest)]


@cache
def _delta_payloads() -> bytes:
    _deltas()
    with DeltaFile(_folder() / "d") as patch:
        num_bytes = patch.manifest.offsets()[-1]
    return (_folder() / "d").read_bytes()[len(delta_file.MAGIC) :][:num_bytes]


def _apply_delta_file(data: bytes) -> None:
    """Apply a delta whose manifest is the input, sealed rightly."""
    payloads, stored = _delta_payloads(), zstandard.compress(data)
    offset = len(delta_file.MAGIC) + len(payloads)
    numbers = struct.pack("<QQII", offset, len(stored), len(data), delta_file.FORMAT_VERSION)
    digest = blake3(delta_file.MAGIC + stored + numbers).digest()
    whole = delta_file.MAGIC + payloads + stored + numbers + digest + delta_file.END_MAGIC
    out = _folder() / "out"
    out.unlink(missing_ok=True)
    with CheckpointFiles(_checkpoints()) as base, DeltaFile(_file("fuzzed.d", whole)) as patch:
        apply_delta(base, patch, out, num_threads=1, advance=lambda _: None)


def _heads() -> list[bytes]:
    state = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.zeros(0, np.float16)}
    return [save(state, {"format": "pt"})]


def _log_plain(*entries: object) -> bytes:
    frames = [msgspec.msgpack.encode(entry) for entry in entries]
    return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)


def _logs() -> list[bytes]:
    event = {"kind": "event", "stream": "tasks", "sequence": 1, "stored_at": 0.0, "data": b"\x80"}
    plain = _log_plain(
        {"penstock_log": FORMAT, "run_id": "r1"},
        {"kind": "object", "key": "a/b", "data": b"x"},
        event,
    )
    return [b"\0" + plain, b"\1" + zstandard.compress(plain)]


def _read_log(data: bytes) -> None:
    whole = data[1:] if data[:1] == b"\1" else zstandard.compress(data[1:])
    for _ in read_entries(_file("log", whole)):
        pass


def _routes() -> list[bytes]:
    routes = torch.arange(3 * 2 * 2, dtype=torch.int16).reshape(3, 2, 2) % 6
    return [seal_routes(routes, num_experts=6, policy_version=3)]


class _Wire(asyncio.Transport):
    def write(self, data: bytes) -> None:
        """Drop it: a guest that fuzzes reads nothing."""

    def abort(self) -> None:
        """Nothing to end."""


def _guest(data: bytes) -> None:
    """Feed a connection with what a guest may send, in pieces of the first byte's length."""

    async def feed() -> None:
        connection = GuestConnection(lambda: "gone")
        connection.connection_made(_Wire())
        connection.post(GuestRequest(op="ping"))
        size = 1 + (data[0] if data else 0)
        for start in range(1, len(data), size):
            connection.data_received(data[start : start + size])
            if connection.died is not None:
                raise connection.died

    asyncio.run(feed())


def _intake(data: bytes) -> None:
    """Take in a message, as a claim where the first byte is odd, under the subject that follows."""
    is_claim, (subject, _, payload) = bool(data[:1] and data[0] & 1), data[1:].partition(b"\0")
    claims = Claims(MemoryStore(), lambda word: claim_key(0.0, word))
    headers = {CLAIM_HEADER: "1"} if is_claim else None

    async def take_in() -> None:
        message = await claims.unpack(payload, headers)
        checked_event("r1", subject.decode("utf-8", "replace"), message)

    asyncio.run(take_in())


def _intake_seeds() -> list[bytes]:
    claim = Claim(object_key="claims/0000000001-x", num_bytes=1, blake3="0" * 64)
    plain = [b"\0ps.r1.tasks.X.k\0" + data for data in messages()]
    return [b"\1ps.r1.tasks.X.k\0" + msgspec.msgpack.encode(claim), *plain]


def _frames() -> list[bytes]:
    replies = [{"id": 1}, {"hello": True}, {"id": 1, "stream": 1, "data": b"x"}, {"error": "e"}]
    frames = [msgspec.msgpack.encode(reply) for reply in replies]
    whole = b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
    return [b"\x10" + whole, b"\xff" + struct.pack("<I", REPLY_BYTES_MAX) + b"x" * 100]


def _harbor(data: bytes) -> None:
    """Read a task whose `task.toml` and expected tests are the input, cut at the first NUL byte."""
    settings, _, tests = data.partition(b"\0")
    folder = _task_folder()
    (folder / "task.toml").write_bytes(settings)
    (folder / "tests" / EXPECTED_FILE).write_bytes(tests)
    read_harbor(folder)


@cache
def _task_folder() -> Path:
    return write_harbor(ladder(1)[0], Split.TRAIN, _folder() / "tasks")


def _harbor_seeds() -> list[bytes]:
    folder = _task_folder()
    expected = (folder / "tests" / EXPECTED_FILE).read_bytes()
    return [(folder / "task.toml").read_bytes() + b"\0" + expected]


@cache
def _tokenizer() -> Tokenizer:
    return train_tokenizer(["def add(a, b):\n    return a + b\n"] * 8, vocab_size=400)


def _parse_turn(data: bytes) -> None:
    ids = np.frombuffer(data[: len(data) & ~1], "<u2").astype(int) % _tokenizer().vocab_size
    parse_turn(_tokenizer(), ids.tolist())


def _egress(data: bytes) -> None:
    method, _, text = data.decode("utf-8", "surrogateescape").partition(" ")
    with contextlib.suppress(PenstockError):
        parse_rules(text.split("\n"), allows_addresses=True)
    requested_target(method, text)


def _head(data: bytes) -> None:
    folder = _folder() / "repository"
    (folder / ".git" / "objects").mkdir(parents=True, exist_ok=True)
    head, _, packed = data.partition(b"\0")
    (folder / ".git" / "HEAD").write_bytes(head)
    (folder / ".git" / "packed-refs").write_bytes(packed)
    GitRepository(folder)


def _hf_config(data: bytes) -> None:
    folder = _folder() / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(data)
    read_hf_config(folder)


def _dockerfile(data: bytes) -> None:
    start_files(data.decode("utf-8", "replace"), plain_tree({"src/a.py": b"x = 1", "b.txt": b"y"}))


def _trace(data: bytes) -> None:
    for _ in read_lines(_file("traces.jsonl", data), ChatTrace, "texts"):
        pass


def _tokenizer_file(data: bytes) -> None:
    Tokenizer.from_json(data.decode("utf-8", "replace"), "a file")


TRACE = b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n'
_SNI = bytes.fromhex("0000000e000c000009") + b"a.example"
_HELLO_BODY = bytes(34) + b"\0" + bytes.fromhex("000213010100") + b"\0\x12" + _SNI
HELLO = b"\x16\x03\x01\0\x41\x01\0\0\x3d" + _HELLO_BODY
CONFIG = (
    b'{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, '
    b'"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4, '
    b'"num_key_value_heads": 1, "intermediate_size": 16, "rope_theta": 1e4, "rms_norm_eps": 1e-6, '
    b'"max_position_embeddings": 64, "tie_word_embeddings": true}'
)


def _bodies(path: str) -> Callable[[], list[bytes]]:
    return lambda: [json.dumps(SEEDS[path]).encode()]


_BODIES = {
    path.strip("/").replace("/", "-"): Target(read, _bodies(path))
    for path, (read, _) in ROUTES.items()
}
TARGETS: dict[str, Target] = _BODIES | {
    "label": Target(read_label, lambda: [b'{"value": 0.5, "labeler": "ann", "comment": "so"}']),
    "messages": Target(decode, messages),
    "intake": Target(_intake, _intake_seeds),
    "delta": Target(_apply_payload, _payloads),
    "delta-file": Target(_apply_delta_file, _deltas),
    "safetensors": Target(lambda data: read_head(_file("head", data)), _heads),
    "hf-config": Target(_hf_config, lambda: [CONFIG]),
    "log-file": Target(_read_log, _logs),
    "routes": Target(open_routes, _routes),
    "guest": Target(_guest, _frames),
    "harbor": Target(_harbor, _harbor_seeds),
    "turn": Target(_parse_turn, lambda: [bytes(range(64))]),
    "egress": Target(_egress, lambda: [b"CONNECT a.example:443", b"GET http://a.example/x"]),
    "hello": Target(lambda data: check_hello(data, "a.example"), lambda: [HELLO]),
    "python": Target(parse_python, lambda: [b"# coding: utf-8\ndef f(a):\n    return [a, (1,)]\n"]),
    "dockerfile": Target(
        _dockerfile, lambda: [b"FROM x\nWORKDIR /work\nCOPY --chown=a src/ /work/\n"]
    ),
    "log-cat": Target(plain_map, messages),
    "trace": Target(_trace, lambda: [TRACE]),
    "tokenizer": Target(_tokenizer_file, lambda: [_tokenizer().to_json().encode()]),
    "git-head": Target(
        _head, lambda: [b"ref: refs/heads/main\0" + b"0" * 40 + b" refs/heads/main"]
    ),
}
