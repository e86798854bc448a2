"""Who reaches the ports of trainer ranks: no entry without the secret, and no code of strangers."""

import os
import pickle
import socket
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from penstock.actors.trainer.ranks.world import RankEnvironment, World
from penstock.infra.ranks.environment import _local_place
from penstock.messages.errors import CorruptDataError

RANK = """
import os
from penstock.actors.trainer.ranks.world import RankEnvironment, World
world = World(RankEnvironment.of(os.environ), "cpu", {timeout})
print("gathered", world.gather({{"rank": world.rank}}), flush=True)
os._exit(0)
"""
STRANGER = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
class Evil:
    def __reduce__(self):
        return (os.system, (f"touch {sys.argv[1]}",))
dist.init_process_group("gloo", rank=1, world_size=2, timeout=timedelta(seconds=5))
dist.all_gather_object([None, None], Evil())
"""


def start(program: str, rank: int, *arguments: str, **place: str):
    environment = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], env=os.environ | environment | place,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_ranks_with_the_secret_meet_on_this_machine_alone():
    place = _local_place()
    program = RANK.format(timeout=60.0)
    ranks = [start(program, rank, **place) for rank in range(2)]
    said = [rank.communicate(timeout=100) for rank in ranks]
    assert all("gathered [{'rank': 0}, {'rank': 1}]" in out for out, _ in said), said


@pytest.mark.slow
def test_a_stranger_who_comes_first_is_no_rank(tmp_path):
    place, proof = _local_place(), tmp_path / "proof"
    first = start(RANK.format(timeout=6.0), 0, **place)
    stranger = start(STRANGER, 1, str(proof), **place)
    out, _ = first.communicate(timeout=100)
    stranger.communicate(timeout=100)
    assert "gathered" not in out and first.returncode
    assert not proof.exists()


@pytest.mark.slow
def test_ranks_of_another_secret_do_not_meet():
    place = _local_place()
    ranks = [
        start(RANK.format(timeout=6.0), rank, **place | {"PENSTOCK_RANKS_SECRET": str(rank) * 32})
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=100) for rank in ranks]
    assert not any("gathered" in out for out, _ in said)


class Evil:
    """Runs when it is unpickled."""

    ran = False

    def __reduce__(self):
        return (setattr, (Evil, "ran", True))


def test_what_was_not_made_with_the_secret_is_not_unpickled(monkeypatch):
    world = World.alone("cpu")
    try:
        assert world.gather([1]) == [[1]]

        def forged(found, _mine):
            data = bytes(32) + pickle.dumps(Evil())
            for each in found:
                each[:] = type(each)([len(data)]) if each.numel() == 1 else each
                if each.numel() > 1:
                    each[: len(data)] = dist_bytes(data)[: each.numel()]

        def dist_bytes(data):
            import torch

            return torch.frombuffer(bytearray(data), dtype=torch.uint8)

        monkeypatch.setattr(dist, "all_gather", forged)
        with pytest.raises(CorruptDataError, match="secret of the ranks"):
            world.gather([1] * 200)
        assert not Evil.ran
    finally:
        monkeypatch.undo()
        world.close()


def test_the_meeting_place_listens_on_its_address_alone(monkeypatch):
    place = _local_place()
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    environment = RankEnvironment(rank=0, num_ranks=2, local_rank=0, secret=b"s" * 32)
    from penstock.actors.trainer.ranks.world import _meet

    other = threading.Thread(
        target=lambda: dist.TCPStore("127.0.0.1", int(place["MASTER_PORT"]), 2, is_master=False)
    )
    other.start()
    store = _meet(environment, timedelta(seconds=20))
    other.join()
    with socket.socket() as elsewhere, pytest.raises(ConnectionRefusedError):
        elsewhere.connect(("127.0.0.2", int(place["MASTER_PORT"])))
    store.set("name", b"value")
    assert store.get("name") == b"value"
    plain = dist.TCPStore("127.0.0.1", int(place["MASTER_PORT"]), 2, is_master=False,
                          wait_for_workers=False)  # fmt: skip
    assert not plain.check(["name"])
    plain.set(store._named("name"), bytes(40))
    with pytest.raises(CorruptDataError):
        store.get("name")
