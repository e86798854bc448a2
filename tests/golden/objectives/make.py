"""Makes `vectors.json`: what public implementations give for a few tensors, on a CPU.

    git clone --bare https://github.com/volcengine/verl
    git clone --bare https://github.com/huggingface/trl
    git clone --bare https://github.com/THUDM/slime
    python tests/golden/objectives/make.py verl.git trl.git slime.git

It needs numpy and torch. Functions are read from the repositories at the commits below and run as
they are, each with the helpers of its own repository; nothing of them is kept here but results.
"""

import __future__

import ast
import json
import math
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

VERL = "b178a3cd56f58b2d502255daba591e92833930a7"
TRL = "f2cd57710ae345ea6428ae95363267fcf38a3dc8"
SLIME = "624b824a898ab0ec1fcb4d373004c7f3852bf515"
LENGTHS = (8, 5, 3, 6, 1, 4)
ADVANTAGES = (1.5, -0.75, 0.25, -1.25, 0.5, -0.25)
REWARDS = (1.0, 0.0, 0.5, 0.0, 1.0, -0.5)
GROUPS = (0, 0, 0, 1, 1, 1)
CLIP_LOW, CLIP_HIGH, DUAL_CLIP, CAP = 0.2, 0.28, 1.4, 2.0
KL_COEFFICIENT = 0.05
REJECTIONS = {
    **{f"{level}_k1": "0.625_1.6" for level in ("token", "seq_sum")},
    "seq_mean_k1": "0.8_1.25",
    **{f"{level}_{k}": "0.08" for level in ("token", "seq_mean") for k in ("k2", "k3")},
    **{f"{level}_{k}": "0.3" for level in ("seq_sum", "seq_max") for k in ("k2", "k3")},
}
"""verl's bounds of k1 are of exp(k1) = sampler / trainer."""


class Source:
    """One repository at one commit."""

    def __init__(self, repository: str, commit: str) -> None:
        self._git = ("git", "--git-dir", repository, "show")
        self._commit = commit

    def take(self, path: str, names: set[str], **scope: Any) -> SimpleNamespace:
        """Run a file's functions, methods and constants of these names, and nothing else of it."""
        text = subprocess.check_output([*self._git, f"{self._commit}:{path}"], text=True)
        found = [node for node in ast.walk(ast.parse(text)) if _names(node) & names]
        for node in found:
            if isinstance(node, ast.FunctionDef):
                node.decorator_list = []
        missing = names - set().union(*(_names(node) for node in found))
        assert not missing, f"{path}: no {missing}"
        flags = __future__.annotations.compiler_flag
        module = ast.Module(body=found, type_ignores=[])
        scope |= {"torch": torch, "np": np, "math": math, "defaultdict": defaultdict, "Any": Any}
        exec(compile(module, path, "exec", flags), scope)
        return SimpleNamespace(**{name: scope[name] for name in names})


def _names(node: ast.AST) -> set[str]:
    match node:
        case ast.FunctionDef(name=name):
            return {name}
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return {name} if name.isupper() else set()
    return set()


def tensors() -> dict[str, torch.Tensor]:
    """Return the inputs, float64 [B, T], zero where the mask is."""
    generator = torch.Generator().manual_seed(0)
    size = (len(LENGTHS), max(LENGTHS))

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    mask = (torch.arange(size[1]) < torch.tensor(LENGTHS)[:, None]).double()
    behavior = -normal(1.5).abs()
    proximal = behavior + normal(0.35)
    current = proximal + normal(0.3)
    reference = behavior + normal(0.5)
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)[:, None].expand(size)
    found = {
        "behavior": behavior,
        "proximal": proximal,
        "current": current,
        "reference": reference,
        "advantages": advantages,
    }
    rounded = {name: (value * 1e6).round() / 1e6 * mask for name, value in found.items()}
    return {**rounded, "mask": mask}


def graded(loss_of: Any, current: torch.Tensor) -> dict[str, Any]:
    """Return a loss and its gradient by the current logprobs."""
    leaf = current.clone().requires_grad_()
    loss = loss_of(leaf)
    loss.backward()
    return {"loss": float(loss.detach()), "gradient": leaf.grad.tolist()}


def from_verl(source: Source, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return all that verl's functions give."""
    helpers = source.take(
        "verl/utils/torch_functional.py", {"masked_sum", "masked_mean", "entropy_from_logits"}
    )
    corrections = source.take(
        "verl/trainer/ppo/rollout_corr_helper.py",
        {
            *("SAFETY_BOUND", "SUPPORTED_ROLLOUT_RS_OPTIONS", "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS"),
            *("_parse_rollout_rs_thresholds", "compute_rollout_rejection_mask"),
            *("compute_rs_metrics", "compute_rollout_correction_weights", "compute_is_metrics"),
            "compute_offpolicy_metrics",
        },
        verl_F=helpers,
    )
    core = source.take(
        "verl/trainer/ppo/core_algos.py",
        {
            *("agg_loss", "compute_policy_loss_vanilla", "compute_policy_loss_gspo"),
            *("compute_policy_loss_cispo", "kl_penalty_forward", "compute_rewards"),
            *("compute_grpo_outcome_advantage", "compute_rloo_outcome_advantage"),
            "compute_policy_loss_reinforce",
        },
        verl_F=helpers,
        ActorConfig=_VerlConfig,
        AlgoConfig=_OtherConfig,
    )
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0], [3.0, 3.0, -4.0, 1.0]], dtype=torch.float64)
    return {
        **_verl_corrections(corrections, given),
        "losses": _verl_losses(core, corrections, given),
        **_verl_rewards(core, given),
        "logits": logits.tolist(),
        "entropies": helpers.entropy_from_logits(logits).tolist(),
    }


def _verl_corrections(verl: Any, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    mask, log_ratio = given["mask"], given["proximal"] - given["behavior"]

    def kept(name: str, bounds: str) -> torch.Tensor:
        return verl.compute_rollout_rejection_mask(log_ratio, mask, name, bounds)[0]

    token, sequence = (
        verl.compute_rollout_correction_weights(log_ratio, mask, level, CAP)[0]
        for level in ("token", "sequence")
    )
    figures = verl.compute_offpolicy_metrics(given["proximal"], given["behavior"], mask)
    return {
        "weights": {
            "token_tis": token.tolist(),
            "sequence_tis": sequence.tolist(),
            "sequence_mis": (sequence * kept("seq_sum_k1", "0.5_2.0")).tolist(),
            "geometric": kept("seq_mean_k1", f"{1 / 1.1}_{1 / 0.9}").tolist(),
        },
        "kept": {name: kept(name, bounds).tolist() for name, bounds in REJECTIONS.items()},
        "offpolicy": {name: figures[name] for name in ("kl", "k3_kl", "chi2_token")},
    }


def _verl_losses(core: Any, corrections: Any, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Sums over all tokens, but for GSPO's, which is a mean over sequences."""
    mask, behavior, proximal = given["mask"], given["behavior"], given["proximal"]
    aggregate = "seq-mean-token-sum-norm"
    token_tis = corrections.compute_rollout_correction_weights(
        proximal - behavior, mask, "token", CAP
    )[0]

    def loss(function: Any, old: torch.Tensor, bound: float, weights: Any = None) -> dict[str, Any]:
        fixed = (given["advantages"], mask, aggregate, _VerlConfig(bound), weights)
        return graded(lambda current: function(old, current, *fixed)[0], given["current"])

    def reinforce(current: torch.Tensor) -> torch.Tensor:
        weights = corrections.compute_rollout_correction_weights(
            current.detach() - behavior, mask, "token", CAP
        )[0]
        fixed = (given["advantages"], mask, aggregate, _VerlConfig(math.inf), weights)
        return core.compute_policy_loss_reinforce(behavior, current, *fixed)[0]

    vanilla = core.compute_policy_loss_vanilla
    return {
        "policy_gradient": graded(reinforce, given["current"]),
        "ppo_clip": loss(vanilla, behavior, math.inf),
        "ppo_dual_clip": loss(vanilla, behavior, DUAL_CLIP),
        "cispo": loss(core.compute_policy_loss_cispo, behavior, math.inf),
        "gspo": loss(core.compute_policy_loss_gspo, behavior, math.inf),
        "decoupled_ppo": loss(vanilla, proximal, math.inf, token_tis),
        "decoupled_dual_clip": loss(vanilla, proximal, DUAL_CLIP, token_tis),
    }


def _verl_rewards(core: Any, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    mask, behavior, reference = given["mask"], given["behavior"], given["reference"]
    scores = torch.zeros_like(mask)
    scores[:, 0] = torch.tensor(REWARDS)
    with_kl = core.compute_rewards(scores, behavior, reference, KL_COEFFICIENT) * mask
    groups = np.array(GROUPS)

    def grpo(rewards: torch.Tensor, *, by_std: bool) -> list[float]:
        options = {"norm_adv_by_std_in_grpo": by_std}
        found = core.compute_grpo_outcome_advantage(rewards.clone(), mask, groups, **options)
        return found[0][:, 0].tolist()

    def k3(current: torch.Tensor) -> torch.Tensor:
        return (core.kl_penalty_forward(current, reference, "k3") * mask).sum()

    return {
        "k1": (core.kl_penalty_forward(behavior, reference, "k1") * mask).tolist(),
        "k3": graded(k3, given["current"]),
        "advantages_with_kl": grpo(with_kl, by_std=False),
        "dr_grpo": grpo(scores, by_std=False),
        "grpo": grpo(scores, by_std=True),
        "rloo": core.compute_rloo_outcome_advantage(scores, mask, groups)[0][:, 0].tolist(),
    }


class _OtherConfig:
    """Stands for a type of verl's that is named and not used."""


class _VerlConfig:
    """The fields that verl's losses read."""

    clip_ratio, clip_ratio_low, clip_ratio_high = CLIP_LOW, CLIP_LOW, CLIP_HIGH

    def __init__(self, dual_clip: float) -> None:
        self._dual_clip = dual_clip
        self.global_batch_info = {"loss_scale_factor": 1}

    def get(self, _name: str, _default: float) -> float:
        return self._dual_clip


def from_trl(source: Source, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    scope = {"nanmin": torch.min, "nanmax": torch.max}  # Of figures that are logged.
    method = source.take("trl/trainer/grpo_trainer.py", {"_compute_loss"}, **scope)._compute_loss

    def loss(**settings: Any) -> dict[str, Any]:
        def run(current: torch.Tensor) -> torch.Tensor:
            return method(_trainer(current, settings), None, _trl_inputs(given))

        return graded(run, given["current"])

    return {
        "ppo_clip": loss(),
        "k3": loss(beta=KL_COEFFICIENT),
        "gspo": loss(importance_sampling_level="sequence", loss_type="grpo"),
        "cispo": loss(loss_type="cispo", epsilon_high=1.28),
    }


def _trl_inputs(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mask = given["mask"].long()
    prompts = torch.zeros((len(mask), 1), dtype=torch.int64)
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompts + 1,
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": given["advantages"],
        "old_per_token_logps": given["behavior"],
        "ref_per_token_logps": given["reference"],
        "num_items_in_batch": torch.tensor(1.0),
    }


def _trainer(current: torch.Tensor, settings: dict[str, Any]) -> Any:
    """Return what TRL's loss reads of its trainer; logging goes nowhere."""
    mask_length = current.shape[1]
    lists = defaultdict(lambda: defaultdict(list))
    accelerator = SimpleNamespace(
        gather=lambda value: value,
        reduce=lambda value, reduction: value,
        num_processes=1,
        device=current.device,
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (current, current.detach() * 0, None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=mask_length,
        _entropy_bonus_enabled=False,
        _metrics=lists,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        **{
            "beta": 0.0,
            "importance_sampling_level": "token",
            "loss_type": "dr_grpo",
            "epsilon_low": CLIP_LOW,
            "epsilon_high": CLIP_HIGH,
        }
        | settings,
    )


def from_slime(source: Source, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    icepop = source.take("slime/backends/megatron_utils/loss.py", {"icepop_function"})
    weights, _, _ = icepop.icepop_function(
        SimpleNamespace(tis_clip_low=0.7, tis_clip=1.4),
        pg_loss=torch.ones_like(given["mask"]),
        train_log_probs=[given["proximal"]],
        rollout_log_probs=[given["behavior"]],
        loss_masks=[given["mask"]],
    )
    return {"icepop": (weights * given["mask"]).tolist()}


def main() -> None:
    verl, trl, slime = sys.argv[1:]
    given = tensors()
    found = {
        "made_from": {
            "volcengine/verl": VERL,
            "huggingface/trl": TRL,
            "THUDM/slime": SLIME,
        },
        "given": {name: value.tolist() for name, value in given.items()},
        "rewards": REWARDS,
        "groups": GROUPS,
        "verl": from_verl(Source(verl, VERL), given),
        "trl": from_trl(Source(trl, TRL), given),
        "slime": from_slime(Source(slime, SLIME), given),
    }
    path = Path(__file__).with_name("vectors.json")
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
