"""Embeddings from any endpoint that speaks OpenAI's `/v1/embeddings`."""

from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from penstock.messages.errors import PenstockError

BATCH_MAX = 64
CHARACTERS_MAX = 8_000
TIMEOUT_S = 60.0


class EmbeddingError(PenstockError, ConnectionError):
    """The endpoint did not answer with embeddings; the text has its error."""


class HttpEmbedder:
    """Requests embeddings from an endpoint.

    Args:
        url: Base URL, including `/v1`.
        key: Bearer token; empty for none.

    """

    def __init__(self, url: str, model: str, key: str = "") -> None:
        self._url, self._model = url.rstrip("/"), model
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [N, D].

        Raises:
            EmbeddingError: The endpoint did not answer with one embedding per text.

        """
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        rows: list[list[float]] = []
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            for start in range(0, len(texts), BATCH_MAX):
                rows += await self._batch(session, texts[start : start + BATCH_MAX])
        return np.array(rows, np.float32)

    async def _batch(
        self, session: aiohttp.ClientSession, texts: Sequence[str]
    ) -> list[list[float]]:
        body = {"model": self._model, "input": [text[:CHARACTERS_MAX] or " " for text in texts]}
        try:
            async with session.post(f"{self._url}/embeddings", json=body) as reply:
                if reply.status != 200:
                    text = (await reply.text())[:200]
                    raise EmbeddingError(f"{self._url}: status {reply.status}: {text}")
                answer: Any = await reply.json()
            # Services may answer in any order.
            data = sorted(answer["data"], key=lambda one: one["index"])
            rows = [[float(value) for value in one["embedding"]] for one in data]
        except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as error:
            raise EmbeddingError(f"{self._url}: {type(error).__name__}: {error}") from error
        if len(rows) != len(texts) or len({len(row) for row in rows}) != 1:
            raise EmbeddingError(f"{self._url}: expected {len(texts)} embeddings of one size")
        return rows
