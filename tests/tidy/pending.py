"""Files that do not meet a rule of `words.py` yet. The lists only shrink: a mended file must go."""

UNEXPLAINED: frozenset[str] = frozenset(
    {
        "actors/trainer/ranks/actor.py",
        "actors/trainer/turns.py",
        "envs/microvm/firecracker/backend.py",
    }
)
VAGUE: frozenset[str] = frozenset(
    {
        "actors/trainer/engines/protocol.py",
        "infra/deploy/layout.py",
        "infra/deploy/sizes.py",
    }
)
NOUNLESS: frozenset[str] = frozenset(
    {
        "actors/policy/chat/builtin.py",
        "actors/policy/exact.py",
        "actors/trainer/batching/credit.py",
        "actors/trainer/batching/fair_draw.py",
        "actors/trainer/forward.py",
        "messages/reading/sealed.py",
    }
)
