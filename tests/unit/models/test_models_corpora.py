"""Texts and traces become documents; what is broken is refused with its file and line."""

import json
import os
import sys
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.outside_model import qwen_tokenizer

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.open import open_chat
from penstock.actors.policy.tokenizer import train_tokenizer
from penstock.actors.rollout_worker.conversation import offered_tools
from penstock.actors.trainer.midtraining.corpus import decode_corpus
from penstock.infra.corpora import rows as parquet_rows
from penstock.infra.corpora.builder import MIDTRAIN_HELDOUT_KEY, MIDTRAIN_KEY
from penstock.infra.corpora.own import corpus_objects
from penstock.infra.corpora.text import read_texts
from penstock.infra.corpora.traces import ChatTrace, read_traces
from penstock.infra.export.traces import traces_of
from penstock.infra.models.settings import CorpusConfig
from penstock.kernels.arrays import to_array
from penstock.messages.errors import ConfigError, CorruptDataError
from penstock.messages.rollout import StopReason, ToolCall, Turn

READ = {"name": "read_file", "arguments": '{"path": "m.py"}'}
CALL = {"id": "c", "type": "function", "function": READ}
MESSAGES = [
    {"role": "user", "content": "Mend f"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "x <|im_end|> y"},
    {"role": "assistant", "content": "done"},
]
TOOLS = offered_tools("1")


@pytest.fixture(scope="module", params=["penstock", "renderers:qwen3"])
def chat(request):
    if request.param == "penstock":
        return open_chat("penstock", train_tokenizer(["Mend f in m.py"], 330))
    return open_chat(request.param, qwen_tokenizer())


def written(tmp_path, *lines, name="t.jsonl") -> str:
    path = tmp_path / name
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def documents(chat, path, tokens_max=4096):
    return list(read_traces(path, "model.corpora[0]", chat, TOOLS, tokens_max))


def test_only_turns_of_the_assistant_are_targets(chat, tmp_path):
    [(ids, weights)] = documents(chat, written(tmp_path, {"messages": MESSAGES}))
    targets = [i for i, weight in zip(ids, weights, strict=True) if weight]
    first = chat.render_turn("", [ToolCall(name="read_file", arguments={"path": "m.py"})], TOOLS)
    last = chat.render_turn("done", [], TOOLS)
    assert targets == first + last
    text = chat.tokenizer.decode([i for i, w in zip(ids, weights, strict=True) if not w])
    assert "Mend f" in text and "x <|im_end|> y" in text
    assert [one for one in ids if one in chat.stop_ids].count(chat.stop_ids[0]) >= 3


def test_a_document_is_what_an_episode_of_it_holds(chat, tmp_path):
    [(ids, _)] = documents(chat, written(tmp_path, {"messages": MESSAGES}))
    from penstock.actors.policy.chat.format import ChatMessage, Role

    prompt = chat.render_prompt([ChatMessage(role=Role.USER, content="Mend f")], TOOLS)
    turn = chat.render_turn("", [ToolCall(name="read_file", arguments={"path": "m.py"})], TOOLS)
    seen = chat.render_observation(prompt, turn, [("read_file", "x <|im_end|> y")], TOOLS)
    assert ids == prompt + turn + seen + chat.render_turn("done", [], TOOLS)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`"),
        ({"messages": "x"}, r"Expected `array`.*\$\.messages"),
        ({"messages": MESSAGES[:1]}, "messages: expected 2 to"),
        ({"messages": [MESSAGES[0], MESSAGES[0]]}, "expected one of an assistant"),
        ({"messages": MESSAGES[1:]}, r"messages\[0\]: expected another role before"),
        ({"messages": [MESSAGES[0], *MESSAGES[2:]]}, r"messages\[1\]: a tool's result without"),
        ({"messages": [*MESSAGES[:2], MESSAGES[3]]}, r"messages\[2\]: expected the results of 1"),
        (
            {"messages": [MESSAGES[0], MESSAGES[3] | {"reasoning_content": "hm"}]},
            "unknown field `reasoning_content`",
        ),
        ({"messages": [MESSAGES[0], MESSAGES[3] | {"role": "model"}]}, r"\$\.messages.*role"),
        ({"messages": MESSAGES, "mask": 1}, "unknown field `mask`"),
    ],
)
def test_a_broken_line_is_refused_with_file_and_line(chat, tmp_path, line, expected):
    path = written(tmp_path, {"messages": MESSAGES}, "\n\n", line)
    with pytest.raises(ConfigError, match=rf"corpora\[0\]: .*t\.jsonl:3: .*{expected}"):
        documents(chat, path)


@pytest.mark.parametrize("arguments", ['{"path": "m.py", "con', '["m.py"]', "7"])
def test_a_call_that_cannot_be_read_is_context_and_no_target(chat, tmp_path, arguments):
    broken = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }
    talk = [MESSAGES[0], broken, {"role": "tool", "content": "not JSON"}, *MESSAGES[1:]]
    [(ids, weights)] = documents(chat, written(tmp_path, {"messages": talk}))
    targets = [i for i, weight in zip(ids, weights, strict=True) if weight]
    first = chat.render_turn("", [ToolCall(name="read_file", arguments={"path": "m.py"})], TOOLS)
    assert targets == first + chat.render_turn("done", [], TOOLS)
    text = chat.tokenizer.decode(ids)
    assert arguments in text or json.dumps(arguments) in text


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
def test_a_call_without_arguments_is_a_call(chat, tmp_path, arguments):
    called = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }
    [(ids, weights)] = documents(chat, written(tmp_path, {"messages": [MESSAGES[0], called]}))
    targets = [i for i, weight in zip(ids, weights, strict=True) if weight]
    assert targets == chat.render_turn("", [ToolCall(name="f", arguments={})], TOOLS)


def test_a_conversation_that_is_too_long_is_refused(chat, tmp_path):
    path = written(tmp_path, {"messages": MESSAGES})
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: \d+ tokens, more than .* 16"):
        documents(chat, path, tokens_max=16)


def test_traces_that_are_not_there_are_refused_by_field(chat, tmp_path):
    with pytest.raises(ConfigError, match=r"corpora\[0\]: .*expected \.jsonl or \.parquet files"):
        documents(chat, str(tmp_path))
    written(tmp_path, {"messages": MESSAGES})
    assert len(documents(chat, str(tmp_path))) == 1


def test_texts_are_files_of_folders_and_lines(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep" / ".git").mkdir(parents=True)
    (folder / "b.py").write_text("b")
    (folder / "deep" / "a.py").write_text("a")
    (folder / "deep" / ".git" / "x").write_text("hidden")
    (folder / "picture").write_bytes(b"\xff\xd8\0")
    (folder / "link").symlink_to("/etc/passwd")
    lines = written(tmp_path, {"text": "one", "id": 3}, "\n", {"text": "two"})
    assert texts_of(folder) == ["b", "a"]
    assert texts_of(lines) == ["one", "two"]
    with pytest.raises(ConfigError, match=r"corpora\[0\]: .*nothing: no such file"):
        texts_of(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"corpora\[0\]: .*t\.jsonl:1: .*`text`"):
        texts_of(written(tmp_path, {"txt": ""}))
    with pytest.raises(ConfigError, match=r"picture: expected UTF-8"):
        texts_of(folder / "picture")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: expected texts, there are none"):
        texts_of(tmp_path / "empty")
    written(folder, {"text": "three"}, name="deep/shard.jsonl")
    assert texts_of(folder) == ["b", "a", "three"]


def texts_of(path):
    return list(read_texts(str(path), "model.corpora[0]"))


def test_both_become_corpora_with_a_held_out_part(chat, tmp_path):
    traces = written(tmp_path, *[json.dumps({"messages": MESSAGES}) + "\n"] * 3)
    (tmp_path / "a.py").write_text("x = 1\n" * 40)
    (tmp_path / "b.py").write_text("y = 1\n" * 40)
    (tmp_path / "c").mkdir()
    for name in ("a.py", "b.py"):
        (tmp_path / name).rename(tmp_path / "c" / name)
    corpora = (
        CorpusConfig(path=traces, kind="messages"),
        CorpusConfig(path=str(tmp_path / "c"), weight=0.25),
    )
    objects = corpus_objects(corpora, chat, TOOLS, 4096, threading.Event())
    train, heldout = (decode_corpus(objects[key]) for key in (MIDTRAIN_KEY, MIDTRAIN_HELDOUT_KEY))
    assert (len(train.lengths), len(heldout.lengths)) == (3, 2)
    assert set(np.unique(train.weights)) == {0.0, 0.25, 1.0}
    alone = (CorpusConfig(path=str(tmp_path / "c" / "a.py")),)
    with pytest.raises(ConfigError, match=r"a\.py: expected at least two documents.*got 1"):
        corpus_objects(alone, chat, TOOLS, 4096, threading.Event())


def test_a_corpus_ends_with_its_limit(chat, tmp_path):
    lines = written(tmp_path, *[json.dumps({"text": "word " * 20}) + "\n"] * 50)
    whole, some = (
        corpus_objects(
            (CorpusConfig(path=lines, tokens_max=num),), chat, TOOLS, 64, threading.Event()
        )
        for num in (0, 400)
    )
    sizes = [
        sum(decode_corpus(objects[key]).tokens.size for key in (MIDTRAIN_KEY, MIDTRAIN_HELDOUT_KEY))
        for objects in (whole, some)
    ]
    assert sizes[0] > 400 and 400 <= sizes[1] < 400 + 64


def parquet(path, rows):
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    return str(path)


def test_rows_of_parquet_are_documents(chat, tmp_path):
    texts = parquet(tmp_path / "t.parquet", [{"id": n, "text": f"row {n}"} for n in range(3)])
    assert texts_of(texts) == ["row 0", "row 1", "row 2"]
    lines = documents(chat, written(tmp_path, {"messages": MESSAGES}))
    rows = [{"messages": MESSAGES}, {"messages": json.dumps(MESSAGES)}]
    for number, row in enumerate(rows):
        path = parquet(tmp_path / f"m{number}.parquet", [row])
        assert documents(chat, path) == lines, "nulls of a struct column are as if left out"
    with pytest.raises(ConfigError, match=r"t\.parquet: expected a column messages, got id, text"):
        documents(chat, texts)
    wrong = parquet(tmp_path / "w.parquet", [{"text": "a"}, {"text": None}])
    with pytest.raises(ConfigError, match=r"w\.parquet:2: .*`text`"):
        texts_of(wrong)
    broken = tmp_path / "b.parquet"
    broken.write_bytes(b"PAR1 nothing of it")
    with pytest.raises(ConfigError, match=r"b\.parquet: not a Parquet file that can be read"):
        texts_of(broken)


def test_parquet_that_unpacks_to_gigabytes_is_read_in_pieces(tmp_path):
    arrow, path = pytest.importorskip("pyarrow"), tmp_path / "t.parquet"
    texts = arrow.DictionaryArray.from_arrays([0] * 200, ["a" * (8 << 20)])
    table = arrow.table({"text": texts})
    pytest.importorskip("pyarrow.parquet").write_table(table, path, store_schema=False)
    assert path.stat().st_size < 1 << 20
    most = arrow.default_memory_pool().max_memory()
    assert len(next(read_texts(str(path), "f"))) == 8 << 20
    assert arrow.default_memory_pool().max_memory() < max(most, 512 << 20)


@pytest.mark.parametrize(("num_rows", "size_max"), [(1, 16 << 20), (100, 17 << 20)])
def test_a_row_of_parquet_that_is_too_long_is_refused_before_it_is_read(
    tmp_path, num_rows, size_max, monkeypatch
):
    monkeypatch.setattr(parquet_rows, "_GROUP_BYTES_MAX", 17 << 20)
    arrow, path = pytest.importorskip("pyarrow"), tmp_path / "t.parquet"
    texts = arrow.array(["a" * (18 << 20), *["b"] * (num_rows - 1)])
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"text": texts}), path)
    most = arrow.total_allocated_bytes()
    text = rf"t\.parquet: row group 0, of {num_rows} rows, unpacks to \d+ bytes: .*{size_max}"
    with pytest.raises(ConfigError, match=text):
        texts_of(path)
    assert arrow.total_allocated_bytes() <= most


def test_text_of_parquet_that_is_not_utf_8_is_refused(tmp_path):
    arrow, path = pytest.importorskip("pyarrow"), tmp_path / "t.parquet"
    buffers = arrow.array([b"\xff", b"ok"], arrow.binary()).buffers()
    texts = arrow.Array.from_buffers(arrow.string(), 2, buffers)
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"text": texts}), path)
    with pytest.raises(ConfigError, match=r"t\.parquet: not a Parquet file.*utf-8"):
        texts_of(path)


def test_what_no_reading_of_which_ends_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ConfigError, match=r"corpora\[0\]: .*expected a file or folder"):
            next(read_texts(str(path), "model.corpora[0]"))
    with pytest.raises(ConfigError, match="~no-such-user/x"):
        next(read_texts("~no-such-user/x", "model.corpora[0]"))


def test_a_long_conversation_is_refused_at_its_first_turn_that_is_too_long(chat, tmp_path):
    rendered = []

    class Counting:
        def __getattr__(self, name):
            if name == "render_turn":
                rendered.append(name)
            return getattr(chat, name)

    path = written(tmp_path, {"messages": [MESSAGES[0], MESSAGES[3]] * 300})
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: \d+ tokens, more than"):
        documents(Counting(), path, tokens_max=400)
    assert 1 <= len(rendered) < 100


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pyarrow, which is not installed: pip install -e '"):
        texts_of(tmp_path / "t.parquet")


OURS = PenstockChat(train_tokenizer(["def f(a): return a"] * 3, 330))
texts = st.text(st.characters(codec="utf-8"), max_size=8)
rounds = st.lists(
    st.lists(
        st.tuples(
            st.builds(
                ToolCall,
                name=st.sampled_from(["grep", "my_tool"]),
                arguments=st.dictionaries(st.sampled_from(["path", "odd"]), texts, max_size=2),
            ),
            texts,
        ),
        min_size=1,
        max_size=3,
    ),
    min_size=1,
    max_size=3,
)


def turn(context, ids):
    empty = to_array(np.zeros(len(ids), np.float32))
    context, ids = (to_array(np.array(one, np.int32)) for one in (context, ids))
    return Turn(
        context_ids=context,
        token_ids=ids,
        behavior_logprobs=empty,
        version_spans=[],
        stop_reason=StopReason.STOP,
    )


@settings(max_examples=40, deadline=None)
@given(texts, rounds)
def test_an_exported_rollout_is_read_as_the_tokens_that_it_was(tmp_path_factory, task, made):
    from penstock.actors.policy.chat.format import ChatMessage, Role

    context = OURS.render_prompt([ChatMessage(role=Role.USER, content=task)], TOOLS)
    turns, whole = [], []
    for calls in made:
        ids = OURS.render_turn("", [call for call, _ in calls], TOOLS)
        turns.append(turn(context, ids))
        whole += context + ids
        context = OURS.render_observation((), (), [("", text) for _, text in calls])
    [trace] = traces_of(OURS, task, turns)
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    path.write_bytes(msgspec.json.encode(trace))
    [(ids, weights)] = documents(OURS, str(path), 10**6)
    assert ids == whole
    assert sum(weights) == sum(len(one.token_ids.data) // 4 for one in turns)


def test_a_rollout_with_a_turn_that_does_not_parse_is_no_trace():
    ids = OURS.tokenizer.encode("cut off")
    assert traces_of(OURS, "x", [turn([1], ids)]) == []
    call = OURS.render_turn("", [ToolCall(name="grep", arguments={})], TOOLS)
    with pytest.raises(CorruptDataError, match="turn 1: its context is no row of tool results"):
        traces_of(OURS, "x", [turn([1], call), turn(ids, call)])


@pytest.mark.parametrize("calls", [[], [ToolCall(name="grep", arguments={})]])
def test_a_next_step_is_a_user_s_message_of_its_trace(calls):
    said = OURS.render_turn("", calls, TOOLS)
    asked = OURS.render_observation((), (), [("", "found") for _ in calls], TOOLS, "Next")
    [trace] = traces_of(OURS, "First", [turn([1], said), turn(asked, said)])
    told = [(one.role, one.content) for one in trace.messages if one.role != "assistant"]
    assert told == [("user", "First"), *[("tool", "found") for _ in calls], ("user", "Next")]


def test_a_trace_is_plain_chat_completions():
    call = OURS.render_turn("", [ToolCall(name="grep", arguments={"path": "a"})], TOOLS)
    [trace] = traces_of(OURS, "x", [turn([1], call)])
    assert isinstance(trace, ChatTrace)
    [_, message] = json.loads(msgspec.json.encode(trace))["messages"]
    function = {"name": "grep", "arguments": '{"path":"a"}'}
    assert message["tool_calls"] == [{"id": "call_0_0", "type": "function", "function": function}]
