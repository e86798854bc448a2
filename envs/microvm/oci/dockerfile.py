"""Reads a Dockerfile's text: instructions with their lines, variables, and stages. Pure.

Source: docs.docker.com/reference/dockerfile.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from penstock.envs.microvm.oci.tree import ImageError
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json

TEXT_BYTES_MAX, LINES_MAX, INSTRUCTIONS_MAX = 1 << 20, 10_000, 1_000
EXPANDED_MAX = 256 << 10
NAMES = frozenset(
    [
        "ADD",
        "ARG",
        "CMD",
        "COPY",
        "ENTRYPOINT",
        "ENV",
        "EXPOSE",
        "FROM",
        "HEALTHCHECK",
        "LABEL",
        "MAINTAINER",
        "ONBUILD",
        "RUN",
        "SHELL",
        "STOPSIGNAL",
        "USER",
        "VOLUME",
        "WORKDIR",
    ]
)
_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(.*?)\s*")
_HEREDOC = re.compile(r"""<<(?P<dash>-?)(?P<quote>["']?)(?P<word>[A-Za-z_]\w*)(?P=quote)""")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?(?:\s+|$)")
_VARIABLE = re.compile(
    r"\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?::?(?P<how>[-+?])(?P<word>[^}]*))?\})"
)


class DockerfileError(ImageError):
    """A Dockerfile cannot be built; the text begins with its line."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(f"line {line}: {text}" if line else text)


@dataclass(frozen=True, kw_only=True)
class Heredoc:
    """A document inside a Dockerfile."""

    name: str
    content: str
    is_expanded: bool


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction."""

    line: int
    name: str
    flags: list[tuple[str, str]]
    text: str
    """Text after the name and the flags."""
    heredocs: list[Heredoc] = field(default_factory=list)
    escape: str = "\\"

    @property
    def listed(self) -> list[str] | None:
        """The arguments, if they are written as a JSON list."""
        if not self.text.startswith("["):
            return None
        try:
            return parse_json(self.text, list[str], self.name)
        except CodecError:
            return None

    def refused(self, reason: str) -> DockerfileError:
        """Return an error that refuses this instruction."""
        return DockerfileError(self.line, f"{self.name}: {reason}")

    def flag(self, allowed: set[str]) -> dict[str, str]:
        """Return its flags.

        Raises:
            DockerfileError: One of them is not supported.

        """
        for name, _ in self.flags:
            if name not in allowed:
                known = ", ".join(f"--{one}" for one in sorted(allowed)) or "none"
                raise self.refused(f"--{name} is not built here; flags that are: {known}")
        return dict(self.flags)


def parse_dockerfile(data: bytes) -> list[Instruction]:
    """Return the instructions of a Dockerfile.

    Raises:
        DockerfileError: It is too long, not text, or has an unknown instruction.

    """
    if len(data) > TEXT_BYTES_MAX:
        raise DockerfileError(0, f"expected {TEXT_BYTES_MAX} bytes at most, got {len(data)}")
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DockerfileError(data[: error.start].count(b"\n") + 1, "expected UTF-8") from error
    lines = text.split("\n")
    if len(lines) > LINES_MAX or "\0" in text:
        raise DockerfileError(0, f"expected {LINES_MAX} lines of text at most")
    escape = _directives(lines).get("escape", "\\")
    if escape not in {"\\", "`"}:
        raise DockerfileError(1, f"escape: expected \\ or `, got {escape!r}")
    found = list(_instructions(lines, escape))
    if len(found) > INSTRUCTIONS_MAX:
        raise DockerfileError(0, f"more than {INSTRUCTIONS_MAX} instructions")
    if not found or next((one for one in found if one.name != "ARG"), found[0]).name != "FROM":
        raise DockerfileError(found[0].line if found else 0, "expected FROM first")
    return found


def _directives(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        match = _DIRECTIVE.fullmatch(line.strip())
        if match is None:
            break
        found.setdefault(match[1].lower(), match[2])
    return found


def _instructions(lines: list[str], escape: str) -> Iterator[Instruction]:
    at = 0
    while at < len(lines):
        start, parts = at, []
        while at < len(lines):
            line = lines[at]
            at += 1
            # Comments and empty lines inside an instruction are not part of it.
            if line.strip().startswith("#") or (parts and not line.strip()):
                continue
            continued = line.rstrip().endswith(escape)
            parts.append(line.rstrip()[:-1] if continued else line)
            if not continued:
                break
        logical = "".join(parts).strip()
        if logical:
            first = next(n for n in range(start, at) if not _is_empty(lines[n]))
            instruction, at = _instruction(logical, first + 1, lines, at, escape)
            yield instruction


def _is_empty(line: str) -> bool:
    return not line.strip() or line.strip().startswith("#")


def _instruction(
    logical: str, line: int, lines: list[str], at: int, escape: str
) -> tuple[Instruction, int]:
    word, *rest = logical.split(None, 1)
    name, text = word.upper(), rest[0] if rest else ""
    if name not in NAMES:
        raise DockerfileError(line, f"{word[:40]!r}: expected an instruction")
    if not text:
        raise DockerfileError(line, f"{name}: expected arguments")
    flags: list[tuple[str, str]] = []
    while match := _FLAG.match(text):
        if name in {"ENV", "LABEL", "CMD", "ENTRYPOINT"}:
            break
        flags.append((match[1], match[2] or ""))
        text = text[match.end() :]
    heredocs: list[Heredoc] = []
    if name in {"RUN", "COPY", "ADD"}:
        for found in _HEREDOC.finditer(text):
            content: list[str] = []
            while True:
                if at >= len(lines):
                    raise DockerfileError(line, f"{name}: no end of <<{found['word']}")
                one = lines[at].lstrip("\t") if found["dash"] else lines[at]
                at += 1
                if one == found["word"]:
                    break
                content.append(one + "\n")
            heredocs.append(
                Heredoc(
                    name=found["word"], content="".join(content), is_expanded=not found["quote"]
                )
            )
    instruction = Instruction(
        line=line, name=name, flags=flags, text=text, heredocs=heredocs, escape=escape
    )
    return instruction, at


def is_heredoc_alone(text: str) -> bool:
    """Return whether a command consists only of a document."""
    return _HEREDOC.fullmatch(text.strip()) is not None


def without_heredocs(text: str) -> str:
    """Return arguments without their documents."""
    return _HEREDOC.sub("", text)


def expand(instruction: Instruction, text: str, env: Mapping[str, str]) -> str:
    """Return a text with its variables expanded and its quotes kept.

    Raises:
        DockerfileError: A form is not supported, or a required variable is not set.

    """
    out: list[str] = []
    at, quote = 0, ""
    while at < len(text):
        char = text[at]
        if char == instruction.escape and at + 1 < len(text) and quote != "'":
            out.append(text[at : at + 2])
            at += 2
            continue
        if char in {"'", '"'} and quote in {"", char}:
            quote = "" if quote else char
        if char != "$" or quote == "'":
            out.append(char)
            at += 1
            continue
        match = _VARIABLE.match(text, at)
        if match is None:
            if text[at : at + 2] == "${":
                raise instruction.refused(f"{text[at : at + 40]!r} is no form that is built here")
            out.append(char)
            at += 1
            continue
        out.append(_value(instruction, match, env))
        at = match.end()
    expanded = "".join(out)
    if len(expanded) > EXPANDED_MAX:
        raise instruction.refused(f"more than {EXPANDED_MAX} characters")
    return expanded


def _value(instruction: Instruction, match: re.Match[str], env: Mapping[str, str]) -> str:
    name = match["plain"] or match["name"]
    how, word = match["how"], match["word"] or ""
    has_colon = bool(how) and ":" in match[0].partition(name)[2][:1]
    is_set = name in env and (not has_colon or env[name] != "")
    if how == "?" and not is_set:
        raise instruction.refused(f"{name}: {word or 'not set'}")
    if how == "+":
        return expand(instruction, word, env) if is_set else ""
    if how == "-" and not is_set:
        return expand(instruction, word, env)
    return env.get(name, "")


def words(instruction: Instruction, text: str) -> list[str]:
    """Return the words of a text, without quotes and escapes.

    Raises:
        DockerfileError: A quote is not closed.

    """
    found: list[str] = []
    word, quote, has_word = "", "", False
    at = 0
    while at < len(text):
        char = text[at]
        if char == instruction.escape and quote != "'" and at + 1 < len(text):
            word, has_word = word + text[at + 1], True
            at += 2
            continue
        if char in {"'", '"'} and quote in {"", char}:
            quote, has_word = "" if quote else char, True
        elif char.isspace() and not quote:
            if has_word:
                found.append(word)
            word, has_word = "", False
        else:
            word, has_word = word + char, True
        at += 1
    if quote:
        raise instruction.refused(f"no end of {quote}")
    return [*found, word] if has_word else found


def pairs(instruction: Instruction, env: Mapping[str, str]) -> dict[str, str]:
    """Return the names and values of `ENV`, `LABEL` or `ARG`.

    Raises:
        DockerfileError: They have neither the form `NAME=VALUE` nor `NAME VALUE`.

    """
    text = instruction.text
    if "=" not in text.split(None, 1)[0]:
        name, _, value = text.partition(" ")
        if not value.strip():
            raise instruction.refused("expected NAME=VALUE")
        return {
            name: "".join(
                words(instruction, _quoted(instruction, expand(instruction, value.strip(), env)))
            )
        }
    found: dict[str, str] = {}
    # Expanded before the words are split, as values with spaces are quoted.
    for word in _raw_words(instruction, text):
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise instruction.refused(f"{word[:80]!r}: expected NAME=VALUE")
        plain = words(instruction, _quoted(instruction, expand(instruction, value, env)))
        found["".join(words(instruction, name))] = " ".join(plain)
    return found


def _quoted(instruction: Instruction, text: str) -> str:
    """Return a text whose spaces outside quotes do not split words."""
    out, quote, skip = "", "", False
    for char in text:
        if skip:
            out, skip = out + char, False
            continue
        skip = char == instruction.escape and quote != "'"
        if char in {"'", '"'} and quote in {"", char}:
            quote = "" if quote else char
        out += f'"{char}"' if char.isspace() and not quote else char
    return out


def _raw_words(instruction: Instruction, text: str) -> list[str]:
    found, word, quote, skip = [], "", "", False
    for char in text:
        if skip:
            word, skip = word + char, False
            continue
        skip = char == instruction.escape and quote != "'"
        if char in {"'", '"'} and quote in {"", char}:
            quote = "" if quote else char
        if char.isspace() and not quote:
            found, word = [*found, word] if word else found, ""
        else:
            word += char
    if quote:
        raise instruction.refused(f"no end of {quote}")
    return [*found, word] if word else found
