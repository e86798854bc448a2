"""Signals that are declared if a run's configuration declares none.

No rule for weighting such signals has been published. These weights are simple: actions of users
weigh more than their opinions, and test results weigh most.
"""

from penstock.messages.signals.declaration import (
    SignalDirection,
    SignalKind,
    SignalLevel,
    SignalSpec,
)

_HOUR_S = 3600.0
_FRACTION, _DOWN, _SESSION = SignalKind.FRACTION, SignalDirection.DOWN, SignalLevel.SESSION

DEFAULT_SIGNALS: tuple[SignalSpec, ...] = (
    SignalSpec(name="thumbs"),
    SignalSpec(name="accept", kind=_FRACTION),
    SignalSpec(name="reject", kind=_FRACTION, direction=_DOWN),
    SignalSpec(name="partial_accept", kind=_FRACTION),
    SignalSpec(name="edit_distance", kind=_FRACTION, direction=_DOWN, weight=0.5),
    SignalSpec(name="keep_rate_1h", kind=_FRACTION, level=_SESSION, maturity_s=_HOUR_S),
    SignalSpec(
        name="keep_rate_1d", kind=_FRACTION, level=_SESSION, maturity_s=24 * _HOUR_S, weight=1.5
    ),
    SignalSpec(
        name="keep_rate_7d", kind=_FRACTION, level=_SESSION, maturity_s=168 * _HOUR_S, weight=2.0
    ),
    SignalSpec(name="diff_kept", kind=_FRACTION, level=_SESSION),
    SignalSpec(name="agent_finished", level=_SESSION, weight=0.0),
    SignalSpec(name="undo", direction=_DOWN),
    SignalSpec(name="retry", direction=_DOWN, weight=0.5),
    SignalSpec(name="dissatisfied_followup", direction=_DOWN),
    SignalSpec(name="interrupted", direction=_DOWN, weight=0.5),
    SignalSpec(name="tests_passed", kind=_FRACTION, level=_SESSION, weight=2.0),
    SignalSpec(name="commit", level=_SESSION),
    SignalSpec(name="pr_merged", level=_SESSION, weight=2.0),
    SignalSpec(name="comment", kind=SignalKind.COMMENT, weight=0.0),
    SignalSpec(name="correction", kind=SignalKind.CORRECTION, weight=0.0),
)
