"""Embeddings from any endpoint that speaks OpenAI's `/v1/embeddings`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.envs.outbound import LOST, Outbound
from penstock.messages.errors import CodecError, PenstockError
from penstock.messages.reading.parsing import parse_json

BATCH_MAX = 64
CHARACTERS_MAX = 8_000
TIMEOUT_S = 60.0
REPLY_BYTES_MAX = 16 << 20
"""Of one batch: 64 vectors of 8,192 numbers in JSON."""


class EmbeddingError(PenstockError, ConnectionError):
    """The endpoint did not answer with embeddings; the text has its error."""


class HttpEmbedder:
    """Requests embeddings from an endpoint.

    Args:
        url: Base URL, including `/v1`.
        key: Bearer token; empty for none.
        allowed: Hosts off this machine that may get texts and key in plain text.

    """

    def __init__(self, url: str, model: str, key: str = "", allowed: Sequence[str] = ()) -> None:
        self._url, self._model = url.rstrip("/"), model
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._service = Outbound(
            url, field="--embeddings", headers=headers, secrets=[key], allowed=allowed
        )

    async def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return float32 [N, D].

        Raises:
            EmbeddingError: The endpoint did not answer with one embedding per text.

        """
        rows: list[list[float]] = []
        for start in range(0, len(texts), BATCH_MAX):
            rows += await self._batch(texts[start : start + BATCH_MAX])
        return np.array(rows, np.float32)

    async def _batch(self, texts: Sequence[str]) -> list[list[float]]:
        body = {"model": self._model, "input": [text[:CHARACTERS_MAX] or " " for text in texts]}
        try:
            status, found = await self._service.post(
                "/embeddings", TIMEOUT_S, REPLY_BYTES_MAX, json=body
            )
            if status != 200:
                said = self._service.said(found, 200)
                raise EmbeddingError(f"{self._url}: status {status}: {said}")
            answer = parse_json(found, dict[str, Any], "reply")
            # Services may answer in any order.
            data = sorted(answer["data"], key=lambda one: one["index"])
            rows = [[float(value) for value in one["embedding"]] for one in data]
        except (*LOST, CodecError, KeyError, TypeError) as error:
            cause = self._service.hide(f"{type(error).__name__}: {error}")
            raise EmbeddingError(f"{self._url}: {cause}") from error
        if len(rows) != len(texts) or len({len(row) for row in rows}) != 1:
            raise EmbeddingError(f"{self._url}: expected {len(texts)} embeddings of one size")
        return rows
