"""A stranger's repository names programs; task making must not run them."""

import os
import subprocess

import pytest

from penstock.envs.factory.commit_tasks import CommitSource
from penstock.envs.factory.repository import GitError, GitRepository
from penstock.messages.errors import PenstockError

IDENTITY = ["-c", "user.name=a", "-c", "user.email=a@example.org"]


def git(folder, *arguments):
    subprocess.run(["git", "-C", folder, *IDENTITY, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "stranger"
    (folder / "tests").mkdir(parents=True)
    git(tmp_path, "init", "-q", "-b", "main", str(folder))
    for text in ("x = 1\n", "x = 2\n"):
        (folder / "m.py").write_text(text)
        (folder / "tests" / "test_m.py").write_text(f"# {text}")
        git(folder, "add", ".")
        git(folder, "commit", "-qm", "Change")
    return folder


@pytest.fixture
def trap(tmp_path):
    """A program, and a file that exists once it ran."""
    program, proof = tmp_path / "trap.sh", tmp_path / "owned"
    program.write_text(f"#!/bin/sh\ntouch {proof}\ncat\n")
    program.chmod(0o755)
    return program, proof


PROGRAMS = ["core.fsmonitor", "diff.external", "diff.py.textconv", "diff.py.command", "core.pager",
            "core.sshCommand", "filter.py.smudge", "core.alternateRefsCommand",
            "uploadpack.packObjectsHook", "gpg.program"]  # fmt: skip


@pytest.mark.parametrize("key", PROGRAMS)
def test_a_program_named_in_the_configuration_is_not_run(checkout, trap, key):
    program, proof = trap
    git(checkout, "config", key, str(program))
    git(checkout, "config", "log.showSignature", "true")
    (checkout / ".gitattributes").write_text("*.py diff=py filter=py\n")
    (checkout / ".git" / "info").mkdir(exist_ok=True)
    (checkout / ".git" / "info" / "attributes").write_text("*.py diff=py filter=py\n")
    plans = list(CommitSource(checkout).plans())
    assert len(plans) == 1
    assert not proof.exists()


SIGNER = """\
#!/bin/sh
touch {proof}
cat >/dev/null
echo "[GNUPG:] SIG_CREATED x" >&2
printf -- '-----BEGIN PGP SIGNATURE-----\\n\\nx\\n-----END PGP SIGNATURE-----\\n'
"""


def test_the_program_that_checks_signatures_is_not_run(checkout, trap):
    program, proof = trap
    program.write_text(SIGNER.format(proof=proof))
    git(checkout, "config", "gpg.program", str(program))
    git(checkout, "config", "log.showSignature", "true")
    git(checkout, "commit", "-S", "-q", "--amend", "-m", "Signed")
    proof.unlink()
    assert list(CommitSource(checkout).plans())
    assert not proof.exists()


def test_a_hook_is_not_run(checkout, trap):
    program, proof = trap
    for name in ("post-checkout", "reference-transaction", "post-index-change"):
        (checkout / ".git" / "hooks" / name).symlink_to(program)
    assert list(CommitSource(checkout).plans())
    assert not proof.exists()


def test_an_included_configuration_is_not_read(checkout, trap, tmp_path):
    program, proof = trap
    (tmp_path / "more").write_text(f"[diff]\n\texternal = {program}\n")
    git(checkout, "config", "include.path", str(tmp_path / "more"))
    assert list(CommitSource(checkout).plans())
    assert not proof.exists()


def test_a_promised_object_is_not_fetched_through_a_program(checkout, trap):
    program, proof = trap
    git(checkout, "config", "remote.origin.url", f"ext::{program}")
    git(checkout, "config", "remote.origin.promisor", "true")
    git(checkout, "config", "protocol.ext.allow", "always")
    blob = subprocess.check_output(["git", "-C", checkout, "rev-parse", "HEAD:m.py"], text=True)
    (checkout / ".git" / "objects" / blob[:2] / blob[2:].strip()).unlink()
    with pytest.raises(GitError):
        GitRepository(checkout).git("show", "HEAD:m.py")
    assert not proof.exists()


def link_git(folder, elsewhere):
    (folder / ".git").rename(elsewhere)
    (folder / ".git").symlink_to(elsewhere)


def link_objects(folder, elsewhere):
    (folder / ".git" / "objects").rename(elsewhere)
    (folder / ".git" / "objects").symlink_to(elsewhere)


def point_elsewhere(folder, elsewhere):
    (folder / ".git").rename(elsewhere)
    (folder / ".git").write_text(f"gitdir: {elsewhere}\n")


def climb(folder, elsewhere):
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/../../../../secret\n")


def pipe(folder, elsewhere):
    (folder / ".git" / "HEAD").unlink()
    os.mkfifo(folder / ".git" / "HEAD")


def flood(folder, elsewhere):
    with (folder / ".git" / "HEAD").open("wb") as file:
        file.truncate(1 << 40)


def option(folder, elsewhere):
    (folder / ".git" / "HEAD").write_text("--output=/tmp/owned\n")


def ends(folder, elsewhere):
    (folder / ".git" / "shallow").write_bytes(b"\xff\0--upload-pack=x\n")


ODD = [link_git, link_objects, point_elsewhere, climb, pipe, flood, option, ends]


@pytest.mark.parametrize("change", ODD)
def test_an_odd_repository_ends_in_a_typed_error(checkout, tmp_path, change):
    change(checkout, tmp_path / "elsewhere")
    with pytest.raises(PenstockError):
        list(CommitSource(checkout).plans())


def test_a_blob_that_inflates_is_bounded(checkout):
    with (checkout / "bomb").open("wb") as file:
        file.truncate(256 << 20)
    git(checkout, "add", "bomb")
    git(checkout, "commit", "-qm", "Bomb")
    with pytest.raises(GitError, match=r"over 33554432 bytes|File too large"):
        GitRepository(checkout).git("show", "HEAD:bomb")
