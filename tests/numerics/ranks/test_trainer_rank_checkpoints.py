"""What some ranks saved others load, and what they hold together is what one process publishes."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.numerics.ranks.steps import on_ranks
from tests.numerics.ranks.test_trainer_ranks import UNEVEN, config_with, steps_of

from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.trainer.checkpoint import (
    Ranks,
    load_checkpoint,
    newest_checkpoint,
    read_head,
    save_checkpoint,
)
from penstock.actors.trainer.ranks.learner import held_runs, published_shapes
from penstock.infra.stores.directory import DirectoryStore
from penstock.messages.training import MidtrainCompleted


class Place:
    """A store, and the process's own thread."""

    def __init__(self, folder: Path) -> None:
        self.store = DirectoryStore(folder)

    async def offload(self, function, *args, **kwargs):
        return function(*args, **kwargs)


def completed(learner):
    figures = {"num_tokens": 0, "loss_first": 0.0, "loss_last": 0.0, "heldout_loss": 0.0}
    digest = learner.weights_digest()
    return MidtrainCompleted(**figures, heldout_perplexity=0.0, weights_digest=digest, wall_s=0.0)


def bits(steps, learner, number):
    """Take one of the steps; return the digests that it gave."""
    (result,) = replace(steps, manifests=[steps.manifests[number]]).take(learner)
    return result.weights_digest, result.optimizer_digest


def save(world, steps, folder):
    """Take the first step, save, and take the second; return what it gave."""
    learner = steps.ranked(world)
    bits(steps, learner, 0)
    ranks = Ranks(rank=world.rank, gather=world.gather)
    asyncio.run(save_checkpoint(Place(folder), learner, completed(learner), {}, ranks))
    return bits(steps, learner, 1)


def load(world, steps, folder):
    learner = steps.ranked(world)
    place = Place(folder)
    key = asyncio.run(newest_checkpoint(place.store))
    asyncio.run(load_checkpoint(place, key, learner))
    return bits(steps, learner, 1)


def runs_of(world, steps):
    return held_runs(steps.ranked(world).policy)


def test_any_number_of_ranks_goes_on_from_what_two_saved(tmp_path):
    steps = steps_of(UNEVEN, config_with(versions_kept=1), num_rollouts=3, num_steps=2)
    (expected, again) = on_ranks(2, save, steps, tmp_path)
    assert again == expected
    for num_ranks in (1, 3):
        assert on_ranks(num_ranks, load, steps, tmp_path) == [expected] * num_ranks
    place, learner = Place(tmp_path), steps.local()
    key = asyncio.run(newest_checkpoint(place.store))
    asyncio.run(load_checkpoint(place, key, learner))
    assert bits(steps, learner, 1) == expected, "one process without ranks"
    boxes = [
        box
        for piece in asyncio.run(read_head(place.store, key)).stored.pieces
        for box in piece.chunks
    ]
    assert len({(box.tensor, box.offsets) for box in boxes}) == len(boxes), "each stored once"


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_runs_of_all_ranks_are_the_published_tensors_once(num_ranks):
    steps = steps_of(UNEVEN, config_with(), num_rollouts=1, num_steps=1)
    whole = {n: as_numpy(t) for n, t in publishable_state(steps.local().policy).items()}
    assert published_shapes(UNEVEN) == {name: list(each.shape) for name, each in whole.items()}
    found = {name: np.zeros_like(each).reshape(-1) for name, each in whole.items()}
    counts = {name: np.zeros(each.size, int) for name, each in whole.items()}
    for runs in on_ranks(num_ranks, runs_of, steps):
        for run in runs:
            found[run.name][run.start : run.start + run.values.size] = run.values.reshape(-1)
            counts[run.name][run.start : run.start + run.values.size] += 1
    for name, each in whole.items():
        assert (counts[name] == 1).all(), name
        assert np.array_equal(found[name], each.reshape(-1)), name
