"""Renders configurations, and checks manifests against schemas."""

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry, Resource

from penstock.infra.config.file import Table, parse_config, read_toml
from penstock.infra.deploy.pods import Deployment
from penstock.infra.deploy.render import KUSTOMIZATION, VALUES, render

HERE = Path(__file__).parent
CONFIG = HERE / "run.toml"
RENDERED = HERE / "rendered"
KUBERNETES = "1.32"
OWN = {"ScaledObject": "scaledobject", "TriggerAuthentication": "triggerauthentication",
       "JobSet": "jobset"}  # fmt: skip


def golden_files() -> dict[str, str]:
    """Return what the golden files should hold."""
    return rendered(read_toml(CONFIG))


def rendered(data: Table, run_id: str = "run1", image: str = "reg/penstock:1") -> dict[str, str]:
    """Return the files of a deployment."""
    config = parse_config(data, "run.toml")
    deployment = Deployment(
        run_id=run_id, config=config, image=image, namespace="penstock", nats_account="$G"
    )
    return render(data, config, deployment)


def manifests(files: dict[str, str]) -> list[dict[str, Any]]:
    """Return all objects, the kustomization and the chart's values left out."""
    names = sorted(files.keys() - {KUSTOMIZATION, VALUES})
    return [one for name in names for one in yaml.safe_load_all(files[name])]


def check_manifest(manifest: dict[str, Any]) -> None:
    """Check an object against its schema: our own, and Kubernetes' where the package is there."""
    if name := OWN.get(manifest["kind"]):
        jsonschema.Draft202012Validator(schema(name), registry=registry()).validate(manifest)
    if manifest["kind"] == "JobSet":
        for job in manifest["spec"]["replicatedJobs"]:
            spec = job["template"]["spec"]
            check_manifest(
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": spec}
            )
    elif not name:
        check_kubernetes(manifest)


def check_kubernetes(manifest: dict[str, Any]) -> None:
    """Check an object of Kubernetes itself, if the extra `manifests` is installed."""
    try:
        import kubernetes_validate
    except ImportError:
        return
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@functools.cache
def schema(name: str) -> dict[str, Any]:
    return json.loads((HERE / "schemas" / f"{name}.json").read_text())


@functools.cache
def registry() -> Registry[Any]:
    return Registry().with_resource("metadata.json", Resource.from_contents(schema("metadata")))
