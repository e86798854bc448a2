"""What a run keeps on disk is its owner's alone: users' texts, hidden tests, credentials."""

import stat

from penstock.actors.runtime.files import open_private, private_folder, write_atomic
from penstock.gateway.keys import create_key
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.run.runs import RunDir, connect


def readable_by_others(folder):
    return [path for path in (folder, *folder.rglob("*"))
            if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) & 0o077]  # fmt: skip


async def test_a_runs_folder_and_files_are_private(tmp_path, monkeypatch):
    run = RunDir(tmp_path / "runs" / "r1")
    with run.lock():
        write_atomic(run.config, b"")
        create_key(run.gateway_key, key_id="local")
        with open_private(run.path / "a.log", "ab") as file:
            file.write(b"x")
        server = EmbeddedServer(store_dir=run.events)
        await server.start()
        try:
            async with connect(run, server.url, "test") as bus:
                await bus.provision()
                await run.store().put("tasks/hidden/one", b"answers")
        finally:
            await server.stop()
    assert len(list(run.path.rglob("*"))) > 10
    assert readable_by_others(run.path) == []


def test_a_folder_that_was_open_is_closed(tmp_path):
    run = RunDir(tmp_path / "r1")
    run.path.mkdir(mode=0o755)
    with run.lock():
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700


def test_folders_on_the_path_are_private_too(tmp_path):
    private_folder(tmp_path / "a" / "b")
    assert readable_by_others(tmp_path / "a") == []
