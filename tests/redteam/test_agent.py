"""`penstock agent`: what the model leaves must not run when the user next calls git."""

import os
import subprocess

import pytest

from penstock.envs.sandbox import BackendUnavailable, SandboxError
from penstock.infra.agent.checkout import CheckoutBackend, open_checkout
from penstock.infra.cli import main
from penstock.infra.output import printable
from penstock.messages.errors import NotFoundError

pytestmark = pytest.mark.vm
HOOK = "#!/bin/sh\ntouch {proof}\n"


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "mine"
    (folder / "vendor").mkdir(parents=True)
    (folder / "a.py").write_text("x = 1\n")
    for place in (folder, folder / "vendor"):
        subprocess.run(["git", "init", "-q", str(place)], check=True)
    return folder


async def attack(folder, script):
    """Run a shell script as the model's tool would; return what it printed."""
    try:
        async with open_checkout(folder, print) as sandbox:
            done = await sandbox.exec(["sh", "-c", script], timeout_s=20.0)
            return (done.stdout + done.stderr).decode()
    except (BackendUnavailable, SandboxError) as missing:
        pytest.skip(str(missing))


ATTACKS = {
    "hook": "cp /work/trap .git/hooks/pre-commit; cp /work/trap vendor/.git/hooks/pre-commit",
    "config": "git config core.fsmonitor /work/trap; printf '[core]\\nfsmonitor=/work/trap' "
    ">> vendor/.git/config",
    "replace": "rm -rf .git; mv .git old; mkdir -p .git; cp /work/trap .git/hooks/pre-commit",
    "swap the parent": "mv vendor old && mkdir vendor && cd vendor && git init -q . && "
    "git config core.fsmonitor /work/trap",
    "nested": "mkdir -p deep/er && cd deep/er && git init -q . && "
    "git config core.fsmonitor /work/trap",
    "bare": "mkdir bare && cd bare && git init -q --bare . && git config core.fsmonitor /work/trap",
    "common": "mkdir shared && cd shared && git init -q --bare x && echo x > commondir && "
    "echo 'ref: refs/heads/main' > HEAD && git --git-dir=x config core.fsmonitor /work/trap",
    "file": "git init -q --bare store && git --git-dir=store config core.fsmonitor /work/trap; "
    "mkdir sub && echo 'gitdir: ../store' > sub/.git",
    "upper case": "git init -q twin && mv twin/.git twin/.GIT; "
    "printf '[core]\\nfsmonitor=/work/trap' >> twin/.GIT/config",
    "link": "ln -s /work/elsewhere linked; git init -q elsewhere && mkdir l2 && "
    "ln -s ../elsewhere/.git l2/.git",
    "closed folder": "mkdir d && git init -q d/e && git -C d/e config core.fsmonitor /work/trap; "
    "chmod 0111 d/e d",
    "closed repository": "git init -q n && git -C n config core.fsmonitor /work/trap; "
    "chmod -R a-w n",
}


@pytest.mark.parametrize("script", ATTACKS.values(), ids=ATTACKS.keys())
async def test_git_runs_nothing_that_the_model_left(checkout, tmp_path, script):
    proof = tmp_path / "owned"
    trap = checkout / "trap"
    trap.write_text(HOOK.format(proof=proof))
    trap.chmod(0o755)
    before = {path: path.read_bytes() for path in checkout.glob("**/.git/config")}
    await attack(checkout, script)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for root, folders, _ in os.walk(checkout, followlinks=True):
        folders[:] = [name for name in folders if name.lower() != ".git"]
        for command in (["status"], ["add", "-A"], ["commit", "-qm", "x", "--allow-empty"]):
            subprocess.run(["git", *identity, *command], cwd=root, check=False, capture_output=True)
    assert not proof.exists()
    found = {path for path in checkout.glob("**/.git/config")}
    assert len(found) == len(before)


@pytest.mark.parametrize("place", ["n/.git", "z"])
async def test_depth_hides_no_repository(checkout, place):
    dig = "for _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')"
    script = f'git init -q n; mkdir -p {place}; cd {place}; python3 -c "import os\n{dig}"'
    await attack(checkout, script)
    assert not (checkout / "n/.git/HEAD").exists()
    subprocess.run(["rm", "-rf", str(checkout)], check=True)


def test_a_repository_behind_a_link_is_refused(checkout):
    (checkout / "vendor/.git").rename(checkout / "store")
    (checkout / "vendor/.git").symlink_to("../store")
    with pytest.raises(NotFoundError, match=r"vendor/\.git: expected a repository's own folder"):
        CheckoutBackend(checkout, checkout)


async def test_git_itself_still_works_for_the_model(checkout):
    said = await attack(
        checkout, "git status --short; echo y > b.py; git diff --no-index a.py b.py"
    )
    assert "?? a.py" in said
    assert "+y" in said
    assert (checkout / "b.py").read_text() == "y\n"


TRAP = "config core.fsmonitor 'touch {proof}; false'"
GIT_RUNS = (f"git init -q src && git -C src {TRAP}", f"git {TRAP}",
            f"mkdir -p n/m && git init -q n/m && git -C n/m {TRAP}")  # fmt: skip


@pytest.mark.parametrize("script", GIT_RUNS)
async def test_git_runs_nothing_while_the_model_works(checkout, tmp_path, script):
    proof = tmp_path / "owned"
    (checkout / "src").mkdir()
    (checkout / "src/a.py").write_text("x = 1\n")
    try:
        async with open_checkout(checkout, print) as sandbox:
            await sandbox.exec(["sh", "-c", script.format(proof=proof)], timeout_s=20.0)
            for root, folders, _ in os.walk(checkout):
                folders[:] = [name for name in folders if name != ".git"]
                subprocess.run(["git", "status"], cwd=root, check=False, capture_output=True)
    except (BackendUnavailable, SandboxError) as missing:
        pytest.skip(str(missing))
    assert not proof.exists()


async def test_the_change_comes_whole_and_leaves_the_users_own_alone(checkout):
    for name in ("kept.py", "gone.py", "mine.py", "kind.py"):
        (checkout / name).write_text("old\n")
    (checkout / "link").symlink_to("/etc")
    said = []
    script = ("echo new > kept.py; rm gone.py; echo theirs > mine.py; mkdir -p deep/er && "
              "echo x > deep/er/x; chmod 755 kept.py; rm link; mkdir link; echo y > link/passwd; "
              "rm kind.py; mkdir kind.py; ln -s kept.py to; chmod 555 deep/er")  # fmt: skip
    try:
        async with open_checkout(checkout, said.append) as sandbox:
            await sandbox.exec(["sh", "-c", script], timeout_s=20.0)
            assert (checkout / "kept.py").read_text() == "old\n"
            (checkout / "mine.py").write_text("my own\n")
    except (BackendUnavailable, SandboxError) as missing:
        pytest.skip(str(missing))
    assert (checkout / "kept.py").read_text() == "new\n"
    assert (checkout / "kept.py").stat().st_mode & 0o777 == 0o755
    assert not (checkout / "gone.py").exists() and (checkout / "kind.py").is_dir()
    assert (checkout / "mine.py").read_text() == "my own\n"
    assert said == ["mine.py: changed meanwhile: yours is kept"]
    assert (checkout / "link/passwd").read_text() == "y\n" and not (checkout / "link").is_symlink()
    assert (checkout / "to").readlink().name == "kept.py"
    assert (checkout / "deep/er").stat().st_mode & 0o777 == 0o555
    assert not list(checkout.rglob(".penstock-*"))


def test_a_bare_repository_is_no_checkout(tmp_path):
    subprocess.run(["git", "init", "-q", "--bare", str(tmp_path)], check=True)
    with pytest.raises(NotFoundError, match="bare"):
        CheckoutBackend(tmp_path, tmp_path)


def test_no_key_is_taken_from_the_command_line(capsys):
    with pytest.raises(SystemExit):
        main(["agent", "x", "--url", "http://127.0.0.1:9/v1", "--key", "secret"])
    assert "--key" in capsys.readouterr().err


ESCAPES = ["\x1b]0;owned\x07", "\x1b[2J", "\x9b31m", "a\rb", "\u202egpj.exe", "\ud800", "\x7f"]


@pytest.mark.parametrize("text", ESCAPES, ids=ascii)
def test_a_programs_escapes_do_not_reach_the_terminal(text):
    shown = printable(text)
    assert shown.encode().decode().isprintable()
    assert printable("plain\ttext\n") == "plain\ttext\n"
