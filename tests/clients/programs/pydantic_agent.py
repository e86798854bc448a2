"""`pydantic-ai`: agents over Chat Completions, Responses and Messages."""

from typing import Literal

from cases import (
    ANSWERS,
    KEY,
    LONG,
    MODEL,
    SLOW_KEY,
    URL,
    WRONG_KEY,
    among,
    case,
    main,
    raises,
    same,
)
from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Answer(BaseModel):
    passed: bool


def chat(key: str = KEY) -> OpenAIChatModel:
    import openai

    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0)
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))


def with_bash(agent: Agent) -> Agent:
    @agent.tool_plain
    def bash(command: Literal["ls", "pwd"]) -> str:
        """Run a command."""
        return "a.py"

    return agent


@case
def plain():
    reply = Agent(chat(), instructions="Be brief.").run_sync("Fix the tests.")
    among(reply.output, ANSWERS)


@case
def stream():
    import asyncio

    async def run() -> str:
        async with Agent(chat()).run_stream("Fix the tests.") as reply:
            return "".join([text async for text in reply.stream_text(delta=True)])

    among(asyncio.run(run()), ANSWERS)


@case
def tools():
    reply = with_bash(Agent(chat())).run_sync("Fix the tests.")
    among(reply.output, ANSWERS)
    same(sum(len(getattr(m, "parts", ())) for m in reply.all_messages()), 4)


@case
def tool_output():
    agent = Agent(
        chat(), output_type=ToolOutput(Answer), model_settings=ModelSettings(max_tokens=100)
    )
    among(agent.run_sync("Fix.").output.passed, (True, False))


@case
def json_schema():
    agent = Agent(
        chat(), output_type=NativeOutput(Answer), model_settings=ModelSettings(max_tokens=100)
    )
    among(agent.run_sync("Fix.").output.passed, (True, False))


@case
def responses():
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
    agent = with_bash(Agent(OpenAIResponsesModel(MODEL, provider=provider)))
    among(agent.run_sync("Fix the tests.").output, ANSWERS)


@case
def messages():
    provider = AnthropicProvider(base_url=URL, api_key=KEY)
    agent = with_bash(Agent(AnthropicModel(MODEL, provider=provider)))
    among(agent.run_sync("Fix the tests.").output, ANSWERS)


@case
def error_context():
    error = raises(ModelHTTPError, lambda: Agent(chat()).run_sync(LONG))
    same((error.status_code, error.body["code"]), (400, "context_length_exceeded"))


@case
def error_auth():
    error = raises(ModelHTTPError, lambda: Agent(chat(WRONG_KEY)).run_sync("Fix."))
    same(error.status_code, 401)


@case
def error_rate():
    agent = Agent(chat(SLOW_KEY))
    error = raises(ModelHTTPError, lambda: [agent.run_sync("Fix.") for _ in range(5)])
    same(error.status_code, 429)


@case
def session():
    agent = with_bash(Agent(chat()))
    reply = agent.run_sync("Fix the tests.")
    for text in ("Go on.", "And then?"):
        reply = agent.run_sync(text, message_history=reply.all_messages())
    among(reply.output, ANSWERS)


main()
