"""The guest agent frozen and thawed by all kinds of requests, with sanitizers."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from .guest_alone import Guest, build, request

NAME_BYTES_MAX, ENTROPY_BYTES_MAX = 64, 256
REFUSED_NS = 13 * 10**9
"""The stand-in for the kernel's clock refuses this time."""
NAMES = [
    b"",
    b"vm",
    b"n" * NAME_BYTES_MAX,
    b"n" * (NAME_BYTES_MAX + 1),
    bytes(range(64)),
    b"x" * 70000,
]
WRONG = [None, -1, 1.5, "text", b"bytes", [1], {"a": 1}, True]
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))]
FIELDS = {"epoch": int, "clock_ns": int, "entropy": bytes, "hostname": bytes, "machine_id": bytes}


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing: apt-get install gcc")
    return build(tmp_path_factory.mktemp("guest"))


@pytest.fixture
def guest(binary: Path, tmp_path: Path):
    guest = Guest(binary, tmp_path)
    yield guest
    assert guest.end() == 0


class Model:
    """What the agent must answer and leave behind."""

    def __init__(self) -> None:
        self.epoch = 0
        self.is_frozen = False
        self.left: dict[str, bytes] = {"entropy": b""}

    def thaw(self, fields: dict[str, Any]) -> str:
        """Take a thaw whose fields have the right types; return its error, or ''."""
        if fields.get("epoch", 0) < self.epoch:
            return "stale_epoch"
        if fields.get("clock_ns", 0) == REFUSED_NS:
            return "thaw_failed"
        if ns := fields.get("clock_ns", 0):
            self.left["clock"] = b"%d.%09d" % divmod(ns, 10**9)
        self.left["entropy"] += fields.get("entropy", b"")[:ENTROPY_BYTES_MAX]
        names = {key: fields.get(key, b"") for key in ("hostname", "machine_id")}
        if max(map(len, names.values())) > NAME_BYTES_MAX:
            return "thaw_failed"
        if names["hostname"]:
            self.left["name"] = names["hostname"]
            self.left["hostname"] = names["hostname"] + b"\n"
        if names["machine_id"]:
            self.left["machine-id"] = names["machine_id"] + b"\n"
        self.epoch, self.is_frozen = fields.get("epoch", 0), False
        return ""

    def other(self, op: str, epoch: int) -> str:
        """Take another request; return its error, or ''."""
        if epoch < self.epoch:
            return "stale_epoch"
        if self.is_frozen:
            return "frozen"
        self.is_frozen = op == "freeze"
        return ""


def draw_thaw(draw: random.Random, epoch: int) -> dict[str, Any]:
    """Return fields of a thaw: some missing, some too long, the epoch older, the same or newer."""
    fields = {
        "epoch": max(0, epoch + draw.choice([-2, -1, 0, 1, 1, 3])),
        "clock_ns": draw.choice([0, 1, REFUSED_NS, 1_700_000_000_123_456_789, 2**64 - 1]),
        "entropy": draw.randbytes(draw.choice([0, 1, 32, 255, 256, 257, 5000])),
        "hostname": draw.choice(NAMES),
        "machine_id": draw.choice(NAMES),
    }
    missing = draw.sample(sorted(fields), draw.choice([0, 0, 1, 2, 5]))
    return {name: value for name, value in fields.items() if name not in missing}


def draw_wrong(draw: random.Random, epoch: int) -> dict[str, Any]:
    """Return fields of which one has a type that it must not have."""
    name = draw.choice(sorted(FIELDS))
    right = (int,) if FIELDS[name] is int else (str, bytes)
    wrong = [value for value in WRONG if not isinstance(value, right) or value == -1]
    return {**draw_thaw(draw, epoch), name: draw.choice(wrong)}


def check_step(guest: Guest, model: Model, draw: random.Random, number: int) -> str:
    """Send one request of any kind; return the error that it was answered with, as it must be."""
    kind = draw.choice(["thaw"] * 6 + ["wrong"] * 2 + ["freeze", "ping", "exec", "read"])
    if kind == "thaw":
        fields = draw_thaw(draw, model.epoch)
        body, error = request("thaw", number, **fields), model.thaw(fields)
    elif kind == "wrong":
        body, error = request("thaw", number, **draw_wrong(draw, model.epoch)), "bad_request"
    else:
        epoch = max(0, model.epoch + draw.choice([-1, 0, 0, 0, 5]))
        more = {"argv": ["true"], "env": [], "deadline_ms": 9000, "path": "/"}
        body = request(kind, number, epoch=epoch, **(more if kind == "exec" else {"path": "/"}))
        error = model.other(kind, epoch)
    guest.send(body, cut=draw.randrange(len(body) + 4))
    reply = guest.reply()
    said = reply.get("error", "")
    assert (reply["id"], said if kind != "read" or said != "file_error" else "") == (number, error)
    if kind == "thaw" and not error:
        assert reply["epoch"] == model.epoch
    return error


@pytest.mark.parametrize("seed", SEEDS)
def test_every_thaw_is_answered_as_it_must_be_and_leaves_what_it_must(guest, seed):
    draw, model = random.Random(seed), Model()
    seen = {check_step(guest, model, draw, number) for number in range(1, 800)}
    assert seen == {"", "bad_request", "stale_epoch", "thaw_failed", "frozen"}
    for name, value in model.left.items():
        assert guest.record(name) == value


@pytest.mark.parametrize("seed", SEEDS)
def test_mutated_thaws_end_in_an_answer_and_an_epoch_never_falls(guest, seed):
    draw, epoch = random.Random(seed), 0
    thawed = 0
    for number in range(1, 1200):
        body = bytearray(request("thaw", number, **draw_thaw(draw, epoch)))
        for _ in range(draw.randrange(4)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        guest.send(bytes(body[: draw.choice([len(body), draw.randrange(len(body))])]))
        reply = guest.reply()
        if "error" not in reply:
            assert reply["epoch"] >= epoch
            epoch, thawed = reply["epoch"], thawed + 1
        if epoch > 2**62:
            break
    assert thawed > 10


def test_commands_go_on_over_freezes_and_thaws_and_run_once(guest, tmp_path):
    draw = random.Random(0)
    for epoch in range(20):
        marks, own, first = tmp_path / f"marks-{epoch}", epoch + 1, 100 + 5 * epoch
        argv = ["sh", "-c", f"echo x >> {marks}; sleep 0.0{draw.randrange(1, 6)}; echo done"]
        run = {"argv": argv, "env": [], "deadline_ms": 9000, "path": "/", "bytes_max": 99}
        asked = request("exec", own, op_key=f"turn-{epoch}", epoch=epoch, **run)
        guest.send(asked, request("freeze", first, epoch=epoch), cut=draw.randrange(20))
        assert guest.reply()["id"] == first

        stale = request("thaw", first + 1, epoch=epoch - 1) if epoch else b"\x80"
        refused = request("thaw", first + 2, hostname=b"x" * 65, epoch=epoch + 9)
        guest.send(asked, stale, refused)
        errors = [guest.reply()["error"] for _ in range(3)]
        assert errors == ["frozen", "stale_epoch" if epoch else "bad_request", "thaw_failed"]

        thaw = request("thaw", first + 3, epoch=epoch + 1)
        again = request("exec", first + 4, op_key=f"turn-{epoch}", epoch=epoch + 1, **run)
        guest.send(thaw, thaw, again, asked)
        replies = [guest.reply() for _ in range(5)]
        assert [reply["epoch"] for reply in replies if "epoch" in reply] == [epoch + 1] * 2
        assert [r["id"] for r in replies if r.get("error") == "stale_epoch"] == [own]
        done = {reply["id"]: reply["stdout"] for reply in replies if "stdout" in reply}
        assert done == {own: b"done\n", first + 4: b"done\n"}
        assert marks.read_text() == "x\n"


def test_a_name_that_a_program_cut_short_is_written_anew(guest):
    for number, identity in enumerate([b"a" * 32, b"b" * 32], start=1):
        guest.send(request("thaw", number, machine_id=identity, epoch=number))
        assert guest.reply()["epoch"] == number
        assert guest.record("machine-id") == identity + b"\n"
        (guest.records / "machine-id").write_bytes(b"")


def test_a_frame_too_long_ends_the_agent(binary, tmp_path):
    guest = Guest(binary, tmp_path)
    with pytest.raises((AssertionError, ConnectionError)):
        guest.send(request("thaw", 2, entropy=bytes(1 << 20)))
        guest.reply()
    assert guest.end() != 0
