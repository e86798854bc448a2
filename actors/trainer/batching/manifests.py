"""What a batch manifest says of itself. Pure."""

from penstock.messages.reward import Outcome
from penstock.messages.rollout import tokens_by_version
from penstock.messages.training import BatchManifest, SampleEntry


def trained_samples(manifest: BatchManifest) -> list[SampleEntry]:
    """Return the samples with tokens to train: those of groups, then live ones."""
    samples = [sample for group in manifest.groups for sample in group.samples] + manifest.live
    return [sample for sample in samples if sample.outcome.is_trained and sample.version_spans]


def staleness_tokens(manifest: BatchManifest) -> dict[int, int]:
    """Count the trained tokens of rollouts by their age in versions.

    `staleness_max` bounds these; users' samples have bounds of their own (`trainer.live`).
    """
    samples = [sample for group in manifest.groups for sample in group.samples]
    return _ages(samples, manifest)


def _ages(samples: list[SampleEntry], manifest: BatchManifest) -> dict[int, int]:
    tokens = tokens_by_version(span for sample in samples for span in sample.trained_spans)
    return {manifest.policy_version - version: tokens[version] for version in reversed(tokens)}


def batch_figures(manifest: BatchManifest) -> dict[str, float]:
    """Return the metrics that follow from the manifest alone."""
    staleness = staleness_tokens(manifest)
    trained = [
        sample for group in manifest.groups for sample in group.samples if sample.outcome.is_trained
    ]
    num_solved = sum(sample.outcome is Outcome.SOLVED for sample in trained)
    num_tokens = max(sum(staleness.values()), 1)
    live = [sample for sample in manifest.live if sample.outcome.is_trained]
    num_withheld = sum(map(_num_withheld, (s for group in manifest.groups for s in group.samples)))
    return {
        "reward_mean": sum(sample.reward for sample in trained) / max(len(trained), 1),
        "pass_rate": num_solved / max(len(trained), 1),
        "num_groups": float(len(manifest.groups)),
        "num_discarded": float(len(manifest.discarded)),
        "num_live": float(len(live)),
        "staleness_mean": sum(age * count for age, count in staleness.items()) / num_tokens,
        "staleness_max": float(max(staleness, default=0)),
        "live_staleness_max": float(max(_ages(live, manifest), default=0)),
        "withheld_fraction": num_withheld / max(num_withheld + sum(staleness.values()), 1),
    }


def _num_withheld(sample: SampleEntry) -> int:
    """Count a sample's tokens that are not trained for their age, while its reward counts."""
    if sample.outcome is not Outcome.WITHHELD and not sample.outcome.is_trained:
        return 0
    num_sampled = sum(span.num_tokens for span in sample.version_spans)
    return num_sampled - sum(span.num_tokens for span in sample.trained_spans)
