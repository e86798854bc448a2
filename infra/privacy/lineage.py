"""Which requests, feedback and users trained which version, according to the log.

Step s trains version s, and a version contains the samples of all steps up to its own.
"""

from collections.abc import Iterable

import msgspec

from penstock.messages.base import Event
from penstock.messages.bus import Bus
from penstock.messages.errors import NotFoundError
from penstock.messages.feedback import (
    FeedbackReceived,
    InferenceCounted,
    InferenceRecorded,
    LiveSampleJoined,
    UserErased,
)
from penstock.messages.signals.preferences import PreferenceEntry, PreferenceFate
from penstock.messages.training import BatchManifest, StepCompleted

TYPES: tuple[type[Event], ...] = (
    InferenceRecorded,
    InferenceCounted,
    FeedbackReceived,
    LiveSampleJoined,
    UserErased,
    BatchManifest,
    StepCompleted,
)


class TrainedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A live sample, a correction or a judgment, and the step that trained it."""

    step: int
    sample_id: str
    """Sample id; for a correction or judgment, `pair.` or `label.` and the feedback's key."""
    revision: int
    tenant: str
    users: list[str]
    """Pseudonyms of the users of all its requests."""
    requests: list[str]
    feedback: list[str]
    """Feedback as `<tenant>.<feedback id>`."""


class LineageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Lineage of one version, user, request or piece of feedback."""

    kind: str
    name: str
    samples: list[TrainedSample]
    """Trained samples; for a version, those of all steps up to it."""
    first_version: int | None
    """First version with one of the samples, which later versions contain, too; None if none."""
    requests: list[str] = []
    """Requests; for a user, all on record."""
    is_erased: bool = False
    """Whether content of a user was erased."""


class Lineage:
    """Lineage from events, in any order between streams."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[str, str]] = {}
        """(tenant, user) by request; requests that are not stored have no user."""
        self._feedback: dict[str, FeedbackReceived] = {}
        self._joined: dict[str, LiveSampleJoined] = {}
        self._trained: dict[str, int] = {}
        """Step by "sample.revision"."""
        self._preferred: dict[str, tuple[int, PreferenceEntry]] = {}
        """(step, entry) by name of a correction or judgment."""
        self._skipped: set[int] = set()
        self._erased: dict[tuple[str, str], int] = {}
        """Newest step with erased content, by (tenant, user)."""
        self._step_last = 0

    def add(self, event: Event) -> None:
        """Add an event of `TYPES`."""
        match event:
            case InferenceRecorded():
                self._owners[event.request_id] = (event.tenant, event.user)
            case InferenceCounted():
                self._owners[event.request_id] = (event.tenant, "")
            case FeedbackReceived():
                self._feedback[event.key()] = event
            case LiveSampleJoined():
                self._joined[event.key()] = event
            case UserErased():
                owner = (event.tenant, event.user)
                self._erased[owner] = max(self._erased.get(owner, 0), event.step_last)
            case BatchManifest():
                self._step_last = max(self._step_last, event.step)
                for sample in event.live:
                    if sample.outcome.is_trained:
                        self._trained[f"{sample.rollout_id}.{sample.revision}"] = event.step
                for entry in event.preferences:
                    if entry.fate is PreferenceFate.TRAINED:
                        self._preferred[entry.name] = (event.step, entry)
            case StepCompleted() if event.skipped:
                self._skipped.add(event.step)
            case _:
                pass

    def find(self, name: str, tenant: str = "") -> list[LineageRecord]:
        """Return the records of a name: a version number, user, request or feedback.

        Args:
            name: Name in the log; feedback also by its id without the tenant.
            tenant: Tenant to filter by; empty for all, whose feedback ids may repeat.

        Raises:
            NotFoundError: The log does not have the name.

        """
        found = [*self._version(name), *self._users(name), *self._requests(name)]
        found += self._of_feedback(name)
        if tenant:
            found = [each for each in found if self._is_of(each, tenant)]
        if not found:
            text = f"{name}: the log has no such version, user, request or feedback"
            raise NotFoundError(f"{text} of tenant {tenant}" if tenant else text)
        return found

    def samples_of(self, tenant: str, user: str) -> list[TrainedSample]:
        """Return the trained samples with a request of a user."""
        return [
            sample for sample in self._samples() if sample.tenant == tenant and user in sample.users
        ]

    def requests_of(self, tenant: str, user: str) -> list[str]:
        """Return a user's requests that are on record."""
        return [name for name, owner in self._owners.items() if owner == (tenant, user)]

    def is_erased(self, tenant: str, user: str) -> bool:
        """Whether content of a user was erased."""
        return (tenant, user) in self._erased

    def trained_of_erased(self) -> dict[int, set[str]]:
        """Return the trained samples with a request of an erased user, by step."""
        found: dict[int, set[str]] = {}
        for sample in self._samples():
            last = max(self._erased.get((sample.tenant, user), 0) for user in sample.users)
            if sample.step <= last:
                found.setdefault(sample.step, set()).add(sample.sample_id)
        return found

    def _is_of(self, found: LineageRecord, tenant: str) -> bool:
        if found.kind == "version":
            return True
        owners = {self._owners.get(request, ("", ""))[0] for request in found.requests}
        return tenant in owners | {sample.tenant for sample in found.samples}

    def _samples(self) -> list[TrainedSample]:
        found: list[TrainedSample] = []
        for key, step in sorted(self._trained.items(), key=lambda item: item[1]):
            event = self._joined.get(key)
            # A skipped step changed no weights, so its samples are in no version.
            if event is None or step in self._skipped:
                continue
            # Requests of one session may have come from several users.
            owners = (self._owners.get(name, ("", event.user))[1] for name in event.request_ids)
            found.append(
                TrainedSample(
                    step=step,
                    sample_id=event.sample_id,
                    revision=event.revision,
                    tenant=event.tenant,
                    users=sorted({event.user, *owners}),
                    requests=list(event.request_ids),
                    feedback=list(event.feedback_ids),
                )
            )
        found += self._preferences()
        return sorted(found, key=lambda sample: sample.step)

    def _preferences(self) -> list[TrainedSample]:
        found: list[TrainedSample] = []
        for name, (step, entry) in self._preferred.items():
            owners: dict[str, set[str]] = {}
            for owner in sorted(entry.owners) if step not in self._skipped else ():
                tenant, _, user = owner.partition("/")
                owners.setdefault(tenant, set()).add(user)
            found += [
                TrainedSample(
                    step=step,
                    sample_id=name,
                    revision=0,
                    tenant=tenant,
                    users=sorted(users),
                    requests=[entry.request_id],
                    feedback=[entry.feedback],
                )
                for tenant, users in owners.items()
            ]
        return found

    def _version(self, name: str) -> Iterable[LineageRecord]:
        if not name.isascii() or not name.isdigit() or int(name) > self._step_last:
            return ()
        samples = [sample for sample in self._samples() if sample.step <= int(name)]
        return (_found("version", name, samples),)

    def _users(self, name: str) -> Iterable[LineageRecord]:
        for owner in sorted({owner for owner in self._owners.values() if owner[1] == name != ""}):
            found = _found("user", name, self.samples_of(*owner), self.requests_of(*owner))
            yield msgspec.structs.replace(found, is_erased=owner in self._erased)

    def _requests(self, name: str) -> Iterable[LineageRecord]:
        if name not in self._owners:
            return ()
        samples = [sample for sample in self._samples() if name in sample.requests]
        return (_found("request", name, samples, [name]),)

    def _of_feedback(self, name: str) -> Iterable[LineageRecord]:
        for key, event in sorted(self._feedback.items()):
            if name in {key, event.feedback_id}:
                samples = [sample for sample in self._samples() if key in sample.feedback]
                yield _found("feedback", key, samples, [event.request_id])


def _found(
    kind: str, name: str, samples: list[TrainedSample], requests: list[str] | None = None
) -> LineageRecord:
    first = min((sample.step for sample in samples), default=None)
    return LineageRecord(
        kind=kind, name=name, samples=samples, first_version=first, requests=requests or []
    )


async def read(bus: Bus) -> Lineage:
    """Return the lineage of a run's log."""
    lineage = Lineage()
    async for delivery in bus.follow(TYPES, stop_at_end=True):
        lineage.add(delivery.event)
    return lineage
