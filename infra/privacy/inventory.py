"""Every place where a user's data are stored, what erases them there, and by when.

`python -m penstock.infra.privacy.inventory` prints the table of docs/live.md; a test compares the
two, and another plants words through every route, erases, and looks for them in all of these.
"""

import msgspec

from penstock.actors.runtime.vault import ERASED_PREFIX, KEYS_PREFIX
from penstock.gateway.exchange.sessions import SESSION_S_MAX
from penstock.gateway.exchange.spool import BAD_S_MAX
from penstock.messages.reading.claims import CLAIM_PREFIX

_KEY_GONE = "the user's key is deleted"


class DataPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A place where a user's data are stored."""

    name: str
    where: str
    """File, subject, object key or process."""
    form: str
    """Form of the data: sealed, pseudonym, plain."""
    erasure: str
    """What removes the data or makes them unreadable."""
    deadline: str
    """Deadline, counted from `UserErased`."""


PLACES = (
    DataPlace(
        name="records and samples",
        where="streams FEEDBACK and SIGNALS, on each replica of the event server",
        form="sealed; names as pseudonyms",
        erasure=_KEY_GONE,
        deadline="at once",
    ),
    DataPlace(
        name="large turns",
        where=f"objects {CLAIM_PREFIX}*-event-*, with versions that a bucket keeps",
        form="sealed",
        erasure=_KEY_GONE,
        deadline="at once",
    ),
    DataPlace(
        name="requests to generators and replies",
        where="the bus, in memory; above 512 KiB an object, sealed under a key that no disk has",
        form="plain on the bus, sealed as object",
        erasure="the object is deleted with the call; its key is in no message on a stream",
        deadline="with the request, at most `gateway.request_s_max`",
    ),
    DataPlace(
        name="replies to retries",
        where="stream GATEWAY, in memory",
        form="sealed; keyed digests of requests",
        erasure=_KEY_GONE,
        deadline="at once",
    ),
    DataPlace(
        name="records that wait for the log",
        where="spool/*.record on each gateway's host",
        form="sealed under the service's key",
        erasure="removed by each gateway when it reads `UserErased`; a tombstone keeps them from a "
        "new key",
        deadline="before the gateway's next record",
    ),
    DataPlace(
        name="records that the log refused",
        where="spool/*.bad on each gateway's host",
        form="sealed under the service's key",
        erasure="as above; what nobody can decode goes with its age",
        deadline=f"{BAD_S_MAX / 86_400:.0f} days",
    ),
    DataPlace(
        name="gateways' memory",
        where="sessions, summaries, responses that may be continued, ids of replies, keys",
        form="plain",
        erasure="forgotten when `ErasureRequested` and `UserErased` are read",
        deadline=f"at once; without any erasure {SESSION_S_MAX / 3600:.0f} h or the table's bound",
    ),
    DataPlace(
        name="generators' memory",
        where="KV cache and prefixes",
        form="plain",
        erasure="evicted by later requests, or with the next weights",
        deadline="with the next version that the replica serves",
    ),
    DataPlace(
        name="the trainer's memory",
        where="turns of samples that wait, keys",
        form="plain",
        erasure="forgotten when `UserErased` is read; no step after `ErasurePrepared` needs them",
        deadline="at once",
    ),
    DataPlace(
        name="users' keys",
        where=f"objects {KEYS_PREFIX}<tenant>/<user>",
        form="wrapped under the master key",
        erasure="deleted",
        deadline="at once; a bucket must keep no versions",
    ),
    DataPlace(
        name="tombstones",
        where=f"objects {ERASED_PREFIX}<tenant>/<user>/<number>",
        form="pseudonym",
        erasure="kept: they are what keeps the rest erased",
        deadline="never",
    ),
    DataPlace(
        name="sinks",
        where="telemetry receivers",
        form="counts and pseudonyms",
        erasure="none needed: no content leaves",
        deadline="-",
    ),
    DataPlace(
        name="exports of the log",
        where="`log export`: a file; with `--with-keys` it opens",
        form="sealed; with keys, plain to who has it",
        erasure="an export without keys: as the log; the keys of one with keys are refused by "
        "`log import` where the user was erased; the copy is its holder's",
        deadline="at once where it is imported",
    ),
    DataPlace(
        name="exports of preferences, traces and models",
        where="folders that an operator names",
        form="plain",
        erasure="exported again without the user; a model with `erase --retrain`",
        deadline="the operator's",
    ),
    DataPlace(
        name="calls of `penstock tinker`",
        where="stream TINKER, large bodies as objects; a server's memory",
        form="plain tokens, ids of keys",
        erasure="deleted with the server's run; calls name no users, so nothing can be erased "
        "per user",
        deadline="when an operator does it",
    ),
    DataPlace(
        name="backups",
        where="copies of streams, objects and keys",
        form="as above",
        erasure="a key that comes back is deleted again by the first gateway that reads its "
        "`UserErased`; backups of before it are deleted by their own age",
        deadline="when the restored log is read",
    ),
    DataPlace(
        name="weights",
        where="versions that trained the user's samples",
        form="learned",
        erasure="`erase --retrain` trains them again without the user",
        deadline="when an operator does it",
    ),
)


def table() -> str:
    """Return the places as a Markdown table."""
    names = DataPlace.__struct_fields__
    rows = [" | ".join(names), "|".join("---" for _ in names)]
    rows += [" | ".join(getattr(place, name) for name in names) for place in PLACES]
    return "".join(f"| {row} |\n" for row in rows)


if __name__ == "__main__":
    from penstock.infra.output import print_line

    print_line(table(), end="")
