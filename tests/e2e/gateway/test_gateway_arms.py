"""Arms of an experiment at the gateway: who answers, what is on record, and that nobody fails."""

import msgspec
import openai

from penstock.actors.runtime.actor import Effects
from penstock.actors.runtime.context import Context
from penstock.messages.feedback import InferenceRecorded
from penstock.messages.gates import Decision, ExperimentDecided, ExperimentStarted, parse_variant
from penstock.messages.task import Purpose

from .conftest import Reply, ScriptedGenerator, Site, reported, until

USER = [{"role": "user", "content": "add"}]


class ChannelGenerator(ScriptedGenerator):
    """A replica that follows a channel, under the channel's name."""

    def __init__(self, channel: str, policy_version: int) -> None:
        super().__init__(channel)
        self.policy_version = policy_version

    async def on_tick(self, ctx: Context) -> Effects:
        report = reported(self.policy_version, self.replica)
        return (msgspec.structs.replace(report, channel=self.replica),)


async def test_both_arms_are_answered_recorded_and_one_after_a_rollback(bus, tmp_path, tokenizer):
    site = Site(bus, tmp_path, tokenizer, channel="stable")
    stable, candidate = ChannelGenerator("stable", 3), ChannelGenerator("candidate", 7)
    site.generator = stable
    ids = site.chat.render_turn("return a + b")

    async def ask(client: openai.AsyncOpenAI, user: str) -> str:
        answer = await client.chat.completions.create(model="policy", messages=USER, user=user)
        return answer.choices[0].message.content

    async def records() -> list[InferenceRecorded]:
        return await site.events(InferenceRecorded)

    async with (
        site.running(candidate),
        openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="psk-test", max_retries=0) as client,
    ):
        table, arms = site.gateway._services.replicas, site.gateway._services.arms
        await until(lambda: len(table.ready(Purpose.LIVE)) == 2)
        await bus.publish([ExperimentStarted(
            number=4, policy_version=7, stable_version=3, share=0.5, salt="s", sticky_s=1e6, at=0.0
        )])  # fmt: skip
        await until(lambda: arms.route("anyone", 0.0).propensity == 0.5)
        for generator, version in ((stable, 3), (candidate, 7)):
            generator.replies += [Reply(token_ids=ids, policy_version=version) for _ in range(30)]
        for number in range(12):
            assert await ask(client, f"user-{number}") == "return a + b"
        found = await records()
        assert {parse_variant(one.variant).arm for one in found} == {"stable", "candidate"}
        for one in found:
            assert one.channel == parse_variant(one.variant).arm
            assert one.policy_version == {"stable": 3, "candidate": 7}[one.channel]
            assert (one.propensity, one.facts.num_tokens) == (0.5, len(ids))
        again = next(n for n, one in enumerate(found) if one.channel == "candidate")

        # The candidate's replica fails in the middle of a reply: stable goes on with it.
        candidate.replies = [Reply(token_ids=ids, num_chunk=2, fail_after=1, policy_version=7)]
        stable.replies = [Reply(token_ids=ids[2:], policy_version=3)] * 20
        assert await ask(client, f"user-{again}") == "return a + b"
        last = (await records())[-1]
        assert (parse_variant(last.variant).arm, last.channel) == ("candidate", "stable")

        await bus.publish([ExperimentDecided(
            number=4, decision=Decision.ROLLED_BACK, policy_version=7, stable_version=3,
            reason="worse", at=1.0,
        )])  # fmt: skip
        await until(lambda: arms.route("anyone", 0.0).propensity == 1.0)
        stable.replies = [Reply(token_ids=ids, policy_version=3)]
        assert await ask(client, f"user-{again}") == "return a + b"
        last = (await records())[-1]
        assert (last.variant, last.propensity, last.channel) == ("current", 1.0, "stable")
