"""One rank of a test: trains a folder's model, publishes it from its shards, and says what it saw.

python worker.py SPEC, with torchrun's variables in the environment; SPEC is JSON, or a list of it:

    folder        of the model
    expert_ranks  ranks that divide the experts among them
    ranks         more of `trainer.ranks`
    trainer       more of `trainer`
    steps         optimizer steps
    mode          policy.numerics.mode; `off` ignores the recorded routes
    store         folder of objects to publish to
    checkpoints   folder of objects to save the last step to; without steps, to load from
    phase         `midtrain` or `preferences`: what is trained instead of rollouts; `full_rank`: the
                  steps of `adapter_steps.py`, by adapters and by the matrices themselves
    out           file that rank 0 writes
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from tests.engines.ranks.batches import manifest, rollouts
from tests.numerics.adapter_steps import (
    ADAPTER,
    OPTIMIZER,
    freeze_identity,
    is_target,
    take_steps,
)
from torch.distributed.tensor import DTensor

from penstock.actors.policy.adapter import merge
from penstock.actors.policy.checkpoint import as_numpy
from penstock.actors.policy.config import NumericsConfig
from penstock.actors.policy.hf.config import CONFIG_FILE, read_hf_config
from penstock.actors.relay.core.flat_snapshot import tensor_table
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.rank_committer import Committer
from penstock.actors.relay.publish.rank_publisher import RankPublisher
from penstock.actors.relay.publish.shard_uploader import shards_of_runs
from penstock.actors.relay.publish.spans import cut_spans
from penstock.actors.relay.publish.verifier import SpanVerifier
from penstock.actors.trainer.checkpoint import (
    Ranks,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from penstock.actors.trainer.config import MidtrainConfig, OptimizerConfig, TrainerConfig
from penstock.actors.trainer.engines.config import RanksConfig
from penstock.actors.trainer.midtraining.corpus import Corpus, MidtrainCorpora
from penstock.actors.trainer.midtraining.midtrain import Midtrainer
from penstock.actors.trainer.preferences.config import PreferencesConfig
from penstock.actors.trainer.preferences.examples import PreferenceExample, PreferenceReply
from penstock.actors.trainer.preferences.phase import PreferenceTrainer
from penstock.actors.trainer.ranks.hf.adapter import folder_name
from penstock.actors.trainer.ranks.hf.learner import (
    AdapterLearner,
    TransformersLearner,
    load_learner,
)
from penstock.actors.trainer.ranks.hf.policy import load_policy
from penstock.actors.trainer.ranks.world import RankEnvironment, World
from penstock.actors.trainer.step import train_step
from penstock.infra.stores.directory import DirectoryStore
from penstock.kernels.digest import root_digest
from penstock.messages.training import StepCompleted

PROMPT = np.arange(3, 51)
METRICS = ("loss", "grad_norm", "router_mismatch", "tokens_trained")


def main() -> None:
    torch.set_num_threads(1)
    world = World(RankEnvironment.of(os.environ), "cpu", 120.0)
    specs = json.loads(sys.argv[1])
    for spec in specs if isinstance(specs, list) else [specs]:
        (train_phase if "phase" in spec else train)(spec, world)
    dist.barrier()
    world.close()
    os._exit(0)


def opened(spec, world):
    """The learner of a spec, its shape and its settings."""
    folder = Path(spec["folder"])
    numerics = NumericsConfig(mode=spec.get("mode", "fast"))
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=0)
    ranks = RanksConfig(
        num_ranks=world.num_ranks,
        model="transformers",
        num_expert_ranks=spec["expert_ranks"],
        **spec.get("ranks", {}),
    )
    more = msgspec.convert(spec.get("trainer", {}), TrainerConfig)
    shape = read_hf_config(folder)
    config = msgspec.structs.replace(shape, numerics=numerics, adapter=more.adapter)
    trainer = msgspec.structs.replace(more, micro_batch_tokens=64, optimizer=optimizer, ranks=ranks)
    return load_learner(folder, config, trainer, world), config, trainer


def train_phase(spec, world) -> None:
    if spec["phase"] == "full_rank":
        full_rank(spec, world)
        return
    learner, config, settings = opened(spec, world)
    if spec["phase"] == "midtrain":
        phase = midtrainer(learner, config)
        while phase.spent(0.0) < 1.0:
            phase.run(0.0)
        report = phase.report(1.0)
        found = {"first": report.loss_first, "last": report.loss_last, "after": report.heldout_loss}
    else:
        phase = preference_trainer(learner, config, settings)
        found = {"before": phase.measure()}
        while phase.num_done < phase.num_steps:
            phase.run()
        found["after"] = phase.measure()
    found |= {"losses": phase.losses, "weights": learner.weights_digest()}
    if world.rank == 0:
        Path(spec["out"]).write_text(json.dumps(found))


def full_rank(spec, world) -> None:
    """The largest difference between the two, and how far the matrices moved."""
    folder, ranks = Path(spec["folder"]), RanksConfig(model="transformers")
    shape = read_hf_config(folder)
    full = load_policy(folder, shape, ranks, world, 0)
    for name, parameter in full.named_parameters():
        parameter.requires_grad_(is_target(name))
    start = {name: each.detach().clone() for name, each in full.named_parameters()}
    take_steps(TransformersLearner(full, OPTIMIZER, world, ranks))
    shape = msgspec.structs.replace(shape, adapter=ADAPTER)
    adapted = load_policy(folder, shape, ranks, world, 0)
    freeze_identity(adapted.named_parameters())
    take_steps(AdapterLearner(adapted, OPTIMIZER, world, ranks))
    state = {folder_name(name): each.detach() for name, each in adapted.named_parameters()}
    merge(state, ADAPTER.scale)
    pairs = [(each.detach(), state[name], start[name]) for name, each in full.named_parameters()]
    found = {
        "off": max(float((own - theirs).abs().max()) for own, theirs, _ in pairs),
        "moved": max(float((own - first).abs().max()) for own, _, first in pairs),
    }
    Path(spec["out"]).write_text(json.dumps(found))


def midtrainer(learner, config) -> Midtrainer:
    """On documents that count upwards."""
    rng = np.random.default_rng(0)
    starts = rng.integers(config.vocab_size, size=40)
    documents = [(start + np.arange(rng.integers(5, 32))) % 90 for start in starts]
    corpus = Corpus(
        tokens=np.concatenate(documents).astype(np.int32),
        lengths=np.array([len(document) for document in documents], np.int32),
    )
    settings = MidtrainConfig(
        num_tokens=4000, sequence_tokens=32, batch_tokens=400, pass_tokens=128, learning_rate=1e-3
    )
    return Midtrainer(learner, settings, MidtrainCorpora(corpus, corpus), 0)


def preference_trainer(learner, config, settings) -> PreferenceTrainer:
    """On pairs and labels: replies that count upwards are the good ones."""
    rng = np.random.default_rng(1)

    def reply(context, step):
        ids = (context[-1] + step * np.arange(1, 8)) % config.vocab_size
        return PreferenceReply(context_ids=context, reply_ids=ids, is_target=np.ones(7, bool))

    examples = []
    for index in range(18):
        context = rng.integers(0, config.vocab_size, 20)
        good, bad = reply(context, 1), reply(context, -5)
        if index % 3 < 2:
            examples.append(PreferenceExample(chosen=good, rejected=bad))
        else:
            is_good = index % 2 == 0
            ends = {"chosen": good if is_good else None, "rejected": None if is_good else bad}
            examples.append(PreferenceExample(**ends))
    preferences = PreferencesConfig(
        beta=0.3, num_epochs=3, batch_examples=6, learning_rate=1e-3, report_steps=1
    )
    settings = msgspec.structs.replace(settings, preferences=preferences)
    return PreferenceTrainer(learner, settings, examples, examples[:9], 0)


def train(spec, world) -> None:
    learner, config, trainer = opened(spec, world)
    folder = Path(spec["folder"])
    publisher = ShardPublisher(learner, spec["store"], world, folder) if "store" in spec else None
    found = {"steps": [], "published": [], "whole": []}
    place = Here(DirectoryStore(Path(spec["checkpoints"]))) if "checkpoints" in spec else None
    if place is not None and not spec["steps"]:
        key = asyncio.run(newest_checkpoint(place.store))
        found["loaded"] = asyncio.run(load_checkpoint(place, key, learner)).weights_digest
    for step in range(spec["steps"] + 1):
        if step:
            turns = rollouts(config, step)
            result = train_step(learner, manifest(turns, step), turns, trainer)
            figures = {name: result.metrics[name] for name in METRICS}
            digests = {"weights": result.weights_digest, "optimizer": result.optimizer_digest}
            found["steps"].append(figures | digests | {"skipped": result.skipped})
        if publisher is not None:
            found["published"].append(publisher.publish(step))
            found["whole"].append(whole_digest(learner))
    if place is not None and spec["steps"]:
        asyncio.run(save(place, learner, result, spec["steps"], world))
    found["logits"] = logits(learner)
    if world.rank == 0:
        Path(spec["out"]).write_text(json.dumps(found))


class Here:
    """A `Place` without an actor."""

    def __init__(self, store) -> None:
        self.store = store

    async def offload(self, function, *args, **kwargs):
        return function(*args, **kwargs)


async def save(place, learner, result, step, world) -> None:
    completed = StepCompleted(
        step=step,
        policy_version=step,
        weights_digest=result.weights_digest,
        optimizer_digest=result.optimizer_digest,
        metrics=result.metrics,
        staleness_tokens=result.staleness_tokens,
        train_s=0.0,
        wait_s=0.0,
    )
    ranks = Ranks(rank=world.rank, gather=world.gather)
    await save_checkpoint(place, learner, completed, {}, ranks)


@torch.no_grad()
def logits(learner) -> list[list[float]]:
    """Of a prompt, [T][V], with the weights as published."""
    with learner.published_weights():
        output = learner.policy(torch.from_numpy(PROMPT), [PROMPT.size])
        return learner.policy.logits(output.hidden).tolist()


class ShardPublisher:
    """Publishes this rank's shards; rank 0 commits the version."""

    def __init__(self, learner, store, world, folder) -> None:
        self._learner, self._world = learner, world
        self._config_json = (folder / CONFIG_FILE).read_text()
        float32 = learner.published_float32()
        blank = {
            name: np.zeros(shape, np.float32 if name in float32 else np.uint16)
            for name, shape in learner.published_shapes().items()
        }
        self._table = tensor_table(blank)
        self._spans = cut_spans(self._table, world.num_ranks)
        io = StoreIO(DirectoryStore(Path(store)))
        layout, _ = shards_of_runs(self._table, self._spans, learner.held_runs())
        self._publisher = RankPublisher(io, world.rank, self._table, layout)
        self._verifier = SpanVerifier(io, world.rank, self._spans[world.rank])
        self._committer = None
        if world.rank == 0:
            self._committer = Committer(io, world.num_ranks, self._table, self._spans)

    def publish(self, version: int) -> str | None:
        """Return the manifest's digest, on rank 0."""
        return asyncio.run(self._publish(version))

    async def _publish(self, version):
        token = await self._committer.begin() if self._committer else 0
        token = self._world.gather(token)[0]
        _, parts = shards_of_runs(self._table, self._spans, self._learner.held_runs())
        jobs = [
            self._publisher.upload(version, token, parts),
            self._verifier.verify(version, token, wait_s=60),
        ]
        if self._committer:
            text = self._config_json
            jobs.append(self._committer.commit(version, optimizer_step=version, config_json=text))
        done = await asyncio.gather(*jobs)
        return done[2].target_root_digest if self._committer else None


def whole_digest(learner) -> str:
    """Of the whole snapshot, gathered."""
    state = {}
    for name, parameter in learner.policy.model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        rounded = whole.detach().to(torch.bfloat16)
        state |= {each: as_numpy(part) for each, _, part in learner.tensors.runs(name, rounded, 0)}
    return root_digest(state | {n: as_numpy(b) for n, b in learner.tensors.buffers().items()})


if __name__ == "__main__":
    main()
