"""A shared table: a flood of one owner takes nothing from the others."""

from penstock.actors.runtime.fair_table import FairTable


def table(num_max: int, **options) -> FairTable[tuple[str, int], int]:
    return FairTable(num_max, lambda key, _: key[0], **options)


def test_a_flood_drops_its_own_oldest_entries():
    dropped = []
    found = table(100, on_drop=lambda key, _: dropped.append(key))
    for number in range(20):
        found["quiet", number] = number
    for number in range(1000):
        found["loud", number] = number
    assert [key for key in found if key[0] == "quiet"] == [("quiet", n) for n in range(20)]
    assert len(found) == 100 and ("loud", 999) in found and ("loud", 0) not in found
    assert {owner for owner, _ in dropped} == {"loud"}


def test_many_owners_share_equally():
    found = table(100)
    for number in range(100):
        found["first", number] = number
    for owner in range(10):
        for number in range(100):
            found[f"o{owner}", number] = number
    counts = [sum(key[0] == f"o{owner}" for key in found) for owner in range(10)]
    assert len(found) == 100 and min(counts) >= 8, counts


def test_weights_count_and_setting_again_makes_an_entry_the_newest():
    found = table(10, weight=lambda value: value)
    found["a", 1], found["a", 2], found["b", 1] = 4, 3, 3
    found["a", 1] = 4
    found["a", 3] = 2
    assert ("a", 2) not in found and found.weight == 9
    assert sorted(found.oldest()) == [(("a", 1), 4), (("b", 1), 3)] and found.pop(("a", 1)) == 4
    assert found.weight == 5


def test_an_entry_above_the_bound_goes_before_those_of_others():
    found = table(10, weight=lambda value: value)
    found["a", 1] = 3
    found["b", 1] = 50
    assert list(found.items()) == [(("a", 1), 3)]
