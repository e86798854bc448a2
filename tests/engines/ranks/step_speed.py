"""Seconds of a training step on a CPU: ranks with a model of transformers, and plain transformers.

python -m tests.engines.ranks.step_speed [--steps N], in the environment of `ranks`; prints JSON.

Both train the same tokens of the same model in float32 on one thread, in turns, so that other work
on the machine slows both. `plain` is the loop that a user writes: a batch, attention by SDPA, all
logits, the mean log-probability of each token, AdamW. `ranks` is a pass of the trainer and its
optimizer step; `whole_step` also has what the log wants: digests of weights and moments.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from penstock.actors.policy.hf.config import read_hf_config
from penstock.actors.trainer.config import OptimizerConfig, TrainerConfig
from penstock.actors.trainer.engines.config import RanksConfig
from penstock.actors.trainer.ranks.hf.learner import load_learner
from penstock.actors.trainer.ranks.world import World
from penstock.actors.trainer.step import train_step
from penstock.kernels.arrays import to_array
from penstock.messages.reward import Outcome
from penstock.messages.rollout import StopReason, Turn, VersionSpan
from penstock.messages.task import Sampling
from penstock.messages.training import BatchManifest, GroupEntry, SampleEntry

NUM_SEQUENCES, NUM_PROMPT, NUM_SAMPLED = 7, 32, 480
LENGTH = NUM_PROMPT + NUM_SAMPLED
SHAPE = {
    "vocab_size": 16_384,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def turns_of(ids):
    """A rollout of one turn for each row."""
    sampling = Sampling(temperature=1.0, num_tokens_max=NUM_SAMPLED, seed=0)
    spans = [VersionSpan(policy_version=0, num_tokens=NUM_SAMPLED)]
    return {
        f"r{index}": [
            Turn(
                context_ids=to_array(row[:NUM_PROMPT].astype(np.int32)),
                token_ids=to_array(row[NUM_PROMPT:].astype(np.int32)),
                behavior_logprobs=to_array(np.full(NUM_SAMPLED, -9.7, np.float32)),
                version_spans=spans,
                stop_reason=StopReason.LENGTH,
                sampling=sampling,
            )
        ]
        for index, row in enumerate(ids)
    }


def manifest_of(turns, step):
    """One group of them all."""
    samples = [
        SampleEntry(
            rollout_id=name,
            outcome=Outcome.SOLVED,
            reward=1.0,
            advantage=index - 3.0,
            version_spans=turn.version_spans,
        )
        for index, (name, (turn,)) in enumerate(turns.items())
    ]
    group = GroupEntry(group_id="g0", group_index=0, task_id="t", samples=samples)
    return BatchManifest(step=step, policy_version=step - 1, groups=[group])


class PlainTraining:
    """The loop that a user writes."""

    def __init__(self, folder):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, ids):
        ids = torch.from_numpy(ids)
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits[:, NUM_PROMPT - 1 :]
        logprobs = logits.log_softmax(-1).gather(2, ids[:, NUM_PROMPT:, None])
        (-logprobs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=7)
    num_steps = parser.parse_args().steps
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = transformers.LlamaConfig(**SHAPE)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        plain = PlainTraining(folder)
        settings = TrainerConfig(
            micro_batch_tokens=NUM_SEQUENCES * LENGTH,
            optimizer=OptimizerConfig(learning_rate=1e-4),
            ranks=RanksConfig(num_ranks=1, model="transformers"),
        )
        learner = load_learner(folder, read_hf_config(folder), settings, World.alone("cpu"))
    digests = learner.weights_digest, learner.optimizer_digest
    found = {"plain": [], "ranks": [], "whole_step": []}
    for step in range(1, num_steps + 1):
        ids = rng.integers(0, SHAPE["vocab_size"], (NUM_SEQUENCES, LENGTH))
        turns = turns_of(ids)
        batch = manifest_of(turns, step)
        for kind in (
            ("plain", "ranks", "whole_step") if step % 2 else ("whole_step", "ranks", "plain")
        ):
            is_whole = kind == "whole_step"
            learner.weights_digest, learner.optimizer_digest = (
                digests if is_whole else (lambda: "", lambda: "")
            )
            started = time.process_time()
            if kind == "plain":
                plain.step(ids)
            else:
                train_step(learner, batch, turns, settings)
            found[kind].append(time.process_time() - started)
    seconds = {kind: statistics.median(times[1:]) for kind, times in found.items()}
    parameters = sum(p.numel() for p in plain.model.parameters())
    facts = {"parameters": parameters, "tokens": NUM_SEQUENCES * LENGTH, "steps": num_steps - 1}
    ratios = {f"{kind}_ratio": seconds[kind] / seconds["plain"] for kind in ("ranks", "whole_step")}
    print(json.dumps(facts | {k: round(v, 4) for k, v in (seconds | ratios).items()}))


if __name__ == "__main__":
    main()
