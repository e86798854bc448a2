"""The launcher's event server is started again, whatever it died of."""

import asyncio

from penstock.infra.bus.server import kept
from penstock.messages.errors import BusError, DeadlineError


class DyingServer:
    """Dies as soon as it runs, and sometimes while it starts."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.num_starts = 0
        self.stays = asyncio.Event()

    async def wait(self) -> int:
        if not self.failures:
            await self.stays.wait()
        return -9

    async def start(self) -> None:
        self.num_starts += 1
        raise self.failures.pop(0)


async def test_a_server_that_dies_while_it_starts_is_started_again(monkeypatch, capsys):
    monkeypatch.setattr(kept, "SERVER_PAUSE_S", 0.0)
    server = DyingServer(BusError("ended with -9 at start"), DeadlineError("not ready"))
    keeper = asyncio.create_task(kept.keep_server(server))
    while server.failures:
        assert not keeper.done(), keeper.exception()
        await asyncio.sleep(0)
    keeper.cancel()
    assert server.num_starts == 2
    assert "ended with -9 at start" in capsys.readouterr().err
