"""Answers a judge's questions with an OpenAI-compatible service.

The key comes from the environment or a file and is sent only to the configured address
(`envs/outbound.py`). It never appears in a log, event or error.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.actors.judge.rubric.config import EndpointConfig
from penstock.actors.judge.rubric.judge import (
    JudgeAnswer,
    JudgeRefusedError,
    JudgeServiceError,
    TextRefusedError,
)
from penstock.actors.judge.rubric.question import JudgeQuestion
from penstock.actors.runtime.files import read_small
from penstock.envs.outbound import LOST, Outbound, ReplyTooLargeError
from penstock.messages.errors import CodecError, ConfigError
from penstock.messages.reading.parsing import parse_json

REPLY_BYTES_MAX = 1 << 20
KEY_BYTES_MAX = 4096
MODEL_CHARACTERS_MAX = 256
"""Maximum characters of the model name that a service reports; verdicts record it."""
USAGE_TOKENS_MAX = 1 << 31
"""Maximum token count that is believed; a larger one is recorded as 0."""
_SHOWN_CHARACTERS_MAX = 120
_TEXT_REFUSED = frozenset({400, 413, 422})
"""Statuses for texts that are too long or filtered: the policy's doing, not a failed service."""
_BUSY = frozenset({408, 409, 425, 429})


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    model: str = ""
    usage: _Usage | None = None


class Endpoint:
    """A chat-completions service.

    Raises:
        ConfigError: The key is missing or malformed.

    """

    def __init__(self, config: EndpointConfig, environment: Mapping[str, str] = os.environ) -> None:
        self._config = config
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        key = read_key(config, environment)
        self._service = Outbound(
            config.url,
            field="judge.judges.endpoint.url",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            secrets=[key],
            allowed=config.allow_plain_text,
        )

    async def answer(self, question: JudgeQuestion) -> JudgeAnswer:
        """Ask once; see `Answerer`."""
        data = await self._post(self._body(question))
        try:
            reply = parse_json(data, _Reply, "reply")
            text = reply.choices[0].message.content or ""
        except (CodecError, LookupError) as error:
            cause = self._service.hide(f"{type(error).__name__}: {error}")
            raise JudgeServiceError(f"{self._url}: {cause}") from error
        usage = reply.usage or _Usage()
        return JudgeAnswer(
            text=self._service.hide(text),
            answered_by=self._service.hide(reply.model or self._config.model)[
                :MODEL_CHARACTERS_MAX
            ],
            num_prompt_tokens=_count(usage.prompt_tokens),
            num_reply_tokens=_count(usage.completion_tokens),
        )

    def _body(self, question: JudgeQuestion) -> dict[str, Any]:
        config = self._config
        body: dict[str, Any] = {
            "model": config.model,
            "messages": [
                {"role": message.role.value, "content": message.content}
                for message in question.messages
            ],
            "temperature": config.temperature,
            "max_tokens": config.reply_tokens_max,
        }
        if config.structured:
            letter: dict[str, Any] = {"type": "string", "enum": list(question.letters)}
            several = {"choices": {"type": "array", "items": letter}}
            fields = several if question.takes_several else {"choice": letter}
            schema = {
                "type": "object",
                "properties": fields,
                "required": list(fields),
                "additionalProperties": False,
            }
            named = {"name": "answer", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return body

    async def _post(self, body: dict[str, Any]) -> bytes:
        try:
            status, data = await self._service.post(
                "/chat/completions", self._config.timeout_s, REPLY_BYTES_MAX, json=body
            )
        except ReplyTooLargeError as error:
            raise JudgeServiceError(f"{self._url}: {error}") from error
        except (*LOST, OSError, ValueError) as error:
            cause = self._service.hide(f"{type(error).__name__}: {error}")
            raise JudgeServiceError(f"{self._url}: {cause}") from error
        if status == 200:
            return data
        said = self._service.said(data, _SHOWN_CHARACTERS_MAX)
        shown = f"{self._url}: status {status}: {said}"
        if status in _TEXT_REFUSED:
            raise TextRefusedError(shown)
        if status in _BUSY or status >= 500:
            raise JudgeServiceError(shown)
        raise JudgeRefusedError(shown)


def read_key(config: EndpointConfig, environment: Mapping[str, str]) -> str:
    """Return the key; empty where the settings name none.

    Raises:
        ConfigError: The key is missing or malformed.

    """
    if config.key_env:
        field = f"judge.judges.endpoint.key_env {config.key_env}"
        if config.key_env not in environment:
            text = "expected a key in this environment variable; it is not set"
            raise ConfigError(f"{field}: {text}")
        key = environment[config.key_env]
    elif config.key_file:
        field = f"judge.judges.endpoint.key_file {config.key_file}"
        try:
            data = read_small(Path(config.key_file), 2 * KEY_BYTES_MAX)
        except ConfigError as error:
            raise ConfigError(f"{field}: {error}") from error
        key = data.decode("ascii", "replace").strip()
    else:
        return ""
    if not re.fullmatch(rf"[\x21-\x7e]{{1,{KEY_BYTES_MAX}}}", key):
        raise ConfigError(f"{field}: expected a key of printable characters without spaces")
    return key


def _count(num_tokens: int) -> int:
    return num_tokens if 0 <= num_tokens <= USAGE_TOKENS_MAX else 0
