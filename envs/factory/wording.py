"""What the agent is told. Harder wordings name less."""

from collections.abc import Sequence

from penstock.envs.factory.targets import Target

HINTS = ("function", "module", "symptom")


def bug_instruction(
    target: Target, path: str, hint: str, examples: Sequence[tuple[str, str]]
) -> str:
    """Describe a bug.

    Args:
        target: the wrong function.
        path: its file.
        hint: one of `HINTS`: what is named.
        examples: calls and what they must give.

    """
    where = {
        "function": f"`{target.qualname}` in `{path}` gives wrong results for some inputs.",
        "module": f"Something in `{path}` gives wrong results for some inputs.",
        "symptom": "Some calls into this repository give wrong results.",
    }[hint]
    return f"{where} Find the bug and fix it where it is.\n\n{_examples(examples)}"


def feature_instruction(
    target: Target, path: str, hint: str, examples: Sequence[tuple[str, str]]
) -> str:
    """Ask for a function's missing body."""
    return (
        f"`{target.qualname}` in `{path}` has no body. Write it as its docstring says.\n\n"
        f"{_examples(examples)}"
    )


def commit_instruction(subject: str, tests: Sequence[str]) -> str:
    """Ask for what a commit did."""
    names = ", ".join(f"`{name}`" for name in tests)
    return f"{subject}\n\nTests that will be run: {names}. They are not in the repository yet."


def _examples(examples: Sequence[tuple[str, str]]) -> str:
    if not examples:
        return "Other calls must go on giving what they give."
    rows = "\n".join(f"    {call}\n    must give: {line}" for call, line in examples)
    return f"For example:\n\n{rows}\n"
