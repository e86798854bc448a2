"""All tidy rules by name. A rule takes the repository and yields one line per fault.

To add one: write it in the module that fits, add it here, and give it a seed in
`tests/tidy/test_gates_bite.py`, which fails until it has one.
"""

from collections.abc import Callable, Iterator

from tests.tidy import cycles, layout, prose, words
from tests.tidy.repository import Repository

Rule = Callable[[Repository], Iterator[str]]

RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        layout.long_functions,
        layout.long_files,
        layout.crowded_folders,
        layout.lonely_modules,
        layout.undescribed_packages,
        layout.colliding_classes,
        layout.raw_decoding,
        layout.silenced_files,
        layout.unlisted_actors,
        cycles.import_cycles,
        prose.stale_file_names,
        prose.stale_folder_names,
        prose.stale_module_names,
        prose.open_ends,
        prose.untrue_glossary,
        words.unexplained_concurrency,
        words.vague_field_docstrings,
        words.types_without_a_noun,
    )
}


def faults(name: str, repository: Repository) -> list[str]:
    """Return what breaks a rule."""
    return list(RULES[name](repository))
