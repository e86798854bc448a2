"""The fuzzers' targets, each on its seeds and on a few hundred mutations of them."""

import random

import pytest
from tests.fuzz.guard import MemoryBombError, attempt
from tests.fuzz.targets import TARGETS

NUM_MUTATIONS = 150
ODD = [b"", b"\0", b"\xff" * 9, b"\x91" * 5000, b"\xdf\xff\xff\xff\xff", b"[" * 5000]
ODD += [b"\xed\xa0\x80", b"9" * 400, b"-1", b"1e999", b"\xcf" + b"\xff" * 8]


def mutated(rng: random.Random, seed: bytes) -> bytes:
    """Return a seed with one to four cuts, changes or insertions."""
    data = bytearray(seed)
    for _ in range(rng.randint(1, 4)):
        place = rng.randint(0, len(data))
        piece = rng.choice([rng.randbytes(rng.randint(0, 4)), rng.choice(ODD), bytes(data[:40])])
        data[place : place + rng.choice([0, 1, len(piece), rng.randint(0, 40)])] = piece
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_bytes_end_in_typed_errors(name):
    target = TARGETS[name]
    seeds = target.seeds()
    for seed in seeds:
        attempt(target.run, seed)
    rng = random.Random(name)
    for data in (*ODD, *(mutated(rng, rng.choice(seeds)) for _ in range(NUM_MUTATIONS))):
        attempt(target.run, data)


def test_the_guard_sees_an_untyped_error():
    with pytest.raises(ZeroDivisionError):
        attempt(lambda data: 1 // len(data), b"")


def test_the_guard_sees_a_bomb():
    def bomb(data):
        return len(b"x" * (700 << 20))

    with pytest.raises(MemoryBombError):
        attempt(bomb, b"1")
