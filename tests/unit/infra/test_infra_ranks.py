"""Processes of ranks: which there are, how they start, and that they end together."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.engines.config import RanksConfig
from penstock.infra.config.file import parse_config, read_toml
from penstock.infra.config.ranks_checks import check_environment
from penstock.infra.ranks.arithmetic import arithmetic_of
from penstock.infra.ranks.environment import rank_environments
from penstock.infra.ranks.units import first_to_end, stop_processes, units
from penstock.infra.serve.settings import service_config
from penstock.messages.errors import ConfigError

TINY = Path(__file__).parents[2] / "e2e" / "tiny.toml"


def config_of(**tables):
    data = read_toml(TINY)
    for name, values in tables.items():
        data[name] = {**data.get(name, {}), **values}
    return parse_config(data, "tiny")


RANKS = {"engine": "ranks", "ranks": {"num_ranks": 2}}


def test_each_rank_gets_a_process():
    config = config_of(trainer=RANKS)
    ranks = {name: specs for name, specs in config.processes.items() if "rank" in name}
    assert ranks == {"rank-0": ["rank:0"], "rank-1": ["rank:1"]}
    assert "rank-0" not in config_of().processes
    found = arithmetic_of(config)
    assert (found.engine, found.num_ranks, found.layout) == ("ranks", 2, "")


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"processes": {"rank-0": ["rank:0"]}}, 'no role rank without trainer.engine = "ranks"'),
        (
            {"trainer": RANKS, "processes": {"rank-0": ["rank:0", "monitor"]}},
            "processes.rank-0: expected 'rank:0' alone",
        ),
        ({"trainer": RANKS, "processes": {"more": ["rank:2"]}}, "trainer.ranks.num_ranks = 2"),
        ({"trainer": {"engine": "ranks", "ranks": {"num_ranks": 0}}}, "trainer.ranks.num_ranks"),
        ({"trainer": {"engine": "torch"}}, "trainer.engine"),
    ],
)
def test_what_contradicts_ranks_is_refused(tables, text):
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        config_of(**tables)


def test_a_rank_started_otherwise_is_refused():
    config = config_of(trainer=RANKS)
    check_environment(config, "1", 1, 2)
    check_environment(config, "", 1, 2)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE: expected trainer\.ranks.num_ranks = 2"):
        check_environment(config, "1", 1, 3)
    with pytest.raises(ConfigError, match="RANK: expected that of the role, 1, got 0"):
        check_environment(config, "1", 0, 2)
    with pytest.raises(ConfigError, match=r"trainer\.engine = .ranks., got 'local'"):
        check_environment(config_of(), "0", 0, 2)


def test_ranks_of_one_machine_meet_at_a_port_of_it(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    config = TrainerConfig(engine="ranks", ranks=RanksConfig(num_ranks=2))
    unit = {"rank-0": ["rank:0"], "rank-1": ["rank:1"]}
    found = rank_environments(unit, config)
    assert [found[name]["RANK"] for name in unit] == ["0", "1"]
    assert [found[name]["LOCAL_RANK"] for name in unit] == ["0", "1"]
    assert {each["WORLD_SIZE"] for each in found.values()} == {"2"}
    assert {each["MASTER_ADDR"] for each in found.values()} == {"127.0.0.1"}
    assert len({each["MASTER_PORT"] for each in found.values()}) == 1
    assert rank_environments({"trainer": ["trainer"]}, config) == {"trainer": {}}
    monkeypatch.setenv("MASTER_ADDR", "ranks-0")
    assert "MASTER_PORT" not in rank_environments(unit, config)["rank-0"]


def test_a_service_that_learns_keeps_the_ranks_and_another_one_has_none():
    config = config_of(trainer=RANKS, serve={"gated": False})
    learning = service_config(config, learns=True)
    assert learning.trainer.engine == "ranks"
    assert {"rank-0", "rank-1"} <= set(learning.processes)
    serving = service_config(config, learns=False)
    assert serving.trainer.engine == "local"
    assert not {"rank-0", "rank-1"} & set(serving.processes)


async def sleeping():
    code = "import time; time.sleep(60)"
    return await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", code)


async def test_processes_of_a_unit_end_together():
    processes = {"rank-0": ["rank:0"], "trainer": ["trainer"], "rank-1": ["rank:1"]}
    together, alone = units(processes)
    assert (set(together), set(alone)) == ({"rank-0", "rank-1"}, {"trainer"})
    running = {name: await sleeping() for name in together}
    ending = asyncio.create_task(first_to_end(running))
    await asyncio.sleep(0)
    running["rank-1"].kill()
    assert await ending == "rank-1"
    assert running["rank-0"].returncode == -signal.SIGKILL
    more = [await sleeping() for _ in range(2)]
    await stop_processes(more)
    assert {process.returncode for process in more} == {-signal.SIGTERM}


def test_ranks_of_several_machines_need_a_place_to_meet(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    config = TrainerConfig(engine="ranks", ranks=RanksConfig(num_ranks=3))
    unit = {"rank-0": ["rank:0"], "rank-1": ["rank:1"]}
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: .* 2 of 3 ranks start here, .* not set"):
        rank_environments(unit, config)
