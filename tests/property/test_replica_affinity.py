"""Session affinity: stable under joins and leaves, even, and never a dead end."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.policy.replicas.table import SILENT_S, ReplicaTable, preferred
from penstock.messages.generation import NEWEST, ReplicaReported, pinned
from penstock.messages.task import Purpose

NAMES = st.lists(st.text("abcdefgh.-", min_size=1, max_size=6), min_size=1, max_size=8, unique=True)
SESSIONS = st.lists(st.text(max_size=12), min_size=1, max_size=40, unique=True)


def report(replica: str, **changes: object) -> ReplicaReported:
    fields: dict = {
        "region": "west", "replica": replica, "started_at": 1.0, "serves": [Purpose.TRAIN],
        "policy_version": 3, "num_running_max": 4,
    }  # fmt: skip
    return ReplicaReported(**{**fields, **changes})


@given(names=NAMES, sessions=SESSIONS, data=st.data())
def test_a_replica_that_leaves_moves_only_its_own_sessions(names, sessions, data):
    gone = data.draw(st.sampled_from(names))
    left = [name for name in names if name != gone]
    for session in sessions:
        before, after = preferred(session, names), preferred(session, left)
        assert before == gone or after == before
        assert preferred(session, reversed(names)) == before, "the order means nothing"


def test_sessions_spread_evenly():
    counts = Counter(preferred(f"g{n}-m{m}", "abcd") for n in range(250) for m in range(8))
    assert set(counts) == set("abcd")
    assert max(counts.values()) < 1.2 * 500


loads = st.integers(0, 8)
reports = st.builds(
    report,
    st.sampled_from("abc"),
    num_requests=loads,
    started_at=st.sampled_from([1.0, 2.0]),
    serves=st.sampled_from([[], [Purpose.TRAIN], [Purpose.TRAIN, Purpose.EVAL]]),
    policy_version=st.integers(-1, 3),
    is_leaving=st.booleans(),
)


@given(
    events=st.lists(st.tuples(reports, st.floats(0.0, 8.0))), asked=st.sets(st.sampled_from("abc"))
)
def test_a_request_goes_to_a_replica_that_serves_it_if_there_is_any(events, asked):
    table, now = ReplicaTable(), 0.0
    newest: dict[str, tuple[ReplicaReported, float]] = {}
    for event, pause_s in events:
        now += pause_s
        known = newest.get(event.replica)
        table.expire(now)
        newest = {n: (e, at) for n, (e, at) in newest.items() if now - at <= SILENT_S}
        table.add(event, now)
        if known and event.replica in newest and event.started_at < known[0].started_at:
            continue
        newest[event.replica] = (event, now)
        if event.is_leaving:
            del newest[event.replica]
    for channel in (NEWEST, pinned(2)):
        able = {
            name
            for name, (event, _) in newest.items()
            if Purpose.TRAIN in event.serves and (channel == NEWEST or event.policy_version == 2)
        }
        chosen = table.choose("s", Purpose.TRAIN, channel, asked)
        assert (chosen in able) if able else chosen is None
        if able - asked:
            assert chosen not in asked
        roomy = {n for n in able - asked if newest[n][0].num_requests < 4}
        own = preferred("s", able)
        if own in roomy:
            assert chosen == own
        elif roomy:
            loads_of = {n: newest[n][0].num_requests for n in able - asked}
            assert loads_of[chosen] == min(loads_of.values())


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("report"), reports, st.floats(0.0, 8.0)),
            st.tuples(st.just("place"), st.integers(0, 9), st.just(0.0)),
            st.tuples(st.just("leave"), st.integers(0, 9), st.just(0.0)),
        ),
        max_size=60,
    )
)
def test_a_placed_session_stays_and_every_count_is_right(events):
    table, now = ReplicaTable(), 0.0
    for kind, what, pause_s in events:
        now += pause_s
        names = {one.replica for one in table.ready(Purpose.TRAIN)}
        if kind == "report":
            table.expire(now)
            table.add(what, now)
        elif kind == "leave":
            table.leave(f"s{what}")
        else:
            session, home = f"s{what}", table._homes.get(f"s{what}")
            pressures = {name: table._replicas[name].pressure for name in names}
            table.place(session, Purpose.TRAIN, NEWEST)
            if home in names:
                assert table._homes[session] == home
            elif names:
                moved = home is not None and home in table._replicas
                assert moved or pressures[table._homes[session]] == min(pressures.values())
        counts = Counter(table._homes.values())
        assert {n: r.num_sessions for n, r in table._replicas.items() if r.num_sessions} == counts


def test_new_sessions_even_out_what_their_names_would_not():
    """Of two replicas one is busy with others' requests: new sessions go to the other one."""
    table = ReplicaTable()
    table.add(report("a", num_requests=6, num_running_max=16), 0.0)
    table.add(report("b", num_requests=0, num_running_max=16), 0.0)
    for number in range(10):
        table.place(f"s{number}", Purpose.TRAIN, NEWEST)
    homes = Counter(table.choose(f"s{n}", Purpose.TRAIN, NEWEST) for n in range(10))
    assert homes == {"b": 8, "a": 2}
    by_name = Counter(preferred(f"s{n}", ["a", "b"]) for n in range(10))
    assert by_name != homes
    assert table.choose("other", Purpose.TRAIN, NEWEST) == preferred("other", ["a", "b"])
