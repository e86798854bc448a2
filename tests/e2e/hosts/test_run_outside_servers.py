"""A launcher whose log is on a server that is not its own, and whose processes run elsewhere."""

import json

import pytest
from tests.contract.bus.plain_server import plain_server
from tests.e2e.launched import Launched, penstock

INTERRUPTED = 130

pytestmark = pytest.mark.slow


def test_a_launcher_opens_and_closes_the_run_and_a_second_one_is_refused(tmp_path):
    config = f'jetstream {{ store_dir: "{tmp_path}/js" }}'
    with plain_server(tmp_path / "nats", config) as port:
        settings = (
            f'bus.servers=["nats://127.0.0.1:{port}"]',
            "bus.max_bytes=67108864",
            'store.kind="jetstream"',
            "users.num_requests=0",
        )
        run = Launched(tmp_path, *settings, processes="")
        try:
            run.until("preparing 16 tasks")
            opened: list[dict] = []
            for _ in range(60):
                told = penstock(tmp_path, "log", "cat", "r1", "--type", "RunOpened")
                if opened := [json.loads(line) for line in told.stdout.splitlines()]:
                    break
            assert len(opened) == 1, run.output
            (tmp_path / "host.toml").write_text(
                f'[bus]\nservers = ["nats://127.0.0.1:{port}"]\nmax_bytes = 67108864\n'
                '[store]\nkind = "jetstream"\n'
            )
            joining = ("--config", str(tmp_path / "host.toml"))
            other = ("run", "--resume", "r1", "--processes", "", *joining)
            second = penstock(tmp_path / "other", *other)
            assert "a launcher is running it on another host" in second.stderr, second.stderr
            run.ctrl_c()
            assert run.wait() == INTERRUPTED, run.output
        finally:
            run.end()
        told = penstock(tmp_path / "other", "log", "cat", "r1", "--type", "RunClosed")
        (closed,) = [json.loads(line) for line in told.stdout.splitlines()]
        assert (closed["incarnation"], closed["is_complete"]) == (opened[0]["incarnation"], False)
        assert not (tmp_path / "r1" / "events").exists()
