"""Sizes of pods: what they are computed from is what runs."""

import json

import pytest
import torch
from tests.unit.deploy.rendering import CONFIG

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.infra import cli
from penstock.infra.config.file import load_config
from penstock.infra.deploy.layout import Kind, workloads
from penstock.infra.deploy.sizes import POLICY_PROCESS_MIB, launcher_size, num_params, pod_size

LOCAL = ("trainer.engine=local",)
LARGE = ("policy.hidden_size=1024", "policy.num_hidden_layers=16")


@pytest.mark.parametrize(
    "policy",
    [
        PolicyConfig(),
        PolicyConfig(tie_word_embeddings=False, mtp_num_heads=0, num_experts=16),
        PolicyConfig(num_experts=0, num_experts_per_tok=0, intermediate_size=256,
                     moe_intermediate_size=1, hidden_size=96),
    ],
)  # fmt: skip
def test_parameters_are_counted_as_the_model_has_them(policy):
    with torch.device("meta"):
        model = Policy(policy)
    assert num_params(policy) == sum(each.numel() for each in model.parameters())


def test_a_trainer_of_the_small_policy_is_as_large_as_measured():
    small = load_config(CONFIG, [*LOCAL, "policy.hidden_size=64", "policy.num_hidden_layers=2"])
    large = load_config(CONFIG, [*LOCAL, "policy.hidden_size=256", "policy.num_hidden_layers=8"])
    sizes = [{one.name: pod_size(one, c) for one in workloads(c)} for c in (small, large)]
    trainers = [size["trainer"].memory_mib for size in sizes]
    per_param = (num_params(large.policy) - num_params(small.policy)) * 93 / (1 << 20)
    assert trainers[1] - trainers[0] == pytest.approx(per_param, abs=1)
    assert sizes[0]["worker"] == sizes[1]["worker"]
    assert launcher_size(large, replays=True).memory_mib > POLICY_PROCESS_MIB + 79 * num_params(
        small.policy
    ) / (1 << 20)
    assert launcher_size(large, replays=False) == launcher_size(small, replays=False)


def test_a_sandbox_host_has_room_for_all_of_its_machines():
    config = load_config(
        CONFIG, ["sandbox_host.pool.live_max=10", "sandbox_host.pool.memory_mib=300"]
    )
    (host,) = [one for one in workloads(config) if one.kind is Kind.NODE]
    assert pod_size(host, config).memory_mib >= 3000


def test_ranks_share_the_weights():
    sizes = [
        pod_size(next(one for one in workloads(config) if one.kind is Kind.RANK), config).memory_mib
        for config in (
            load_config(CONFIG, [*LARGE, f"trainer.ranks.num_ranks={n}"]) for n in (2, 8)
        )
    ]
    assert (sizes[0] - POLICY_PROCESS_MIB) == pytest.approx(
        4 * (sizes[1] - POLICY_PROCESS_MIB), abs=4
    )


def test_the_command_prints_what_a_run_needs(capsys):
    assert cli.main(["deploy", "size", "--config", str(CONFIG), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    pods = {one["name"]: one for one in found["pods"]}
    assert (pods["ranks"]["num_pods"], found["num_gpus"]) == (4, 0)
    assert pods["generator-west"]["num_pods_max"] == 4  # 192 rollouts, 48 at once
    assert pods["generator-west"]["num_pods"] == 2
    total = sum(one["memory_mib"] * one["num_pods"] for one in found["pods"]) / 1024
    assert found["memory_gib"] == pytest.approx(total)
    assert (found["nats_servers"], found["nats_volume_gib"]) == (3, 13)
