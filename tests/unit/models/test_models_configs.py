"""The shipped configurations of a published model are valid, on CPUs and on a GPU."""

from pathlib import Path

import pytest

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.config import config_json
from penstock.examples.smollm2 import KINDS, NUM_TASKS, tasks
from penstock.infra.config.file import load_config

SMOLLM2 = PolicyConfig(
    family="llama", vocab_size=49_152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, num_experts=0, num_experts_per_tok=0,
    intermediate_size=1536, rope_theta=1e5, max_position_embeddings=8192, mtp_num_heads=0,
)  # fmt: skip


@pytest.mark.parametrize("name", ["smollm2", "smollm2-gpu"])
def test_the_configuration_takes_the_folder(tmp_path, name):
    (tmp_path / "config.json").write_text(config_json(SMOLLM2))
    config = load_config(Path(f"infra/configs/{name}.toml"), [f"model.checkpoint={tmp_path}"])
    assert Path(config.model.corpora[0].path).is_file()
    is_gpu = name.endswith("gpu")
    assert (config.trainer.device, config.generator.device) == (
        ("cuda",) if is_gpu else ("cpu",)
    ) * 2


def test_tasks_are_the_same_each_time_and_of_both_splits():
    found = list(tasks(3))
    assert found == list(tasks(3))
    assert {one.task.category for one in found} == set(KINDS)
    assert 0.2 < sum(one.task.split == "heldout" for one in found) / len(found) < 0.3
    assert len(found) > NUM_TASKS / 2
    assert len({one.task.instruction for one in found}) == len(found)
