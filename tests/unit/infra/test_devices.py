"""A device that is not there, or that cannot compute a policy, is refused by the setting's name."""

from pathlib import Path

import pytest
import torch

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.device import DeviceUnavailableError
from penstock.actors.policy.hf.config import config_json
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
        (["trainer.device=cuda"], r"trainer\.device: expected 'cpu', got 'cuda': .*transformers"),
        (
            ["trainer.device=cuda", "trainer.engine=ranks"],
            r"trainer\.device: expected 'cpu', got 'cuda': .*trainer\.ranks\.model",
        ),
        (["generator.device=cuda"], r"generator\.device: expected 'cpu', got 'cuda': .*vllm"),
    ],
)
def test_devices_that_no_engine_computes_on_are_refused_with_what_to_use(overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        load_config(QUICKSTART, overrides)


@no_gpu
def test_of_ranks_only_the_host_of_a_rank_needs_the_device(tmp_path):
    machines = ["sandbox_host.pool.backend=process", "sandbox_host.pool.allow_process=true"]
    (tmp_path / "config.json").write_text(config_json(PolicyConfig()))
    ranks = ["trainer.engine=ranks", "trainer.ranks.model=transformers", "trainer.device=cuda"]
    config = load_config(QUICKSTART, [*ranks, *machines, f"model.checkpoint={tmp_path}",
                                      "trainer.midtrain.num_tokens=0"])  # fmt: skip
    with pytest.raises(DeviceUnavailableError, match=r"trainer\.device: expected 'cpu'"):
        check_outside(config, ["rank-1"])
    check_outside(config, [name for name in config.processes if not name.startswith("rank-")])


@no_gpu
def test_the_doctor_says_what_a_gpu_takes():
    row = check_gpu()
    assert (row.is_available, row.is_required) == (False, False)
    assert "need a GPU" in row.detail
    assert "cupy" not in row.detail
