"""A run whose rollouts go on from summaries, in each mode, and whose worker is killed."""

from pathlib import Path

import pytest
from tests.e2e.launched import Launched

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(600)]
CONFIG = Path(__file__).parents[3] / "infra" / "configs" / "self-summary.toml"
STEPS = 2
SETTINGS = (
    "prepare.num_train_tasks=32",
    "prepare.num_heldout_tasks=8",
    "prepare.corpora.settings.num_demonstrations=300",
    "prepare.corpora.settings.drill_tokens=60_000",
    "trainer.midtrain.num_tokens=300_000",
    "trainer.groups_per_batch=2",
    "trainer.filter_zero_variance=false",
    "trainer.checkpoint_steps=1",
    f"trainer.steps_max={STEPS}",
    "pacer.group_size=4",
    "evaluator.num_eval_tasks=8",
    "sandbox_host.pool.live_max=12",
    "run.wall_s_max=500.0",
)


@pytest.mark.parametrize("mode", ["trained", "masked", "none"])
def test_chains_are_trained_counted_and_replayed(tmp_path, mode):
    settings = (*SETTINGS, f"rollout_worker.summary.mode={mode}")
    run = Launched(tmp_path, *settings, config=CONFIG)
    run.until("step 1: ", wait_s=400.0)
    run.kill("actor", "rollout_worker")
    assert run.wait(400.0) == 0, run.output
    run.check_sound(steps=STEPS)
    rl, ledger = run.summary["rl"], run.summary["ledger"]
    assert rl["segments_mean"] > 1
    assert (rl["summaries"] > 0) == (rl["summary_token_share"] > 0) == (mode != "none")
    assert (ledger["withheld"] > 0) == (mode == "masked")
    assert ledger["trained"] > 0
