"""Pairs and labels: the phase before RL, and corrections and judgments of users beside samples."""

import msgspec
import numpy as np
import pytest
from tests.sealed import open_vault

from penstock.actors.trainer.config import LiveConfig
from penstock.actors.trainer.counterfactual.retraining import retrain
from penstock.actors.trainer.preferences.config import PreferencesConfig
from penstock.actors.trainer.preferences.examples import (
    PREFERENCES_HELDOUT_KEY,
    PREFERENCES_KEY,
    StoredExample,
    StoredReply,
    encode_examples,
)
from penstock.actors.trainer.preferences.reading import ExampleReader
from penstock.actors.trainer.replay import ReplayLog, replay
from penstock.infra.privacy.erase import erase
from penstock.infra.privacy.lineage import read as read_lineage
from penstock.kernels.arrays import from_array, to_array
from penstock.messages.errors import CorruptDataError
from penstock.messages.feedback import (
    FeedbackReceived,
    FeedbackRetracted,
    InferenceRecorded,
    LiveSampleJoined,
    feedback_key,
    owner_of,
)
from penstock.messages.reading.ledger import Ledger
from penstock.messages.reading.sealed import FeedbackContent, SealedTurn
from penstock.messages.reward import Outcome
from penstock.messages.rollout import EXTERNAL_VERSION, VersionSpan
from penstock.messages.signals.preferences import (
    Label,
    PreferenceFate,
    PreferencePair,
    PreferencesProgressed,
    PreferencesTrained,
)
from penstock.messages.training import BatchManifest, MidtrainCompleted, StepCompleted

from .test_trainer_erasure import TENANT, LogBus, Users

FATE = PreferenceFate


class Critics(Users):
    """People who correct and judge replies."""

    def __init__(self, world, *, live_weight: float = 1.0) -> None:
        super().__init__(world)
        preferences = PreferencesConfig(live_weight=live_weight, beta=0.5)
        live = LiveConfig(user_share_max=1.0, tenant_share_max=1.0)
        world.config = msgspec.structs.replace(world.config, preferences=preferences, live=live)

    async def record(self, user: str, *, consent: bool = True) -> str:
        """Store one request."""
        name = f"q{self.num_requests}"
        self.num_requests += 1
        turn = self.world.turn(self.service.version)
        sealed = await self.vault.seal(owner_of(TENANT, user), name, msgspec.msgpack.encode(turn))
        await self.world.log.publish(
            InferenceRecorded(
                request_id=name, session_id=name, key_id="k", training_consent=consent,
                replica="west", turn=SealedTurn(summary=turn.summary, sealed=sealed),
                policy_version=self.service.version, tenant=TENANT, user=user, variant="v",
                propensity=1.0,
            )
        )  # fmt: skip
        return name

    async def correct(
        self, user: str, *, amends: str = "", author: str = "", request_id: str = "", ids=None
    ) -> str:
        """Have a reply corrected; return the feedback's id."""
        request_id = request_id or await self.record(user)
        author = author or user
        self.num_requests += 1
        name = f"f{self.num_requests}"
        key = feedback_key(TENANT, name)
        ids = self.world.numpy.integers(0, 64, 5).tolist() if ids is None else ids
        content = msgspec.msgpack.encode(FeedbackContent(correction="c", correction_ids=ids))
        sealed = await self.vault.seal(owner_of(TENANT, author), key, content)
        await self.world.log.publish(
            FeedbackReceived(
                feedback_id=name, request_id=request_id, name="correction", value=0.0, key_id="k",
                tenant=TENANT, user=author, content=sealed, amends=amends,
            ),
            PreferencePair(
                feedback=key, root=feedback_key(TENANT, amends or name), request_id=request_id,
                tenant=TENANT, user=user, author=owner_of(TENANT, author), policy_version=0,
            ),
        )  # fmt: skip
        await self.service.read()
        return name

    async def judge(self, user: str, is_desirable: bool) -> str:
        """Have a reply judged; return the feedback's id."""
        request_id = await self.record(user)
        self.num_requests += 1
        name = f"f{self.num_requests}"
        await self.world.log.publish(
            Label(
                feedback=feedback_key(TENANT, name), root=feedback_key(TENANT, name), name="thumbs",
                request_id=request_id, is_desirable=is_desirable, weight=0.5, tenant=TENANT,
                user=user, policy_version=0,
            )
        )  # fmt: skip
        await self.service.read()
        return name

    async def retract(self, name: str) -> None:
        """Take feedback back."""
        event = FeedbackRetracted(feedback_id=name, request_id="", tenant=TENANT)
        await self.world.log.publish(event)
        await self.service.read()

    async def due(self) -> None:
        """Let the time of an epoch pass."""
        await self.service.tick(self.service.clock + 61.0)

    def fates(self) -> dict[str, str]:
        """Return the fate of each piece of feedback that a manifest lists, by its id."""
        entries = [e for m in self.world.log.of(BatchManifest) for e in m.preferences]
        return {e.feedback.removeprefix(f"{TENANT}."): str(e.fate) for e in entries}

    def ledger(self) -> Ledger:
        """Fold the log."""
        ledger = Ledger()
        for event in (d.event for d in self.world.log.deliveries):
            if isinstance(event, PreferencePair | Label):
                ledger.preferences.add(event)
            if isinstance(event, BatchManifest):
                ledger.add_manifest(event)
        return ledger


@pytest.fixture
async def critics(make_world):
    world = make_world(3, steps_max=2, checkpoints_kept=9)
    await world.run()
    found = Critics(world)
    found.of_run = make_world(3, steps_max=2).config
    await found.service.start()
    yield found
    await found.service.ctx.close()


async def test_corrections_and_judgments_are_trained_once_and_replayed(critics):
    service, log = critics.service, critics.world.log
    await critics.ask("u-a")
    await critics.correct("u-a")
    assert service.version == 3, "a sample and a correction are an epoch"
    metrics = log.of(StepCompleted)[-1].metrics
    assert (metrics["num_pairs"], metrics["num_live"]) == (1.0, 1.0)
    await critics.judge("u-b", True)
    await critics.judge("u-c", False)
    assert service.version == 4, "they make a version without any sample, too"
    metrics = log.of(StepCompleted)[-1].metrics
    assert metrics["num_labels"] == 2.0 and metrics["kto_kl"] >= 0.0
    await service.ctx.close()
    await service.start()  # As kill -9: steps 3 and 4 are taken again, from their manifests.
    await critics.correct("u-a")
    await critics.judge("u-b", True)
    assert service.version == 5
    assert set(critics.fates().values()) == {"trained"} and len(critics.fates()) == 5
    digests = [step.weights_digest for step in log.of(StepCompleted)]
    assert len(set(digests)) == 5
    report = await critics.replayed()
    assert report.first_difference == ""
    assert (report.identical, report.steps_compared) == (True, 5)
    totals = critics.ledger().preferences.totals()
    assert (totals["made"], totals["trained"], totals["waiting"]) == (5, 5, 0)
    assert critics.ledger().preferences.violations == []


async def test_a_pair_moves_the_policy_from_the_reply_to_the_correction(critics):
    """By a step that trains nothing else; the margin is measured by the next."""
    name = await critics.correct("u-a")
    request = critics.world.log.of(FeedbackReceived)[-1].request_id
    await critics.due()
    margins = [critics.world.log.of(StepCompleted)[-1].metrics["dpo_margin"]]
    for _ in range(2):
        await critics.correct("u-a", request_id=request, amends=name, ids=[1, 2, 3, 4, 5])
        await critics.due()
        margins.append(critics.world.log.of(StepCompleted)[-1].metrics["dpo_margin"])
    assert margins[2] > margins[1], "the same correction is likelier after its step"


async def test_what_is_amended_or_taken_back_is_left_out_and_nothing_else(critics):
    first = await critics.correct("u-a")
    request = critics.world.log.of(FeedbackReceived)[-1].request_id
    amended = await critics.correct("u-a", request_id=request, amends=first)
    assert critics.service.version == 2
    gone = await critics.judge("u-b", True)
    # Two made an epoch: the amendment and the judgment.
    assert critics.fates() == {first: "superseded", amended: "trained", gone: "trained"}
    waiting = await critics.judge("u-b", True)
    await critics.retract(waiting)
    await critics.retract(first)  # Too late: trained.
    unread = await critics.correct("u-c", ids=[])
    await critics.ask("u-a")
    assert critics.fates()[waiting] == "retracted" and critics.fates()[unread] == "unreadable"
    totals = critics.ledger().preferences.totals()
    assert (totals["made"], sum(totals[f] for f in FATE)) == (5, 5)
    assert (await critics.replayed()).identical


async def test_a_request_without_consent_is_never_trained_whatever_the_log_says(critics):
    request = await critics.record("u-a", consent=False)
    name = await critics.correct("u-a", request_id=request)
    await critics.due()
    assert critics.fates() == {name: "unreadable"}


async def test_without_a_weight_nothing_waits(make_world):
    world = make_world(3, steps_max=2)
    await world.run()
    critics = Critics(world, live_weight=0.0)
    await critics.service.start()
    await critics.correct("u-a")
    await critics.due()
    assert critics.service.version == 2 and critics.fates() == {}
    assert critics.ledger().preferences.totals()["waiting"] == 1
    await critics.service.ctx.close()


async def test_who_wrote_a_correction_can_be_erased_like_who_asked(critics):
    """Of a user who is erased nothing waits any more, and no step needs them again."""
    await critics.correct("u-a", author="u-x")
    await critics.judge("u-b", False)
    assert critics.service.version == 3
    waiting = await critics.correct("u-c", author="u-x")
    bus = LogBus(critics.world.log)
    erasure = await erase(bus, critics.vault, TENANT, "u-x", is_up=False)
    assert erasure.steps == [3]
    await critics.service.read()
    await critics.service.ctx.close()
    await critics.service.start()
    await critics.judge("u-b", True)
    await critics.judge("u-b", True)
    assert critics.fates()[waiting] == "erased"
    report = await critics.replayed()
    assert (report.identical, report.steps_erased) == (True, 1)
    assert report.first_difference == ""
    left_out = (await read_lineage(bus)).trained_of_erased()
    assert list(left_out) == [3] and all(name.startswith("pair.") for name in left_out[3])
    _, again = await retrain(critics.replay_log(), critics.world.policy, critics.of_run, left_out)
    assert again.num_left_out == 1
    digests = [step.weights_digest for step in critics.world.log.of(StepCompleted)]
    assert again.weights_digest not in digests


async def test_kl_to_the_version_that_served_is_measured_and_holds_the_policy(make_world):
    moved = {}
    for coefficient in (0.0, 100.0):
        live = LiveConfig(user_share_max=1.0, tenant_share_max=1.0, kl_coefficient=coefficient)
        world = make_world(3, steps_max=2, live=live)
        await world.run()
        users = Users(world)
        users.of_run = make_world(3, steps_max=2).config
        await users.service.start()
        for _ in range(2):
            await users.ask("u-a")
        step = world.log.of(StepCompleted)[-1]
        assert step.step == 3 and step.metrics["live_kl"] > 0
        moved[coefficient] = step.weights_digest, step.metrics["loss"]
        if coefficient:
            assert (await users.replayed()).identical
        await users.service.ctx.close()
    assert moved[0.0][0] != moved[100.0][0]
    assert moved[100.0][1] > moved[0.0][1]


def offline_examples(count: int) -> list[StoredExample]:
    """Replies of low ids are preferred."""
    rng = np.random.default_rng(1)

    def reply(low: int) -> StoredReply:
        return StoredReply(token_ids=(low + rng.integers(0, 8, 4)).tolist(), targets=[True] * 4)

    found = []
    for index in range(count):
        context = rng.integers(0, 64, 20).tolist()
        good, bad = reply(0), reply(40)
        if index % 3:
            found.append(StoredExample(context=context, chosen=good, rejected=bad))
        else:
            found.append(StoredExample(context=context, chosen=good if index % 2 else None,
                                       rejected=None if index % 2 else bad))  # fmt: skip
    return found


async def test_the_phase_before_rl_learns_what_is_preferred_and_is_repeated_after_a_kill(
    make_world,
):
    digests = set()
    for is_killed in (False, True):
        world = make_world(
            2, steps_max=2,
            preferences=PreferencesConfig(
                num_epochs=4, batch_examples=8, learning_rate=3e-3, report_steps=3, beta=0.5
            ),
        )  # fmt: skip
        world.store.objects[PREFERENCES_KEY] = encode_examples(offline_examples(24))
        world.store.objects[PREFERENCES_HELDOUT_KEY] = encode_examples(offline_examples(6))
        if is_killed:
            world.log.num_until_kill = 0
        await world.run()
        (trained,) = world.log.of(PreferencesTrained)
        assert (trained.num_pairs, trained.num_labels, trained.num_heldout) == (20, 10, 6)
        assert trained.num_steps == 12
        assert trained.heldout_before["loss"] == pytest.approx(
            (4 * np.log(2) + 2 * 0.5) / 6, rel=1e-3
        )
        assert trained.heldout_after["dpo_accuracy"] == 1.0
        assert trained.heldout_after["loss"] < 0.8 * trained.heldout_before["loss"]
        assert world.log.of(PreferencesProgressed)
        (midtrained,) = world.log.of(MidtrainCompleted)
        assert midtrained.weights_digest == trained.weights_digest
        log = ReplayLog(
            deliveries=world.log.follow(),
            last=world.log.last,
            store=world.store,
            opener=open_vault(),
        )
        assert (await replay(log, world.policy, world.config)).identical
        digests.add(trained.weights_digest)
    assert len(digests) == 1


async def test_examples_that_do_not_fit_the_policy_are_refused(make_world):
    world = make_world(2, steps_max=2)
    bad = StoredExample(context=[1], chosen=StoredReply(token_ids=[64], targets=[True]))
    world.store.objects[PREFERENCES_KEY] = encode_examples([bad])
    world.store.objects[PREFERENCES_HELDOUT_KEY] = encode_examples([])
    with pytest.raises(CorruptDataError, match="token ids: expected 0 to 63"):
        await world.run()


async def test_an_external_session_is_counted_as_not_reproducible_and_trained_as_a_label(critics):
    """Only the assistant's turns count in it: other words between them change no figure."""
    log, made = critics.world.log, critics.world.turn

    def external(version, between):
        turn = made(version)
        ids = from_array(turn.token_ids).copy()
        ids[1:3] = between
        spans = [VersionSpan(policy_version=EXTERNAL_VERSION, num_tokens=ids.size)]
        return msgspec.structs.replace(
            turn, token_ids=to_array(ids), version_spans=spans, forced=[(1, 3)], sampling=None
        )

    critics.world.turn = lambda version: external(version, (5, 6))
    name = await critics.judge("u-a", True)
    record = log.of(InferenceRecorded)[-1]
    await log.publish(
        LiveSampleJoined(
            sample_id=record.request_id, request_ids=[record.request_id], reward=1.0,
            feedback_ids=[feedback_key(TENANT, name)], turns=[record.turn.summary],
            policy_version=EXTERNAL_VERSION, tenant=TENANT, user="u-a", variant="v", propensity=1.0,
        )
    )  # fmt: skip
    await critics.service.read()
    await critics.due()
    manifest = log.of(BatchManifest)[-1]
    assert [entry.outcome for entry in manifest.live] == [Outcome.NOT_REPRODUCIBLE]
    assert critics.fates() == {name: "trained"}
    ledger = Ledger()
    for event in (*log.of(LiveSampleJoined), *log.of(BatchManifest)):
        (ledger.add_live if isinstance(event, LiveSampleJoined) else ledger.add_manifest)(event)
    row = ledger.rows()[EXTERNAL_VERSION]
    num_tokens = record.turn.summary.num_sampled
    assert (row.generated, row.not_reproducible, row.trained) == (num_tokens, num_tokens, 0)
    report = await critics.replayed()
    assert (report.identical, report.first_difference) == (True, "")
    store, vault, last = critics.world.store, critics.vault, log.last
    [example] = await ExampleReader(store, vault, last, critics.world.policy).read(manifest)
    assert np.flatnonzero(~example.chosen.is_target).tolist() == [1, 2]
