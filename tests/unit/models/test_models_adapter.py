"""`[trainer.adapter]` and PEFT folders: what is not computed is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.outside_model import write_model

from penstock.actors.policy.checkpoint import adapter_shapes
from penstock.actors.policy.hf.config import ModelFormatError
from penstock.actors.policy.hf.peft import PEFT_CONFIG, PEFT_WEIGHTS, read_adapter_config
from penstock.infra.config.file import apply_overrides, load_config, read_toml
from penstock.infra.config.settings import RunConfig
from penstock.infra.run.command import parse_new
from penstock.messages.errors import ConfigError

pytest.importorskip("transformers")
pytest.importorskip("renderers")
BASE = Path("infra/configs/from-checkpoint.toml")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("dense", "sparse"):
        write_model(folder / name, dense=name == "dense")
    return folder


def parsed(models, *settings, model="dense") -> RunConfig:
    given = [f"model.checkpoint={models / model}", *settings]
    return parse_new(apply_overrides(read_toml(BASE), given), str(BASE))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["trainer.adapter.rank=0"], "trainer.adapter.rank"),
        (["trainer.adapter.rank=100000"], "trainer.adapter.rank"),
        (["trainer.adapter.alpha=0.0"], "trainer.adapter.alpha"),
        (["trainer.adapter.targets=[]"], "trainer.adapter.targets"),
        (["trainer.adapter.targets=['lm_head']"], "expected some of q_proj.*got 'lm_head'"),
        (["trainer.adapter.targets=['q_proj','q_proj']"], "each name once"),
        (["trainer.adapter.dropout=0.1"], "dropout"),
        (["trainer.adapter.rank=600", "generator.engine=vllm"], "trainer.adapter.rank.*512"),
        (["trainer.adapter.rank=4", "policy.numerics.expert_format=mxfp8"], "expert_format"),
        (["policy.adapter.rank=4"], "set trainer.adapter instead"),
        (["trainer.adapter.rank=4", "trainer.engine=ranks"], "trainer.ranks.model"),
    ],
)
def test_a_wrong_setting_is_named(models, settings, text):
    with pytest.raises(ConfigError, match=text):
        parsed(models, *settings)


def test_experts_have_no_adapters(models):
    given = "trainer.adapter.targets=['q_proj','up_proj']"
    with pytest.raises(ConfigError, match="got 'up_proj': matrices of experts have no adapters"):
        parsed(models, given, model="sparse")
    targets = "trainer.adapter.targets=['q_proj']"
    with pytest.raises(ConfigError, match=r"generator\.engine: expected 'native'"):
        parsed(models, targets, "generator.engine=vllm", model="sparse")
    assert parsed(models, targets, model="sparse").policy.adapter.targets == ("q_proj",)


def test_adapters_need_a_base():
    with pytest.raises(ConfigError, match=r"model\.checkpoint: expected the folder of a base"):
        load_config(Path("examples/quickstart/config.toml"), ["trainer.adapter.rank=4"])


def write_adapter(folder, shapes, **changes):
    folder.mkdir(exist_ok=True)
    save_file({n: torch.zeros(s) for n, s in shapes.items()}, folder / PEFT_WEIGHTS)
    plain = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8,
             "target_modules": ["v_proj", "q_proj"], "bias": "none", "rank_pattern": {},
             "use_dora": False, "init_lora_weights": True, "lora_dropout": 0.05}  # fmt: skip
    (folder / PEFT_CONFIG).write_text(json.dumps(plain | changes))
    return folder


@pytest.fixture
def shapes(models):
    config = parsed(models, "trainer.adapter.rank=4", "trainer.adapter.targets=['q_proj','v_proj']")
    return adapter_shapes(config.policy)


def test_the_settings_follow_from_a_folder(models, shapes, tmp_path):
    folder = write_adapter(tmp_path / "peft", shapes)
    config = parsed(models, f"model.adapter={folder}")
    assert config.trainer.adapter == config.policy.adapter
    assert (config.trainer.adapter.rank, config.trainer.adapter.alpha) == (4, 8.0)
    assert config.trainer.adapter.targets == ("q_proj", "v_proj")
    with pytest.raises(ConfigError, match=r"trainer\.adapter\.rank: expected 4.*leave it out"):
        parsed(models, f"model.adapter={folder}", "trainer.adapter.rank=8")
    name, shape = next(iter(shapes.items()))
    write_adapter(folder, shapes | {name: (3, shape[1])})
    with pytest.raises(ModelFormatError, match=name.replace(".", r"\.")):
        parsed(models, f"model.adapter={folder}")
    write_adapter(folder, {n: s for n, s in shapes.items() if n != name})
    with pytest.raises(ModelFormatError, match="1 tensors are missing"):
        parsed(models, f"model.adapter={folder}")
    (folder / PEFT_WEIGHTS).unlink()
    with pytest.raises(ModelFormatError, match=PEFT_WEIGHTS):
        parsed(models, f"model.adapter={folder}")


@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 8}},
        {"alpha_pattern": {"q_proj": 8}},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "pissa"},
        {"layers_to_transform": [0]},
        {"target_modules": "all-linear"},
        {"target_modules": ["../x"]},
        {"r": "4"},
        {"r": -1},
        {"lora_alpha": float("nan")},
        {"some_new_variant": 1},
    ],
    ids=str,
)
def test_another_kind_of_adapter_is_refused_by_name(change, tmp_path):
    folder = write_adapter(tmp_path / "peft", {}, **change)
    with pytest.raises(ModelFormatError, match=PEFT_CONFIG):
        read_adapter_config(folder)
