"""Steps of LoRA and of full training on the same matrices, through any learner."""

from functools import partial

import msgspec
import torch
from torch.nn import functional as F

from penstock.actors.policy.config import ADAPTER_TARGETS, AdapterConfig, PolicyConfig
from penstock.actors.trainer.config import OptimizerConfig

NUM_STEPS = 5
WIDTH = 32
"""Of every adapted matrix's input, so that one rank is full for all."""
ADAPTER = AdapterConfig(rank=WIDTH, alpha=float(WIDTH))
SHAPE = PolicyConfig(
    family="llama", vocab_size=64, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, num_experts=0, num_experts_per_tok=0,
    intermediate_size=WIDTH, mtp_num_heads=0, max_position_embeddings=64,
)  # fmt: skip
ADAPTED = msgspec.structs.replace(SHAPE, adapter=ADAPTER)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=0, eps=1e-4)
"""An `eps` above the rounding of gradients, which Adam would otherwise blow up to whole steps."""
IDS = torch.arange(3, 51) * 7 % 61
_LENGTHS = [20, 28]


def take_steps(learner) -> None:
    """Take the steps on the next-token loss of two sequences, each a pass of its own."""
    pieces = IDS.split(_LENGTHS)
    for step in range(1, NUM_STEPS + 1):
        passes = [partial(_loss, learner.policy, ids) for ids in pieces]
        learner.accumulate(passes, num_workers=1, num_threads=1)
        learner.apply(step, OPTIMIZER, NUM_STEPS)


def _loss(policy, ids):
    logits = policy.logits(policy(ids, [len(ids)]).hidden)
    return F.cross_entropy(logits[:-1].float(), ids[1:]), None


def freeze_identity(parameters) -> None:
    """Make every A the identity, and frozen: then B is what full training adds to the matrix."""
    for name, parameter in parameters:
        if is_a(name):
            with torch.no_grad():
                parameter.copy_(torch.eye(WIDTH))
            parameter.requires_grad_(False)


def is_a(name: str) -> bool:
    """Whether a parameter is some adapter's A, of the built-in policy or of PEFT."""
    return name.endswith(".a") or ".lora_A." in name


def is_target(name: str) -> bool:
    """Whether a parameter of a folder is a target."""
    return name.removesuffix(".weight").rpartition(".")[2] in ADAPTER_TARGETS
