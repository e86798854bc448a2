"""A bounded table that tenants share fairly: the one with the most entries loses its own first."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class FairTable(MutableMapping[K, V]):
    """Entries by key, each of an owner; setting an entry makes it its owner's newest.

    When the table is full, the owner of the new entry loses its oldest one if it has more than an
    equal share, otherwise the owner with the most does.
    """

    def __init__(
        self,
        weight_max: int,
        owner: Callable[[K, V], str],
        *,
        weight: Callable[[V], int] = lambda _: 1,
        on_drop: Callable[[K, V], None] = lambda _key, _value: None,
    ) -> None:
        """Create an empty table.

        Args:
            weight_max: Maximum weight of all entries together; at least one entry is kept.
            owner: Returns the owner of an entry.
            weight: Returns the weight of an entry when it is set.
            on_drop: Called with each evicted entry.

        """
        self._weight_max = weight_max
        self._owner = owner
        self._weigh = weight
        self._on_drop = on_drop
        self._entries: dict[str, OrderedDict[K, tuple[V, int]]] = {}
        """Owner -> its entries, the one set longest ago first."""
        self._owner_of: dict[K, str] = {}
        self._weights: dict[str, int] = {}
        self.weight = 0
        """Weight of all entries."""

    def __len__(self) -> int:
        return len(self._owner_of)

    def __iter__(self) -> Iterator[K]:
        return iter(self._owner_of)

    def __getitem__(self, key: K) -> V:
        return self._entries[self._owner_of[key]][key][0]

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        owner, weight = self._owner(key, value), self._weigh(value)
        self._entries.setdefault(owner, OrderedDict())[key] = (value, weight)
        self._owner_of[key] = owner
        self._weights[owner] = self._weights.get(owner, 0) + weight
        self.weight += weight
        while self.weight > self._weight_max and len(self) > 1:
            self._drop(owner)

    def __delitem__(self, key: K) -> None:
        owner = self._owner_of.pop(key)
        _, weight = self._entries[owner].pop(key)
        self._weights[owner] -= weight
        self.weight -= weight
        if not self._entries[owner]:
            del self._entries[owner], self._weights[owner]

    def oldest(self) -> list[tuple[K, V]]:
        """Return the entry of each owner that was set longest ago."""
        found = [next(iter(entries.items())) for entries in self._entries.values()]
        return [(key, value) for key, (value, _) in found]

    def _drop(self, owner: str) -> None:
        if self._weights.get(owner, 0) * len(self._weights) < self.weight:
            owner = max(self._weights, key=self._weights.__getitem__)
        key, (value, _) = next(iter(self._entries[owner].items()))
        del self[key]
        self._on_drop(key, value)
