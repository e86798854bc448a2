"""Sessions by prefix: what belongs together is found, and tokens decide about chains."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.policy.chat.format import Role
from penstock.gateway.conversation import Call, RequestMessage
from penstock.gateway.exchange.sessions import (
    NUM_OWNER_MARKS_MAX,
    NUM_TIPS_MAX,
    SESSION_S_MAX,
    PrefixKind,
    Sessions,
)

ANN, BOB = ("acme", "u-ann"), ("acme", "u-bob")


def said(role, text="", *calls):
    return RequestMessage(role=role, text=text, calls=tuple(calls))


def user(text):
    return said(Role.USER, text)


class Client:
    """Sends a conversation and takes each reply into it; contexts are the words themselves."""

    def __init__(self, sessions, owner=ANN):
        self.sessions, self.owner, self.now = sessions, owner, 0.0
        self.messages, self.num = [], 0

    def send(self, reply="ok", *, calls=(), context=None, named="", messages=None):
        messages = self.messages if messages is None else messages
        self.num += 1
        name = f"{self.owner[1]}-{self.num}"
        thread = self.sessions.open(self.owner, messages, named=named, new=name, now=self.now)
        context = list(context if context is not None else tokens(messages))
        ids = tokens([said(Role.ASSISTANT, reply, *calls)])
        chain, kind = self.sessions.settle(thread, name, context, ids, self.now)
        self.sessions.remember(thread, reply, calls, self.now)
        self.messages = [*messages, said(Role.ASSISTANT, reply, *calls)]
        return thread.name, chain, kind


def tokens(messages):
    """Return a stand-in for rendered ids: each message's own, so a prefix of messages is one."""
    found = []
    for one in messages:
        calls = [(call.name, sorted(call.arguments.items())) for call in one.calls]
        found += list(f"{one.role}:{one.text}:{calls};".encode())
    return found


def test_a_conversation_that_goes_on_is_one_session_and_one_segment():
    client = Client(Sessions())
    client.messages = [said(Role.SYSTEM, "Be brief."), user("one")]
    first = client.send()
    assert first == ("u-ann-1", "u-ann-1", None)
    for text in ("two", "three"):
        client.messages.append(user(text))
        assert client.send() == ("u-ann-1", "u-ann-1", PrefixKind.EXACT)


def test_another_user_with_the_same_words_has_a_session_of_their_own():
    sessions = Sessions()
    for owner in (ANN, BOB):
        client = Client(sessions, owner)
        client.messages = [user("one")]
        client.send()
        client.messages.append(user("two"))
        assert client.send()[0] == f"{owner[1]}-1"


def test_a_turn_that_comes_back_changed_starts_a_segment():
    call = Call(call_id="a", name="bash", arguments={"command": "ls", "deep": {"a": 1, "b": 2}})
    again = Call(call_id="b", name="bash", arguments={"deep": {"b": 2, "a": 1}, "command": "ls"})
    changes = [
        [user(" one\n"), said(Role.ASSISTANT, "Look.", call), said(Role.TOOL, "a.py")],
        [user("one"), said(Role.ASSISTANT, "", again), said(Role.TOOL, "a.py")],
        [
            said(Role.SYSTEM, "Now."),
            user("one"),
            said(Role.ASSISTANT, "Look.", call),
            user("x"),
        ],
    ]
    for changed in changes:
        client = Client(Sessions())
        client.messages = [user("one")]
        client.send("Look.", calls=[call])
        context = [7, *tokens(changed)]  # Rendered otherwise than it was sampled.
        name, chain, kind = client.send(messages=changed, context=context)
        assert (name, chain, kind) == ("u-ann-1", "u-ann-2", PrefixKind.CHANGED)
        client.messages.append(user("two"))
        context = [7, *tokens(client.messages)]
        assert client.send(context=context) == ("u-ann-1", "u-ann-2", PrefixKind.EXACT)


def test_branches_and_retries_are_segments_of_the_session():
    client = Client(Sessions())
    client.messages = [user("one")]
    client.send()
    before = [*client.messages, user("two")]
    assert client.send("a", messages=before)[1:] == ("u-ann-1", PrefixKind.EXACT)
    assert client.send("b", messages=before)[1:] == ("u-ann-3", PrefixKind.CHANGED)
    last = [*before, said(Role.ASSISTANT, "a"), user("three")]
    assert client.send("c", messages=last)[:2] == ("u-ann-1", "u-ann-1")


def test_a_turn_of_elsewhere_is_unknown_and_begins_a_session():
    client = Client(Sessions())
    client.messages = [user("one"), said(Role.ASSISTANT, "elsewhere"), user("two")]
    assert client.send() == ("u-ann-1", "u-ann-1", PrefixKind.UNKNOWN)


def test_a_name_comes_before_a_prefix():
    client = Client(Sessions())
    client.messages = [user("one")]
    client.send(named="mine")
    client.messages.append(user("two"))
    assert client.send(named="mine") == ("mine", "u-ann-1", PrefixKind.EXACT)
    client.messages.append(user("three"))
    assert client.send(named="other")[0] == "other"


def test_sessions_expire_and_tables_are_bounded():
    sessions = Sessions()
    client = Client(sessions)
    client.messages = [user("one")]
    client.send()
    client.messages.append(user("two"))
    client.now = SESSION_S_MAX + 1.0
    assert client.send()[0] == "u-ann-2"
    assert len(sessions) == 1
    for number in range(2 * NUM_TIPS_MAX):
        client.send(messages=[user(str(number))], named="one")
    (session,) = [one for (_, name), one in sessions._sessions.items() if name == "one"]
    assert len(session.tips) == NUM_TIPS_MAX
    for number in range(NUM_OWNER_MARKS_MAX + 8):
        client.send(messages=[user(f"x{number}")])
    assert len(sessions._marks[ANN]) == NUM_OWNER_MARKS_MAX


@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.text(max_size=3)), max_size=12))
def test_a_segment_is_a_chain_of_extended_contexts(turns):
    sessions = Sessions()
    clients = [Client(sessions, ANN), Client(sessions, ANN)]
    ends = {}
    for which, text in turns:
        client = clients[which]
        client.messages.append(user(text))
        context = tokens(client.messages)
        name = f"{which}-{len(client.messages)}"
        thread = sessions.open(ANN, client.messages, named="", new=name, now=0.0)
        chain, kind = sessions.settle(thread, name, context, [1, 2], 0.0)
        if chain in ends:
            assert context[: len(ends[chain])] == ends[chain]
            assert kind is not PrefixKind.CHANGED
        ends[chain] = [*context, 1, 2]
        sessions.remember(thread, "ok", (), 0.0)
        client.messages.append(said(Role.ASSISTANT, "ok"))


@given(st.text(), st.lists(st.sampled_from([" ", "\n", "\t", "  "]), min_size=1, max_size=4))
def test_white_space_makes_no_other_conversation_and_words_do(text, spaces):
    def mark(content):
        return Sessions().open(ANN, [user(content)], named="", new="n", now=0.0).digest

    assert mark("".join(f"{one}{text}" for one in spaces)) == mark(text * len(spaces))
    assert mark(f"{text}x") != mark(text)
