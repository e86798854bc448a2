"""The commands that pages print about tasks and images, executed as printed in a folder beside."""

import subprocess
from pathlib import Path

import pytest
from tests.docs.commands import IN_MACHINES, Command, commands, execute

from penstock.envs.microvm.images.assets import vm_cache_dir
from penstock.envs.microvm.images.layers import layer_folder

pytestmark = [pytest.mark.slow, pytest.mark.vm, pytest.mark.timeout(1800, func_only=True)]

GIT = ("git", "-C", "my-checkout", "-c", "user.name=a", "-c", "user.email=a@b.example")
MODULE = '''"""Text."""


def shorten(text, limit):
    """Return the text, cut to a number of characters with an ellipsis."""
    if limit < 3:
        raise ValueError("limit")
    if len(text) {} limit:
        return text
    return text[: limit - 3] + "..."
'''
TEST = """import unittest

from text import shorten


class ShortenTest(unittest.TestCase):
    def test_a_text_that_fits_stays(self):
        self.assertEqual(shorten("abcd", 4), "abcd")

    def test_a_long_text_is_cut(self):
        self.assertEqual(shorten("abcdefgh", 6), "abc...")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder beside a checkout of two commits, with a repository in it."""
    outside = tmp_path_factory.mktemp("user")
    checkout, folder = outside / "my-checkout", outside / "penstock"
    for made in (checkout, folder / "repository"):
        made.mkdir(parents=True)
    (folder / "repository" / "one.py").write_text("ONE = 1\n")
    subprocess.run(["git", "init", "--quiet", checkout], check=True)
    for condition, files in (("<", {}), ("<=", {"test_text.py": TEST})):
        for name, content in {"text.py": MODULE.format(condition), **files}.items():
            (checkout / name).write_text(content)
        subprocess.run([*GIT, "add", "."], cwd=outside, check=True)
        subprocess.run([*GIT, "commit", "--quiet", "-m", "Cut texts"], cwd=outside, check=True)
    return folder


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be there, with layers of images of our own above the machine's base."""
    built = vm_cache_dir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PENSTOCK_CACHE", str(folder / "cache"))
    layer_folder().mkdir(parents=True, exist_ok=True)
    for path in built.iterdir():
        if path.name not in {"images", "build.lock"}:
            (vm_cache_dir() / path.name).unlink(missing_ok=True)
            (vm_cache_dir() / path.name).symlink_to(path)


@pytest.mark.parametrize(
    "command",
    [each for each in commands() if each.text.startswith(IN_MACHINES)],
    ids=lambda each: each.name,
)
def test_commands_in_machines(command: Command):
    execute(command)
