"""Each gate fails on one seeded violation, and passes without it."""

import os
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from tests.tidy.repository import ROOT, Repository
from tests.tidy.rules import RULES
from tests.tidy.scratch import copy, edit, write
from tests.tidy.types import setting_faults, type_faults
from tests.tidy.unreachable import unreachable_modules, unreachable_names

BIN = Path(sys.executable).parent
Files = dict[str, str]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy(tmp_path_factory.mktemp("clean"))


@pytest.fixture
def scratch(clean: Path, tmp_path: Path) -> Path:
    return copy(tmp_path, root=clean)


FUNCTION = "def f():\n" + "    pass\n" * 70
CYCLE = {
    "kernels/seed_a.py": "def f():\n    from penstock.kernels import seed_b\n",
    "kernels/seed_b.py": "from typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    from penstock.kernels.seed_a import f\n",
}
CONCURRENT = "import asyncio\n\n\nasync def f():\n" + 4 * "    asyncio.create_task(f())\n"
TIDY: dict[str, tuple[Files, ...]] = {
    "long_functions": ({"kernels/seed.py": FUNCTION}, {"tests/unit/seed.py": FUNCTION}),
    "long_files": (
        {"kernels/seed.py": "\n" * 601},
        {"kernels/seed.cu": "\n" * 600 + "//"},
        {"tests/unit/seed.py": "\n" * 601},
    ),
    "crowded_folders": ({f"kernels/seed/m{n}.py": "" for n in range(21)},),
    "lonely_modules": ({"kernels/seed/__init__.py": "", "kernels/seed/m.py": ""},),
    "undescribed_packages": (
        {"kernels/seed/__init__.py": ""},
        {"kernels/seed/m.py": ""},
        {"messages/__init__.py": '"""Typed events."""\n'},
    ),
    "colliding_classes": ({"kernels/seed.py": "class Task: ...\n"},),
    "raw_decoding": (
        {"kernels/seed.py": "import msgspec\n\nx = msgspec.json.decode(b'')\n"},
        {"infra/seed.py": "import tomllib\n\nx = tomllib.loads('')\n"},
    ),
    "silenced_files": (
        {"kernels/seed.py": "# pyright: basic\n"},
        {"kernels/seed.py": "# pyright: strict, reportUnusedImport=false\n"},
        {"kernels/seed.py": "# type: ignore[assignment]\n"},
        {"tests/unit/seed.py": "# ruff: noqa: F401\n"},
        {"kernels/seed.py": "from typing import no_type_check\n"},
    ),
    "unlisted_actors": ({"actors/seed/__init__.py": ""},),
    "import_cycles": (CYCLE,),
    "stale_file_names": (
        {"docs/seed.md": "See `actors/gone.py`.\n"},
        {"kernels/seed.py": '"""See `gone.py`."""\n'},
        {"kernels/seed.py": '"""See `learner.py`, which is elsewhere."""\n'},
        {"tests/unit/seed.py": "x = 1  # as in docs/gone.md\n"},
        {"kernels/seed.c": "int x; /* as in\n  gone.h */\n"},
        {"infra/seed.toml": "x = 1  # see gone.py\n"},
        {"infra/seed.sh": "# see gone.py\n"},
    ),
    "stale_folder_names": (
        {"docs/seed.md": "See `envs/gone/`.\n"},
        {"kernels/seed.py": '"""See `gone/`."""\n'},
    ),
    "stale_module_names": ({"kernels/seed.py": '"""See `penstock.actors.gone`."""\n'},),
    "untrue_glossary": ({"docs/glossary.md": "| seed | | | `messages/task.py` `Gone` |\n"},),
    "unexplained_concurrency": ({"kernels/seed.py": CONCURRENT},),
    "vague_field_docstrings": (
        {"kernels/seed.py": 'class Seed:\n    """A seed."""\n\n    x: int\n    """Of the x."""\n'},
    ),
    "types_without_a_noun": ({"kernels/seed.py": "class Seeded: ...\n"},),
    "open_ends": ({"kernels/seed.py": "# TO" + "DO: more\n"},),
}
SEEDS = [(name, files) for name, seeds in TIDY.items() for files in seeds]


@cache
def _faults(name: str, root: Path) -> frozenset[str]:
    return frozenset(RULES[name](Repository(root)))


def test_every_tidy_rule_has_a_seed():
    assert set(TIDY) == set(RULES)


@pytest.mark.parametrize(("name", "files"), SEEDS)
def test_a_tidy_rule_bites(name: str, files: Files, clean: Path, scratch: Path):
    before = _faults(name, clean)  # none, says test_tidy.py
    write(scratch, files)
    [fault] = set(RULES[name](Repository(scratch))) - before
    assert any(path.rpartition("/")[0] in fault.replace(".", "/") for path in files), fault


def test_unreachable_names_bite(scratch: Path):
    write(scratch, {"messages/seed.py": "def only_a_test_calls_me(): ...\n"})
    write(scratch, {"tests/unit/seed.py": "from penstock.messages.seed import *\n"})
    assert list(unreachable_names(Repository(scratch))) == [
        "messages/seed.py:1: unused function only_a_test_calls_me"
    ]


def test_unreachable_modules_bite(scratch: Path):
    assert not list(unreachable_modules(Repository(scratch)))
    write(scratch, {"messages/seed.py": "from penstock.messages import base\n"})
    assert list(unreachable_modules(Repository(scratch))) == [
        "messages/seed.py: no program reaches this module"
    ]


RUFF = (
    ("check", "import os\n"),
    ("check", "x = y  # no" + "qa\n"),
    ("check", "x: int = ''  # type: " + "ignore\n"),
    ("format", "x = {  }\n"),
)


@pytest.mark.parametrize(("command", "text"), RUFF)
def test_ruff_bites(command: str, text: str, scratch: Path):
    words = [str(BIN / "ruff"), command, "--no-cache", *(["--check"] * (command == "format")), "."]
    assert subprocess.run(words, cwd=scratch, capture_output=True, check=False).returncode == 0
    write(scratch, {"kernels/seed.py": text})
    done = subprocess.run(words, cwd=scratch, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "kernels/seed.py" in done.stdout.replace(os.sep, "/")


CONTRACTS = {
    "direction": {"messages/seed.py": "import penstock.kernels\n"},
    "actors stand alone": {"actors/pacer/seed.py": "import penstock.actors.trainer.config\n"},
    "messages import no": {"messages/seed.py": "import numpy\n"},
    "only infra.bus": {"gateway/seed.py": "import nats\n"},
}


def _contracts(root: Path) -> tuple[int, list[str]]:
    done = subprocess.run(
        [str(BIN / "lint-imports"), "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / ".pyroot")},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, [line for line in done.stdout.splitlines() if line.endswith("BROKEN")]


def test_every_contract_has_a_seed_and_holds(clean: Path):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = [each["name"] for each in settings["tool"]["importlinter"]["contracts"]]
    assert all(any(name.startswith(start) for start in CONTRACTS) for name in contracts)
    assert _contracts(clean) == (0, [])


@pytest.mark.parametrize("name", CONTRACTS)
def test_an_import_contract_bites(name: str, scratch: Path):
    write(scratch, CONTRACTS[name])
    code, broken = _contracts(scratch)
    assert code == 1
    assert [line for line in broken if line.startswith(name)] == broken


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One package is enough to see that the check looks, and at what."""
    root = copy(tmp_path_factory.mktemp("typed"), ("messages", ".pyroot", "pyproject.toml"))
    (root / ".venv").symlink_to(BIN.parent)
    return root


def test_types_bite(typed: Path):
    found, num_files = type_faults(typed)
    assert found == [f"only {num_files} files analysed, at least 400 expected"]
    write(typed, {"messages/seed.py": 'x: int = "no number"\n'})
    found, _ = type_faults(typed, files_min=num_files)
    assert len(found) == 1
    assert found[0].startswith("messages/seed.py:1: ")


WEAKER = (
    ('"infra", "examples"', '"examples"', "include lacks infra"),
    ('"examples", "tests/lab"', '"examples"', "include lacks tests/lab"),
    ('strict = ["messages", ', "strict = [", "strict lacks messages"),
    ('"standard"', '"off"', "typeCheckingMode is not standard or strict"),
    ("[tool.pyright]", '[tool.pyright]\nignore = ["envs"]', "ignore hides errors"),
    ("[tool.pyright]", "[tool.pyright]\nreportReturnType = false", "reportReturnType hides errors"),
)


@pytest.mark.parametrize(("old", "new", "fault"), WEAKER)
def test_weaker_types_are_found(old: str, new: str, fault: str, tmp_path: Path):
    copy(tmp_path, ("pyproject.toml",))
    assert not list(setting_faults(tmp_path))
    edit(tmp_path, "pyproject.toml", old, new)
    assert list(setting_faults(tmp_path)) == [f"pyproject.toml: tool.pyright.{fault}"]


def test_a_second_settings_file_is_found(tmp_path: Path):
    copy(tmp_path, ("pyproject.toml",))
    write(tmp_path, {"pyrightconfig.json": "{}"})
    [fault] = setting_faults(tmp_path)
    assert fault.startswith("pyrightconfig.json replaces")
