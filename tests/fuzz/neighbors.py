"""`python -m tests.fuzz.neighbors`: what others wait for while one key attacks the gateway.

A gateway on a real server, with replies of a fixed pace; honest clients ask one after the other,
first alone, then beside a process that sends long prompts, half connections, deep bodies and
streams that it does not read. The last line is JSON; `is_first` says whether the gateway had
processors for itself, for which the program must be root and no leader of a session (`setsid -f`).
"""

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
from tests.e2e.gateway.conftest import TEXTS, Reply, ScriptedGenerator, Site, _nats
from tests.property.test_gateway_bodies import SEEDS
from tests.redteam.gateway.test_routes import HEADERS, attacks

from penstock.actors.policy.tokenizer import train_tokenizer

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "Fix add."}]}
PATH = "/v1/chat/completions"
PACE_S = 0.02
ATTACKER, HONEST = "psk-test", "psk-private"
GROUP = Path("/proc/self/autogroup")


class Paced(ScriptedGenerator):
    """Answers everything alike, after a while."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__()
        self.token_ids = token_ids

    async def _generate(self, message):
        await asyncio.sleep(PACE_S)
        self.replies = [Reply(token_ids=self.token_ids)]
        self.asked = []
        async for chunk in super()._generate(message):
            yield chunk


async def honest(url: str, num: int) -> list[float]:
    """Return how long each of `num` requests took, in seconds."""
    took = []
    async with aiohttp.ClientSession(url) as http:
        for _ in range(num):
            started = time.perf_counter()
            reply = await http.post(PATH, json=CHAT, headers={"Authorization": f"Bearer {HONEST}"})
            assert reply.status == 200, await reply.text()
            await reply.read()
            took.append(time.perf_counter() - started)
            await asyncio.sleep(0.01)
    return took


async def attack(url: str) -> None:
    """Do all that one key can, until it is ended."""
    host, port = url.removeprefix("http://").split(":")
    rng = random.Random(0)
    long = json.dumps(CHAT | {"messages": [{"role": "user", "content": "x y " * 450_000}]}).encode()
    connections = []

    async def post(data, headers):
        try:
            async with (
                aiohttp.ClientSession(url) as http,
                asyncio.timeout(30),
                http.post(rng.choice(sorted(SEEDS)), data=data, headers=HEADERS | headers) as reply,
            ):
                await reply.read()
        except (aiohttp.ClientError, TimeoutError):
            pass

    async def prompts():
        while True:
            await post(long, {})

    async def bodies():
        for path in itertools.cycle(sorted(SEEDS)):
            data, headers = attacks(rng, SEEDS[path])
            await post(data, headers)

    async def halves():
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"POST / HTTP/1.1\r\nHost:")
                connections.append(writer)
                while len(connections) > 400:
                    connections.pop(0).close()
            except OSError:
                pass
            await asyncio.sleep(0.005)

    await asyncio.gather(prompts(), prompts(), bodies(), bodies(), halves())


def _first_place() -> bool:
    """Let no other session of this machine take processor time from this one, if that is allowed.

    Attacker and gateway share its processors, which they would not elsewhere: what is measured is
    what the gateway does, and not how the kernel divides two processors among sessions.
    """
    try:
        os.setsid()
        GROUP.write_text("-10")
    except OSError:
        return False
    return True


def _answered(site: Site) -> float:
    """Return how many requests the gateway has answered, refusals included."""
    samples = (
        each for one in site.gateway._services.metrics.registry.collect() for each in one.samples
    )
    return sum(each.value for each in samples if each.name == "penstock_gateway_requests_total")


async def main(num: int) -> None:
    is_first = _first_place()
    tokenizer = train_tokenizer(TEXTS * 8, vocab_size=400)
    with tempfile.TemporaryDirectory() as folder:
        async with _nats(Path(folder)) as bus:
            site = Site(bus, Path(folder), tokenizer, num_requests_max=64)
            site.generator = Paced(site.chat.render_turn("return a + b"))
            async with site.running():
                gc.collect()
                gc.freeze()  # As a run's process does.
                await honest(site.url, 20)
                before = await honest(site.url, num)
                command = [sys.executable, "-m", "tests.fuzz.neighbors", "--attack", site.url]
                process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
                try:
                    await asyncio.sleep(3.0)
                    counted, began = _answered(site), time.monotonic()
                    during = await honest(site.url, num)
                    hostile = _answered(site) - counted - num
                    hostile_per_s = hostile / (time.monotonic() - began)
                finally:
                    process.kill()
                    await process.wait()
    p95 = [statistics.quantiles(took, n=20)[-1] for took in (before, during)]
    figures = {
        "p50_alone_ms": round(1e3 * statistics.median(before), 1),
        "p50_attacked_ms": round(1e3 * statistics.median(during), 1),
        "p95_alone_ms": round(1e3 * p95[0], 1),
        "p95_attacked_ms": round(1e3 * p95[1], 1),
        "ratio": round(p95[1] / p95[0], 2),
        "hostile_requests_per_s": round(hostile_per_s, 1),
        "is_first": is_first,
        "failed": 0,
        "num_requests": num,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attack", help="attack this address instead")
    parser.add_argument("--num", type=int, default=300, help="honest requests each time")
    given = parser.parse_args()
    asyncio.run(attack(given.attack) if given.attack else main(given.num))
