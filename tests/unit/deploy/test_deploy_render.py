"""`penstock deploy render`: golden files, schemas, and any valid configuration."""

import copy
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.deploy.rendering import (
    CONFIG,
    RENDERED,
    check_kubernetes,
    check_manifest,
    golden_files,
    manifests,
    rendered,
)

from penstock.infra import cli, config
from penstock.infra.config.file import read_toml
from penstock.infra.deploy.render import KUSTOMIZATION, VALUES
from penstock.messages.errors import ConfigError

CONFIGS = Path(config.__file__).parents[1] / "configs"


def data() -> dict[str, Any]:
    return read_toml(CONFIG)


def test_the_manifests_are_those_of_the_golden_files():
    found = {path.name: path.read_text() for path in RENDERED.iterdir()}
    assert found == golden_files(), "python -m tests.unit.deploy.write"


def test_the_command_writes_the_files(tmp_path, capsys):
    output = tmp_path / "manifests"
    arguments = ["--config", str(CONFIG), "--image", "reg/penstock:1", "--run-id", "run1"]
    assert cli.main(["deploy", "render", *arguments, "-o", str(output)]) == 0
    assert {path.name for path in output.iterdir()} == {path.name for path in RENDERED.iterdir()}
    assert str(output) in capsys.readouterr().out
    assert cli.main(["deploy", "render", *arguments, "-o", str(CONFIG)]) == 2


@pytest.mark.parametrize("name", ["kubernetes", "kubernetes-30b"])
def test_the_shipped_configurations_can_be_deployed(name):
    found = manifests(rendered(read_toml(CONFIGS / f"{name}.toml")))
    images = {one["spec"]["containers"][0]["image"] for one in templates(found)}
    vllm = {"reg/penstock-vllm:1", "reg/penstock-ranks:1"} if name == "kubernetes-30b" else set()
    assert images == {"reg/penstock:1", "reg/penstock-sandbox:1"} | vllm
    for manifest in found:
        check_manifest(manifest)


def test_every_manifest_meets_its_schema():
    found = manifests(golden_files())
    kinds = {one["kind"] for one in found}
    assert kinds >= {"Deployment", "StatefulSet", "DaemonSet", "Job", "Service", "ScaledObject",
                     "PodDisruptionBudget", "NetworkPolicy", "ConfigMap", "JobSet"}  # fmt: skip
    for manifest in found:
        check_manifest(manifest)


def test_kubernetes_own_schemas_are_used_where_they_are_installed():
    pytest.importorskip(
        "kubernetes_validate", reason="extra manifests: pip install -e .[manifests]"
    )
    (found,) = [one for one in manifests(golden_files()) if one["kind"] == "DaemonSet"]
    found["spec"]["template"]["spec"]["nodeSelectors"] = {}
    with pytest.raises(jsonschema.ValidationError, match="nodeSelectors"):
        check_kubernetes(found)


def test_our_schemas_refuse_what_the_definitions_do():
    scaled = next(one for one in manifests(golden_files()) if one["kind"] == "ScaledObject")
    for change in ({"minReplicaCount": "1"}, {"triggers": []}, {"replicas": 3}):
        wrong = copy.deepcopy(scaled)
        wrong["spec"] |= change
        with pytest.raises(jsonschema.ValidationError):
            check_manifest(wrong)


def test_a_region_scales_by_queue_time_and_shared_work_by_its_lag():
    found = {
        one["metadata"]["name"]: one["spec"]
        for one in manifests(golden_files())
        if one["kind"] == "ScaledObject"
    }
    assert set(found) == {
        f"run1-{n}" for n in ("generator-west", "generator-east", "worker", "judges")
    }
    (lag,) = found["run1-worker"]["triggers"]
    assert lag["metadata"]["natsServerMonitoringEndpoint"] == "nats-headless.nats:8222"
    assert lag["metadata"]["consumer"] == "run1-rollout_worker"
    (queue,) = found["run1-generator-west"]["triggers"]
    assert queue["metadata"]["valueLocation"] == "regions.west.queue_s"
    assert found["run1-generator-west"]["minReplicaCount"] == 2


def test_ranks_are_a_jobset_that_torchrun_could_have_started():
    (jobset,) = [one for one in manifests(golden_files()) if one["kind"] == "JobSet"]
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == 4
    (container,) = job["template"]["spec"]["containers"]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert values["WORLD_SIZE"] == "4" and values["LOCAL_RANK"] == "0" and values["RANK"] is None
    assert values["MASTER_ADDR"] == "run1-ranks-rank-0-0.run1-ranks"
    assert container["args"][:2] == ["actor", "rank:$(RANK)"]
    assert "limits" not in container["resources"]


def test_each_rank_and_replica_of_a_gpu_run_has_a_card():
    found = manifests(rendered(read_toml(CONFIGS / "kubernetes-30b.toml")))
    cards = {
        one["spec"]["containers"][0]["image"]: one["spec"]["containers"][0]["resources"]["limits"]
        for one in templates(found)
        if "limits" in one["spec"]["containers"][0]["resources"]
    }
    for image in ("reg/penstock-ranks:1", "reg/penstock-vllm:1"):
        assert cards[image] == {"nvidia.com/gpu": "1"}


def test_routes_between_servers_are_authenticated_by_both_ends():
    cluster = yaml.safe_load(golden_files()[VALUES])["config"]["cluster"]
    assert cluster["tls"]["enabled"] and cluster["tls"]["merge"]["verify"]
    assert cluster["tls"]["secretName"] != "nats-tls"


def test_every_pod_has_secrets_of_its_own_and_bounded_ways_out():
    found = manifests(golden_files())
    policies = {one["metadata"]["name"]: one["spec"] for one in found
                if one["kind"] == "NetworkPolicy"}  # fmt: skip
    for one in templates(found):
        part = one["metadata"]["labels"]["app.kubernetes.io/component"]
        secrets = {v["secret"]["secretName"] for v in one["spec"]["volumes"] if "secret" in v}
        (container,) = one["spec"]["containers"]
        names = {each["secretRef"]["name"] for each in container["envFrom"]}
        assert f"run1-bus-{part}" in secrets and names == {f"run1-store-{part}"}
        assert not any(name.startswith("run1-bus-") for name in secrets - {f"run1-bus-{part}"})
        spec = policies[f"run1-{part}"]
        assert "Egress" in spec["policyTypes"]
        for rule in spec["egress"]:
            assert rule.get("ports") or rule["to"]
    inside = [rule for rule in policies["run1-machines"]["egress"] if "to" in rule]
    assert "10.0.0.0/8" in inside[0]["to"][0]["ipBlock"]["except"]
    assert 443 not in {port["port"] for rule in policies["run1-trainer"]["egress"]
                       for port in rule.get("ports", []) if "to" in rule}  # fmt: skip


def test_keda_asks_the_gateway_over_tls_where_it_speaks_tls():
    scaled = [one for one in manifests(golden_files()) if one["kind"] == "ScaledObject"]
    urls = [t["metadata"]["url"] for one in scaled for t in one["spec"]["triggers"]
            if "url" in t["metadata"]]  # fmt: skip
    assert urls and all(url.startswith("https://") for url in urls)


def test_no_secret_is_in_the_manifests(tmp_path):
    tables = data()
    for table, name in (("bus", "nkey_seed_file"), ("store", "master_key_file")):
        path = tmp_path / name
        path.write_text("a value that nobody may see")
        tables[table][name] = str(path)
    text = "".join(rendered(tables).values())
    assert "nobody may see" not in text and str(tmp_path) not in text
    assert "/etc/penstock/bus/nkey_seed" in text


def test_the_volume_of_a_nats_server_holds_what_the_streams_reserve():
    values = yaml.safe_load(golden_files()[VALUES])
    cluster = values["config"]["cluster"]
    assert (cluster["enabled"], cluster["replicas"]) == (True, 3)
    assert values["config"]["jetstream"]["fileStore"]["pvc"]["size"] == "13Gi"  # 11 x 1 GiB, 10%
    tables = data()
    del tables["bus"]["max_bytes"]
    values = yaml.safe_load(rendered(tables)[VALUES])
    assert values["config"]["jetstream"]["fileStore"]["pvc"]["size"] == "91Gi"


WRONG = {
    "bus": ({"servers": []}, "bus.servers"),
    "store": ({"kind": "jetstream", "bucket": ""}, "store.kind"),
    "users": ({"num_requests": 3}, "users.num_requests"),
}
WRONG_PROCESSES = {
    "Front": (["monitor"], "processes.Front: expected at most 32"),
    "launcher": (["monitor"], "processes.launcher: expected letters"),
    "config": (["monitor"], "processes.config: expected another name"),
    "mixed": (["generator:west/c", "monitor"], "processes.mixed: replicas scale alone"),
    "gates": (["gateway:c", "monitor"], "processes.gates: several gateways"),
    "hosts": (["sandbox_host:b", "monitor"], "processes.hosts: a sandbox host runs on each node"),
}


@pytest.mark.parametrize("table", WRONG)
def test_what_cannot_be_deployed_is_refused_by_name(table):
    tables = data()
    change, expected = WRONG[table]
    tables.setdefault(table, {}).update(change)
    if table == "bus":
        tables["bus"] = {}
        tables["store"]["kind"] = "s3"
    with pytest.raises(ConfigError, match=expected):
        rendered(tables)


@pytest.mark.parametrize("name", WRONG_PROCESSES)
def test_a_process_that_cannot_be_a_workload_is_refused_by_name(name):
    tables = data()
    roles, expected = WRONG_PROCESSES[name]
    tables["processes"][name] = roles
    with pytest.raises(ConfigError, match=expected):
        rendered(tables)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [("host", "127.0.0.1", "gateway.host"), ("port", 0, "gateway.port")],
)
def test_a_gateway_that_no_service_reaches_is_refused(key, value, expected):
    tables = data()
    tables["gateway"][key] = value
    with pytest.raises(ConfigError, match=expected):
        rendered(tables)


def test_a_region_without_a_bucket_or_behind_a_link_is_refused():
    tables = data()
    del tables["regions"][1]["bucket"]
    with pytest.raises(ConfigError, match=r"regions\.east\.bucket"):
        rendered(tables)
    with pytest.raises(ConfigError, match="--run-id"):
        rendered(data(), run_id="Run_1")
    for image in ("", "reg/penstock:1 x", "Reg/x:1", "reg/penstock:1@sha256:" + "0" * 64):
        with pytest.raises(ConfigError, match="--image"):
            rendered(data(), image=image)


def test_names_of_which_kubernetes_makes_no_object_are_refused():
    """A Service's name begins with a letter; a StatefulSet of 53 characters gets no pod."""
    with pytest.raises(ConfigError, match=r"--run-id: expected a letter first.*'2026-run'"):
        rendered(data(), run_id="2026-run")
    tables = data()
    tables["processes"]["w" * 31] = ["rollout_worker"]
    rendered(tables, run_id="r" * 20)
    with pytest.raises(ConfigError, match="--run-id: expected at most 52"):
        rendered(tables, run_id="r" * 21)


def test_names_that_kubectl_would_read_as_numbers_or_truth_values_are_quoted():
    tables = data()
    tables["processes"] |= {"12e3": ["rollout_worker"], "0o17": ["judge"]}
    files = rendered(tables, run_id="n")
    assert "app.kubernetes.io/instance: 'n'\n" in files["12e3.yaml"]
    assert "app.kubernetes.io/component: '12e3'\n" in files["12e3.yaml"]
    assert "app.kubernetes.io/component: '0o17'\n" in files["0o17.yaml"]


LABELS = st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z0-9]", fullmatch=True)


@st.composite
def configurations(draw) -> dict[str, Any]:
    """Draw the tables of a run that can be deployed."""
    names = draw(st.lists(LABELS, min_size=5, max_size=5, unique=True))
    regions = draw(st.lists(LABELS, min_size=1, max_size=3, unique=True))
    tables = data()
    tables["regions"] = [{"name": name, "serves": [], "bucket": "w"} for name in regions]
    for purpose in ("train", "eval", "live"):
        for index in draw(st.sets(st.integers(0, len(regions) - 1), min_size=1)):
            tables["regions"][index]["serves"].append(purpose)
    processes: dict[str, list[str]] = {
        f"p-{names[0]}": ["trainer", *(f"relay:{name}" for name in regions)],
        f"q-{names[1]}": draw(st.permutations(["rollout_worker", "judge"])),
        f"r-{names[2]}": draw(st.sampled_from([["sandbox_host"], ["sandbox_host", "judge"]])),
        f"s-{names[3]}": ["pacer", "evaluator", "monitor"],
    }
    for region in regions:
        for number in range(draw(st.integers(1, 3))):
            processes[f"{region}_{number}"] = [f"generator:{region}/r{number}"]
    for number in range(draw(st.integers(0, 3))):
        processes[f"gateway-{number}"] = [f"gateway:g{number}"]
    tables["processes"] = processes
    tables["bus"]["num_replicas"] = draw(st.sampled_from([1, 3, 5]))
    if draw(st.booleans()):
        for name in ("tls_ca", "tls_cert", "tls_key"):
            del tables["bus"][name]
    backend = draw(st.sampled_from(["uml", "qemu-tcg", "qemu-kvm"]))
    pool = {"backend": backend, "live_max": draw(st.integers(1, 500))}
    tables.setdefault("sandbox_host", {})["pool"] = pool
    size = {"vocab_size": (512, 200_000), "num_hidden_layers": (1, 80)}
    if num_ranks := draw(st.integers(0, 5)):
        tables["trainer"] = {"engine": "ranks", "ranks": {"num_ranks": num_ranks}}
    else:
        del tables["trainer"]
    tables["policy"] = {name: draw(st.integers(*bounds)) for name, bounds in size.items()}
    tables["gateway"]["spool_bytes_max"] = draw(st.integers(1, 1 << 40))
    return tables


@settings(max_examples=10, deadline=None)
@given(configurations(), LABELS)
def test_any_deployable_configuration_renders_to_valid_manifests(tables, run_id):
    files = rendered(tables, run_id=run_id)
    found = manifests(files)
    for manifest in found:
        check_manifest(manifest)
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(names) == len(set(names))
    assert yaml.safe_load(files[KUSTOMIZATION])["resources"] == sorted(
        files.keys() - {KUSTOMIZATION, VALUES}
    )
    pods = templates(found)
    for manifest in found:
        selector = manifest.get("spec", {}).get("selector", {})
        wanted = selector.get("matchLabels", selector)
        assert any(wanted.items() <= pod["metadata"]["labels"].items() for pod in pods)
    for secret in secrets_of(pods):
        assert f" {secret} " in files[KUSTOMIZATION]
    check_roles(tables, pods)
    written = tomllib.loads(found_config(found)["run.toml"])
    assert written["processes"] == tables["processes"]


def templates(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the pod templates of all workloads."""
    specs = [one.get("spec", {}) for one in found]
    specs += [job["template"]["spec"] for spec in specs for job in spec.get("replicatedJobs", [])]
    return [spec["template"] for spec in specs if "template" in spec]


def secrets_of(pods: list[dict[str, Any]]) -> set[str]:
    volumes = [volume for pod in pods for volume in pod["spec"]["volumes"]]
    return {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}


def found_config(found: list[dict[str, Any]]) -> dict[str, str]:
    return next(one["data"] for one in found if one["kind"] == "ConfigMap")


def check_roles(tables: dict[str, Any], pods: list[dict[str, Any]]) -> None:
    """Check that each role of the configuration is in the arguments of a pod."""
    arguments = [pod["spec"]["containers"][0]["args"] for pod in pods]
    roles = [word.partition("/")[0] for words in arguments for word in words]
    for specs in tables["processes"].values():
        for spec in specs:
            role = spec.partition("/")[0]
            kind = role.partition(":")[0]
            named = {f"{kind}:$(POD_NAME)", f"{kind}:$(RANK)"}
            assert role in roles or not named.isdisjoint(roles), role
