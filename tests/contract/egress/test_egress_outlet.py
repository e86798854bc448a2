"""A machine's outlet and the guest agent that is to listen for it."""

import asyncio

import pytest

from penstock.envs.egress.outlet import ENVIRONMENT, EgressOutlet
from penstock.envs.sandbox import SandboxRequestError


class Agent:
    """A line to an agent that fails to listen so many times."""

    def __init__(self, num_failures):
        self.on_piece, self.num_failures, self.num_asked = None, num_failures, 0

    async def call(self, request, *, timeout_s):
        self.num_asked += 1
        assert self.on_piece is not None
        await asyncio.sleep(0)
        if self.num_asked <= self.num_failures:
            raise SandboxRequestError("listen_failed")

    def post(self, request):
        pass


async def test_an_outlet_is_closed_until_its_agent_listens():
    agent = Agent(num_failures=2)
    outlet = EgressOutlet(agent)
    for _ in range(2):
        with pytest.raises(SandboxRequestError, match="listen_failed"):
            await outlet.open(["a.test:80"])
        assert outlet.environment == {} and outlet.attempts == [] and agent.on_piece is None
    await outlet.open(["b.test:80"])
    assert outlet.environment == ENVIRONMENT and agent.on_piece is not None


async def test_whoever_asks_meanwhile_waits_and_changes_nothing():
    agent = Agent(num_failures=0)
    outlet = EgressOutlet(agent)
    await asyncio.gather(*(outlet.open(["a.test:80"]) for _ in range(3)))
    assert agent.num_asked == 1
    with pytest.raises(SandboxRequestError, match="set already"):
        await outlet.open(["b.test:80"])


async def test_an_address_needs_the_operators_word():
    outlet = EgressOutlet(Agent(num_failures=0))
    with pytest.raises(SandboxRequestError, match=r"sandbox_host\.egress_addresses"):
        await outlet.open(["a.test:80@127.0.0.1"])
    assert outlet.environment == {}
    await outlet.open(["a.test:80@127.0.0.1"], allows_addresses=True)
    assert outlet.environment == ENVIRONMENT
