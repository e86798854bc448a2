"""What `penstock serve` makes of a run's configuration."""

import contextlib
from pathlib import Path

import msgspec
import pytest
import tomli_w
from tests.outside_model import write_tokenizer

from penstock.actors.gatekeeper.config import GatekeeperConfig
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.config import config_json
from penstock.actors.policy.tokenizer import train_tokenizer
from penstock.infra import cli
from penstock.infra.config.file import load_config, parse_config, read_toml
from penstock.infra.config.settings import RegionSection
from penstock.infra.models.claim import read_tokenizer
from penstock.infra.serve import command
from penstock.infra.serve.command import CHECKPOINT_CONFIG, fit
from penstock.infra.serve.settings import STEPS_MAX, service_config, service_tables
from penstock.messages.errors import ConfigError
from penstock.messages.task import Purpose

QUICKSTART = CHECKPOINT_CONFIG.parents[2] / "examples" / "quickstart" / "config.toml"


def roles(config):
    return sorted(spec for specs in config.processes.values() for spec in specs)


@pytest.fixture
def run():
    return load_config(QUICKSTART)


@pytest.fixture
def ungated():
    return load_config(QUICKSTART, ["serve.gated=false"])


def test_without_learning_it_answers_and_nothing_else(run, ungated):
    for given, channel in ((run, "stable"), (ungated, "newest")):
        config = service_config(given, learns=False)
        assert roles(config) == ["gateway", "generator:east", "monitor", "relay:east"]
        assert config.region("east").channel == config.gateway.channel == channel


def test_learning_adds_the_join_and_the_trainer_and_no_tasks(ungated):
    run, config = ungated, service_config(ungated, learns=True)
    more = {"feedback", "trainer"}
    assert set(roles(config)) == {"gateway", "generator:east", "monitor", "relay:east"} | more
    assert (config.trainer.steps_max, config.pacer.steps_max) == (STEPS_MAX, 0)
    assert config.trainer.epoch is not None
    assert config.trainer.epoch.num_samples == run.serve.epoch_samples
    assert config.users.num_requests == 0


def test_it_goes_on_at_the_learning_rate_that_the_run_ended_with(run):
    optimizer = service_config(run, learns=True).trainer.optimizer
    assert run.trainer.optimizer.decay_fraction > 0
    assert optimizer.learning_rate == pytest.approx(run.trainer.optimizer.learning_rate / 10)
    assert optimizer.decay_fraction == 0.0


def test_simulated_tasks_are_optional_beside_users(ungated):
    run = ungated
    serve = msgspec.structs.replace(run.serve, simulates=True)
    config = service_config(msgspec.structs.replace(run, serve=serve), learns=True)
    assert roles(config) == roles(run) and config.trainer.epoch is None


def test_with_a_gatekeeper_versions_are_evaluated(run):
    regions = [
        RegionSection(name=name, serves=[*run.region(name).serves]) for name in ("west", "east")
    ]
    regions.append(RegionSection(name="first", serves=[Purpose.LIVE], channel="stable"))
    regions.append(RegionSection(name="next", serves=[Purpose.LIVE], channel="candidate"))
    processes = run.processes | {
        "gates": ["gatekeeper"],
        "first": ["generator:first", "relay:first"],
        "next": ["generator:next", "relay:next"],
    }
    gateway = msgspec.structs.replace(run.gateway, channel="stable")
    gated = msgspec.structs.replace(run, regions=regions, processes=processes, gateway=gateway)
    found = roles(service_config(gated, learns=True))
    judging = {"rollout_worker", "sandbox_host", "judge"}
    assert {"gatekeeper", "evaluator", "pacer", *judging} < set(found)
    assert "generator:east" in found and "generator:west" not in found
    assert "evaluator" not in roles(service_config(gated, learns=False))


def test_an_epoch_may_be_larger_than_a_run_s_live_part(run):
    serve = msgspec.structs.replace(run.serve, epoch_samples=500)
    config = service_config(msgspec.structs.replace(run, serve=serve), learns=True)
    assert config.trainer.live.num_samples_max == 500


def test_what_is_missing_is_added_but_for_somebody_who_answers(run):
    bare = {name: specs for name, specs in run.processes.items() if name != "front"}
    config = service_config(msgspec.structs.replace(run, processes=bare), learns=False)
    assert "gateway" in roles(config)
    regions = [
        RegionSection(name="west", serves=[Purpose.TRAIN, Purpose.EVAL]),
        RegionSection(name="far", serves=[Purpose.LIVE]),
    ]
    nobody = msgspec.structs.replace(run, processes={"a": ["generator:west"]}, regions=regions)
    with pytest.raises(ConfigError, match="a generator of a region that serves live"):
        service_config(nobody, learns=False)


def gated(run, **gatekeeper):
    serve = msgspec.structs.replace(run.serve, simulates=not gatekeeper)
    settings = msgspec.convert(gatekeeper, GatekeeperConfig)
    return msgspec.structs.replace(run, serve=serve, gatekeeper=settings)


def test_gates_give_users_regions_of_their_own(run):
    config = service_config(gated(run), learns=True)
    added = {"generator:live-stable", "generator:live-candidate", "gatekeeper"}
    relays = {"relay:live-stable", "relay:live-candidate"}
    assert set(roles(config)) == {*roles(run), *added, *relays}
    serves = {region.name: (region.serves, region.channel) for region in config.regions}
    assert serves["east"] == ([Purpose.EVAL], "newest")
    assert serves["live-candidate"] == ([Purpose.LIVE], "candidate")
    assert config.gateway.channel == "stable"


def test_gates_evaluate_without_simulated_training_or_not_at_all(run):
    config = service_config(gated(run, offline={"num_tasks": 0}), learns=True)
    assert {"gatekeeper", "generator:live-candidate"} < set(roles(config))
    assert "evaluator" not in roles(config)
    config = service_config(gated(run, quality_bar=0.0), learns=True)
    assert {"evaluator", "pacer", "judge", "generator:east"} < set(roles(config))
    assert config.pacer.steps_max == 0, "no group is granted"


@pytest.mark.parametrize("missing", ["evaluator", "judge", "generator:east"])
def test_where_nobody_evaluates_guards_and_users_are_the_gates(run, missing):
    processes = {
        name: [spec for spec in specs if spec != missing] for name, specs in run.processes.items()
    }
    config = service_config(msgspec.structs.replace(run, processes=processes), learns=True)
    assert "gatekeeper" in roles(config) and "evaluator" not in roles(config)
    assert (config.gatekeeper.offline.num_tasks, config.gatekeeper.quality_bar) == (0, 0.0)
    assert service_config(run, learns=True).gatekeeper == run.gatekeeper


SHIPPED = ("four-regions.toml", "harness2.toml", "parallel-calls.toml")


def _shipped(name: str) -> Path:
    lab = Path(__file__).parents[2] / "lab" / "regions" / name
    return lab if lab.exists() else CHECKPOINT_CONFIG.with_name(name)


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("learns", [False, True])
def test_a_run_of_a_shipped_configuration_can_be_served(name, learns):
    config = service_config(load_config(_shipped(name)), learns=learns)
    assert ("gatekeeper" in roles(config)) == learns
    assert config.gateway.channel == "stable"


def test_a_region_of_its_own_name_is_not_replaced(run):
    regions = [*run.regions, RegionSection(name="live-stable", serves=[Purpose.LIVE])]
    with pytest.raises(ConfigError, match="expected other names than live-stable"):
        service_config(gated(msgspec.structs.replace(run, regions=regions)), learns=True)


@pytest.mark.parametrize("learns", [False, True])
def test_its_file_holds_all_of_it(run, learns, tmp_path):
    config = service_config(run, learns=learns)
    file = tmp_path / "service.toml"
    file.write_text(tomli_w.dumps(service_tables(config)))
    assert load_config(file) == config


def test_the_configuration_for_a_model_s_folder_is_valid():
    data = {
        **read_toml(CHECKPOINT_CONFIG),
        "model": {},
        "policy": {"max_position_embeddings": 65_536},
    }
    config = service_config(parse_config(data, "serve.toml"), learns=True)
    assert "gatekeeper" in roles(config) and "evaluator" not in roles(config)


def test_options_of_a_checkpoint_are_refused_with_a_run(tmp_path, capsys):
    words = ["--runs-dir", str(tmp_path), "serve", "r1"]
    assert cli.main([*words, "--run-id", "x"]) == 2
    assert "--run-id: expected only with the folder of a model" in capsys.readouterr().err
    assert cli.main(words) == 2
    assert "run 'r1': not found" in capsys.readouterr().err


def test_without_gates_is_a_word_and_a_setting(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(command, "_target", lambda arguments: asked.append(arguments.overrides))
    for words in (["--learn"], ["--learn", "--ungated", "--set", "serve.epoch_samples=4"]):
        with contextlib.suppress(TypeError):  # There is no run to serve.
            cli.main(["--runs-dir", str(tmp_path), "serve", "r1", *words])
    assert asked == [[], ["serve.epoch_samples=4", "serve.gated=false"]]


@pytest.mark.parametrize(("positions", "context"), [(64, 64), (1024, 1024), (8192, 4096)])
def test_a_models_folder_gets_the_context_and_the_format_that_it_can(tmp_path, positions, context):
    shape = PolicyConfig(vocab_size=400, max_position_embeddings=positions)
    (tmp_path / "config.json").write_text(config_json(shape, eos_token_id=1, pad_token_id=0))
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(["x = 1\n"] * 4, 400).to_json())
    data = read_toml(CHECKPOINT_CONFIG)
    fit(data, tmp_path)
    assert data["generator"]["num_tokens_max"] == context
    assert data["model"]["chat"] == "penstock"
    data["policy"] = {"max_position_embeddings": positions}
    data["model"]["checkpoint"] = str(tmp_path)
    parse_config(data, "serve.toml")  # Nothing else in it asks for more.
    write_tokenizer(tmp_path)
    data = read_toml(CHECKPOINT_CONFIG)
    fit(data, tmp_path)
    assert data["model"]["chat"] == "renderers:qwen3"


def test_a_tokenizer_that_is_no_text_is_refused_by_its_file(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"model\.checkpoint: .*/tokenizer\.json: expected UTF-8"):
        read_tokenizer(tmp_path)
