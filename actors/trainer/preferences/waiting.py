"""The queue of users' corrections and judgments that wait for a step. Pure.

```
 PreferencePair, Label ─▶ waiting ──▶ replaced by an amendment: superseded
                            │ retracted, erased, too many: left out
                            ▼
          manifest: trained once, or left out with its fate
```
Each is in exactly one manifest. Training is not undone; a later amendment is a new entry.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

import msgspec

from penstock.actors.trainer.batching.fair_draw import RecentUsers, draw, user_of
from penstock.actors.trainer.batching.withdrawals import Withdrawals
from penstock.actors.trainer.config import TrainerConfig
from penstock.messages.errors import CodecError, ErasedError
from penstock.messages.feedback import ConsentWithdrawn, FeedbackRetracted, owner_of
from penstock.messages.signals.preferences import (
    Label,
    PreferenceEntry,
    PreferenceFate,
    PreferenceKind,
    PreferencePair,
)
from penstock.messages.training import BatchManifest

NUM_WAITING_MAX = 10_000
"""Maximum waiting entries; beyond it the oldest are `capped`."""
NUM_LEFT_OUT_MAX = 1000
"""Maximum left-out entries per manifest; others follow in the next one."""
NUM_KEPT_MAX = 200_000
"""Maximum names remembered of finished entries, and of retractions."""


def _keys(event: PreferencePair | Label) -> tuple[str, ...]:
    return (event.key_id,) if event.key_id else ()


def entry_of(event: PreferencePair | Label) -> PreferenceEntry:
    """Return the manifest entry of a correction or judgment that is trained."""
    is_label = isinstance(event, Label)
    return PreferenceEntry(
        kind=PreferenceKind.LABEL if is_label else PreferenceKind.PAIR,
        fate=PreferenceFate.TRAINED,
        feedback=event.feedback,
        request_id=event.request_id,
        tenant=event.tenant,
        user=event.user,
        author="" if is_label else event.author,
        is_desirable=is_label and event.is_desirable,
        weight=event.weight if is_label else 1.0,
    )


def trained_preferences(manifest: BatchManifest) -> list[PreferenceEntry]:
    """Return the corrections and judgments that a manifest trains, in its order."""
    return [each for each in manifest.preferences if each.fate is PreferenceFate.TRAINED]


class WaitingPreferences:
    """Waiting corrections and judgments, in the order of arrival."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._waiting: OrderedDict[str, PreferenceEntry] = OrderedDict()
        self._events: dict[str, PreferencePair | Label] = {}
        """By name, of those that wait."""
        self._withdrawn = Withdrawals()
        self._left_out: dict[str, PreferenceEntry] = {}
        """Entries that will not be trained and are in no manifest yet."""
        self._newest: dict[str, str] = {}
        """Name of the waiting entry by "kind.root"."""
        self._roots: dict[str, str] = {}
        """ "kind.root" by name of the waiting entry."""
        self._done: OrderedDict[str, None] = OrderedDict()
        self._retracted: OrderedDict[str, None] = OrderedDict()
        self._erasing: set[str] = set()
        self._recent = RecentUsers()
        self._served: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._num_trained = 0

    @property
    def is_on(self) -> bool:
        """Whether live preferences are trained."""
        return self._config.preferences.live_weight > 0

    def __len__(self) -> int:
        """Return the number of waiting entries."""
        return len(self._waiting)

    def add(self, event: PreferencePair | Label) -> None:
        """Add a correction or judgment, replacing the one that it amends."""
        entry = entry_of(event)
        name = entry.name
        if not self.is_on or name in self._done or name in self._waiting or name in self._left_out:
            return
        root = f"{entry.kind}.{event.root}"
        if (older := self._newest.get(root)) is not None:
            self._leave_out([older], PreferenceFate.SUPERSEDED)
        self._waiting[name], self._events[name] = entry, event
        self._newest[root], self._roots[name] = name, root
        # The retraction or erasure may have been read first: the streams have no common order.
        is_withdrawn = self._withdrawn.cover(event.tenant, _keys(event), event.recorded_at)
        if is_withdrawn or event.root in self._retracted:
            self._leave_out([name], PreferenceFate.RETRACTED)
        elif not entry.owners.isdisjoint(self._erasing):
            self._leave_out([name], PreferenceFate.ERASED)
        # The oldest go: they are about the oldest versions.
        num_above = max(len(self._waiting) - NUM_WAITING_MAX, 0)
        self._leave_out(list(self._waiting)[:num_above], PreferenceFate.CAPPED)

    def retract(self, event: FeedbackRetracted) -> None:
        """Leave out a piece of feedback and its amendments, if not trained yet."""
        self._retracted[event.key()] = None
        _trim(self._retracted)
        names = [self._newest.get(f"{kind}.{event.key()}") for kind in PreferenceKind]
        self._leave_out([name for name in names if name], PreferenceFate.RETRACTED)

    def withdraw(self, event: ConsentWithdrawn) -> None:
        """Leave out those of a key that may not be trained any more, also what still comes."""
        self._withdrawn.add(event)
        names = [
            name
            for name, one in self._events.items()
            if event.covers(one.tenant, _keys(one), one.recorded_at)
        ]
        self._leave_out(names, PreferenceFate.RETRACTED)

    def erase(self, tenant: str, user: str) -> None:
        """Leave out everything with a user's content, now and in future."""
        self._erasing.add(owner_of(tenant, user))
        names = [
            name for name, one in self._waiting.items() if owner_of(tenant, user) in one.owners
        ]
        self._leave_out(names, PreferenceFate.ERASED)

    def readmit(self, tenant: str, user: str) -> None:
        """Accept a user's content again."""
        self._erasing.discard(owner_of(tenant, user))

    def entries(self) -> list[PreferenceEntry]:
        """Return the next batch's entries: fairly drawn ones to train, and left-out ones."""
        eligible = list(self._waiting.values())
        shares = self._recent.shares(eligible, self._config.live)
        # By users' shares, so that one busy user cannot fill every step.
        drawn = draw(eligible, shares, self._served, self._config.preferences.num_live_max)
        return [*drawn, *list(self._left_out.values())[:NUM_LEFT_OUT_MAX]]

    def commit(self, manifest: BatchManifest) -> None:
        """Remove the entries that a stored manifest lists."""
        for entry in manifest.preferences:
            self._forget(entry.name)
            self._left_out.pop(entry.name, None)
            self._done[entry.name] = None
        _trim(self._done)
        trained = trained_preferences(manifest)
        self._recent.add(trained)
        for entry in trained:
            self._num_trained += 1
            self._served[user_of(entry)] = self._num_trained
            self._served.move_to_end(user_of(entry))
        # Users who were served longest ago count like new ones.
        while len(self._served) > NUM_WAITING_MAX:
            self._served.popitem(last=False)

    def _leave_out(self, names: Iterable[str], fate: PreferenceFate) -> None:
        for name in names:
            entry = self._forget(name)
            if entry is not None:
                self._left_out[name] = msgspec.structs.replace(entry, fate=fate)

    def _forget(self, name: str) -> PreferenceEntry | None:
        root = self._roots.pop(name, "")
        if self._newest.get(root) == name:
            del self._newest[root]
        self._events.pop(name, None)
        return self._waiting.pop(name, None)


def _trim(names: OrderedDict[str, None]) -> None:
    while len(names) > NUM_KEPT_MAX:
        names.popitem(last=False)


def left_out(
    entries: Iterable[PreferenceEntry], unreadable: Mapping[str, CodecError]
) -> list[PreferenceEntry]:
    """Return a batch's entries, with the fates of unreadable ones."""
    return [
        msgspec.structs.replace(entry, fate=_fate_of(unreadable[entry.name]))
        if entry.name in unreadable
        else entry
        for entry in entries
    ]


def _fate_of(error: CodecError) -> PreferenceFate:
    is_erased = isinstance(error, ErasedError)
    return PreferenceFate.ERASED if is_erased else PreferenceFate.UNREADABLE
