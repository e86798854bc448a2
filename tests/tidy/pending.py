"""Files that do not meet a rule of `words.py` yet. The lists only shrink: a mended file must go."""

UNEXPLAINED: frozenset[str] = frozenset(
    {
        "actors/trainer/ranks/actor.py",
        "actors/trainer/turns.py",
        "envs/microvm/firecracker/backend.py",
    }
)
VAGUE: frozenset[str] = frozenset()
NOUNLESS: frozenset[str] = frozenset({"messages/reading/sealed.py"})
