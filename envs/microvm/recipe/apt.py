"""A private apt configuration: the machine's own sources and lists stay as they are."""

from collections.abc import Sequence
from pathlib import Path

from penstock.envs.microvm.recipe.steps import BuildError, Steps

MIRROR = "http://deb.debian.org/debian"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def apt_options(folder: Path, kind: str, *suites: str) -> list[str]:
    """Return options that keep apt to some suites of Debian, with all that it needs in a folder.

    Args:
        folder: gets the list of sources, the lists and the cache.
        kind: `deb` or `deb-src`.
        suites: one or more.

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
    """Fetch lists of packages; a suite that the mirror does not have is gone on without."""
    try:
        steps.run("kernel: package lists", ["apt-get", *options, "update"], timeout_s=600)
    except BuildError as error:
        steps.say(f"kernel: some package lists are missing ({str(error).splitlines()[0]})")
