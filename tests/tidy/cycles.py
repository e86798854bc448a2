"""Rule: no module imports itself through others, not even late or for types only.

Import-linter skips what stands under `TYPE_CHECKING`; a reader does not: two files that name each
other can only be understood together. So every import statement of a file counts here, wherever it
stands.
"""

import ast
from collections.abc import Container, Iterator

from tests.tidy.layout import module_of
from tests.tidy.repository import Repository

PACKAGE = "penstock."


def _targets(
    node: ast.AST, module: str, is_package: bool, modules: Container[str]
) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name.removeprefix(PACKAGE)
    elif isinstance(node, ast.ImportFrom):
        base = (node.module or "").removeprefix(PACKAGE)
        if node.level:
            parents = module.split(".")
            parents = parents[: len(parents) - node.level + is_package]
            base = ".".join([*parents, base] if base else parents)
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            yield inner if inner in modules else base


def import_graph(repository: Repository) -> dict[str, set[str]]:
    """Return, for each module of the product, the modules of the product that it names."""
    paths = {module_of(path): path for path in repository.python()}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        is_package = path.endswith("/__init__.py")
        graph[module] = {
            target
            for node in repository.nodes(path)
            for target in _targets(node, module, is_package, paths)
            if target in paths and target != module
        }
    return graph


def strongly_connected(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected components of more than one module (Tarjan, iterative)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    for root in sorted(graph):
        if root in index:
            continue
        work = [(root, iter(sorted(graph[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            module, rest = work[-1]
            for target in rest:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    work.append((target, iter(sorted(graph[target]))))
                    break
                if target in stack:
                    low[module] = min(low[module], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[module])
                if low[module] == index[module]:
                    cut = stack.index(module)
                    component, stack[cut:] = stack[cut:], []
                    if len(component) > 1:
                        yield component


def _shortest_cycle(graph: dict[str, set[str]], component: list[str]) -> list[str]:
    start, inside = min(component), set(component)
    paths = [[start]]
    seen: set[str] = set()
    while True:
        path = paths.pop(0)
        for target in sorted(graph[path[-1]] & inside):
            if target == start:
                return path
            if target not in seen:
                seen.add(target)
                paths.append([*path, target])


def import_cycles(repository: Repository) -> Iterator[str]:
    """No two modules depend on each other."""
    graph = import_graph(repository)
    for component in strongly_connected(graph):
        cycle = _shortest_cycle(graph, component)
        yield f"{' -> '.join([*cycle, cycle[0]])} ({len(component)} modules in the knot)"
