"""`openai-agents`: its loop over Responses and Chat Completions."""

import asyncio
from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cases import ANSWERS, KEY, LONG, MODEL, SLOW_KEY, URL, WRONG_KEY, among, case, main, raises
from pydantic import BaseModel

set_tracing_disabled(True)


class Answer(BaseModel):
    passed: bool


@function_tool
def bash(command: Literal["ls", "pwd"]) -> str:
    """Run a command."""
    return "a.py"


def run(kind: Any, text: Any = "Fix the tests.", key: str = KEY, **options: Any) -> Any:
    async def all_of_it() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0) as client:
            agent = Agent(name="a", model=kind(MODEL, client), **options)
            return await Runner.run(agent, text)

    return asyncio.run(all_of_it())


def stream_of(kind: Any) -> str:
    async def all_of_it() -> str:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
            done = Runner.run_streamed(
                Agent(name="a", model=kind(MODEL, client), tools=[bash]), "Fix."
            )
            async for _ in done.stream_events():
                pass
            return done.final_output

    return asyncio.run(all_of_it())


@case
def responses_plain():
    among(run(OpenAIResponsesModel, instructions="Be brief.").final_output, ANSWERS)


@case
def responses_tools():
    among(run(OpenAIResponsesModel, tools=[bash]).final_output, ANSWERS)


@case
def responses_stream():
    among(stream_of(OpenAIResponsesModel), ANSWERS)


@case
def responses_json_schema():
    options = {"output_type": Answer, "model_settings": ModelSettings(max_tokens=100)}
    among(run(OpenAIResponsesModel, **options).final_output.passed, (True, False))


@case
def chat_plain():
    among(run(OpenAIChatCompletionsModel).final_output, ANSWERS)


@case
def chat_tools():
    among(run(OpenAIChatCompletionsModel, tools=[bash]).final_output, ANSWERS)


@case
def chat_stream():
    among(stream_of(OpenAIChatCompletionsModel), ANSWERS)


@case
def chat_json_schema():
    options = {"output_type": Answer, "model_settings": ModelSettings(max_tokens=100)}
    among(run(OpenAIChatCompletionsModel, **options).final_output.passed, (True, False))


@case
def chat_tool_required():
    settings = ModelSettings(tool_choice="required", max_tokens=200)
    tool = function_tool(lambda deep: "a.py", name_override="look", description_override="Look.")
    tool.params_json_schema["properties"]["deep"] = {"type": "boolean"}
    reply = run(OpenAIChatCompletionsModel, tools=[tool], model_settings=settings)
    among(reply.final_output, ANSWERS)


@case
def error_context():
    raises(openai.BadRequestError, lambda: run(OpenAIResponsesModel, LONG))


@case
def error_auth():
    raises(openai.AuthenticationError, lambda: run(OpenAIResponsesModel, key=WRONG_KEY))


@case
def error_rate():
    kind = OpenAIResponsesModel
    raises(openai.RateLimitError, lambda: [run(kind, key=SLOW_KEY) for _ in range(5)])


@case
def session():
    reply = run(OpenAIResponsesModel, tools=[bash])
    for text in ("Go on.", "And then?"):
        items = [*reply.to_input_list(), {"role": "user", "content": text}]
        reply = run(OpenAIResponsesModel, items, tools=[bash])
    among(reply.final_output, ANSWERS)


main()
