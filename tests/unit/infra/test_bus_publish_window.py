"""Messages sent ahead of their acknowledgements."""

import asyncio
import gc

import pytest

from penstock.infra.bus.jetstream.connection import ConnectionLostError
from penstock.infra.bus.jetstream.puller import PublishWindow


class Connection:
    def __init__(self):
        self.is_broken = asyncio.Event()

    async def ask(self, subject, data, *, deadline_s, headers):
        await self.is_broken.wait()
        raise ConnectionLostError(subject)


@pytest.fixture
def unread():
    contexts = []
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: contexts.append(context["message"]))
    yield loop, contexts
    loop.close()


def test_a_sender_that_is_cancelled_leaves_no_unread_errors(unread):
    loop, contexts = unread

    async def fill(connection):
        window = PublishWindow(connection, 2, 1.0)
        while True:
            await window.send("a", b"")

    async def main():
        connection = Connection()
        filling = asyncio.create_task(fill(connection))
        await asyncio.sleep(0.01)
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)
        del filling
        connection.is_broken.set()
        await asyncio.sleep(0.01)

    loop.run_until_complete(main())
    gc.collect()
    assert contexts == []


def test_answers_come_in_the_order_of_sending_errors_among_them():
    async def main():
        connection = Connection()
        window = PublishWindow(connection, 2, 1.0)
        await window.send("a", b"")
        await window.send("b", b"")
        connection.is_broken.set()
        await window.send("c", b"")
        return await window.answers()

    assert [str(answer) for answer in asyncio.run(main())] == ["a", "b", "c"]
