"""A run's configuration to a folder of manifests."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w
import yaml

from penstock.actors.runtime.files import write_atomic
from penstock.infra.deploy.layout import Kind, Workload, check_label, workloads
from penstock.infra.deploy.nats_values import nats_values
from penstock.infra.deploy.objects import config_map, launcher, manifests, network_policies
from penstock.infra.deploy.pods import (
    BUS_DIR,
    KEYS_DIR,
    MASTER_KEY_DIR,
    Deployment,
    Manifest,
    secret_files,
)
from penstock.infra.deploy.scaling import OPERATOR_KEY, operator_key
from penstock.infra.run.config import RunConfig
from penstock.infra.run.hosts import OWN_TABLES
from penstock.messages.errors import ConfigError

Table = dict[str, Any]
IMAGE = re.compile(r"[a-z0-9][a-z0-9._:/-]*(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?")
AMBIGUOUS = re.compile(r"[yYnN]|[-+]?\d+[eE][-+]?\d+|0o[0-7]+")
"""Texts that are numbers or truth values to the parser of kubectl, but not to PyYAML."""
NAME_CHARACTERS_MAX = 52
"""Of an object: Kubernetes gives a StatefulSet's pods a label of its name and a hash, of 63."""
VALUES = "nats-values.yaml"
KUSTOMIZATION = "kustomization.yaml"


def render(data: Table, config: RunConfig, deployment: Deployment) -> dict[str, str]:
    """Return the files of a deployment, by name.

    Args:
        data: The tables of the run's configuration, completed and checked (`parse_new`).
        config: The same, typed.
        deployment: Names and image.

    Raises:
        ConfigError: A table cannot be deployed; the text names the field.

    """
    check_label(deployment.run_id, "--run-id")
    check_label(deployment.namespace, "--namespace")
    if not deployment.run_id[0].isalpha():
        text = "expected a letter first, as names of Services have"
        raise ConfigError(f"--run-id: {text}, got {deployment.run_id!r}")
    if IMAGE.fullmatch(deployment.image) is None:
        text = "expected NAME:TAG (no digest: the other images have others)"
        raise ConfigError(f"--image: {text}, got {deployment.image!r}")
    found = workloads(config)
    for one in found:
        name = deployment.name(one.name)
        if len(name) > NAME_CHARACTERS_MAX:
            expected = f"expected at most {NAME_CHARACTERS_MAX} characters with the workload's name"
            raise ConfigError(f"--run-id: {expected}, got {name!r}")
    deployment = _with_gateway(deployment, found)
    files = {"config.yaml": [config_map(deployment, _config_files(data, config))]}
    files["launcher.yaml"] = [launcher(deployment)]
    files |= {f"{one.name}.yaml": manifests(deployment, one) for one in found}
    files["network-policies.yaml"] = network_policies(deployment, found)
    if deployment.gateway and any(one.kind is Kind.REPLICA for one in found):
        files["operator-key.yaml"] = [operator_key(deployment)]
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": deployment.namespace,
        "resources": sorted(files),
    }
    texts = {name: "---\n".join(_yaml(one) for one in objects) for name, objects in files.items()}
    head = "".join(f"# {line}\n" for line in secrets_needed(deployment))
    return texts | {KUSTOMIZATION: head + _yaml(kustomization), VALUES: _yaml(nats_values(config))}


def write(files: Mapping[str, str], folder: Path) -> None:
    """Write the files; a folder's other files stay.

    Raises:
        OSError: The folder cannot be written.

    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomic(folder / name, text.encode(), mode=0o644)


def secrets_needed(deployment: Deployment) -> list[str]:
    """Return the commands that make the Secrets to which the manifests refer."""
    config = deployment.config
    create = f"kubectl --namespace {deployment.namespace} create secret generic"
    lines = ["The pods refer to these Secrets:"]
    keys = " ".join(f"--from-file={key}=FILE" for key in secret_files(config).values())
    if keys:
        lines.append(f"  {create} {deployment.name('bus')} {keys}")
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")
    values = " ".join(f"--from-literal={name}=VALUE" for name in names)
    lines.append(f"  {create} {deployment.name('store')} {values}")
    if config.store.master_key_file:
        lines.append(f"  {create} {deployment.name('master-key')} --from-file=master_key=FILE")
    if config.gateway.keys_file:
        lines.append(f"  {create} {deployment.name('gateway-keys')} --from-file=keys.toml=FILE")
    if deployment.gateway:
        name = deployment.name(OPERATOR_KEY)
        lines.append(f"  {create} {name} --from-literal=token=KEY (of an operator, for KEDA)")
    return lines


def _with_gateway(deployment: Deployment, found: list[Workload]) -> Deployment:
    """Return the deployment with the workload that reports queue times: a gateway, to a monitor."""
    roles = {role for one in found for role in one.role_names}
    names = [one.name for one in found if one.kind is Kind.GATEWAY]
    if not names or "monitor" not in roles:
        return deployment
    return replace(deployment, gateway=names[0])


def _config_files(data: Table, config: RunConfig) -> dict[str, str]:
    """Return the run's configuration and a host's, with the paths of mounted Secrets."""
    bus = data["bus"] | {name: f"{BUS_DIR}/{key}" for name, key in secret_files(config).items()}
    store = dict(data["store"])
    if config.store.master_key_file:
        store["master_key_file"] = f"{MASTER_KEY_DIR}/master_key"
    tables = data | {"bus": bus, "store": store}
    if config.gateway.keys_file:
        tables["gateway"] = data["gateway"] | {"keys_file": f"{KEYS_DIR}/keys.toml"}
    own = {name: tables[name] for name in OWN_TABLES}
    return {"run.toml": tomli_w.dumps(tables), "host.toml": tomli_w.dumps(own)}


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and repeats what is the same object."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if AMBIGUOUS.fullmatch(text) else None
    tag = "tag:yaml.org,2002:str"
    return dumper.represent_scalar(tag, text, style=style)  # pyright: ignore[reportUnknownMemberType]


_Dumper.add_representer(str, _text)


def _yaml(manifest: Manifest) -> str:
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=1000)
