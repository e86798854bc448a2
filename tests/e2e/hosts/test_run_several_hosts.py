"""A whole run on hosts that share nothing but a NATS cluster and a bucket, under kills."""

import asyncio
import json
import os
import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from tests.e2e.hosts.lan import CREDENTIALS, Host, Lan
from tests.e2e.hosts.services import MASTER_KEY, TOKEN, Services, open_site
from tests.e2e.launched import TINY

pytestmark = [pytest.mark.slow, pytest.mark.vm, pytest.mark.timeout(900)]

STEPS = 10
HERE = "trainer,front"
"""Entries of `[processes]` that the launcher starts."""
RUN = "r1"
PROGRAMS = {
    "b": {"control": ["pacer", "evaluator", "feedback", "relay:west", "relay:east"],
          "west-a": ["generator:west/a"]},
    "c": {"worker": ["rollout_worker"], "west-b": ["generator:west/b"],
          "east-a": ["generator:east/a"]},
    "d": {"machines": ["sandbox_host:d", "judge"], "east-b": ["generator:east/b"]},
}  # fmt: skip
"""Programs of each host; the launcher's has trainer, gateway and monitor."""
CONFIG = """\
base = "{base}"
[[regions]]
name = "west"
serves = ["train"]
bucket = "west"
endpoint = "{endpoint}"
allow_plain_text = [{hosts}]

[[regions]]
name = "east"
serves = ["eval", "live"]
bucket = "east"
endpoint = "{endpoint}"
allow_plain_text = [{hosts}]

[run]
wall_s_max = 600.0

[trainer]
steps_max = {steps}

[processes]
machines = ["sandbox_host:d", "judge"]
"""
REACH = """
[bus]
servers = [{servers}]
allow_plain_text = [{hosts}]
token_file = "{token}"
num_replicas = 3

[store]
kind = "s3"
bucket = "objects"
endpoint = "{endpoint}"
allow_plain_text = [{hosts}]
master_key_file = "{master_key}"
"""


class Site(Services):
    """Servers and store, and four hosts that work."""

    def __init__(self, root: Path, lan: Lan) -> None:
        super().__init__(root, lan)
        self.hosts = {name: Host(lan, name, root) for name in "abcd"}

    def reach(self, host: Host) -> str:
        """Return how a host reaches servers and store, and put its secret there."""
        secret = host.folder / "token"
        secret.write_text(TOKEN)
        master_key = host.folder / "master_key"
        master_key.write_text(MASTER_KEY)
        return REACH.format(
            servers=self.urls_toml,
            token=secret,
            endpoint=self.endpoint,
            hosts=self.hosts_toml,
            master_key=master_key,
        )

    def start(self) -> None:
        """Start the launcher on host a, and the others' programs."""
        for host in self.hosts.values():
            (host.folder / "host.toml").write_text(self.reach(host))
        first = self.hosts["a"]
        own = CONFIG.format(base=TINY, endpoint=self.endpoint, hosts=self.hosts_toml, steps=STEPS)
        (first.folder / "run.toml").write_text(own + self.reach(first))
        first.keep(
            "launcher",
            first.penstock("run", "--config", "run.toml", "--run-id", RUN, "--processes", HERE),
            again=False,
        )  # fmt: skip
        for name, programs in PROGRAMS.items():
            host = self.hosts[name]
            for program, roles in programs.items():
                joining = ("actor", *roles, "--run", RUN, "--config", "host.toml")
                host.keep(program, host.penstock(*joining))

    async def ask(self, name: str, *arguments: str) -> str:
        """Return what a command on a host says."""
        process = await asyncio.create_subprocess_exec(
            *self.hosts[name].penstock(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | CREDENTIALS,
        )  # fmt: skip
        output, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return output.decode()

    async def until(self, text: str, within_s: float = 300.0) -> None:
        """Wait until the launcher says something."""
        log = self.hosts["a"].folder / "launcher.log"
        async with asyncio.timeout(within_s):
            while text not in log.read_text():
                await asyncio.sleep(0.1)

    async def end(self) -> None:
        for host in self.hosts.values():
            await host.lose()
        await super().end()


@pytest.fixture
async def site(tmp_path):
    async with open_site(Site, tmp_path) as site:
        yield site


async def test_a_run_on_several_hosts_survives_a_leader_a_replica_and_a_host(site):
    site.start()
    await site.until("step 1: ")
    dice = random.Random(0)
    leader = await site.leader(site.hosts["b"])
    leader.kill("nats")
    await asyncio.sleep(dice.uniform(0.5, 2.0))
    site.hosts["b"].kill("west-a")
    await asyncio.sleep(dice.uniform(0.5, 2.0))
    lost = site.hosts["c"]
    await lost.lose()
    await asyncio.sleep(1.0)
    lost.replace()
    await check_end(site, "a")
    assert (leader.folder / "nats.log").read_text().count("Starting nats-server") == 2
    told = await site.ask("d", "log", "cat", RUN, "--type", "ActorStarted")
    starts = Counter(json.loads(line)["actor"] for line in told.splitlines())
    assert starts["trainer"] == starts["pacer"] == 1
    again = ("generator-west.a", "generator-west.b", "generator-east.a", "rollout_worker")
    assert {name: starts[name] for name in again} == dict.fromkeys(again, 2)
    assert starts["generator-east.b"] == 1


async def test_a_run_whose_launcher_and_trainer_are_lost_goes_on_elsewhere(site):
    site.start()
    await site.until("step 3: ")
    await site.hosts["a"].lose()
    resuming = ("run", "--resume", RUN, "--config", "host.toml", "--processes", HERE)
    other = site.hosts["d"]
    other.keep("launcher", other.penstock(*resuming), again=False)
    await check_end(site, "d")


async def check_end(site: Site, name: str) -> None:
    """Check that the run ends well, says a host's launcher, and that all actors end with it."""
    host = site.hosts[name]
    async with asyncio.timeout(600.0):
        assert await host.ended("launcher") == 0, (host.folder / "launcher.log").read_text()
    summary = json.loads((host.folder / "runs" / RUN / "summary.json").read_text())
    assert summary["rl"]["steps"] == STEPS
    assert summary["ledger"]["balanced"] is True
    assert summary["replay"]["identical"] is True
    assert summary["replay"]["steps_compared"] == STEPS
    for name, programs in PROGRAMS.items():
        for program in programs:
            assert await asyncio.wait_for(site.hosts[name].ended(program), 60.0) == 0
    await check_reading(site)
    check_folders(site)


async def check_reading(site: Site) -> None:
    """Every host reads the run from the log, with and without a file."""
    state = json.loads(await site.ask("d", "status", RUN, "--json"))
    assert state["run"]["phase"] == "finished"
    replicas = {name for region in state["regions"].values() for name in region["replicas"]}
    assert replicas == {f"{region}.{name}" for region in ("west", "east") for name in "ab"}
    assert all(max(one["replicas"].values()) == STEPS for one in state["regions"].values())
    told = await site.ask("c", "log", "cat", "latest", "--config", "host.toml")
    kinds = {json.loads(line)["type"] for line in told.splitlines()}
    assert {"RunOpened", "RunClosed", "BatchManifest"} <= kinds
    replayed = json.loads((await site.ask("b", "replay", RUN, "--json")).splitlines()[-1])
    assert replayed["identical"] is True


def check_folders(site: Site) -> None:
    """No host holds another's objects, and no folder of the run holds the secret."""
    for host in site.hosts.values():
        folder = host.folder / "runs" / RUN
        assert not (folder / "objects").exists() and not (folder / "regions").exists()
        for file in folder.rglob("*"):
            assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file
