"""What a step of a folder's model takes by full training and by adapters, one line of JSON each.

python -m tests.numerics.adapters.adapter_speed FOLDER [RANK...]     by default full, 16 and 32
"""

import json
import multiprocessing
import resource
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch.nn import functional as F

from penstock.actors.policy.config import AdapterConfig
from penstock.actors.policy.hf.config import read_hf_config
from penstock.actors.trainer.config import OptimizerConfig
from penstock.actors.trainer.learner import Learner

NUM_STEPS = 3
NUM_PASSES, LENGTHS = 4, [128, 128]


def measure(folder: Path, rank: int) -> None:
    """Take steps of 1,024 random tokens on one thread; rank 0 trains all weights."""
    torch.set_num_threads(1)
    config = read_hf_config(folder)
    if rank:
        adapter = AdapterConfig(rank=rank, alpha=2.0 * rank)
        config = msgspec.structs.replace(config, adapter=adapter)
    optimizer = OptimizerConfig(learning_rate=1e-4, warmup_steps=0)
    learner = Learner.initialized(config, optimizer, 0)
    learner.load_model(folder)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (NUM_PASSES, sum(LENGTHS)), generator=generator)
    seconds = []
    for step in range(1, NUM_STEPS + 1):
        began = time.process_time()
        passes = [partial(loss, learner, each) for each in ids]
        learner.accumulate(passes, num_workers=1, num_threads=1)
        learner.apply(step, optimizer, NUM_STEPS)
        seconds.append(time.process_time() - began)
    found = {
        "rank": rank,
        "trained": sum(each.numel() for each in learner.trained.values()),
        "processor_s": round(statistics.median(seconds), 2),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    sys.stdout.write(f"{json.dumps(found)}\n")


def loss(learner, ids):
    output = learner.policy(ids, LENGTHS)
    return F.cross_entropy(learner.policy.logits(output.hidden)[:-1], ids[1:]), None


if __name__ == "__main__":
    given, *ranks = sys.argv[1:]
    # Each in a process of its own, whose peak is its own.
    for each in map(int, ranks or ["0", "16", "32"]):
        process = multiprocessing.get_context("spawn").Process(
            target=measure, args=(Path(given), each)
        )
        process.start()
        process.join()
