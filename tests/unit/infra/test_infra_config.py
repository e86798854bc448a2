"""Configurations: every wrong key or value is named with its file and path."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

from penstock.infra.config.file import load_config, parse_config, read_toml
from penstock.infra.models.environment import check_environments, python_of
from penstock.messages.errors import ConfigError
from penstock.messages.task import Purpose

QUICKSTART = Path("examples/quickstart/config.toml")
VLLM = Path("infra/configs/vllm-cpu.toml")


def test_the_quickstart_is_valid_and_every_purpose_is_served() -> None:
    config = load_config(QUICKSTART)
    assert all(config.regions_serving(purpose) for purpose in Purpose)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.step_max=3", "step_max"),
        ("trainer.steps_max=-3", "steps_max"),
        ("run.seed='one'", r"\$\.run\.seed"),
        ("nonsense.key=1", "nonsense"),
        ("trainer.loss.correction='tiss'", "token_tis"),
        ("policy.num_attention_heads=3", "num_attention_heads"),
        ("prepare.limits.turns=3", "unknown field `turns`"),
        (
            "prepare.limits.wall_s_max=nan",
            r"`\$\.prepare\.limits\.wall_s_max`, got nan",
        ),
        ("trainer.optimizer.beta1=1.0", r"< 1\.0 - at `\$\.trainer\.optimizer\.beta1`, got 1\.0"),
        ("trainer.midtrain.learning_rate=nan", r"\$\.trainer\.midtrain\.learning_rate"),
        ("pacer.top_p=0", r"\$\.pacer\.top_p"),
        ("sandbox_host.pool.backend=['uml']", r"\$\.sandbox_host\.pool\.backend"),
        ("store.kind='tape'", r"\$\.store\.kind"),
        ("store.kind='s3'", "bucket"),
        ("store.bucket='b'", "jetstream and s3"),
        ("store.retain_for_replay=false", "compactor"),
    ],
)
def test_a_wrong_key_or_value_is_named(override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        load_config(QUICKSTART, [override])
    assert str(QUICKSTART) in str(caught.value)


def test_the_value_that_broke_a_constraint_is_named_but_no_whole_table() -> None:
    with pytest.raises(ConfigError, match=r"\$\.pacer\.group_size`, got 0$"):
        load_config(QUICKSTART, ["pacer.group_size=0"])
    with pytest.raises(ConfigError, match=r"unknown field `rungs` - at `\$\.prepare\.limits`$"):
        load_config(QUICKSTART, ["prepare.limits.rungs=['call']"])


def test_a_process_of_the_base_without_roles_is_left_out() -> None:
    base, config = load_config(QUICKSTART), load_config(VLLM)
    assert set(base.processes) - set(config.processes) == {"generator-east"}
    assert config.processes["generator-west"] == base.processes["generator-west"]
    assert config.prepare == base.prepare and len(config.regions) == 1


def test_an_override_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        load_config(QUICKSTART, ["run.seed"])


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ConfigError, match=r"broken\.toml: not TOML"):
        load_config(broken)


def test_a_purpose_that_nobody_serves_is_refused() -> None:
    data = read_toml(QUICKSTART)
    data["regions"] = [{"name": "west", "serves": ["train"]}]
    with pytest.raises(ConfigError, match="none serves 'eval'"):
        parse_config(data, "test")


def test_what_the_pacer_grants_follows_what_the_trainer_takes() -> None:
    config = load_config(QUICKSTART, ["trainer.steps_max=7"])
    assert config.pacer.steps_max == 7
    with pytest.raises(ConfigError, match=r"pacer\.steps_max"):
        load_config(QUICKSTART, ["trainer.steps_max=7", "pacer.steps_max=8"])


def test_what_ran_without_a_kernel_of_its_own_is_trained_only_where_that_is_allowed() -> None:
    assert load_config(QUICKSTART).trainer.isolation_classes == ("user_mode_kernel",)
    weak = ["sandbox_host.pool.backend='process'", "sandbox_host.pool.allow_process=true"]
    assert load_config(QUICKSTART, weak[:1]).trainer.isolation_classes == ("user_mode_kernel",)
    assert load_config(QUICKSTART, weak).trainer.isolation_classes == ("process",)


def test_the_written_configuration_reads_back_the_same() -> None:
    data = read_toml(QUICKSTART)
    assert tomllib.loads(tomli_w.dumps(data)) == data


def test_reading_a_configuration_imports_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from penstock.infra.config.file import load_config;"
        f"load_config(Path({str(QUICKSTART)!r}));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=50).returncode == 0


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("policy.numerics.mode=exact", "policy.numerics.mode: expected fast or off"),
        ("policy.numerics.expert_format=mxfp8", "policy.numerics.expert_format: expected bf16"),
        ("generator.engine=sglang", "generator.engine"),
        ("generator.probe_tolerance=0", "generator.probe_tolerance"),
    ],
)
def test_what_vllm_does_not_compute_is_refused_by_name(setting, expected):
    config = load_config(VLLM)
    assert config.generator.engine == "vllm"
    with pytest.raises(ConfigError, match=expected):
        load_config(VLLM, [setting])


def test_generators_run_in_the_environment_of_their_engine(tmp_path):
    native, vllm = load_config(QUICKSTART).generator, load_config(VLLM).generator
    specs = ["generator:west", "relay:west"]
    assert python_of(native, specs) == python_of(vllm, ["trainer"]) == sys.executable
    assert python_of(vllm, specs) == str(Path(".venv-vllm/bin/python").absolute())
    named = load_config(VLLM, [f"generator.environment='{tmp_path}'"]).generator
    assert python_of(named, specs) == str(tmp_path / "bin/python")
    check_environments(named, [["trainer"]])
    with pytest.raises(ConfigError, match=r"generator\.environment: .*make vllm-env"):
        check_environments(named, [["trainer"], specs])


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("pacer.tree.branches=2", "pacer.tree: needs machines with the capability 'fork'"),
        ("rollout_worker.checkpoint_turns=1", "rollout_worker.checkpoint_turns: needs machines"),
    ],
)
def test_what_machines_cannot_do_is_refused_with_the_field_and_the_choices(setting, field):
    with pytest.raises(ConfigError, match=field) as refused:
        load_config(QUICKSTART, [setting])
    assert "sandbox_host.pool.backend 'uml'" in str(refused.value)
    assert "qemu-tcg" in str(refused.value)
    config = load_config(QUICKSTART, [setting, "sandbox_host.pool.backend=qemu-tcg"])
    assert config.trainer.isolation_classes == ("emulated_vm",)


def test_a_tree_must_divide_its_group():
    with pytest.raises(ConfigError, match=r"pacer\.tree\.branches: expected a divisor"):
        load_config(QUICKSTART, ["pacer.tree.branches=3", "sandbox_host.pool.backend=qemu-tcg"])


def test_demonstrations_use_the_tools_that_the_pacer_names():
    assert load_config(QUICKSTART).prepare.harness == "1"
    assert load_config(Path("infra/configs/harness2.toml")).prepare.harness == "2"
