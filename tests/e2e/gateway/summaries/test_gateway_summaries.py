"""Sessions that outgrow the window: summed up, answered in a new context, one live sample."""

import asyncio
import json

import msgspec
import openai
import pytest
from tests.e2e.gateway.conftest import Reply, ScriptedGenerator, Site

from penstock.actors.feedback.actor import FeedbackJoiner
from penstock.actors.feedback.config import JoinConfig
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.summaries import SummaryConfig, SummaryMode
from penstock.actors.trainer.sequences import sample_sequences
from penstock.envs.harness.tool_calls import ToolResult
from penstock.gateway.exchange.summaries import Summaries
from penstock.infra.agent.display import Display
from penstock.infra.agent.loop import Dialogue
from penstock.infra.agent.model import Model
from penstock.kernels.arrays import from_array
from penstock.messages.feedback import InferenceRecorded, LiveSampleJoined
from penstock.messages.reading.ledger import Ledger
from penstock.messages.reward import Outcome
from penstock.messages.rollout import ToolCall
from penstock.messages.training import SampleEntry

WINDOW = 200
REQUEST = "Sum up."
KEPT = "I look.\nSummary: add is open"
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
HEADERS = {"X-Session-Id": "mine", "X-Penstock-Summaries": "auto"}
TASK = {"role": "user", "content": "Fix add."}
RESULT = "def add(a, b):\n    return a + b\n"


class Summing(ScriptedGenerator):
    """Sums up where it is asked to, else calls a tool."""

    said = KEPT
    chat = None
    tool = "look"

    async def _generate(self, message):
        text = self.chat.tokenizer.decode(from_array(message.token_ids).tolist()[-12:])
        is_asked = REQUEST in text
        turn = (self.said, []) if is_asked else ("", [ToolCall(name=self.tool, arguments={})])
        self.replies = [Reply(token_ids=self.chat.render_turn(*turn))]
        async for chunk in super()._generate(message):
            yield chunk


class Session:
    """A client that sends all that was said, each time."""

    def __init__(self, site: Site, client, headers=HEADERS) -> None:
        self.site, self._client, self._headers = site, client, headers
        self.messages = [TASK]
        self.told: list[str | None] = []

    async def step(self, result: str = RESULT) -> None:
        raw = await self._client.chat.completions.with_raw_response.create(
            model="policy", messages=self.messages, tools=[LOOK], extra_headers=self._headers
        )
        self.told.append(raw.headers.get("x-penstock-summaries"))
        message = raw.parse().choices[0].message.model_dump(exclude_none=True)
        self.messages.append(message)
        for one in message.get("tool_calls", []):
            self.messages.append({"role": "tool", "tool_call_id": one["id"], "content": result})

    async def turns(self):
        records = await self.site.events(InferenceRecorded)
        return records, [await self.site.turn(record) for record in records]


@pytest.fixture
async def session(bus, tmp_path, tokenizer, request):
    mode, headers = getattr(request, "param", (SummaryMode.TRAINED, HEADERS))
    summary = SummaryConfig(mode=mode, trigger=0.5, num_tokens_max=40, request=REQUEST)
    site = Site(
        bus, tmp_path, tokenizer, summary=summary, context_tokens_max=WINDOW, reply_tokens_max=40
    )
    site.generator = Summing()
    site.generator.chat = site.chat
    async with (
        site.running(FeedbackJoiner(JoinConfig(reward_wait_s=0.0))),
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="psk-test", max_retries=0) as client,
    ):
        yield Session(site, client, headers)


def seen(turn) -> list[int]:
    return from_array(turn.context_ids).tolist() + from_array(turn.token_ids).tolist()


@pytest.mark.parametrize(
    "session",
    [(SummaryMode.TRAINED, HEADERS), (SummaryMode.MASKED, HEADERS)],
    indirect=True,
    ids=["trained", "masked"],
)
async def test_a_session_goes_on_in_one_live_sample_of_several_segments(session):
    for _ in range(8):
        await session.step()
    records, turns = await session.turns()
    num_summaries = sum(turn.is_summary for turn in turns)
    assert num_summaries >= 2
    assert session.told[0] is None and session.told[-1] == str(num_summaries)
    assert len(turns) == 8 + num_summaries == len(session.site.generator.asked)
    assert all(len(seen(turn)) <= WINDOW for turn in turns)
    follow = [turns[i + 1].starts_segment for i, turn in enumerate(turns) if turn.is_summary]
    assert follow == [True] * num_summaries == [t for t in follow if t]
    assert sum(turn.starts_segment for turn in turns) == num_summaries
    assert {record.chain for record in records} == {records[0].request_id}
    for turn in turns:
        text = session.site.tokenizer.decode(from_array(turn.context_ids).tolist())
        assert TASK["content"] in text
        assert ("Summary" in text) == (turn is not turns[0] and "add is open" in text)
    body = {"session_id": "mine", "name": "tests_passed", "value": 1.0}
    await session._client.post("/feedback", body=body, cast_to=object)
    async with asyncio.timeout(20.0):
        while not (joined := await session.site.events(LiveSampleJoined)):
            await asyncio.sleep(0.02)
    [sample] = joined
    assert sample.request_ids == [record.request_id for record in records]
    check_sample(sample, turns, session.site.tokenizer.vocab_size)


def check_sample(sample: LiveSampleJoined, turns, vocab_size: int) -> None:
    """Each segment is one sequence, and each token is counted once."""
    dense = PolicyConfig(
        vocab_size=vocab_size, num_experts=0, num_experts_per_tok=0, intermediate_size=128
    )
    bare = [msgspec.structs.replace(turn, route_segments=[]) for turn in turns]
    entry = SampleEntry(
        rollout_id=sample.sample_id, outcome=Outcome.SOLVED, reward=1.0, advantage=0.5,
        num_turns=len(turns), version_spans=[s for turn in turns for s in turn.version_spans],
    )  # fmt: skip
    sequences = sample_sequences(entry, bare, dense, 1.0)
    assert len(sequences) == 1 + sum(turn.starts_segment for turn in turns)
    ends = [
        turn
        for turn, after in zip(turns, [*turns[1:], None], strict=True)
        if after is None or after.starts_segment
    ]
    assert [s.token_ids.tolist() for s in sequences] == [seen(turn) for turn in ends]
    drawn = sum(turn.token_ids.shape[0] for turn in turns)
    withheld = sum(turn.token_ids.shape[0] for turn in turns if turn.is_withheld)
    assert sum(s.is_trained.size for s in sequences) == drawn
    assert sum(s.sampled_at.size for s in sequences) == drawn - withheld
    ledger = Ledger()
    ledger.add_live(sample)
    assert (ledger.totals().generated, ledger.totals().in_flight) == (drawn, drawn)


@pytest.mark.parametrize(
    "session", [(SummaryMode.TRAINED, {"X-Session-Id": "mine"})], indirect=True
)
async def test_a_session_is_summed_up_for_those_alone_who_ask_for_it(session):
    with pytest.raises(openai.BadRequestError) as caught:
        for _ in range(14):
            await session.step()
    assert caught.value.code == "context_length_exceeded"
    _, turns = await session.turns()
    assert not any(turn.is_summary for turn in turns)
    assert set(session.told) == {None}


async def test_a_gateway_that_does_not_know_a_session_sums_it_up_anew(session):
    for _ in range(7):
        await session.step()
    known = session.site.gateway._services
    before = int(session.told[-1])
    known.summaries = Summaries()
    await session.step()
    assert 1 <= int(session.told[-1]) <= 4
    _, turns = await session.turns()
    assert all(len(seen(turn)) <= WINDOW for turn in turns)
    assert sum(turn.is_summary for turn in turns) == before + int(session.told[-1])


async def test_what_the_client_changed_is_read_as_it_is(session):
    while session.told[-1:] != ["1"]:
        await session.step()
    del session.messages[3:]
    session.messages[0] = {"role": "user", "content": "Fix sub."}
    await session.step()
    assert session.told[-1] is None


@pytest.mark.parametrize("said", ["no mark", "Summary:", "Summary: " + "open " * 60])
async def test_without_a_summary_the_session_goes_on_while_there_is_room(session, said):
    session.site.generator.said = said
    with pytest.raises(openai.BadRequestError) as caught:
        for _ in range(14):
            await session.step()
    assert caught.value.code == "context_length_exceeded"
    _, turns = await session.turns()
    failed = [turn for turn in turns if turn.is_summary]
    assert failed and all(turn.parse_error and not turn.calls for turn in failed)
    assert len(turns) - len(failed) > 2


async def test_what_a_user_says_next_stays_word_for_word(session):
    while session.told[-1:] != ["1"]:
        await session.step()
    session.messages.append({"role": "user", "content": "Now edit."})
    await session.step()
    asked = from_array(session.site.generator.asked[-1].token_ids).tolist()
    assert "Now edit." in session.site.tokenizer.decode(asked)


@pytest.mark.parametrize(
    "session", [(SummaryMode.TRAINED, {"X-Penstock-Summaries": "yes"})], indirect=True
)
async def test_another_value_of_the_header_is_refused(session):
    with pytest.raises(openai.BadRequestError) as caught:
        await session.step()
    assert caught.value.param == "X-Penstock-Summaries"


async def test_streams_and_tokens_counted_are_of_what_is_read(session):
    while session.told[-1:] != ["1"]:
        await session.step()
    body = {"model": "policy", "messages": session.messages, "tools": [LOOK], "stream": True}
    async with session._client._client.stream(
        "POST",
        f"{session.site.url}/v1/chat/completions",
        json=body,
        headers=HEADERS | {"Authorization": "Bearer psk-test"},
    ) as reply:
        assert reply.headers["x-penstock-summaries"] == "1"
        lines = [line async for line in reply.aiter_lines() if line.startswith("data: {")]
    assert json.loads(lines[0].removeprefix("data: "))["choices"]


async def test_the_agent_goes_on_beyond_the_window_by_itself(session):
    class Lists:
        async def run(self, calls):
            return [ToolResult(name=one.name, text=RESULT) for one in calls]

    site = session.site
    site.generator.tool = "list_dir"
    model = Model(f"{site.url}/v1", "psk-test", "policy", "1")
    conversation = Dialogue(model, Lists(), Display(lambda _text: None, 400))
    report = await conversation.ask(TASK["content"], 12)
    assert (report.end, report.num_turns) == ("turn_limit", 12)
    records, turns = await session.turns()
    assert report.num_summaries == sum(turn.is_summary for turn in turns) >= 2
    assert len({record.chain for record in records}) == 1
    assert all(len(seen(turn)) <= WINDOW for turn in turns)
