"""Rooms: the modules and packages directly below a top folder, and the imports between them.

A folder reads well when its rooms can be stacked so that imports only point down. What cannot be
stacked is counted: the fewest imports, over all orders, that run back up.
"""

from collections.abc import Iterable

from tests.tidy.cycles import import_graph, strongly_connected
from tests.tidy.repository import Repository

Edge = tuple[str, str]


def room_edges(repository: Repository, top: str) -> set[Edge]:
    """Return the pairs of rooms of which the first imports the second."""
    edges: set[Edge] = set()
    for module, targets in import_graph(repository).items():
        for target in targets:
            parts, others = module.split("."), target.split(".")
            inside = parts[0] == others[0] == top and len(parts) > 1 and len(others) > 1
            if inside and parts[1] != others[1]:
                edges.add((parts[1], others[1]))
    return edges


def rooms(repository: Repository, top: str) -> list[str]:
    """Return the packages below a top folder."""
    found = {path.split("/")[1] for path in repository.python(top) if path.count("/") > 1}
    return sorted(found)


def num_arrows_up(edges: Iterable[Edge]) -> int:
    """Return the fewest imports between rooms that run back up, over all orders of the rooms."""
    edges = set(edges)
    graph: dict[str, set[str]] = {name: set() for edge in edges for name in edge}
    for source, target in edges:
        graph[source].add(target)
    return sum(_fewest(graph, component) for component in strongly_connected(graph))


def _fewest(graph: dict[str, set[str]], component: list[str]) -> int:
    """Minimum feedback arc set of one knot, by dynamic programming over subsets."""
    index = {name: number for number, name in enumerate(component)}
    above = [
        sum(1 << index[target] for target in graph[name] if target in index) for name in component
    ]
    # costs[placed]: `placed` are the rooms already stacked, from the ground up. A room that a
    # placed one imports would stand above its importer: each such import runs back up.
    costs = [0] + [len(component) ** 2] * ((1 << len(component)) - 1)
    for placed in range(1 << len(component)):
        for number in range(len(component)):
            if placed >> number & 1:
                continue
            up = sum(above[other] >> number & 1 for other in _bits(placed))
            after = placed | 1 << number
            costs[after] = min(costs[after], costs[placed] + up)
    return costs[-1]


def _bits(number: int) -> list[int]:
    return [bit for bit in range(number.bit_length()) if number >> bit & 1]
