"""Every role on a real server: what its code does is allowed, and the server refuses the rest.

The matrix is derived: a new role, event or service is in it without a change here.
"""

import asyncio

import nats
import pytest
import pytest_asyncio

from penstock.infra.bus.jetstream.access import as_access, inbox_prefix
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.permissions import _events, _families, permissions, role_access, role_names
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.stores.directory import DirectoryStore
from penstock.messages.base import Stream
from penstock.messages.errors import PenstockError
from penstock.messages.streams import durable_name

RUN = "r1"
USERS_WORDS = {Stream.FEEDBACK, Stream.SIGNALS}
COMMON = {
    "ActorFailed", "ActorReported", "ActorStarted", "ItemCharged", "ItemQuarantined",
    "MessageRejected", "ProcessorUsed",
}  # fmt: skip
"""What every process reports of itself."""


def test_decisive_events_have_one_author():
    """Stated by hand: a change here is a change of who may decide what."""
    authors = {name: set() for name in _events()}
    for role in role_names():
        for kind in role_access(role).publishes:
            authors[kind.__name__].add(role)
    assert authors["Verdict"] == {"judge"}
    assert authors["BatchManifest"] == authors["StepCompleted"] == {"trainer"}
    assert authors["StartRollout"] == authors["CreditsChanged"] == {"pacer"}
    assert authors["RolloutFinished"] == authors["TurnSampled"] == {"rollout_worker"}
    assert authors["ExperimentDecided"] == authors["ChannelMoved"] == {"gatekeeper"}
    assert authors["InferenceRecorded"] == authors["FeedbackReceived"] == {"gateway"}
    assert authors["LiveSampleJoined"] == {"feedback"}
    for name in ("TinkerCalled", "TinkerAnswered", "TinkerSaved", "TinkerKept"):
        assert authors[name] == {"tinker"}, name
    # By the operator's commands alone.
    for name in ("ErasureRequested", "UserErased", "QuarantineReleased"):
        assert authors[name] == set(), name
    assert not authors["WeightsPublished"] & {
        "generator",
        "rollout_worker",
        "sandbox_host",
        "judge",
    }
    for role in role_names():
        assert {kind.__name__ for kind in role_access(role).publishes} >= COMMON


def test_few_roles_read_users_words():
    readers = {role for role in role_names() if role_access(role).reads & USERS_WORDS}
    assert readers == {"feedback", "gatekeeper", "gateway", "monitor", "rank", "trainer"}


def test_requests_into_machines_are_served_by_their_hosts_alone():
    assert [role for role in role_names() if "sandbox" in role_access(role).serves] == [
        "sandbox_host"
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    identities = {
        role: permissions([role], RUN, inbox_prefix(role), ["bucket"]) for role in role_names()
    }
    folder = tmp_path_factory.mktemp("nats")
    server = EmbeddedServer(store_dir=folder / "events", identities=identities)
    await server.start()
    owner = await NatsBus.connect(
        server.url, run_id=RUN, store=DirectoryStore(folder / "o"), name="x"
    )
    await owner.provision()
    yield server
    await owner.close()
    await server.stop()


class Probe:
    """A client of one role, and what the server refuses it."""

    def __init__(self, server: EmbeddedServer, role: str) -> None:
        self._server, self._role = server, role
        self._refused: list[str] = []

    async def __aenter__(self) -> "Probe":
        address = self._server.url.rpartition("@")[2]
        access = as_access(f"nats://{self._server.credentials(self._role)}@{address}")

        async def note(error: Exception) -> None:
            self._refused.append(str(error).lower())

        self._client = await nats.connect(access.servers, error_cb=note, **access.options)
        return self

    async def __aexit__(self, *_) -> None:
        await self._client.close()

    async def may_publish(self, subjects: list[str]) -> dict[str, bool]:
        return await self._tried("publish", subjects, lambda one: self._client.publish(one, b"{}"))

    async def may_subscribe(self, subjects: list[str]) -> dict[str, bool]:
        return await self._tried("subscription", subjects, self._client.subscribe)

    async def _tried(self, word: str, subjects: list[str], attempt) -> dict[str, bool]:
        self._refused.clear()
        for subject in subjects:
            await attempt(subject)
        # The server answers in order; the client may send its first ping ahead of what is pending.
        for _ in range(3):
            await self._client.flush()
            await asyncio.sleep(0.02)
        found = {subject: True for subject in subjects}
        for text in self._refused:
            for subject in subjects:
                if f'{word} to "{subject.lower()}"' in text:
                    found[subject] = False
        return found


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("role", role_names())
async def test_the_server_allows_what_the_code_does_and_nothing_else(server, role):
    access = role_access(role)
    events = {
        f"ps.{RUN}.{k.stream}.{k.__name__}.x": k in access.publishes for k in _events().values()
    }
    foreign = {subject.replace(f"ps.{RUN}.", "ps.r2."): False for subject in events}
    asked = {f"ps.{RUN}.rpc.{name}.x": name in access.requests for name in _families()}
    admin = {
        f"$JS.API.{call}.PS_{stream.upper()}": False
        for stream in Stream
        for call in ("STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE",
                     "STREAM.MSG.DELETE", "STREAM.SNAPSHOT", "STREAM.RESTORE")
    }  # fmt: skip
    admin |= {f"$JS.API.{call}": False for call in ("STREAM.NAMES", "STREAM.LIST")}
    reads = {
        f"$JS.API.{call}.PS_{stream.upper()}{end}": stream in access.reads
        for stream in Stream
        for call, end in (
            ("STREAM.MSG.GET", ""),
            ("CONSUMER.CREATE", ".read-1"), ("CONSUMER.MSG.NEXT", ".read-1"),
        )
    }  # fmt: skip
    admin |= {
        f"$JS.API.DIRECT.GET.PS_{stream.upper()}{end}": False
        for stream in Stream
        for end in ("", ".ps.r1.x")
    }
    queues = {
        f"$JS.API.CONSUMER.{call}.PS_{stream}.{durable_name(RUN, owner)}": False
        for stream, owner in (("TASKS", "rollout_worker"), ("TRAJECTORIES", "judge"))
        for call in ("MSG.NEXT", "DELETE", "CREATE", "DURABLE.CREATE")
        if role != owner
    }
    expected = events | foreign | asked | admin | reads | queues
    served = {f"ps.{RUN}.rpc.{name}.x": name in access.serves for name in _families()}
    served |= {f"{inbox_prefix(other)}.>": other == role for other in role_names()}
    served |= dict.fromkeys(
        (">", "ps.>", f"ps.{RUN}.>", f"ps.{RUN}.rpc.>", "_INBOX.>", "$JS.>"), False
    )
    async with Probe(server, role) as probe:
        assert await probe.may_publish([*expected]) == expected
        assert await probe.may_subscribe([*served]) == served


@pytest.mark.asyncio(loop_scope="module")
async def test_a_wrong_password_is_refused(server, tmp_path):
    address = server.url.rpartition("@")[2]
    with pytest.raises(PenstockError):
        await NatsBus.connect(
            f"nats://judge:wrong@{address}", run_id=RUN, store=DirectoryStore(tmp_path), name="x"
        )


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_cannot_go_to_a_subject_that_is_no_inbox(server):
    """A role that asks its own service may name any subject for the answer."""
    verdict = f"ps.{RUN}.rewards.Verdict.x"
    async with Probe(server, "generator") as probe:
        client = probe._client

        async def answer(message) -> None:
            await client.publish(message.reply, b"forged")

        await client.subscribe(f"ps.{RUN}.rpc.generate.x", cb=answer)
        await client.publish(f"ps.{RUN}.rpc.generate.x", b"{}", reply=verdict)
        for _ in range(5):
            await client.flush()
            await asyncio.sleep(0.02)
        assert any(verdict.lower() in text for text in probe._refused)
