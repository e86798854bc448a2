"""Every engine passes `check_engine`; the torch engine does with both of its steps."""

from functools import cache, partial

import msgspec
import pytest
import torch
from tests.contract.check_engine import STOP_ID, VOCAB_SIZE
from tests.contract.check_engine_settings import CHECKS

from penstock.actors.generator import core
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.sampler import GrammarMasks
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.tokenizer import train_tokenizer

CONFIG = PolicyConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    num_hidden_layers=2,
    head_dim=16,
    moe_intermediate_size=32,
    max_position_embeddings=256,
)
DENSE = msgspec.structs.replace(
    CONFIG, num_experts=0, num_experts_per_tok=0, intermediate_size=48, tie_word_embeddings=False
)
OPTIONS = EngineOptions(
    num_running_max=4,
    num_parked_max=4,
    num_waiting_max=4,
    num_tokens_max=200,
    prefill_tokens_max=32,
)


@cache
def tokenizer():
    return train_tokenizer(["one line of text to learn merges from"], VOCAB_SIZE)


@cache
def weights_of(version, config=CONFIG):
    policy = Policy(config, seed=version)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(5.0 if parameter.dim() > 1 else 1.0)
    return {name: as_numpy(tensor) for name, tensor in publishable_state(policy).items()}


@pytest.mark.parametrize("config", [CONFIG, DENSE], ids=["sparse", "dense"])
@pytest.mark.parametrize("step", ["native", "torch"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_engine_conforms(check, step, config, monkeypatch):
    if step == "torch":
        monkeypatch.setattr(core.NativeDecoder, "load", lambda *_: None)
    masks = GrammarMasks(tokenizer(), [STOP_ID], VOCAB_SIZE)
    engine = TorchEngine(config, OPTIONS, masks)
    if step not in engine.capabilities().name:
        pytest.skip("no C compiler")
    engine.start()
    try:
        await check(engine, partial(weights_of, config=config))
    finally:
        await engine.stop()
