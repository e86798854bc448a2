"""Machines of container images, and Dockerfiles built in machines: real kernels, real programs."""

import asyncio
import json
import subprocess

import pytest
from tests.support.container_images import Image, tar_of

from penstock.envs.backends import open_backend
from penstock.envs.microvm.images.assets import load_assets, vm_cache_dir
from penstock.envs.microvm.images.layers import Images, layer_folder
from penstock.envs.microvm.oci.build import BuildOptions, build_dockerfile
from penstock.envs.microvm.oci.image import ImageStore
from penstock.envs.microvm.oci.prepare import prepare_image, pull_image
from penstock.envs.microvm.oci.tree import ImageError
from penstock.envs.sandbox import BackendUnavailable
from penstock.infra.cli import main
from penstock.messages.task import MachineNeeds

START_S = 60.0
NEEDS = MachineNeeds(memory_mib=256)
MOUNT = 'import ctypes; exit(ctypes.CDLL(None).mount(b"x", b"/tmp", b"tmpfs", 0, 0))'


@pytest.fixture(scope="module")
def debian(tmp_path_factory):
    """Return a cache that has an image `debian`: what the base image has, as a container image."""
    try:
        open_backend("uml")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("debian")
    cache = folder / "vm"
    cache.mkdir()
    for path in vm_cache_dir().iterdir():
        if path.is_file():
            (cache / path.name).symlink_to(path)
    base, assets = load_assets()
    root = folder / "root"
    subprocess.run(["fsck.erofs", f"--extract={root}", base / assets.image], check=True)
    subprocess.run(
        ["tar", "cf", folder / "root.tar", "--exclude=./work", "--exclude=./app",
         "--owner=0", "--group=0", "-C", root, "."],
        check=True,
    )  # fmt: skip
    more = tar_of(
        ("srv/run.sh", {"mode": 0o755}, b'#!/bin/sh\necho "$WHO in $(pwd) as $(id -u)"\n'),
        ("usr/bin/.wh.rg", {}),
        ("usr/bin/as-root", {"mode": 0o4755}, b""),
    )
    config = {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "WHO=world"], "WorkingDir": "/srv"}
    image = Image([(folder / "root.tar").read_bytes(), more], config=config, compression="plain")
    path = image.docker_save(folder / "debian.tar")
    return cache, path


@pytest.fixture
async def cache(debian):
    folder, archive = debian
    if not (layer_folder(folder) / "debian.json").exists():
        options = BuildOptions(cache=folder)
        await pull_image(archive, name="debian", options=options, say=lambda _: None)
    return folder


async def sh(machine, text):
    return await machine.exec(["sh", "-c", text], timeout_s=30.0)


async def start(cache, name):
    return await open_backend("uml", cache=cache, layer=name, needs=NEEDS).start(timeout_s=START_S)


async def build(cache, folder, name="built", said=None, **options):
    say = (said if said is not None else []).append
    chosen = BuildOptions(cache=cache, memory_mib=512, **options)
    return await build_dockerfile(folder, name, chosen, say)


async def test_a_machine_runs_as_the_image_says(cache):
    machine = await start(cache, "debian")
    try:
        done = await sh(machine, "./run.sh; ls /usr/bin/rg; echo $HOME; touch new && ls /work/new")
        assert done.stdout.decode().split("\n")[:3] == ["world in /srv as 0", "/root", "/work/new"]
        await machine.write_files({"a/b": b"1"})
        assert await machine.read_file("/srv/a/b", 9) == b"1"
        assert await machine.list_files("/work") == ["a/b", "new", "run.sh"]
        git = "git init -q . && git add . && git -c user.name=a -c user.email=b commit -qm c"
        assert (await sh(machine, git)).exit_code == 0
    finally:
        await machine.close()


async def test_root_reaches_nothing_beyond_its_files(cache):
    machine = await start(cache, "debian")
    try:
        for text in (
            "mknod /dev/disk b 98 0",
            "ls /dev/ubda || ls /dev/ttyS0",
            "echo 1 > /proc/sys/kernel/threads-max",
            "head -c1 /proc/1/mem",
            "cat /proc/1/environ",
            "readlink /proc/1/fd/3",
            "unshare -m true",
            f"python3 -c '{MOUNT}'",
            "chroot /proc/1/root true",
            "date -s 2001-01-01",
        ):
            assert (await sh(machine, text)).exit_code != 0, text
        await sh(machine, "kill -9 1; kill -STOP 1")
        assert (await sh(machine, "echo alive")).stdout == b"alive\n"
    finally:
        await machine.close()


async def test_a_host_has_its_own_copies(cache, tmp_path):
    images = Images(
        lambda layer: open_backend("uml", cache=cache, layer=layer, needs=NEEDS),
        own=tmp_path / "own",
        shared=layer_folder(cache),
    )
    prepared = await prepare_image("debian", options=BuildOptions(cache=cache), say=print)
    backend = await images.open(prepared.digest, [])
    machine = await backend.start(timeout_s=START_S)
    try:
        assert (await sh(machine, "cat /srv/run.sh")).exit_code == 0
    finally:
        await machine.close()
    assert len(list((tmp_path / "own").glob("*.erofs"))) == 3


DOCKERFILE = """\
ARG BASE=debian
FROM ${BASE} AS build
ARG WHO=me
ENV GREETING="hello there" \\
    # a comment
    N=3
WORKDIR /src
COPY . .
RUN ls *.md 2>/dev/null; ls secret.env 2>/dev/null; \\
    echo "$GREETING $WHO" > greeting && id -u > uid
RUN <<EOF
mkdir -p deep/er && echo heredoc > deep/er/file
ln -s file deep/er/link && ln deep/er/file deep/er/hard && chmod 4711 deep/er/file
rm -rf /usr/share/git-core && mkdir /usr/share/git-core && touch /usr/share/git-core/new
EOF
FROM build AS unused
RUN false
FROM debian
RUN ["/bin/sh", "-c", "echo 'app:x:1234:99::/home/app:/bin/sh' >> /etc/passwd"]
COPY --from=build --chown=app --chmod=755 /src/deep /src/deep /out/
COPY --from=build /usr/share/git-core /core
ADD add.tar /added/
COPY <<"EOF" <<B /texts/
$raw
EOF
$WHO
B
USER app
WORKDIR /out
RUN id -u > /tmp/uid
CMD ["cat", "x"]
"""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "context"
    (folder / "sub").mkdir(parents=True)
    (folder / "Dockerfile").write_bytes(DOCKERFILE.replace("FROM build AS unused\nRUN false\n", "")
                                        .replace("\n", "\r\n").encode())  # fmt: skip
    (folder / ".dockerignore").write_text("*.md\n!keep.md\n*.env\n")
    for name in ("a.md", "keep.md", "secret.env", "sub/x"):
        (folder / name).write_text(name)
    (folder / "add.tar").write_bytes(tar_of(("in/file", {"uid": 5, "mode": 0o600}, b"added")))
    return folder


async def test_a_dockerfile_is_built_and_each_step_kept(cache, folder):
    said = []
    first = await build(cache, folder, said=said)
    machine = await start(cache, "built")
    try:
        done = await sh(machine, "pwd; id -u; cat /tmp/uid er/file /texts/*; ls /core /added")
        assert done.stdout.decode().split() == [
            *("/out", "1234", "1234", "heredoc", "world", "$raw"),
            *("/added:", "in", "/core:", "new"),
        ], done  # fmt: skip
        stats = await sh(machine, "stat -c '%a %u %g %F' /out/er/file /out/er/link /added/in/file")
        assert stats.stdout.decode().splitlines() == [
            "755 1234 99 regular file", "777 1234 99 symbolic link", "600 5 0 regular file",
        ]  # fmt: skip
    finally:
        await machine.close()
    said.clear()
    assert (await build(cache, folder, said=said)).digest == first.digest
    assert all("as before" in one for one in said)
    (folder / "secret.env").write_text("other")
    (folder / "sub" / "x").write_text("other")
    said.clear()
    await build(cache, folder, said=said)
    assert "as before" not in said[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM debian\n\nRUN echo out; exit 7", "line 3: RUN: failed: out\n+exit code 7"),
        ("FROM debian\nRUN while :; do :; done", "line 2: RUN: takes more than 3 s"),
        ("FROM debian\nRUN --mount=type=secret,id=a b", "line 2: RUN: --mount"),
        ("FROM debian\nCOPY nothing /x", "line 2: COPY: no file of the folder"),
        ("FROM debian\nCOPY ../../etc/passwd /x", "line 2: COPY: no file of the folder"),
        ("FROM debian\nCOPY --from=debian /no /x", "line 2: COPY: no file is '/no'"),
        ("FROM debian\nCOPY --chown=who Dockerfile /x", "line 2: COPY: the image has no user"),
        ("FROM debian\nCOPY --parents a /x", "line 2: COPY: --parents is not built"),
        ("FROM debian\nADD https://a.test/x /x", "line 2: ADD: 'https://a.test/x'"),
        ("FROM debian\nCOPY Dockerfile sub /x", "line 2: COPY: '/x': expected a folder"),
        ("FROM nothing-there", "line 1: FROM: 'nothing-there' is not in the store"),
        ("FROM debian\nONBUILD RUN x", "line 2: ONBUILD"),
        ("FROM --platform=linux/arm64 debian", "line 1: FROM: expected platform"),
        ("FROM debian\nUSER who\nRUN x", "line 3: RUN: the image has no user 'who'"),
    ],
)
async def test_what_cannot_be_built_is_refused_with_its_line(cache, folder, text, words):
    (folder / "Dockerfile").write_text(text)
    before = set(layer_folder(cache).iterdir())
    with pytest.raises(ImageError, match=words):
        await build(cache, folder, "failed", step_s=3.0, offline=True)
    assert set(layer_folder(cache).iterdir()) == before


async def test_stages_and_arguments(cache, folder):
    (folder / "Dockerfile").write_text(
        "FROM debian AS one\nARG V=1\nENV W=${V:+set}\nRUN echo $V$W > /one\n"
        "FROM one AS two\nRUN echo two >> /one\nENTRYPOINT [\"e\"]\n"
        "FROM scratch AS last\nCOPY --from=two /one /two/\nUSER 5:6\n"
    )  # fmt: skip
    await build(cache, folder, "two", stage="two", arguments={"V": "7"})
    machine = await start(cache, "two")
    try:
        assert (await sh(machine, "cat /one")).stdout == b"7set\ntwo\n"
    finally:
        await machine.close()
    await build(cache, folder, "last")
    layers, config = ImageStore(print, cache).load("last")
    assert (len(layers), config.User) == (1, "5:6")


async def test_what_a_step_leaves_running_ends_with_it(cache, folder):
    (folder / "Dockerfile").write_text(
        "FROM debian\nRUN (sleep 1; echo late > /late) & echo early > /early\n"
        "RUN --mount=type=cache,target=/cache echo x > /cache/x; test ! -e /late\n"
    )
    await build(cache, folder, "quiet")
    machine = await start(cache, "quiet")
    try:
        assert (await sh(machine, "ls /early /cache")).stdout == b"/early\n\n/cache:\n"
    finally:
        await machine.close()


TASK = {
    "task.toml": 'schema_version = "1.3"\n[verifier]\ntimeout_sec = 60.0\n',
    "instruction.md": "Write the tool's name into /app/answer.\n",
    "environment/Dockerfile": (
        "FROM debian\n"
        "RUN echo 'app:x:1234:99::/home/app:/bin/sh' >> /etc/passwd && echo saw > /tool\n"
        "WORKDIR /app\nCOPY note.txt .\nUSER app\n"
    ),
    "environment/note.txt": "a note\n",
    "tests/test.sh": (
        "#!/bin/bash\nmkdir -p /logs/verifier\n"
        "cmp /app/answer /tool && grep -q note /app/note.txt && reward=1\n"
        "echo ${reward:-0} > /logs/verifier/reward.txt\n"
    ),
    "solution/solve.sh": "#!/bin/bash\n[ $(id -u) = 1234 ] && cat /tool > /app/answer\n",
}


def test_a_task_with_a_dockerfile_is_built_read_and_graded(debian, tmp_path, monkeypatch, capsys):
    vm, archive = debian
    monkeypatch.setenv("PENSTOCK_CACHE", str(vm.parent))
    options = BuildOptions(cache=vm)
    asyncio.run(pull_image(archive, name="debian", options=options, say=lambda _: None))
    for path, text in TASK.items():
        place = tmp_path / "tasks/one" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    folder = str(tmp_path / "tasks")
    assert main(["tasks", "check", folder]) != 0
    assert f"`penstock tasks images {folder}/one`" in capsys.readouterr().err
    images = ["tasks", "images", folder, "--memory-mib", "512", "--offline", "--json"]
    assert main(images) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["made"]) == 1
    assert main(["tasks", "check", folder, "--json"]) == 0, capsys.readouterr()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"num_tasks": 1, "rejected": {}}
    assert main(images) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["made"] == {}


async def test_files_belong_to_the_user_of_an_image(cache, folder):
    (folder / "Dockerfile").write_text("FROM debian\nWORKDIR /app\nCOPY sub sub\nUSER 1234:99\n")
    await build(cache, folder, "other-user")
    machine = await start(cache, "other-user")
    try:
        await machine.write_files({"/work/top": b"1", "/work/new/deep": b"2"})
        done = await sh(
            machine, "stat -c '%u %g' /app . top new new/deep sub; echo 3 > own; rm top"
        )
        assert done.stdout.split(b"\n")[:6] == [b"1234 99"] * 5 + [b"0 0"], done
        assert done.exit_code == 0
        assert (await sh(machine, "echo 4 > sub/x")).exit_code != 0
    finally:
        await machine.close()
