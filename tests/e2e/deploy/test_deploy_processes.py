"""The command lines of rendered manifests run as processes, apart from each other, under kills."""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from tests.e2e.deploy.cluster import Cluster, Objects, Pod
from tests.e2e.hosts.lan import CREDENTIALS, Lan
from tests.e2e.hosts.services import MASTER_KEY, TOKEN, Services, open_site
from tests.e2e.launched import TINY

pytestmark = [pytest.mark.slow, pytest.mark.vm, pytest.mark.timeout(1500)]

STEPS = 10
RUN = "r1"
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

[bus]
servers = [{servers}]
allow_plain_text = [{hosts}]
token_file = "token"
num_replicas = 3

[store]
kind = "s3"
bucket = "objects"
endpoint = "{endpoint}"
allow_plain_text = [{hosts}]
master_key_file = "master_key"

[run]
wall_s_max = 1200.0

[trainer]
steps_max = {steps}
engine = "ranks"

[trainer.optimizer]  # So small a policy solves nothing; the decay moves its weights all the same.
weight_decay = 0.1
warmup_steps = 1

[gateway]
host = "0.0.0.0"
allow_plain_text = ["0.0.0.0"]
port = 8080

[users]
num_requests = 0

[processes]
generator-west-b = ["generator:west/b"]
generator-east-b = ["generator:east/b"]
"""


class Site(Services):
    """Servers and store, and the pods of a deployment."""

    def __init__(self, root: Path, lan: Lan) -> None:
        super().__init__(root, lan)
        self.root, self.lan = root, lan
        self.cluster: Cluster | None = None

    def deploy(self, *settings: str) -> Cluster:
        """Render the manifests, as a user does, and start their pods."""
        config = self.root / "run.toml"
        config.write_text(
            CONFIG.format(
                base=TINY,
                endpoint=self.endpoint,
                hosts=self.hosts_toml,
                servers=self.urls_toml,
                steps=STEPS,
            )
        )
        folder = self.root / "manifests"
        overrides = [word for setting in settings for word in ("--set", setting)]
        subprocess.run(
            [*(sys.executable, "-m", "penstock.infra.cli", "deploy", "render"),
             *("--config", str(config), "--image", "penstock:test", "--run-id", RUN),
             *("-o", str(folder), *overrides)],
            check=True,
        )  # fmt: skip
        resources = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        manifests = [
            one for name in resources for one in yaml.safe_load_all((folder / name).read_text())
        ]
        secrets = {
            f"{RUN}-bus": {"token": TOKEN},
            f"{RUN}-store": CREDENTIALS,
            f"{RUN}-master-key": {"master_key": MASTER_KEY},
        }
        self.cluster = Cluster(self.lan, self.root, Objects(manifests, secrets))
        self.cluster.start()
        return self.cluster

    async def end(self) -> None:
        if self.cluster is not None:
            await self.cluster.lose()
        await super().end()


@pytest.fixture
async def site(tmp_path):
    async with open_site(Site, tmp_path) as site:
        yield site


async def until(pod: Pod, text: str, within_s: float = 600.0) -> None:
    """Wait until a pod says something."""
    async with asyncio.timeout(within_s):
        while text not in pod.log:
            await asyncio.sleep(0.2)


async def test_a_deployed_run_survives_kills_and_evictions(site):
    cluster = site.deploy()
    (launcher,) = cluster.of("launcher")
    await until(launcher, "step 1: ")
    await cluster.until_ready(120.0)
    await check_lag(site, launcher)
    dice = random.Random(0)
    leader = await site.leader(launcher.host)
    leader.kill("nats")
    await asyncio.sleep(dice.uniform(0.5, 2.0))
    cluster.of("generator-west")[0].kill()
    await asyncio.sleep(dice.uniform(0.5, 2.0))
    cluster.of("worker")[0].kill()
    await asyncio.sleep(dice.uniform(0.5, 2.0))
    for kill in cluster.of("ranks")[1:]:
        kill.kill()
    await until(launcher, "step 4: ")
    await evict(cluster)
    await until(launcher, "step 6: ")
    await cluster.replace(launcher)
    await check_end(cluster, launcher)


async def check_lag(site: Site, pod: Pod) -> None:
    """Check that the consumers are there whose lag KEDA reads."""
    assert site.cluster is not None
    scaled = [one for one in site.cluster.objects.manifests if one["kind"] == "ScaledObject"]
    triggers = [trigger for one in scaled for trigger in one["spec"]["triggers"]]
    read = [one["metadata"] for one in triggers if one["type"] == "nats-jetstream"]
    assert {one["consumer"] for one in read} == {f"{RUN}-rollout_worker"}
    for one in read:
        info = await site.ask_servers(
            pod.host, f"$JS.API.CONSUMER.INFO.{one['stream']}.{one['consumer']}"
        )
        assert info["num_pending"] + info["num_ack_pending"] >= 0


async def evict(cluster: Cluster) -> None:
    """Stop a pod of each kind in order, within its grace period, and start it again."""
    for part in ("generator-west", "worker", "machines", "front", "trainer"):
        pod = cluster.of(part)[-1]
        assert await pod.stop() == 0, pod.log
        assert (await pod.probe("/healthz"))[0] == 0
        if part == "trainer":
            await check_saved(cluster)
        pod.start(cluster.objects, cluster.names)


async def check_saved(cluster: Cluster) -> None:
    """Check that a trainer that was stopped in order saved its last step."""
    (launcher,) = cluster.of("launcher")
    (step, saved) = [
        max(event["step"] for event in await events(launcher, kind))
        for kind in ("StepCompleted", "CheckpointSaved")
    ]
    assert saved == step > 0


async def check_end(cluster: Cluster, launcher: Pod) -> None:
    """Check that the run ends well, and that every pod ends with it."""
    async with asyncio.timeout(900.0):
        assert await launcher.host.ended("pod") == 0, launcher.log
    runs = launcher.host.folder / "work" / "runs"
    summary = json.loads((runs / RUN / "summary.json").read_text())
    assert summary["rl"]["steps"] == STEPS
    assert summary["ledger"]["balanced"] is True
    assert summary["replay"]["identical"] is True
    assert summary["replay"]["steps_compared"] == STEPS
    for pod in cluster.pods.values():
        assert await asyncio.wait_for(pod.host.ended("pod"), 90.0) == 0, pod.log
    await check_starts(cluster, launcher)


async def check_starts(cluster: Cluster, launcher: Pod) -> None:
    """Check who started how often: what was killed or evicted again, and nobody else."""
    starts = Counter(event["actor"] for event in await events(launcher, "ActorStarted"))
    once = ("pacer", "evaluator", f"generator-east.{RUN}-generator-east-0")
    twice = ("trainer", "gateway", f"generator-west.{RUN}-generator-west-0")
    assert {name: starts[name] for name in once} == dict.fromkeys(once, 1)
    assert {name: starts[name] for name in twice} == dict.fromkeys(twice, 2)
    assert starts["rollout_worker"] == 3
    assert {f"sandbox-{RUN}-machines-{index}" for index in (0, 1)} <= starts.keys()


async def events(pod: Pod, kind: str) -> list[dict]:
    """Return all events of a type, as a pod with a folder of the run reads them."""
    runs = str(pod.host.folder / "work" / "runs")
    words = ("--runs-dir", runs, "log", "cat", RUN, "--type", kind)
    process = await asyncio.create_subprocess_exec(
        *pod.host.penstock(*words), stdout=subprocess.PIPE, env=os.environ | CREDENTIALS
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return [json.loads(line) for line in output.decode().splitlines()]
