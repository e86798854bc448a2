"""Rendered manifests as processes: a network namespace and a folder for each pod.

What a cluster does for a pod is done here by itself: names and environment, files of ConfigMap and
Secrets, as many pods as a workload has, a start after each failure, probes, SIGTERM. Paths of a
container are those of its folder, and names in DNS are addresses.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.hosts.lan import Host, Lan

from penstock.envs.microvm.images.assets import vm_cache_dir

Manifest = dict[str, Any]
NUM_NODES = 2
"""For sandboxes."""
KEPT = ("PATH", "PYTHONPATH", "LANG")
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


class Pod:
    """One pod's container: a program on a host of its own."""

    def __init__(self, host: Host, template: Manifest, index: int) -> None:
        self.host = host
        self.name = host.name
        self.spec = template["spec"]
        (self.container,) = self.spec["containers"]
        self.index = index
        self.labels = template["metadata"]["labels"]

    @property
    def log(self) -> str:
        return (self.host.folder / "pod.log").read_text()

    @property
    def is_of_gang(self) -> bool:
        """Whether it is started again with others, by its JobSet."""
        return self.spec.get("restartPolicy") == "Never"

    @property
    def probed_port(self) -> int:
        return next(p["containerPort"] for p in self.container["ports"] if p["name"] == "health")

    def start(self, objects: "Objects", names: dict[str, str]) -> None:
        """Put its files there, and run it."""
        folders = self._mount(objects)
        environment = self._environment(objects, names)

        def placed(text: str) -> str:
            for path, folder in folders.items():
                text = text.replace(path, str(folder))
            return re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], text)

        for volume in folders.values():
            for file in volume.glob("*.toml"):
                file.write_text(placed(file.read_text()))
        program, *words = self.container["command"] + self.container["args"]
        assert program == "penstock"
        argv = [sys.executable, "-m", "penstock.infra.cli", *map(placed, words)]
        environment = {name: placed(value) for name, value in environment.items()}
        argv = self.host.command(*argv)
        self.host.keep("pod", argv, again=not self.is_of_gang, environment=environment)

    def _mount(self, objects: "Objects") -> dict[str, Path]:
        """Return path in the container -> folder; longer paths first."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        folders: dict[str, Path] = {}
        for mount in self.container["volumeMounts"]:
            folder = self.host.folder / mount["name"]
            folder.mkdir(exist_ok=True)
            volume = volumes.get(mount["name"], {})
            for name, content in objects.files(volume).items():
                (folder / name).write_text(content)
            if mount["mountPath"] != "/tmp":
                folders[mount["mountPath"]] = folder
        return dict(sorted(folders.items(), key=lambda item: -len(item[0])))

    def _environment(self, objects: "Objects", names: dict[str, str]) -> dict[str, str]:
        found = {name: os.environ[name] for name in KEPT if name in os.environ}
        found["PENSTOCK_CACHE"] = str(vm_cache_dir().parent)  # As the images set it.
        for source in self.container.get("envFrom", []):
            found |= objects.secrets[source["secretRef"]["name"]]
        fields = {"metadata.name": self.name, _INDEX: str(self.index)}
        for one in self.container["env"]:
            field = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = fields[field] if field else one["value"]
            found[one["name"]] = names.get(value, value)
        if "RANK" in found:
            found["GLOO_SOCKET_IFNAME"] = "eth0"  # A pod's own name is its address in a cluster.
        return found

    async def probe(self, path: str) -> tuple[int, Any]:
        """Return what an endpoint of its health server answers; 0 where none listens."""
        script = (
            "import sys, urllib.request, urllib.error\n"
            "try: reply = urllib.request.urlopen(sys.argv[1], timeout=5)\n"
            "except urllib.error.HTTPError as error: reply = error\n"
            "except OSError: print('0'); print('null'); sys.exit()\n"
            "print(reply.status); print(reply.read().decode())\n"
        )
        url = f"http://{self.host.address}:{self.probed_port}{path}"
        process = await asyncio.create_subprocess_exec(
            *self.host.command(sys.executable, "-c", script, url), stdout=subprocess.PIPE
        )
        status, _, body = (await process.communicate())[0].decode().partition("\n")
        return int(status), json.loads(body)

    async def stop(self) -> int:
        """SIGTERM, with the grace period that the manifest gives; return the exit code."""
        async with asyncio.timeout(self.spec["terminationGracePeriodSeconds"]):
            return await self.host.stop("pod")

    def kill(self) -> None:
        self.host.kill("pod")


class Objects:
    """What a cluster keeps: manifests and Secrets."""

    def __init__(self, manifests: list[Manifest], secrets: dict[str, dict[str, str]]) -> None:
        self.manifests = manifests
        self.secrets = secrets

    def files(self, volume: Manifest) -> dict[str, str]:
        """Return the files of a volume: none of one that begins empty."""
        if secret := volume.get("secret"):
            held = self.secrets[secret["secretName"]]
            return {item["path"]: held[item["key"]] for item in secret["items"]}
        if source := volume.get("configMap"):
            return next(
                one["data"]
                for one in self.manifests
                if one["kind"] == "ConfigMap" and one["metadata"]["name"] == source["name"]
            )
        return {}


class Cluster:
    """All pods of a deployment."""

    def __init__(self, lan: Lan, root: Path, objects: Objects) -> None:
        self.objects = objects
        self.pods: dict[str, Pod] = {}
        self._lan = lan
        self._gangs: list[asyncio.Task[None]] = []
        for manifest in objects.manifests:
            for name, template, index in pods_of(manifest):
                self.pods[name] = Pod(Host(lan, name, root), template, index)

    def start(self) -> None:
        """Start every pod, in no order."""
        for pod in self.pods.values():
            pod.start(self.objects, self.names)
        gangs = {pod.name.rpartition("-")[0] for pod in self.pods.values() if pod.is_of_gang}
        self._gangs = [asyncio.create_task(self._keep_gang(name)) for name in gangs]

    async def _keep_gang(self, name: str) -> None:
        """Start all pods of a JobSet again when one of them fails."""
        pods = [pod for pod in self.pods.values() if pod.name.rpartition("-")[0] == name]
        while True:
            ends = [asyncio.ensure_future(pod.host.ended("pod")) for pod in pods]
            running: set[asyncio.Future[int]] = set(ends)
            while running and not any(one.done() and one.result() for one in ends):
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if not any(one.done() and one.result() for one in ends):
                return
            for pod, end in zip(pods, ends, strict=True):
                if not end.done():
                    pod.kill()
            await asyncio.gather(*ends)
            for pod in pods:
                pod.start(self.objects, self.names)

    @property
    def names(self) -> dict[str, str]:
        """Names in DNS of pods of a JobSet -> addresses."""
        return {
            f"{name}.{name.rsplit('-', 3)[0]}": pod.host.address
            for name, pod in self.pods.items()
            if "-rank-" in name
        }

    def of(self, part: str) -> list[Pod]:
        """Return the pods of a workload."""
        key = "app.kubernetes.io/component"
        return [pod for pod in self.pods.values() if pod.labels[key] == part]

    async def replace(self, pod: Pod) -> None:
        """Lose a pod with all that is on its disk, and start another one."""
        await pod.host.lose()
        for file in sorted(pod.host.folder.rglob("*"), reverse=True):
            if file.name != "pod.log":
                file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
        self._lan.add(pod.host.name)
        pod.start(self.objects, self.names)

    async def until_ready(self, within_s: float) -> None:
        """Wait until every pod with a readiness probe is ready."""
        for pod in self.pods.values():
            if "readinessProbe" in pod.container:
                path = pod.container["readinessProbe"]["httpGet"]["path"]
                async with asyncio.timeout(within_s):
                    while (await pod.probe(path))[0] != 200:
                        await asyncio.sleep(0.5)

    async def lose(self) -> None:
        for gang in self._gangs:
            gang.cancel()
        await asyncio.gather(*self._gangs, return_exceptions=True)
        for pod in self.pods.values():
            await pod.host.lose()


def pods_of(manifest: Manifest) -> list[tuple[str, Manifest, int]]:
    """Return name, template and index of each pod of a manifest, as a cluster would make them."""
    kind, spec = manifest["kind"], manifest.get("spec", {})
    name = manifest["metadata"]["name"]
    if kind == "JobSet":
        (job,) = spec["replicatedJobs"]
        template = job["template"]["spec"]["template"]
        number = job["template"]["spec"]["completions"]
        return [(f"{name}-{job['name']}-0-{index}", template, index) for index in range(number)]
    number = {
        "Deployment": spec.get("replicas", 0),
        "StatefulSet": spec.get("replicas", 0),
        "DaemonSet": NUM_NODES,
        "Job": 1,
    }.get(kind, 0)
    return [(f"{name}-{index}", spec["template"], index) for index in range(number)]
