"""Each sink holds every metric of a run once, with the log's values, killed or not."""

import math
import subprocess
import sys
from collections import Counter

import msgspec
import numpy as np
import pytest
from tests.unit.monitor import story
from tests.unit.sinks import wandb_file
from tests.unit.sinks.otlp_receiver import OtlpReceiver
from tests.unit.sinks.sink_world import killed_after, opened, rows_of, run_log

from penstock.infra.sinks.command import drain
from penstock.infra.sinks.rows import Row
from penstock.infra.sinks.sink import SINKS, SinkSettings, open_sink
from penstock.infra.sinks.traces import spans_of
from penstock.messages.errors import ConfigError
from penstock.messages.retries import RetryPolicy
from penstock.messages.rollout import EpisodeEnd, EpisodeFiles, RolloutFinished, TurnSampled
from penstock.messages.task import Purpose

KILLS = (None, 0, 1, 5)
"""Batches written before the sink dies; None: it does not."""


def points_of(rows: list[Row]) -> Counter[tuple[str, int, str]]:
    return Counter(
        (name, row.step, repr(float(np.float32(value))))
        for row in rows
        for name, value in row.values.items()
    )


async def fill(name, folder, num_writes, endpoint="") -> list[Row]:
    """Have a sink copy the log, maybe killed once; return what it must hold."""
    bus = await run_log()
    if num_writes is not None:
        await killed_after(bus, opened(name, folder, endpoint), num_writes)
    sink = opened(name, folder, endpoint)
    try:
        assert await drain(bus, sink)
    finally:
        await sink.close()
    return await rows_of(bus)


async def test_rows_hold_every_metric_of_a_step() -> None:
    rows = await rows_of(await run_log())
    [last] = [row for row in rows if row.step == 22 and "step/reward_mean" in row.values]
    assert last.values["step/reward_mean"] == 0.5 and last.values["step/wait_s"] == 3.0
    assert math.isnan(last.values["step/ess"]) and last.values["staleness_tokens/1"] == 15
    names = {name for row in rows for name in row.values}
    assert {"eval/pass_rate", "midtrain/heldout_loss", "weights/published_bytes"} <= names


@pytest.mark.parametrize("num_writes", KILLS)
async def test_tensorboard_holds_every_point_once(tmp_path, num_writes) -> None:
    rows = await fill("tensorboard", tmp_path, num_writes)
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    [file] = tmp_path.glob("events.out.tfevents.*")
    found = [event for event in LegacyEventFileLoader(str(file)).Load() if event.summary.value]
    assert points_of(rows) == Counter(
        (value.tag, event.step, repr(value.simple_value))
        for event in found
        for value in event.summary.value
    )
    assert [event.wall_time for event in found] == [row.at for row in rows]


async def test_tensorboard_continues_a_log_that_grows(tmp_path) -> None:
    bus = await run_log()
    for _ in range(2):
        sink = opened("tensorboard", tmp_path)
        count = await drain(bus, sink)
        await sink.close()
    assert count == 0


@pytest.mark.parametrize("num_writes", (None, 1))
async def test_wandb_holds_every_point_once(tmp_path, num_writes) -> None:
    rows = await fill("wandb", tmp_path, num_writes)
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = wandb_file.history(file)
    assert len(found) == len(rows)
    for row, line in zip(rows, found, strict=True):
        assert line["policy_version"] == row.step
        assert line["_timestamp"] == pytest.approx(row.at, abs=1e-3)
        assert {name: float(line[name]) for name in row.values} == pytest.approx(
            row.values, rel=0, abs=0, nan_ok=True
        )


@pytest.mark.parametrize("num_writes", KILLS)
async def test_otel_holds_every_point_once(tmp_path, num_writes, monkeypatch) -> None:
    otel = pytest.importorskip("penstock.infra.sinks.otel", reason="pip install -e '.[otel]'",
                               exc_type=ImportError)  # fmt: skip
    monkeypatch.setattr(otel, "RETRY", RetryPolicy(pause_s=0.01, num_attempts_max=3))
    async with OtlpReceiver(num_refused=2) as receiver:
        rows = await fill("otel", tmp_path, num_writes, receiver.url)
    expected = {
        (f"penstock.{name.replace('/', '.')}", row.step, round(row.at * 1e9), repr(value))
        for row in rows
        for name, value in row.values.items()
    }
    assert set(receiver.points) == expected
    if num_writes is None:
        assert len(receiver.points) == len(expected)


@pytest.mark.parametrize("num_writes", (None, 2))
async def test_otel_has_a_span_per_rollout_and_turn(tmp_path, num_writes) -> None:
    pytest.importorskip("opentelemetry.proto", reason="pip install -e '.[otel]'")
    async with OtlpReceiver() as receiver:
        await fill("otel", tmp_path, num_writes, receiver.url)
    spans = {span.span_id: span for span in receiver.spans}
    assert Counter(span.name for span in spans.values()) == {"rollout": 3, "turn": 6}
    for span in spans.values():
        parent = spans.get(span.parent_span_id, span)
        assert (parent is span) == (span.name == "rollout")
        assert parent.trace_id == span.trace_id
        assert parent.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= parent.end_time_unix_nano


async def test_calls_follow_their_turn_and_last_as_long_as_recorded() -> None:
    bus = await run_log()
    turns = [story.turn(0, 3), story.turn(0, 2)]
    common = {"rollout_id": "long", "group_id": "g", "purpose": Purpose.TRAIN}
    for index, turn in enumerate(turns):
        await bus.publish([TurnSampled(**common, turn_index=index, turn=turn)])
    finished = RolloutFinished(
        **common, group_index=0, group_size=1, member=0, task_id="t", category="c",
        end=EpisodeEnd.FINISHED, turns=[turn.summary for turn in turns], files=EpisodeFiles(),
        wall_s=50.0, tool_names=[["read_file", "run"], ["finish"]], call_s=[[0.25, 2.0], [0.0]],
    )  # fmt: skip
    stored = await bus.last(TurnSampled, "long.0")
    delivery = msgspec.structs.replace(stored, event=finished, stored_at=stored.stored_at + 10)
    root, first, read, run, second, finish = await spans_of(bus, delivery)
    assert (root.end_s, root.start_s) == (delivery.stored_at, delivery.stored_at - 50)
    assert (first.start_s, first.end_s) == (root.start_s, stored.stored_at)
    assert [call.name for call in (read, run, finish)] == [
        "call read_file", "call run", "call finish"
    ]  # fmt: skip
    assert (read.start_s, read.end_s) == (first.end_s, first.end_s + 0.25)
    assert run.end_s == first.end_s + 2.0 and second.start_s == run.end_s
    assert {read.parent_id, run.parent_id} == {first.span_id} and finish.parent_id == second.span_id


async def test_otel_refuses_an_endpoint_that_is_no_receiver(tmp_path) -> None:
    with pytest.raises(ConfigError, match="--endpoint: expected the URL"):
        opened("otel", tmp_path, "localhost:4318")
    async with OtlpReceiver(status=404) as receiver:
        with pytest.raises(ConfigError, match="expected status 200, got 404"):
            await fill("otel", tmp_path, None, receiver.url)


@pytest.mark.parametrize("name", sorted(SINKS))
def test_a_missing_library_names_its_extra(tmp_path, monkeypatch, name) -> None:
    libraries = ("tensorboard", "wandb", "opentelemetry")
    for module in [*libraries, *filter(lambda each: each.startswith(libraries), sys.modules)]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"penstock.infra.sinks.{name}", raising=False)
    with pytest.raises(ConfigError, match=rf"pip install -e '.\[{name}\]'"):
        open_sink(name, SinkSettings(run_id="r1", folder=tmp_path))


def test_nothing_but_the_command_imports_the_libraries() -> None:
    libraries = "{'tensorboard', 'wandb', 'opentelemetry'}"
    code = (
        f"from penstock.infra import cli; cli.make_parser(); print({libraries} & set(sys.modules))"
    )
    command = [sys.executable, "-c", f"import sys; {code}"]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "set()"
