import subprocess
import sys

import msgspec
import pytest

from penstock.actors.trainer import config
from penstock.actors.trainer.config import LossConfig, OptimizerConfig, TrainerConfig
from penstock.actors.trainer.learner import rate
from penstock.actors.trainer.objective import advantages, corrections, losses


def test_every_name_has_its_function():
    assert tuple(advantages._ESTIMATORS) == config.ESTIMATORS
    assert tuple(corrections._CORRECTIONS) == config.CORRECTIONS
    assert tuple(corrections._REJECTIONS) == config.REJECTIONS
    assert all(spec.function is getattr(losses, name) for name, spec in config.LOSSES.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"estimator": "x"}, r"\(dr_grpo\|grpo\|rloo\).*\$\.estimator"),
        ({"loss": {"correction": "tis"}}, r"token_tis.*\$\.loss\.correction"),
        ({"loss": {"name": "ppo"}}, r"ppo_clip.*\$\.loss\.name"),
        ({"loss": {"name": "ppo_clip"}}, "trainer.loss.correction: expected none"),
        ({"loss": {"name": "gspo"}}, "trainer.loss.correction: expected none, since gspo"),
        ({"loss": {"rejection": "k1"}}, r"token_k1.*\$\.loss\.rejection"),
        ({"loss": {"rejection_low": 3.0}}, "rejection_low: expected at most rejection_high 2"),
        ({"loss": {"dual_clip": 0.5}}, "dual_clip: expected 0 or a number above 1, got 0.5"),
        ({"loss": {"kl": {"where": "both"}}}, r"none\|reward\|loss.*\$\.loss\.kl\.where"),
        ({"num_passes": 0}, r">= 1 .*\$\.num_passes"),
        ({"midtrain": {"schedule": "linear"}}, r"wsd\|cosine.*\$\.midtrain\.schedule"),
        ({"midtrain": {"batch_tokens": 8}}, "batch_tokens: expected at least .* 256, got 8"),
        ({"groups_per_batch": 0}, r">= 1 .*\$\.groups_per_batch"),
        ({"staleness_max": -1}, r">= 0 .*\$\.staleness_max"),
        ({"staleness_policy": "wait"}, r"pace\|drop.*\$\.staleness_policy"),
        ({"straggler_wait_s": 2.0}, "straggler_wait_s: expected 0 with pace"),
    ],
)
def test_a_wrong_value_is_named(settings, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(settings, TrainerConfig)


def test_an_unknown_key_is_refused_with_its_path():
    with pytest.raises(msgspec.ValidationError, match=r"lr.*\$.optimizer"):
        msgspec.convert({"optimizer": {"lr": 1}}, TrainerConfig)


def test_settings_and_pure_parts_import_no_torch():
    code = (
        "import sys, penstock.actors.trainer.config, penstock.actors.trainer.batching.batcher;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_learning_rate_rises_stays_and_falls_to_a_tenth():
    config = OptimizerConfig(warmup_steps=4, decay_fraction=0.5)
    expected = {1: 0.25, 4: 1.0, 10: 1.0, 15: 0.55, 20: 0.1, 21: 0.1}
    assert {step: rate(config, step, 20) for step in expected} == pytest.approx(expected)


def test_without_a_decay_the_learning_rate_stays():
    assert [rate(OptimizerConfig(warmup_steps=0), step, 20) for step in (1, 20)] == [1.0, 1.0]


def test_versions_are_kept_where_a_correction_has_bounds_for_the_engine():
    kept = {
        name: TrainerConfig(loss=LossConfig(correction=name), staleness_max=3).num_versions_kept
        for name in config.CORRECTIONS
    }
    assert {name: num for name, num in kept.items() if num} == {"icepop": 3, "geometric": 3}
    assert TrainerConfig(versions_kept=5).num_versions_kept == 5
    assert TrainerConfig(loss=LossConfig(correction="icepop"), versions_kept=0).versions_kept == 0
