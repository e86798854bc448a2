"""Makes `trl.json` from TRL's own loss functions, once, in an environment of its own:

    python -m venv env && env/bin/pip install trl==0.19.1
    env/bin/python tests/golden/preferences/make.py

Inputs are drawn from a seed, and what TRL returns for them stands beside. `DPOTrainer.dpo_loss`
and `KTOTrainer.kto_loss` are called with what they read of their trainer, and nothing is copied.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from trl import DPOTrainer, KTOTrainer

FILE = Path(__file__).with_name("trl.json")


def drawn(random: torch.Generator, count: int) -> torch.Tensor:
    """Return log-probabilities of replies, float64 [count]."""
    return -30 * torch.rand(count, generator=random, dtype=torch.float64) - 1


def dpo_case(random: torch.Generator, beta: float, label_smoothing: float) -> dict:
    """Return the inputs and the losses of some pairs."""
    given = [drawn(random, 5) for _ in range(4)]
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"), beta=beta, label_smoothing=label_smoothing,
        loss_type="sigmoid", reference_free=False, f_divergence_type="reverse_kl",
    )  # fmt: skip
    losses, _, _ = DPOTrainer.dpo_loss(trainer, *given)
    names = ("chosen", "rejected", "reference_chosen", "reference_rejected")
    inputs = {name: value.tolist() for name, value in zip(names, given, strict=True)}
    settings = {"beta": beta, "label_smoothing": label_smoothing}
    return settings | inputs | {"losses": losses.tolist()}


def kto_case(random: torch.Generator, beta: float, weights: tuple[float, float]) -> dict:
    """Return the inputs and the losses of some labels, desirable ones first."""
    desirable, undesirable = weights
    given = [drawn(random, count) for count in (3, 2, 5, 3, 2, 5)]
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda value: value),
        beta=beta, desirable_weight=desirable, undesirable_weight=undesirable, loss_type="kto",
        calculate_KL=True,
    )  # fmt: skip
    losses, _, _, kl = KTOTrainer.kto_loss(trainer, *given)
    names = ("desirable", "undesirable", "unrelated")
    names = (*names, *(f"reference_{name}" for name in names))
    inputs = {name: value.tolist() for name, value in zip(names, given, strict=True)}
    settings = {"beta": beta, "desirable_weight": desirable, "undesirable_weight": undesirable}
    return settings | inputs | {"kl": float(kl), "losses": losses.tolist()}


def main() -> None:
    random = torch.Generator().manual_seed(15)
    cases = {
        "dpo": [dpo_case(random, *each) for each in ((0.1, 0.0), (0.1, 0.1), (0.5, 0.0))],
        "kto": [
            kto_case(random, beta, weights)
            for beta in (0.1, 0.5)
            for weights in ((1.0, 1.0), (1.0, 1.5), (0.7, 1.0))
        ],
    }
    FILE.write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
