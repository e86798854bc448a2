"""Timing of replies: drafts of one user's tokens would make another's reply faster."""

import pytest
from tests.e2e.launched import TINY

from penstock.infra.config.file import load_config
from penstock.infra.models import engine as engines
from penstock.infra.run.roles import Assembly, build_actors
from penstock.infra.run.runs import RunDir
from penstock.infra.stores.memory import MemoryStore


class EngineAskedFor(Exception):
    """The engine would be started now, with these settings."""


@pytest.mark.parametrize(("place", "drafts"), [("west", True), ("east", False)])
async def test_replicas_that_serve_users_do_not_draft(tmp_path, monkeypatch, place, drafts):
    async def start(settings, *_rest):
        raise EngineAskedFor(settings.num_drafts_max)

    async def nothing(*_arguments):
        return None

    monkeypatch.setattr(engines, "start_engine", start)
    monkeypatch.setattr(Assembly, "chat_format", nothing)
    monkeypatch.setattr("penstock.actors.policy.hf.stored.published_config", nothing)
    config = load_config(TINY, [])
    assembly = Assembly(RunDir(tmp_path / "r1"), config, None, MemoryStore())
    with pytest.raises(EngineAskedFor) as asked:
        await build_actors(f"generator:{place}", assembly)
    assert (asked.value.args[0] > 0) == drafts
