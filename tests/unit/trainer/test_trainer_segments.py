"""A step over chains: each segment is trained as a sequence of its own, with the chain's credit."""

import msgspec
import pytest
from tests.chains import POLICY, Chain, branched, call, conversation, ids_of, say, take

from penstock.actors.policy.summaries import SummaryConfig, SummaryMode
from penstock.actors.trainer.config import LossConfig, TrainerConfig
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.sequences import check_trajectory
from penstock.actors.trainer.step import train_step
from penstock.messages.reading.trajectories import own_turns, segments
from penstock.messages.reward import Outcome
from penstock.messages.training import BatchManifest, GroupEntry, SampleEntry

SMALL = msgspec.structs.replace(
    POLICY, hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    moe_intermediate_size=32,
)  # fmt: skip


def chain_of(mode: SummaryMode, num_turns: int = 9) -> Chain:
    summary = SummaryConfig(mode=mode, trigger=0.5, num_tokens_max=60, request="Sum up.")
    talk = conversation(summary, num_segments_max=3, window_tokens_max=260, num_turns_max=40)
    chain = Chain(conversation=talk)
    while talk.end is None and len(talk.turns) < num_turns:
        words = chr(97 + len(talk.turns)) * 20
        take(chain, say(f"Summary: {words}") if talk.is_summary else call(words), [words])
    return chain


def stepped(turns_of, denominator: float, tokens_max: int = 4096):
    """Take a step over rollouts that all have the advantage 0.25."""
    samples = [
        SampleEntry(
            rollout_id=name, outcome=Outcome.SOLVED, reward=1.0, advantage=0.25,
            version_spans=[span for turn in turns for span in turn.version_spans],
        )
        for name, turns in turns_of.items()
    ]  # fmt: skip
    group = GroupEntry(group_id="g", group_index=0, task_id="t", samples=samples)
    manifest = BatchManifest(step=1, policy_version=0, groups=[group])
    loss = LossConfig(token_denominator=denominator, correction="none")
    config = TrainerConfig(loss=loss, num_workers=1, micro_batch_tokens=tokens_max)
    return train_step(
        Learner.initialized(SMALL, config.optimizer, seed=0), manifest, turns_of, config
    )


@pytest.mark.parametrize("mode", list(SummaryMode))
def test_a_chain_is_trained_as_its_segments_apart(mode):
    turns = chain_of(mode).turns
    parts = segments(turns)
    assert len(parts) == 3
    apart = {}
    for index, part in enumerate(parts):
        first = msgspec.structs.replace(part[0], starts_segment=False)
        apart[f"r{index}"] = [first, *part[1:]]
    whole = stepped({"r": turns}, 384.0)
    each = stepped(apart, 128.0)
    assert not whole.skipped
    assert whole.weights_digest == each.weights_digest
    trained = [turn for turn in turns if not turn.is_withheld]
    assert whole.metrics["tokens_trained"] == sum(len(ids_of(turn)[1]) for turn in trained)
    num_withheld = len(turns) - len(trained)
    assert num_withheld == (2 if mode is SummaryMode.MASKED else 0)


def test_what_a_withheld_summary_says_reaches_no_gradient_of_its_own():
    masked, trained = chain_of(SummaryMode.MASKED), chain_of(SummaryMode.TRAINED)
    assert [ids_of(turn) for turn in masked.turns] == [ids_of(turn) for turn in trained.turns]
    read = [stepped({"r": chain.turns}, 128.0) for chain in (masked, trained)]
    assert read[0].weights_digest != read[1].weights_digest
    assert read[0].metrics["tokens_read"] == read[1].metrics["tokens_read"]


def test_a_segment_without_a_token_to_train_takes_no_part():
    """A branch that left its trunk just before a summary that is withheld."""
    chain = chain_of(SummaryMode.MASKED)
    at = next(index for index, turn in enumerate(chain.turns) if turn.is_summary)
    event, turns = branched(chain, at)
    own = own_turns(event, turns)
    check_trajectory("b", own, SMALL)
    alone = stepped({"b": own}, 128.0, tokens_max=1)
    rest = [msgspec.structs.replace(own[1], starts_segment=False), *own[2:]]
    assert alone.weights_digest == stepped({"b": rest}, 128.0, tokens_max=1).weights_digest
