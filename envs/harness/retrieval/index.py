"""The search index of one machine's files, kept on the host.

Each search lists the files with sizes and times, reads and splits those that changed, and embeds
only new chunks. Files are split into definitions, together with the comments above them, by a line
pattern: this works for any language and for broken files, and nothing by the policy is parsed.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.envs.harness.retrieval.ranking import WordIndex, cosine_scores, fused_scores
from penstock.envs.harness.tool_calls import InvalidCallError
from penstock.envs.sandbox import WORK_DIR, Sandbox, SandboxFileError

LINES_MAX = 60
LINES_MIN = 3
_DEFINITION = re.compile(
    r"^\s*(?:(?:export|public|private|static|async|pub|abstract|final|default)\s+)*"
    r"(?:def|class|func|fn|function|interface|struct|enum|impl|trait|type|module)\b"
)
_ATTACHED = re.compile(r"^\s*(?:@|#|//|/\*|\*|\"\"\"|$)")


@dataclass(frozen=True)
class Chunk:
    """Some lines of a file."""

    path: str
    first_line: int
    """First line, from 1."""
    text: str

    @property
    def last_line(self) -> int:
        """Last line, inclusive."""
        return self.first_line + self.text.count("\n")


def cut(path: str, text: str) -> list[Chunk]:
    """Split a file into chunks, in its order."""
    lines = text.splitlines()
    definitions = [index for index, line in enumerate(lines) if _DEFINITION.match(line)]
    starts = sorted({0, *(_with_attached(lines, at) for at in definitions)})
    chunks: list[Chunk] = []
    for first, after in zip(starts, [*starts[1:], len(lines)], strict=True):
        # Long definitions are split: an embedding of many lines says little about any of them.
        for start in range(first, after, LINES_MAX):
            piece = lines[start : min(after, start + LINES_MAX)]
            if any(line.strip() for line in piece):
                chunks.append(Chunk(path, start + 1, "\n".join(piece)))
    return _merged(chunks)


def _with_attached(lines: list[str], at: int) -> int:
    """Return the first line of the decorators and comments above a definition."""
    first = at
    while first > 0 and lines[first - 1].strip() and _ATTACHED.match(lines[first - 1]):
        first -= 1
    return first


def _merged(chunks: list[Chunk]) -> list[Chunk]:
    kept: list[Chunk] = []
    for chunk in chunks:
        is_short = chunk.text.count("\n") + 1 < LINES_MIN
        if kept and is_short and kept[-1].text.count("\n") + LINES_MIN <= LINES_MAX:
            last = kept.pop()
            gap = "\n" * (chunk.first_line - last.last_line)
            kept.append(Chunk(last.path, last.first_line, f"{last.text}{gap}{chunk.text}"))
        else:
            kept.append(chunk)
    return kept


FILES_MAX = 4_000
FILE_BYTES_MAX = 256 << 10
LIST_BYTES_MAX = 1 << 20
LIST_S_MAX = 20.0
SHOWN_LINES = 4
_LIST = ["find", ".", "-type", "f", "-not", "-path", "*/.*", "-printf", "%P\\t%s\\t%T@\\n"]


class Embedder(Protocol):
    """Turns texts into vectors."""

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [N, D], one row per text."""
        ...


class CodeSearch:
    """Search over the working directory of one machine."""

    def __init__(self, sandbox: Sandbox, embedder: Embedder | None) -> None:
        self._sandbox, self._embedder = sandbox, embedder
        self._files: dict[str, tuple[str, list[Chunk]]] = {}
        """(size and time, chunks) by path."""
        self._vectors: dict[str, np.ndarray] = {}
        """Embedding [D] by digest of a chunk's text."""
        self._words: tuple[str, WordIndex] | None = None
        """Digest of all chunks, and their index."""

    async def find(self, query: str, below: str, num: int) -> str:
        """Return the best chunks as `path:first-last` with their first lines."""
        await self._refresh()
        chunks = [
            chunk
            for path in sorted(self._files)
            if below in {".", path} or path.startswith(f"{below}/")
            for chunk in self._files[path][1]
        ]
        if not chunks:
            raise InvalidCallError(f"nothing to search below {below}")
        scores = await self._scores(query, chunks)
        best = [index for index in np.argsort(-scores, kind="stable")[:num] if scores[index] > 0]
        return "\n".join(_shown(chunks[index]) for index in best) or "no match"

    async def _scores(self, query: str, chunks: list[Chunk]) -> np.ndarray:
        texts = [f"{chunk.path}\n{chunk.text}" for chunk in chunks]
        by_words = self._word_index(texts).scores(query)
        if self._embedder is None:
            return by_words
        vectors = await self._embedded(self._embedder, texts)
        (asked,) = await self._embedder.embed([query])
        return fused_scores([by_words, cosine_scores(asked, vectors)])

    def _word_index(self, texts: list[str]) -> WordIndex:
        key = _digest("\0".join(texts))
        if self._words is None or self._words[0] != key:
            self._words = (key, WordIndex(texts))
        return self._words[1]

    async def _embedded(self, embedder: Embedder, texts: list[str]) -> np.ndarray:
        keys = [_digest(text) for text in texts]
        missing = {key: text for key, text in zip(keys, texts, strict=True)
                   if key not in self._vectors}  # fmt: skip
        if missing:
            rows = await embedder.embed(list(missing.values()))
            self._vectors |= dict(zip(missing, rows, strict=True))
        # Forget the others, or edits would make the cache grow without bound.
        self._vectors = {key: self._vectors[key] for key in keys}
        return np.stack([self._vectors[key] for key in keys])

    async def _refresh(self) -> None:
        done = await self._sandbox.exec(
            _LIST, timeout_s=LIST_S_MAX, output_bytes_max=LIST_BYTES_MAX
        )
        rows = [line.split("\t") for line in done.stdout.decode("utf-8", "replace").splitlines()]
        stamps = {
            row[0]: f"{row[1]} {row[2]}"
            for row in rows
            if len(row) == 3 and row[1].isdigit() and int(row[1]) <= FILE_BYTES_MAX
        }
        if len(stamps) > FILES_MAX:
            raise InvalidCallError(f"{len(stamps)} files, at most {FILES_MAX} can be searched")
        for path in self._files.keys() - stamps.keys():
            del self._files[path]
        for path, stamp in stamps.items():
            # By size and time: reading every file for each search would take seconds.
            if path not in self._files or self._files[path][0] != stamp:
                self._files[path] = (stamp, cut(path, await self._text(path)))

    async def _text(self, path: str) -> str:
        try:
            data = await self._sandbox.read_file(f"{WORK_DIR}/{path}", FILE_BYTES_MAX)
            return "" if b"\0" in data else data.decode()
        except (SandboxFileError, UnicodeDecodeError):
            return ""


def _shown(chunk: Chunk) -> str:
    lines = [line for line in chunk.text.splitlines() if line.strip()][:SHOWN_LINES]
    return "\n".join([f"{chunk.path}:{chunk.first_line}-{chunk.last_line}", *lines])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
