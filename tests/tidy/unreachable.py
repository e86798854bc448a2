"""Names that no product code uses: `python -m tests.tidy.unreachable` (vulture, product only).

Modules that no program reaches are found, too. Tests do not count: what only a test calls, no run,
command or role needs. Fields of msgspec structs count as used, since they are encoded whole, and so
do names that stand in strings where a registry
(`"folder.module:Name"`, or `"penstock.module", "Name"`) or a quoted type needs them. What is used
in another way that vulture cannot see stands in ALLOWED with the reason; an entry that allows
nothing is a fault, too, so that the list stays short.
"""

import ast
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatch
from itertools import pairwise

import vulture
from tests.tidy.cycles import import_graph
from tests.tidy.layout import module_of
from tests.tidy.repository import PRODUCT, Repository

CONFIDENCE_MIN = 60
PROGRAM = '\nif __name__ == "__main__":\n'
OFFERED = ("infra.api.names", "envs.sandbox_client.group")
"""Modules for programs of others: what `import penstock` offers, and whole groups of machines."""
_REFERENCE = re.compile(r"^[a-z_]+\.[a-z_.]+:(\w+)$")

# File pattern, name pattern, reason.
ALLOWED: tuple[tuple[str, str, str], ...] = (
    ("*", "on_*", "handlers of events, found by their name (actors/runtime)"),
    ("infra/logs.py", "converter", "an attribute of logging.Formatter, like the ones below"),
    ("infra/logs.py", "default_*_format", "of a Formatter"),
    ("actors/runtime/event_dispatcher.py", "__call__", "the Protocol of a handler"),
    ("messages/reading/trajectories.py", "__call__", "the Protocol of a reader"),
    ("actors/policy/device.py", "fill_uninitialized_memory", "a setting of torch's"),
    ("actors/policy/tokenizer.py", "encode_special_tokens", "an attribute of the library's"),
    ("actors/policy/tokenizer.py", "pre_tokenizer", "an attribute of the library's"),
    ("actors/policy/chat/renderers.py", "*_token_id", "the package renderers reads it"),
    ("actors/policy/chat/renderers.py", "name_or_path", "the package renderers reads it"),
    ("actors/policy/chat/renderers.py", "convert_tokens_to_ids", "the package renderers calls it"),
    ("actors/generator/sampler.py", "*os_token_id", "the library llguidance reads it"),
    ("actors/generator/sampler.py", "special_token_ids", "the library llguidance reads it"),
    ("actors/generator/*engine.py", "reset_prefix_cache", "tests/lab measures a cold cache"),
    ("actors/trainer/ranks/learner.py", "allocate", "FSDP calls it"),
    ("actors/trainer/ranks/learner.py", "async_op", "FSDP may pass it"),
    ("actors/generator/vllm/worker.py", "penstock_*", "called through vLLM, by their names"),
    ("envs/factory/targets.py", "returns", "an attribute of the ast module's"),
    ("envs/tasks/apart/*_side.py", "dont_write_bytecode", "an attribute of sys"),
    ("envs/tasks/apart/stand_ins.py", "__getattr__", "asked for what an exception class lacks"),
    ("envs/tasks/apart/tests_side.py", "create_module", "the import system calls it"),
    ("envs/tasks/apart/tests_side.py", "exec_module", "the import system calls it"),
    ("envs/microvm/machine.py", "ping", "tests/lab measures the round trip to a guest"),
    ("envs/microvm/connection.py", "connection_*", "asyncio.Protocol calls them"),
    ("envs/microvm/connection.py", "data_received", "asyncio.Protocol calls it"),
    ("envs/microvm/connection.py", "exc", "asyncio.Protocol passes it"),
    ("envs/microvm/connection.py", "outbox", "`+=` on a bytearray that the line keeps"),
    (
        "envs/sandbox_client/group.py",
        "lease_group",
        "for programs that lease whole groups (docs/sandbox-hosts.md)",
    ),
    ("gateway/listening.py", "connection_made", "asyncio.Protocol calls it"),
    ("kernels/decode/layout.py", "*", "the fields of a C struct, and what keeps its arrays alive"),
    ("infra/sinks/otel.py", "*_unix_nano", "fields of OTLP's messages, like the two below"),
    ("infra/sinks/otel.py", "*_value", "of an attribute"),
    ("infra/sinks/otel.py", "as_double", "of a point"),
    ("infra/sinks/otel.py", "parent_span_id", "of a span"),
    ("infra/deploy/render.py", "ignore_aliases", "the library yaml calls it"),
)


def _struct_fields(repository: Repository) -> set[str]:
    """Return the names of the fields of every class that derives from `msgspec.Struct`."""
    classes = [
        node
        for path in repository.python()
        for node in repository.nodes(path)
        if isinstance(node, ast.ClassDef)
    ]
    structs = {"Struct"}
    before = 0
    while before != len(structs):
        before = len(structs)
        for node in classes:
            bases = {each.id if isinstance(each, ast.Name) else "" for each in node.bases}
            bases |= {each.attr if isinstance(each, ast.Attribute) else "" for each in node.bases}
            if bases & structs:
                structs.add(node.name)
    return {
        each.target.id
        for node in classes
        if node.name in structs
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def _quoted(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node uses in strings."""
    items: Sequence[ast.expr] = ()
    if isinstance(node, ast.Tuple | ast.List):
        items = node.elts
    elif isinstance(node, ast.Call):
        items = node.args
    texts = [str(each.value) if isinstance(each, ast.Constant) else "" for each in items]
    for module, name in pairwise(texts):
        if module.startswith("penstock."):
            yield name
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast":
        yield texts[0]
    elif isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Constant):
        yield str(node.annotation.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _REFERENCE.findall(node.value)


def unreachable_names(repository: Repository) -> Iterator[str]:
    """Every public name of the product is reached from a command, a config or a role."""
    quoted = {
        name
        for path in repository.python()
        for node in repository.nodes(path)
        for name in _quoted(node)
    }
    checker = vulture.Vulture(ignore_names=sorted(quoted - {""}))
    root = repository.root
    tops = (*PRODUCT, "examples")  # Own code: what it uses of the product is needed.
    checker.scavenge([str(root / top) for top in tops if (root / top).exists()])
    fields = _struct_fields(repository)
    needed: set[int] = set()
    for item in checker.get_unused_code(min_confidence=CONFIDENCE_MIN):
        path = item.filename.relative_to(root).as_posix()
        if path.startswith("examples/") and not path.startswith("examples/quickstart/"):
            continue
        entries = {
            number
            for number, (files, names, _) in enumerate(ALLOWED)
            if fnmatch(path, files) and fnmatch(item.name, names)
        }
        needed |= entries
        is_field = item.typ in {"variable", "attribute"} and item.name in fields
        if not entries and not is_field:
            yield f"{path}:{item.first_lineno}: unused {item.typ} {item.name}"
    for number, (files, names, _) in enumerate(ALLOWED):
        if number not in needed:
            yield f"ALLOWED: nothing to allow for {names} in {files}"


def _named_modules(repository: Repository, path: str, modules: Collection[str]) -> Iterator[str]:
    """Yield the modules that a file's strings name: `"run.command:run"`, f"penstock.a.{name}"."""
    for node in repository.nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0].removeprefix("penstock.")
            beside = f"{module_of(path).rpartition('.')[0]}.{node.value.removesuffix('.py')}"
            yield from {name, f"infra.{name}", beside * node.value.endswith(".py")} & {*modules}
        elif isinstance(node, ast.JoinedStr) and ast.unparse(node).startswith("f'penstock."):
            parts = [
                re.escape(str(each.value)) if isinstance(each, ast.Constant) else r"\w+"
                for each in node.values
            ]
            pattern = re.compile("".join(parts))
            yield from (each for each in modules if pattern.fullmatch(f"penstock.{each}"))


def unreachable_modules(repository: Repository) -> Iterator[str]:
    """Every module is a program, or is imported or named in a string on a path from one."""
    graph = import_graph(repository)
    paths = {module_of(path): path for path in repository.python()}
    reached: set[str] = set()
    pending = [each for each, path in paths.items() if PROGRAM in repository.text(path)]
    pending += [module for module in OFFERED if module in paths]
    while pending:
        module = pending.pop()
        if module in reached:
            continue
        reached.add(module)
        pending += graph[module]
        pending += _named_modules(repository, paths[module], graph)
        parent = module.rpartition(".")[0]
        pending += [parent] * (parent in graph)
    for module in sorted({*graph} - reached):
        yield f"{paths[module]}: no program reaches this module"


def main() -> None:
    """Print what is wrong; exit with 1 if there is anything."""
    repository = Repository()
    faults = [*unreachable_modules(repository), *unreachable_names(repository)]
    for fault in faults:
        print(fault)
    print(f"unreachable names: {len(faults)} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
