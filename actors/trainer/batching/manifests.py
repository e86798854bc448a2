"""What a batch manifest says of itself. Pure."""

from collections.abc import Iterable, Mapping

import msgspec

from penstock.messages.reward import Outcome
from penstock.messages.rollout import tokens_by_version
from penstock.messages.training import BatchManifest, SampleEntry


def trained_samples(manifest: BatchManifest) -> list[SampleEntry]:
    """Return the samples with tokens to train: those of groups, then live ones."""
    samples = [sample for group in manifest.groups for sample in group.samples] + manifest.live
    return [sample for sample in samples if sample.outcome.is_trained and sample.version_spans]


def with_num_inputs(manifest: BatchManifest, lengths: Mapping[str, list[int]]) -> BatchManifest:
    """Return a manifest that says how long the sequences of its trained samples are, by sample."""

    def told(samples: Iterable[SampleEntry]) -> list[SampleEntry]:
        return [
            msgspec.structs.replace(sample, num_inputs=lengths[sample.rollout_id])
            if sample.rollout_id in lengths
            else sample
            for sample in samples
        ]

    groups = [msgspec.structs.replace(g, samples=told(g.samples)) for g in manifest.groups]
    return msgspec.structs.replace(manifest, groups=groups, live=told(manifest.live))


def length_only_weight(manifest: BatchManifest) -> float:
    """Return the weight of a sample whose group was trained for its lengths alone.

    A step's loss is divided by the number of its other samples (`num_divided`). With this weight,
    those of length-only groups together count at most as much as these, however many they are.
    """
    return min(1.0, num_divided(manifest) / max(len(length_only_samples(manifest)), 1))


def num_divided(manifest: BatchManifest) -> int:
    """Return the number of samples that a step's loss is divided by.

    Samples of length-only groups are not counted, so that the others weigh the same with and
    without them; in a batch that has no others, they are.
    """
    num_samples = len(trained_samples(manifest))
    return num_samples - len(length_only_samples(manifest)) or num_samples


def length_only_samples(manifest: BatchManifest) -> set[str]:
    """Return the trained rollouts of length-only groups."""
    return {
        sample.rollout_id
        for group in manifest.groups
        if group.is_length_only
        for sample in group.samples
        if sample.outcome.is_trained and sample.version_spans
    }


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
    complete = [*manifest.groups, *manifest.discarded]
    num_judged = sum(group.num_judged for group in complete)
    num_solved = sum(group.num_solved for group in complete)
    num_all_solved = sum(group.num_solved == group.num_judged > 0 for group in manifest.groups)
    num_tokens = max(sum(staleness.values()), 1)
    live = [sample for sample in manifest.live if sample.outcome.is_trained]
    num_withheld = sum(map(_num_withheld, (s for group in manifest.groups for s in group.samples)))
    return {
        "reward_mean": sum(sample.reward for sample in trained) / max(len(trained), 1),
        "pass_rate": num_solved / max(num_judged, 1),
        "num_groups": float(len(manifest.groups)),
        "num_groups_all_solved": float(num_all_solved),
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
