"""The gateway over the real engine as a rubric judge's endpoint, masked decoding included."""

import msgspec
import pytest
from tests.judge_service import make_rubric

from penstock.actors.generator.actor import Generator
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.sampler import GrammarMasks
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.judge.rubric.config import CriterionConfig, RubricConfig
from penstock.actors.judge.rubric.endpoint import Endpoint
from penstock.actors.judge.rubric.judge import RubricJudge
from penstock.actors.judge.submission import Submission
from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.config import PolicyConfig
from penstock.infra.judge.asking import LocalWaits
from penstock.messages.task import Purpose

from ..conftest import Site
from .test_gateway_engine import swap

pytestmark = [pytest.mark.slow]
STRUCTURED = {
    "model": "policy",
    "structured": True,
    "reply_tokens_max": 64,
    "temperature": 1.0,
}
GRADED = {"fully": 1.0, "in part": 0.5, "no": 0.0}


def open_endpoint(rubric: RubricConfig, key: str = "psk-test") -> Endpoint:
    assert rubric.endpoint is not None
    config = msgspec.structs.replace(rubric.endpoint, key_env="KEY")
    return Endpoint(config, {"KEY": key})


async def test_the_gateway_answers_as_a_judge(bus, tmp_path, tokenizer):
    config = PolicyConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        head_dim=16,
        moe_intermediate_size=32,
        max_position_embeddings=4096,
    )
    masks = GrammarMasks(tokenizer, PenstockChat(tokenizer).stop_ids, tokenizer.vocab_size)
    engine = TorchEngine(config, EngineOptions(num_tokens_max=4096), masks)
    engine.start()
    try:
        await swap(engine, config, 0)
        site = Site(bus, tmp_path, tokenizer, context_tokens_max=4096)
        site.generator = Generator(engine, [Purpose.LIVE], "west", "west")
        async with site.running():
            criteria = [CriterionConfig(name="right", text="Is it right?", choices=GRADED)]
            rubric = make_rubric(
                f"{site.url}/v1",
                criteria=criteria,
                repeats=3,
                num_attempts_max=12,
                endpoint=STRUCTURED,
            )
            judge = RubricJudge(rubric, open_endpoint(rubric), LocalWaits())
            work = Submission(sample_id="r", task="Fix add.", diff="+x", final="Fixed add.")
            [found] = await judge.score(work)
            assert (found.repeats, found.detail) == (3, "")
            assert found.score is not None and found.num_prompt_tokens > 300
            short = make_rubric(f"{site.url}/v1", shows=("final",), endpoint={"model": "policy"})
            plain = RubricJudge(short, open_endpoint(short), LocalWaits())
            [unread] = await plain.score(work)
            assert unread.score == 0.0 and "no letter alone" in unread.detail
            refused = RubricJudge(short, open_endpoint(short, "wrong"), LocalWaits())
            [denied] = await refused.score(work)
            assert denied.score is None and "status 401" in denied.detail
    finally:
        await engine.stop()
