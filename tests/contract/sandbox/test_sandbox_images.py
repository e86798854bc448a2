"""Layers: built once for equal inputs, found by name, over the base image and under the writes."""

import os
import shutil

import pytest

from penstock.envs.backends import open_backend
from penstock.envs.microvm.images.assets import vm_cache_dir
from penstock.envs.microvm.images.layers import (
    layer_folder,
    layer_path,
    list_layers,
    load_layer,
    pinned,
    remove_unnamed,
)
from penstock.envs.microvm.recipe.layer import LayerSources, build_layer
from penstock.envs.microvm.recipe.steps import BuildError
from penstock.envs.sandbox import BackendUnavailable, ImageAbsent
from penstock.messages.task import MachineNeeds

from .check_sandbox import sh

START_S = 60.0


@pytest.fixture
def repository(tmp_path):
    if shutil.which("mkfs.erofs") is None:
        pytest.skip("mkfs.erofs is missing: apt-get install erofs-utils")
    folder = tmp_path / "repository"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "a.py").write_text("A = 1\n")
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    return folder


@pytest.fixture
def cache(tmp_path):
    """An empty cache with this machine's kernel and image."""
    folder = tmp_path / "vm"
    try:
        open_backend("uml")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    folder.mkdir()
    for path in vm_cache_dir().iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path)
    return folder


def build(cache, name="task", **sources):
    said = []
    return build_layer(name, LayerSources(**sources), cache, said.append), said


async def test_a_machine_works_in_its_layer(cache, repository):
    layer, _ = build(cache, folder=repository)
    backend = open_backend("uml", cache=cache, layer="task")
    machine = await backend.start(timeout_s=START_S)
    plain = await open_backend("uml", cache=cache).start(timeout_s=START_S)
    assert await machine.list_files("/work") == ["run.sh", "src/a.py"]
    assert await plain.list_files("/work") == []
    assert await sh(machine, "./run.sh; echo B = 2 >> src/a.py; cat src/a.py; stat -c %U .") == (
        "ran\nA = 1\nB = 2\nagent\n"
    )
    again = await backend.start(timeout_s=START_S)
    assert await sh(again, "cat src/a.py") == "A = 1\n"
    assert machine.info.image_digest == again.info.image_digest != plain.info.image_digest
    for each in (machine, plain, again):
        await each.close()
    assert layer.digest in str(load_layer("task", cache)[0])


def test_equal_inputs_are_built_once_and_give_equal_bytes(cache, repository):
    first, _ = build(cache, folder=repository)
    second, said = build(cache, folder=repository)
    assert second == first
    assert "up to date" in said[-1]
    other, _ = build(cache, name="other", folder=repository)
    assert other.digest == first.digest
    (repository / "src" / "a.py").write_text("A = 2\n")
    changed, _ = build(cache, folder=repository)
    assert changed.digest != first.digest
    assert [layer.name for layer in list_layers(cache)] == ["other", "task"]
    assert remove_unnamed(cache) == []
    (cache / "images" / "other.json").unlink()
    (gone,) = remove_unnamed(cache)
    assert first.digest in gone.name


async def test_no_history_comes_along_and_app_is_the_working_directory(cache, repository):
    (repository / ".git").mkdir()
    (repository / ".git" / "packed-refs").write_text("the fix")
    (repository / "src" / "lib").symlink_to(".")
    first, _ = build(cache, folder=repository, target="/app")
    (repository / ".git" / "packed-refs").write_text("another fix")
    assert build(cache, folder=repository, target="/app")[0] == first
    machine = await open_backend("uml", cache=cache, layer="task").start(timeout_s=START_S)
    assert await machine.list_files("/work") == ["run.sh", "src/a.py"]
    assert await sh(machine, "touch new; cd /app; ls -A") == "new\nrun.sh\nsrc\n"
    await machine.close()
    (repository / "src" / "lib").unlink()
    assert build(cache, folder=repository, target="/app")[0].inputs != first.inputs


def test_a_name_is_pinned_where_it_means_something(cache, repository):
    layer, _ = build(cache, name="org/task:1", folder=repository)
    assert load_layer("org/task:1", cache)[1] == layer
    assert pinned("org/task:1", cache) == layer.digest
    assert pinned(f"other@sha256:{layer.digest}", cache) == layer.digest
    for unknown in ("absent", "sha256:ab", f"x@y:{layer.digest}", "../../etc/passwd"):
        assert pinned(unknown, cache) == unknown


@pytest.mark.parametrize("target", ["../../x", "/work/../../x", "work", ""])
def test_no_target_leads_out_of_a_layer(cache, repository, target):
    with pytest.raises(BuildError, match="expected an absolute path"):
        build(cache, folder=repository, target=target)


def test_what_is_no_file_is_in_no_layer(cache, repository):
    os.mkfifo(repository / "pipe")
    with pytest.raises(BuildError, match=r"pipe: expected a file"):
        build(cache, folder=repository)


def test_what_cannot_be_built_or_found_says_why(cache):
    with pytest.raises(BuildError, match="image name"):
        build(cache, name="../escape", packages=["x"])
    with pytest.raises(BuildError, match="expected packages"):
        build(cache)
    with pytest.raises(BackendUnavailable, match="there are: none"):
        open_backend("uml", cache=cache, layer="absent")


async def test_a_layer_that_is_gone_is_absent(cache, repository):
    layer, _ = build(cache, folder=repository)
    backend = open_backend("uml", cache=cache, layer="task")
    layer_path(layer_folder(cache), layer.digest).unlink()
    with pytest.raises(ImageAbsent, match=layer.digest):
        await backend.start(timeout_s=START_S)


async def test_sqlite_runs_in_the_base_image(cache):
    machine = await open_backend("uml", cache=cache).start(timeout_s=START_S)
    script = (
        "import sqlite3; d = sqlite3.connect('t.db'); d.execute('create table t (x)'); "
        "d.executemany('insert into t values (?)', [(i,) for i in range(100)]); d.commit(); "
        "print(d.execute('select sum(x) from t').fetchone()[0])"
    )
    result = await machine.exec(["python3", "-I", "-c", script], timeout_s=START_S)
    assert result.stdout == b"4950\n", result
    await machine.close()


POSTGRES = """
set -e
bin=$(ls -d /usr/lib/postgresql/*/bin)
$bin/initdb -D /tmp/pg -U agent --no-sync > /dev/null
$bin/pg_ctl -D /tmp/pg -l /tmp/pg.log -w -t 120 -o "-k /tmp -c fsync=off" start > /dev/null
$bin/psql -h /tmp -U agent postgres -Atc \
  "create table t as select generate_series(1, 100) x; select sum(x) from t"
$bin/pg_ctl -D /tmp/pg -m fast stop > /dev/null
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_postgresql_runs_in_a_layer(cache):
    build(cache, name="postgresql", packages=["postgresql-15"])
    backend = open_backend(
        "uml", cache=cache, layer="postgresql", needs=MachineNeeds(memory_mib=512)
    )
    machine = await backend.start(timeout_s=START_S)
    result = await machine.exec(["sh", "-c", POSTGRES], timeout_s=600.0)
    assert result.stdout.split()[-1:] == [b"5050"], result
    await machine.close()
