"""What each role may do on a NATS server, derived from the code of its actors.

```
 infra/run/roles.py ─builder of a role─▶ modules of its actors ─imports─▶ all modules that it runs
     │ events that these construct ─▶ publish       events that they name ─▶ read their streams
     │ services that they define ───▶ subscribe     services that they name ─▶ request
     ▼
 permissions of one user of the server; only the launcher may create, change or delete streams
```
Nothing is listed by hand, so a new actor, event or service needs no change here. Reading is limited
by stream, because consumers of several event types cannot be limited by subject.
"""

import ast
import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import penstock
from penstock import messages
from penstock.infra.bus.archive.reading import ARCHIVED
from penstock.infra.bus.jetstream.access import INBOXES
from penstock.messages.base import Event, Stream
from penstock.messages.control import LogArchived
from penstock.messages.streams import durable_name

ROLES_MODULE = "penstock.infra.run.roles"
_COMMON = ("penstock.actors.runtime", "penstock.infra.bus.jetstream", "penstock.infra.run.process")
"""Packages and modules that every process runs, whatever its roles."""
_MESSAGES = "penstock.messages"
_LIVENESS = "penstock.infra.run.liveness"
"""Where a builder makes its process the only one of a role."""
_FOLLOWED = (
    *("penstock.actors", "penstock.gateway", "penstock.envs", "penstock.infra.ranks"),
    "penstock.infra.tinker",
    *(_MESSAGES, _LIVENESS),
)
"""Packages whose imports are followed; others hold no actor's code."""
# Not DIRECT.GET for events: the server publishes a stored body to any reply subject, so a reader
# could turn its own event into an event of another role.
_STREAM_READS = ("STREAM.INFO", "STREAM.MSG.GET")
_OBJECT_READS = (*_STREAM_READS, "DIRECT.GET")
_CONSUMER_CALLS = ("CREATE", "DURABLE.CREATE", "DELETE", "INFO", "MSG.NEXT")


class RoleAccess(NamedTuple):
    """What the code of one role does on the bus."""

    publishes: frozenset[type[Event]]
    reads: frozenset[Stream]
    serves: frozenset[str]
    """First words of the services that it offers, e.g. `generate`."""
    requests: frozenset[str]
    """First words of the services that it asks."""
    queues: frozenset[str]
    """Names of the work queues that it shares."""


class _Module(NamedTuple):
    """What the source of one module shows that it does."""

    is_message: bool
    imports: frozenset[str]
    constructs: frozenset[str]
    """Names that it calls."""
    names: frozenset[str]
    """Names that it uses."""
    texts: frozenset[str]
    """First words of dotted texts, constant or formatted."""
    serves: frozenset[str]
    """First words of the texts in functions named `services`, and of what `Bus.serve` gets."""
    serves_named: frozenset[str]
    """Names that these functions use, of constants or functions that give a service's name."""
    defines: Mapping[str, frozenset[str]]
    """First words of the dotted texts in each constant and function of the module."""


def role_access(role: str) -> RoleAccess:
    """Return what a role does on the bus.

    Args:
        role: Name of the role without region or name.

    Raises:
        KeyError: There is no such role.

    """
    closure = [_read(name) for name in sorted(_closure(_entries()[role]))]
    own = [_read(name) for name in sorted(_closure(_entries()[role], shared=()))]
    # Messages define names that others use; they do nothing themselves.
    acting = [one for one in own if not one.is_message]
    shared = [_read(name) for name in _shared()]
    events, defines = _events(), _defined(closure)
    published = _all(one.constructs for one in (*acting, *shared)) & events.keys()
    named = _all(one.names for one in acting)
    texts = _all(one.texts for one in acting) | _all(defines.get(n, frozenset()) for n in named)
    return RoleAccess(
        publishes=frozenset(events[name] for name in published),
        reads=frozenset(events[name].stream for name in (named & events.keys()) | published),
        serves=_served(closure),
        requests=texts & _families(),
        queues=frozenset({role}),
    )


def _all(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*sets)


def role_names() -> tuple[str, ...]:
    """Return the names of all roles."""
    return tuple(sorted(_entries()))


def permissions(
    roles: Iterable[str], run_id: str, inbox: str, buckets: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the permissions of a process as nats-server's configuration has them.

    Args:
        roles: Roles of the process, without regions and names.
        run_id: Run whose subjects the process may use.
        inbox: Prefix of its inboxes, which no other process may read.
        buckets: Object buckets in JetStream that it may read and write.

    """
    found = [role_access(role) for role in roles]
    publish = [
        f"ps.{run_id}.{kind.stream}.{kind.__name__}.>" for one in found for kind in one.publishes
    ]
    # Replies may go to any inbox; `allow_responses` would allow any subject that a request names.
    publish.append(f"{INBOXES}.*.>")
    publish += [
        f"ps.{run_id}.rpc.{name}{end}"
        for one in found
        for name in one.requests
        for end in ("", ".>")
    ]
    subscribe = [f"{inbox}.>"]
    subscribe += [
        f"ps.{run_id}.rpc.{name}{end}" for one in found for name in one.serves for end in ("", ".>")
    ]
    # A publisher reads back the result of an uncertain publication, so `reads` includes those.
    streams = {f"PS_{stream.upper()}" for one in found for stream in one.reads}
    if streams & {f"PS_{stream.upper()}" for stream in ARCHIVED}:
        # Every reader of these streams looks up where their archive ends (`LogArchived`).
        publish.append(f"$JS.API.STREAM.MSG.GET.PS_{LogArchived.stream.upper()}")
    for bucket in buckets:
        streams.add(f"OBJ_{bucket}")
        publish += [f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"]
        publish += [
            f"$JS.API.{call}.OBJ_{bucket}" for call in ("STREAM.PURGE", "STREAM.MSG.DELETE")
        ]
    for stream in sorted(streams):
        calls = _OBJECT_READS if stream.startswith("OBJ_") else _STREAM_READS
        publish += [f"$JS.API.{call}.{stream}{end}" for call in calls for end in ("", ".>")]
        publish += [f"$JS.API.CONSUMER.{call}.{stream}.>" for call in _CONSUMER_CALLS]
        publish.append(f"$JS.ACK.{stream}.>")
    others = {
        durable_name(run_id, role)
        for role in work_roles()
        if role not in {name for one in found for name in one.queues}
    }
    deny = [
        subject
        for name in sorted(others)
        for call in _CONSUMER_CALLS
        for subject in (f"$JS.API.CONSUMER.{call}.*.{name}", f"$JS.API.CONSUMER.{call}.*.{name}.>")
    ]
    deny += [f"$JS.ACK.*.{name}.>" for name in sorted(others)]
    return {
        "publish": {"allow": sorted(set(publish)), "deny": deny},
        "subscribe": {"allow": sorted(set(subscribe))},
    }


@cache
def work_roles() -> frozenset[str]:
    """Return the roles that share a work queue; its consumer bears the role's name."""
    tree = ast.parse(_path(ROLES_MODULE).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            targets = {one.id for one in node.targets if isinstance(one, ast.Name)}
            keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            if "_WORKERS" in targets:
                return frozenset(map(str, keys))
    raise KeyError("_WORKERS")


@cache
def _events() -> Mapping[str, type[Event]]:
    """Return all event types by name."""
    for found in pkgutil.walk_packages(messages.__path__, "penstock.messages."):
        importlib.import_module(found.name)
    waiting: list[type[Event]] = [Event]
    events: dict[str, type[Event]] = {}
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind is not Event and hasattr(kind, "stream"):
            events[kind.__name__] = kind
    return events


@cache
def _families() -> frozenset[str]:
    """Return the first words of all services of all roles."""
    names = {name for entries in _entries().values() for name in _closure(entries)}
    return _served([_read(name) for name in sorted(names)])


def _served(closure: Sequence[_Module]) -> frozenset[str]:
    """Return the first words of the services that some modules offer."""
    defines = _defined(closure)
    found = [one.serves for one in closure]
    found += [defines.get(name, frozenset()) for one in closure for name in one.serves_named]
    return _all(found)


def _defined(closure: Sequence[_Module]) -> Mapping[str, frozenset[str]]:
    defined: dict[str, frozenset[str]] = {}
    for one in closure:
        for name, words in one.defines.items():
            defined[name] = defined.get(name, frozenset()) | words
    return defined


@cache
def _entries() -> Mapping[str, frozenset[str]]:
    """Return the modules that the builder of each role imports."""
    tree = ast.parse(_path(ROLES_MODULE).read_text())
    functions = {
        n.name: n for n in tree.body if isinstance(n, ast.AsyncFunctionDef | ast.FunctionDef)
    }

    imported = {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def modules(node: ast.AST, seen: frozenset[str]) -> Iterator[str]:
        for inner in ast.walk(node):
            if isinstance(inner, ast.ImportFrom) and inner.module:
                yield inner.module
            elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                # `_plain` has its module's name as a string.
                yield inner.value
            elif isinstance(inner, ast.Name) and inner.id in functions.keys() - seen:
                yield from modules(functions[inner.id], seen | {inner.id})
            elif isinstance(inner, ast.Name) and inner.id in imported:
                yield imported[inner.id]

    for node in tree.body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == "ROLES"
        ):
            assert isinstance(node.value, ast.Dict)
            return {
                str(key.value): frozenset(
                    name
                    for name in modules(value, frozenset({"_plain"}))
                    if name.startswith(_FOLLOWED)
                )
                for key, value in zip(node.value.keys, node.value.values, strict=True)
                if isinstance(key, ast.Constant)
            }
    raise KeyError("ROLES")


def _closure(entries: Iterable[str], shared: Iterable[str] | None = None) -> set[str]:
    """Return modules with all that they import, and those of every process."""
    waiting, found = [*entries], set(_shared() if shared is None else shared)
    while waiting:
        name = waiting.pop()
        if name in found or name.startswith(_COMMON) or not _path(name).is_file():
            continue
        found.add(name)
        waiting += [one for one in _read(name).imports if one.startswith(_FOLLOWED)]
    return found


@cache
def _shared() -> tuple[str, ...]:
    return tuple(name for start in _COMMON for name in _inside(start))


def _inside(name: str) -> Iterator[str]:
    path = _path(name)
    if path.name != "__init__.py":
        yield name
        return
    for file in sorted(path.parent.glob("*.py")):
        yield name if file.name == "__init__.py" else f"{name}.{file.stem}"


@cache
def _read(name: str) -> _Module:
    tree = ast.parse(_path(name).read_text())
    imports: set[str] = set()
    constructs: set[str] = set()
    names: set[str] = set()
    serves: set[str] = set()
    serves_named: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            constructs.add(node.func.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "serve" and node.args:
                serves |= set(_words(node.args[0]))
                serves_named |= {
                    one.id for one in ast.walk(node.args[0]) if isinstance(one, ast.Name)
                }
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef) and node.name == "services":
            serves |= set(_words(node))
            serves_named |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return _Module(
        is_message=name.startswith(_MESSAGES),
        imports=frozenset(imports),
        constructs=frozenset(constructs),
        names=frozenset(names),
        texts=frozenset(_words(tree)),
        serves=frozenset(serves),
        serves_named=frozenset(serves_named),
        defines={name: words for node in tree.body for name, words in _definition(node)},
    )


def _definition(node: ast.stmt) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the name that a statement defines, and the words of its dotted texts."""
    if isinstance(node, ast.FunctionDef):
        yield node.name, frozenset(_words(node))
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.JoinedStr):
        for target in node.targets:
            if isinstance(target, ast.Name):
                value = getattr(node.value, "value", "")
                alone = [value] if isinstance(value, str) and value.isidentifier() else []
                yield target.id, frozenset([*_words(node.value), *alone])


def _words(node: ast.AST) -> Iterator[str]:
    """Yield the first words of the dotted texts in a piece of code."""
    for inner in ast.walk(node):
        first = inner.values[0] if isinstance(inner, ast.JoinedStr) and inner.values else inner
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            word, dot, rest = first.value.partition(".")
            # Sentences also have dots, but also spaces.
            if word.isidentifier() and dot and not set(rest) & set(" \n"):
                yield word


def _path(module: str) -> Path:
    """Return the file of a module."""
    root = Path(penstock.__path__[0])
    path = root.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
