"""A device that is not there, or that cannot compute a policy, is refused by the setting's name."""

from pathlib import Path

import pytest
import torch

from penstock.actors.generator.torch_engine import EngineOptions, TorchEngine
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.device import DeviceUnavailableError, open_device
from penstock.infra.commands.doctor import check_gpu
from penstock.infra.config.file import load_config
from penstock.infra.run.hosts import check_outside
from penstock.messages.errors import ConfigError

QUICKSTART = Path("examples/quickstart/config.toml")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.device=gpu"], r"\(cpu\|cuda\).*\$\.trainer\.device"),
        (["generator.device=cuda:1"], r"\(cpu\|cuda\).*\$\.generator\.device"),
        (
            ["trainer.device=cuda", "policy.numerics.mode=exact"],
            r"policy\.numerics\.mode: expected 'fast' or 'off' with trainer\.device = 'cuda'",
        ),
        (
            ["generator.device=cuda", "policy.numerics.expert_format=nvfp4"],
            r"policy\.numerics\.expert_format: .*generator\.device = 'cuda', got 'nvfp4'",
        ),
        (
            ["trainer.device=cuda", "policy.num_experts=1025"],
            r"policy\.num_experts: expected at most 1024 with trainer\.device = 'cuda', got 1025",
        ),
    ],
)
def test_settings_that_no_gpu_can_compute_are_refused(overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        load_config(QUICKSTART, overrides)


@no_gpu
@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_a_run_does_not_start_without_the_device_that_a_setting_names(role):
    config = load_config(QUICKSTART, [f"{role}.device=cuda", "sandbox_host.pool.backend=process",
                                      "sandbox_host.pool.allow_process=true"])  # fmt: skip
    with pytest.raises(
        DeviceUnavailableError, match=rf"{role}\.device: expected 'cpu', got 'cuda'"
    ):
        check_outside(config, list(config.processes))
    elsewhere = [
        name
        for name, specs in config.processes.items()
        if not any(spec.startswith(role) for spec in specs)
    ]
    check_outside(config, elsewhere)


@no_gpu
def test_of_ranks_only_the_host_of_a_rank_needs_the_device():
    machines = ["sandbox_host.pool.backend=process", "sandbox_host.pool.allow_process=true"]
    config = load_config(QUICKSTART, ["trainer.engine=ranks", "trainer.device=cuda", *machines])
    with pytest.raises(DeviceUnavailableError, match=r"trainer\.device: expected 'cpu'"):
        check_outside(config, ["rank-1"])
    check_outside(config, [name for name in config.processes if not name.startswith("rank-")])


@no_gpu
def test_an_engine_without_its_device_is_refused():
    with pytest.raises(DeviceUnavailableError, match=r"generator\.device: .* need a GPU"):
        TorchEngine(PolicyConfig(), EngineOptions(device="cuda"))
    assert open_device("cpu", "trainer.device") == torch.device("cpu")


@no_gpu
def test_the_doctor_says_what_a_gpu_takes():
    row = check_gpu()
    assert (row.is_available, row.is_required) == (False, False)
    assert "need a GPU" in row.detail
    assert "nvcc" in row.how_to_get
