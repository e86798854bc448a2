import asyncio
import random
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest
from tests.ladder import prepared

from penstock.actors.policy import special_tokens
from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.format import ParsedTurn
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer, train_tokenizer
from penstock.actors.trainer.midtraining.corpus import decode_corpus
from penstock.envs.harness.tool_calls import ToolResult
from penstock.envs.harness.tools import tools_prompt
from penstock.envs.tasks.storage import load_hidden_tests, load_tasks, tasks_key
from penstock.examples.quickstart.ladder.generate import (
    LADDER,
    LadderSource,
    Selection,
    draw_repositories,
)
from penstock.examples.quickstart.ladder.repository import HIDDEN_FILE
from penstock.examples.quickstart.ladder.transcripts import DemonstratedTurn, Habits, Transcript
from penstock.examples.quickstart.midtrain_data import add_transcript, attempts
from penstock.examples.quickstart.settings import LadderCorpora
from penstock.infra.config.prepare import PrepareConfig, SlowCalls
from penstock.infra.config.settings import RunConfig, RunSection
from penstock.infra.corpora.builder import MIDTRAIN_KEY, CorpusBuilder
from penstock.infra.models.settings import CorpusConfig, ModelSection
from penstock.infra.run import prepare as preparing
from penstock.messages.errors import ConfigError
from penstock.messages.rollout import ToolCall
from penstock.messages.task import Split, Task

NUM_DEMONSTRATIONS = 14
CORPORA = {
    "num_demonstrations": NUM_DEMONSTRATIONS, "code_tokens": 2_000, "drill_tokens": 400,
}  # fmt: skip
CONFIG = prepared(CORPORA, num_train_tasks=14, num_heldout_tasks=7)
SETTINGS = msgspec.convert(CORPORA, LadderCorpora)
POLICY = PolicyConfig(vocab_size=512)
KEYS = (TOKENIZER_KEY, *preparing.TASK_KEYS, *preparing.CORPUS_KEYS)


def with_corpora(**changes):
    """Return the configuration with other settings of its corpora."""
    return msgspec.structs.replace(CONFIG, corpora=prepared(CORPORA | changes).corpora)


def run_config(config: PrepareConfig, seed: int = 3) -> RunConfig:
    run = RunSection(seed=seed)
    return RunConfig(processes={}, regions=[], prepare=config, policy=POLICY, run=run)


@pytest.fixture(scope="module")
def objects():
    return preparing.build(run_config(CONFIG), threading.Event())


@pytest.fixture(scope="module")
def tokenizer(objects):
    return Tokenizer.from_json(objects[TOKENIZER_KEY].decode(), TOKENIZER_KEY)


async def test_tasks_are_of_their_split_and_every_task_has_hidden_tests(objects):
    store = MemoryStore()
    store.objects = objects
    for split in Split:
        tasks = await load_tasks(store, split)
        assert {task.split for task in tasks} == {split}
        hidden = await load_hidden_tests(store, split)
        assert [task.task_id for task in tasks] == list(hidden)
    assert {task.category for task in await load_tasks(store, Split.HELDOUT)} == set(LADDER)


async def test_what_pacer_and_evaluator_read_holds_no_hidden_tests(objects):
    store = MemoryStore()
    store.objects = objects
    for split in Split:
        data = objects[tasks_key(split)]
        assert set(msgspec.msgpack.decode(data)[0]) <= set(Task.__struct_fields__)
        assert HIDDEN_FILE.encode() not in data
        for task in await load_tasks(store, split):
            hidden = (await load_hidden_tests(store, split))[task.task_id]
            [(path, gold)] = hidden.gold_files.items()
            assert task.files[path] != gold and gold.encode() not in data


def test_the_tokenizer_has_the_policys_vocabulary(tokenizer):
    assert tokenizer.vocab_size == POLICY.vocab_size


def documents(objects):
    corpus = decode_corpus(objects[MIDTRAIN_KEY])
    ends = np.cumsum(corpus.lengths)[:-1]
    return list(zip(np.split(corpus.tokens, ends), np.split(corpus.weights, ends), strict=True))


def test_what_the_actor_says_weighs_most_and_parses_as_turns(objects, tokenizer):
    transcripts = documents(objects)[-NUM_DEMONSTRATIONS:]
    for tokens, weights in transcripts:
        starts = np.flatnonzero(tokens == tokenizer.special_id(special_tokens.ASSISTANT)) + 1
        assert starts.size >= 1
        for start in starts:
            end = (
                start
                + int(np.argmax(tokens[start:] == tokenizer.special_id(special_tokens.END)))
                + 1
            )
            turn = PenstockChat(tokenizer).parse_turn(tokens[start:end].tolist())
            assert isinstance(turn, ParsedTurn)
            assert len(turn.calls) == 1
            assert (weights[start:end] == 1.0).all()
            assert weights[start - 1] == pytest.approx(SETTINGS.context_weight)
        assert tokens[-1] == tokenizer.special_id(special_tokens.END)


def test_a_slip_is_refused_and_read_but_not_imitated():
    habits = Habits(looks=1.0, edits=1.0, edits_rightly=1.0, slips=1.0, checks=0.0)
    rng = random.Random(5)
    selection = Selection(categories=("operator", "call"))
    repositories = list(draw_repositories(Split.TRAIN, 8, selection, rng, "slip"))
    for transcript in attempts(repositories, habits, rng, "1"):
        slips = [turn for turn in transcript.turns if turn.is_slip]
        assert len(slips) == 1
        assert slips[0].results[0].text.startswith("error: old is ")
        after = transcript.turns[transcript.turns.index(slips[0]) + 1]
        assert after.results[0].is_valid and not after.is_slip


@pytest.mark.parametrize("parallel", [0.0, 1.0])
def test_what_needs_no_other_result_is_asked_for_in_one_turn_or_in_a_turn_each(parallel):
    habits = Habits(looks=1.0, edits=1.0, edits_rightly=1.0, checks=1.0, parallel=parallel)
    rng = random.Random(5)
    repositories = list(draw_repositories(Split.TRAIN, 6, Selection(categories=("pair",)), rng, ""))
    for repository, transcript in zip(
        repositories, attempts(repositories, habits, rng, "1"), strict=True
    ):
        calls = [[call.name for call in turn.calls] for turn in transcript.turns]
        pairs = [["read_file"] * 2, ["edit_file"] * 2]
        alone = [[name] for pair in pairs for name in pair]
        assert calls == [*(pairs if parallel else alone), ["run_terminal"], ["finish"]]
        assert all(result.is_valid for turn in transcript.turns for result in turn.results)
        assert transcript.turns[-2].results[0].text == "ok"
        read = [r.text for turn in transcript.turns for r in turn.results if r.name == "read_file"]
        assert [text.rstrip("\n") for text in read] == [
            fault.text.rstrip("\n") for fault in repository.faults
        ]


def test_single_bugs_are_demonstrated_alike_whatever_the_habit_of_pairs():
    def demonstrated(parallel):
        rng = random.Random(7)
        repositories = list(draw_repositories(Split.TRAIN, 6, Selection(), rng, "t"))
        return attempts(repositories, Habits(parallel=parallel), rng, "1")

    assert demonstrated(0.7) == demonstrated(0.0)


def test_the_tokens_of_a_slip_weigh_nothing(tokenizer):
    call = ToolCall(name="edit_file", arguments={"path": "a.py", "old": "x", "new": "y"})
    refused = ToolResult(name="edit_file", text="error: old is not in the file", is_valid=False)
    slip = DemonstratedTurn((call,), (refused,), is_slip=True)
    end = DemonstratedTurn(
        (ToolCall(name="finish", arguments={}),), (ToolResult(name="finish", text="done"),)
    )
    weights = {}
    for name, turns in (("with", (slip, end)), ("without", (end,))):
        builder, chat = CorpusBuilder(), PenstockChat(tokenizer)
        add_transcript(builder, chat, Transcript("mend it", turns), 0.25)
        weights[name] = builder.build().weights
    assert (weights["with"] == 1.0).sum() == (weights["without"] == 1.0).sum()
    assert (weights["with"] == 0.0).sum() > 5


def test_without_endings_demonstrations_are_cut_after_their_last_edits():
    habits = Habits(looks=0.8, edits=0.8, edits_rightly=0.3, slips=0.4, checks=0.8, repairs=1.0)
    repositories = list(draw_repositories(Split.TRAIN, 40, Selection(), random.Random(2), "t"))
    num_cut = 0
    for whole in attempts(repositories, habits, random.Random(2), "1"):
        cut = whole.until_edited()
        names, kept = ([turn.calls[0].name for turn in one.turns] for one in (whole, cut))
        if "edit_file" not in names:
            assert cut is whole
            continue
        assert kept == names[: len(kept)] and kept[-1] == "edit_file"
        assert not cut.turns[-1].is_slip and "edit_file" not in names[len(kept) :]
        num_cut += 1
    assert num_cut > 10


@pytest.mark.parametrize("endings", [0.0, 1.0])
def test_the_corpus_has_the_endings_that_the_settings_want(endings):
    habits = {"looks": 1.0, "edits": 1.0, "checks": 1.0}
    config = with_corpora(endings=endings, habits=habits)
    made = preparing.build(run_config(config), threading.Event())
    tokenizer = Tokenizer.from_json(made[TOKENIZER_KEY].decode(), TOKENIZER_KEY)
    texts = [tokenizer.decode(ids.tolist()) for ids, _ in documents(made)[-NUM_DEMONSTRATIONS:]]
    assert all("edit_file" in text for text in texts)
    assert {"finish" in text for text in texts} == {endings == 1.0}


NUM_DRILLS = 10


def test_drills_say_plain_tokens_twice_and_count_the_second_time(objects, tokenizer):
    drills = documents(objects)[-NUM_DEMONSTRATIONS - NUM_DRILLS : -NUM_DEMONSTRATIONS]
    for tokens, weights in drills:
        first, second = np.split(tokens, 2)
        assert (first == second).all() and first.size == SETTINGS.drill_half_tokens
        assert all(tokenizer.special_of(int(token)) is None for token in first)
        assert weights.tolist() == [0.0] * 21 + [1.0] * 19


def test_code_comes_first_in_pieces(objects):
    code = documents(objects)[: -NUM_DEMONSTRATIONS - NUM_DRILLS]
    assert sum(tokens.size for tokens, _ in code) >= SETTINGS.code_tokens
    assert max(tokens.size for tokens, _ in code) <= SETTINGS.piece_tokens
    assert all((weights == np.float32(SETTINGS.code_weight)).all() for _, weights in code)


class MemoryStore:
    def __init__(self):
        self.objects = {}

    async def put(self, key, data):
        self.objects[key] = bytes(data)

    async def get(self, key):
        return self.objects[key]

    async def exists(self, key):
        return key in self.objects


async def test_prepare_stores_once_and_says_so(monkeypatch):
    monkeypatch.setattr(preparing, "build", lambda *_: dict.fromkeys(KEYS, b"x"))
    store, said = MemoryStore(), []
    await preparing.prepare(run_config(CONFIG), store, said.append)
    assert set(store.objects) == set(KEYS)
    await preparing.prepare(run_config(CONFIG), store, said.append)
    assert len(said) == 1


async def test_a_cancelled_preparation_ends_its_thread_and_puts_nothing(monkeypatch):
    begun, ended = threading.Event(), threading.Event()
    candidates = LadderSource.candidates

    def slow(source):
        begun.set()
        try:
            for _ in range(1000):
                yield next(candidates(source))
        finally:
            ended.set()

    monkeypatch.setattr(LadderSource, "candidates", slow)
    store = MemoryStore()
    work = asyncio.create_task(preparing.prepare(run_config(CONFIG), store, lambda _: None))
    assert await asyncio.to_thread(begun.wait, 60.0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert await asyncio.to_thread(ended.wait, 60.0)
    assert not store.objects


def test_own_corpora_join_the_rest_or_stand_alone(tmp_path):
    lines = tmp_path / "t.jsonl"
    lines.write_text("".join(f'{{"text": "zebra number {n} is here"}}\n' for n in range(40)))
    model = ModelSection(corpora=(CorpusConfig(path=str(lines), weight=0.5),))
    some = with_corpora(num_demonstrations=3, code_tokens=0, drill_tokens=0)
    beside = msgspec.structs.replace(run_config(some), model=model)
    built = preparing.build(beside, threading.Event())
    own = Tokenizer.from_json(built[TOKENIZER_KEY].decode(), TOKENIZER_KEY)
    text = [own.decode(tokens.tolist()) for tokens, _ in documents(built)]
    assert sum("zebra number" in one for one in text) == 38, "two of forty are held out"
    assert len(text) == 38 + 3
    none = with_corpora(num_demonstrations=0, code_tokens=0, drill_tokens=0)
    alone = msgspec.structs.replace(beside, prepare=none)
    assert len(documents(preparing.build(alone, threading.Event()))) == 38
    nothing = msgspec.structs.replace(alone, model=ModelSection())
    with pytest.raises(ConfigError, match=r"settings\.code_tokens: expected demonstrations and"):
        preparing.build(nothing, threading.Event())


def test_wrong_settings_are_told():
    with pytest.raises(ValueError, match="categories"):
        Selection(categories=("stairs",))
    with pytest.raises(msgspec.ValidationError, match="num_train_tasks"):
        msgspec.convert({"num_train_tasks": 0}, PrepareConfig)
    for wrong, message in (
        (
            {"habits": {"edits": 2.0}},
            r"^prepare\.corpora\.settings\.habits\.edits: Expected",
        ),
        ({"selection": {"families": ["x"]}}, r"^prepare\.corpora\.settings\.selection\.families: "),
        ({"steps": 1}, r"^prepare\.corpora\.settings: Object contains unknown field `steps`"),
    ):
        with pytest.raises(ConfigError, match=message):
            preparing.build(run_config(with_corpora(**wrong)), threading.Event())


def test_settings_import_no_torch():
    code = "import sys, penstock.infra.run.prepare; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_demonstrations_use_the_tools_of_their_version():
    repositories = list(draw_repositories(Split.TRAIN, 3, Selection(), random.Random(1), "t"))
    habits = Habits(looks=1.0, edits=1.0, edits_rightly=1.0, checks=1.0)
    for repository, transcript in zip(
        repositories, attempts(repositories, habits, random.Random(1), "2"), strict=True
    ):
        turns = {turn.calls[0].name: turn.results[0] for turn in transcript.turns}
        assert all(result.is_valid for result in turns.values())
        assert turns["read_file"].text.startswith("     1\t")
        assert turns["run_terminal"].text == "ok"
        assert transcript.harness == "2"
        assert repository.task.instruction == transcript.instruction
    documents, tokenizer = CorpusBuilder(), train_tokenizer([tools_prompt("2")], 400)
    add_transcript(documents, PenstockChat(tokenizer), transcript, 0.5)
    first = documents.build().tokens[0]
    assert tokenizer.special_of(int(first)) == special_tokens.SYSTEM


def test_slow_calls_are_short_in_most_tasks_and_long_in_some():
    drawn = [SlowCalls().draw(random.Random(number)) for number in range(1000)]
    assert all(0.5 <= low <= high <= 6.0 for low, high in drawn)
    means = sorted((low + high) / 2 for low, high in drawn)
    assert means[500] < 1.2 and means[950] > 3 * means[500], "a heavy tail"
    with pytest.raises(ConfigError, match=r"prepare\.slow_calls\.s_min: expected at most s_max 1"):
        SlowCalls(s_min=2.0, s_max=1.0)


async def test_machines_of_tasks_sleep_where_the_settings_want_slow_ones():
    changes = {"num_train_tasks": 3, "num_heldout_tasks": 3, "slow_calls": SlowCalls()}
    config = run_config(msgspec.structs.replace(CONFIG, **changes))
    store = MemoryStore()
    store.objects = preparing._task_sets(config, threading.Event())
    slept = [one.call_sleep_s for split in Split for one in await load_tasks(store, split)]
    assert len(set(slept)) == 6 and all(high >= low >= 0.5 for low, high in slept)
    store.objects = preparing._task_sets(run_config(config.prepare, seed=4), threading.Event())
    other = [one.call_sleep_s for split in Split for one in await load_tasks(store, split)]
    assert other != slept
