"""DPO and KTO: pure functions of summed log-probabilities.

With log-ratio h(y) = log pi(y | x) - log pi_reference(y | x), summed over the reply's tokens:

    DPO (arXiv 2305.18290, equation 7):  -log sigmoid(beta (h(chosen) - h(rejected)))
    KTO (arXiv 2402.01306, section 4.1): w (1 - sigmoid(beta (h(y) - z)))  of a desirable reply
                                         w (1 - sigmoid(beta (z - h(y))))  of an undesirable one

z estimates KL(pi || reference) from replies that do not belong to their contexts, without a
gradient. Shapes: N examples.
"""

import torch
from torch.nn import functional as F

from penstock.actors.trainer.preferences.config import PreferencesConfig


def dpo_losses(
    chosen: torch.Tensor, rejected: torch.Tensor, config: PreferencesConfig
) -> torch.Tensor:
    """Return the loss of each pair, [N], from the log-ratios [N] of both replies.

    A share `label_smoothing` of the pairs is taken to be the wrong way round (conservative DPO).
    """
    margin, share = config.beta * (chosen - rejected), config.label_smoothing
    return -(1 - share) * F.logsigmoid(margin) - share * F.logsigmoid(-margin)


def kto_kl(log_ratios: torch.Tensor) -> torch.Tensor:
    """Return z, 0-dim, at least 0, from log-ratios [N] of unrelated replies; 0 without any."""
    if not log_ratios.numel():
        return log_ratios.new_zeros(())
    return log_ratios.detach().mean().clamp(min=0)


def kto_losses(
    log_ratios: torch.Tensor,
    is_desirable: torch.Tensor,
    kl: torch.Tensor,
    config: PreferencesConfig,
) -> torch.Tensor:
    """Return the loss of each label, [N].

    Args:
        log_ratios: [N].
        is_desirable: bool [N].
        kl: z of the batch.
        config: beta and the weights of both kinds.

    """
    above = torch.where(is_desirable, log_ratios - kl, kl - log_ratios)
    share = is_desirable.to(log_ratios.dtype)
    weight = config.desirable_weight * share + config.undesirable_weight * (1 - share)
    return weight * (1 - torch.sigmoid(config.beta * above))
