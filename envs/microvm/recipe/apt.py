"""Configures apt privately, so that the sources and lists of this machine stay untouched."""

from collections.abc import Sequence
from pathlib import Path

from penstock.envs.microvm.recipe.steps import BuildError, Steps

MIRROR = "http://deb.debian.org/debian"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def apt_options(folder: Path, kind: str, *suites: str) -> list[str]:
    """Return options that restrict apt to some suites of Debian and keep its state in a folder.

    Args:
        folder: Folder for the list of sources, the package lists and the cache.
        kind: `deb` or `deb-src`.
        suites: Names of one or more suites.

    """
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    lines = (f"{kind} [signed-by={KEYRING}] {MIRROR} {suite} main\n" for suite in suites)
    (folder / "sources.list").write_text("".join(lines))
    settings = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "Acquire::Languages": "none",
        "APT::Sandbox::User": "root",
    }
    return [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]


def update_lists(steps: Steps, options: Sequence[str]) -> None:
    """Fetch package lists; a suite that the mirror does not have is reported and skipped."""
    try:
        steps.run("kernel: package lists", ["apt-get", *options, "update"], timeout_s=600)
    except BuildError as error:
        steps.say(f"kernel: some package lists are missing ({str(error).splitlines()[0]})")
