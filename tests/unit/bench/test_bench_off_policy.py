"""Part `off_policy`: its arms are settings of the shipped recipe, and its figures are right."""

import pytest
from tests.lab.bench.learning import off_policy
from tests.lab.bench.learning.off_policy import ARMS, CONFIG, METRICS, SEEDS, summarize, units

from penstock.infra.config.file import load_config


def test_every_arm_is_off_policy_on_purpose():
    found = {}
    for arm, settings in ARMS.items():
        pairs = [f"{key}={value}" for key, value in settings.items()]
        trainer = load_config(CONFIG, pairs).trainer
        assert (trainer.staleness_max, trainer.num_passes) == (8, 2)
        found[arm] = (trainer.loss.name, trainer.loss.correction, trainer.num_versions_kept)
    assert found == {
        "none": ("policy_gradient", "none", 0),
        "token-tis": ("policy_gradient", "token_tis", 0),
        "icepop": ("policy_gradient", "icepop", 8),
        "decoupled-ppo": ("decoupled_ppo", "token_tis", 0),
    }


def test_units_are_a_start_and_every_arm_of_every_seed():
    names = [unit.name for unit in units()]
    assert names[0] == "start"
    assert sorted(names[1:]) == sorted(f"{arm}-{seed}" for arm in ARMS for seed in SEEDS)


def results(rates):
    """Return what units found: of 100 tasks, the first ones are solved."""
    found = {"start": {"seconds": 60.0}}
    for arm, of_seeds in rates.items():
        for seed, rate in zip(SEEDS, of_seeds, strict=True):
            found[f"{arm}-{seed}"] = {
                "tasks": {f"t{i}": i < round(100 * rate) for i in range(100)},
                "steps": dict.fromkeys(METRICS, 0.8) | {"ratio_ess": 0.7 + 0.05 * seed},
                "replay": {"identical": True},
                "ledger": {"balanced": True},
                "seconds": 60.0,
            }
    return found


def test_figures_have_intervals_over_tasks_and_over_seeds():
    rates = dict.fromkeys(ARMS, (0.5, 0.6, 0.7)) | {"none": (0.3, 0.4, 0.5)}
    figures = summarize(results(rates))
    arm = figures["decoupled-ppo"]
    assert (arm["held_out"], arm["by_seed"]) == (0.6, [0.5, 0.6, 0.7])
    half = 1.96 * (0.25 / 100 + 0.24 / 100 + 0.21 / 100) ** 0.5 / 3
    assert arm["interval_tasks"] == pytest.approx([0.6 - half, 0.6 + half], abs=1e-3)
    assert arm["interval_seeds"] == pytest.approx([0.6 - 0.2484, 0.6 + 0.2484], abs=1e-3)
    assert figures["minus_none"]["token-tis"]["difference"] == pytest.approx(0.2)
    assert set(figures["minus_none"]) == set(ARMS) - {"none"}
    assert figures["ratio_ess_max"] == 0.8
    assert figures["replay_identical"] and figures["ledger_balanced"]
    assert figures["minutes"] == 13.0
    assert off_policy._STUDENT_T == 4.303, "of three seeds"
