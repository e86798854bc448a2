"""Trajectories in ATIF, out of conversations and in again."""

import json

import msgspec
import pytest

from penstock.infra.corpora.atif import read_atif, to_atif
from penstock.infra.corpora.traces import trace_texts
from penstock.infra.corpora.traces_format import ChatTrace, TraceCall, TraceFunction, TraceMessage
from penstock.messages.errors import ConfigError

CALL = TraceCall(id="c1", function=TraceFunction(name="read_file", arguments='{"path": "a.py"}'))
TRACE = ChatTrace(
    messages=[
        TraceMessage(role="system", content="Be brief."),
        TraceMessage(role="user", content="Fix a.py"),
        TraceMessage(role="assistant", content="I look.", tool_calls=[CALL]),
        TraceMessage(role="tool", content="x = 1", tool_call_id="c1"),
        TraceMessage(role="assistant", content="Done."),
    ],
    metadata={"rollout_id": "r"},
)


def written(tmp_path, document):
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(document))
    return path


def document(**changes):
    return json.loads(msgspec.json.encode(to_atif(TRACE, "s", "1"))) | changes


def test_a_conversation_comes_back_as_it_went_out(tmp_path):
    again = read_atif(written(tmp_path, document()))
    assert [(one.role, one.content, one.tool_call_id) for one in again.messages] == [
        (one.role, one.content, one.tool_call_id) for one in TRACE.messages
    ]
    [call] = again.messages[2].tool_calls or []
    assert (call.id, call.function.name) == ("c1", "read_file")
    assert call.function.arguments == {"path": "a.py"}


def test_steps_have_the_numbers_and_results_that_the_format_asks_for():
    steps = document()["steps"]
    assert [step["step_id"] for step in steps] == [1, 2, 3, 4]
    assert [step["source"] for step in steps] == ["system", "user", "agent", "agent"]
    assert steps[2]["observation"] == {"results": [{"source_call_id": "c1", "content": "x = 1"}]}
    assert steps[2]["tool_calls"][0]["arguments"] == {"path": "a.py"}


def test_anothers_trajectory_is_read_with_what_a_conversation_has(tmp_path):
    steps = [
        {"step_id": 1, "source": "user", "message": "old", "is_copied_context": True},
        {"step_id": 2, "source": "user", "message": [{"type": "text", "text": "Go"}, {}]},
        {
            "step_id": 3, "source": "agent", "message": "Ran.", "reasoning_content": "hm",
            "metrics": {"prompt_tokens": 3}, "observation": {"results": [{"content": "out"}]},
        },
    ]  # fmt: skip
    path = written(
        tmp_path, {"schema_version": "ATIF-v1.2", "agent": {"name": "x"}, "steps": steps}
    )
    told = [(one.role, (one.content or "").strip()) for one in read_atif(path).messages]
    assert told == [("user", "Go"), ("assistant", "Ran."), ("user", "out")]
    assert list(trace_texts(str(tmp_path), "model.corpora")) == ["Go\n\nRan.\nout"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema_version": "ATIF-v2"}, "schema_version"),
        ({"steps": [{"step_id": 1, "source": "robot"}]}, "robot"),
        ({"agent": None}, "agent"),
    ],
)
def test_what_is_no_trajectory_is_refused_by_its_field(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        read_atif(written(tmp_path, document(**changes)))
