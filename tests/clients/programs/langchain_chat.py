"""`langchain-openai`."""

import openai
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
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """What was found."""

    model_config = ConfigDict(extra="forbid")
    passed: bool


@tool
def bash(command: str) -> str:
    """Run a command."""
    return "a.py"


@tool
def look(deep: bool) -> str:
    """Look."""
    return "a.py"


def model(key: str = KEY, **options) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, api_key=key, base_url=f"{URL}/v1", max_retries=0, **options)


@case
def plain():
    reply = model().invoke("Fix the tests.")
    among(reply.content, ANSWERS)
    same(reply.usage_metadata["output_tokens"], 5)


@case
def stream():
    among("".join(chunk.content for chunk in model().stream("Fix the tests.")), ANSWERS)


@case
def tools():
    asks = model().bind_tools([bash])
    first = HumanMessage("Fix the tests.")
    reply = asks.invoke([first])
    (call,) = reply.tool_calls
    same((call["name"], call["args"]), ("bash", {"command": "ls"}))
    result = ToolMessage("a.py", tool_call_id=call["id"])
    among(asks.invoke([first, reply, result]).content, ANSWERS)


@case
def tool_required():
    reply = (
        model(max_tokens=200)
        .bind_tools([look], tool_choice="required", strict=True)
        .invoke("Look.")
    )
    among(reply.tool_calls[0]["args"]["deep"], (True, False))


@case
def tool_named():
    reply = (
        model(max_tokens=200)
        .bind_tools([look, bash], tool_choice="look", strict=True)
        .invoke("Look.")
    )
    same(reply.tool_calls[0]["name"], "look")


@case
def json_schema():
    asks = model(max_tokens=100).with_structured_output(Answer, method="json_schema")
    among(asks.invoke("Fix.").passed, (True, False))


@case
def function_calling():
    asks = model(max_tokens=100).with_structured_output(
        Answer, method="function_calling", strict=True
    )
    among(asks.invoke("Fix.").passed, (True, False))


@case
def stop():
    same(model().invoke("Fix.", stop=[" pass"]).content, "The tests")


@case
def several():
    same(len(model(n=3).generate([[HumanMessage("Fix.")]]).generations[0]), 3)


@case
def logprobs():
    reply = model(logprobs=True, top_logprobs=2).invoke("Fix.")
    same(len(reply.response_metadata["logprobs"]["content"]), 5)


@case
def responses():
    reply = model(use_responses_api=True).invoke("Fix the tests.")
    among(reply.text if isinstance(reply.text, str) else reply.text(), ANSWERS)


@case
def error_context():
    error = raises(openai.BadRequestError, lambda: model().invoke(LONG))
    same(error.code, "context_length_exceeded")


@case
def error_auth():
    raises(openai.AuthenticationError, lambda: model(WRONG_KEY).invoke("Fix."))


@case
def error_rate():
    slow = model(SLOW_KEY)
    raises(openai.RateLimitError, lambda: [slow.invoke("Fix.") for _ in range(5)])


@case
def session():
    asks, history = model().bind_tools([bash]), [HumanMessage("Fix the tests.")]
    for text in ("Go on.", "And then?", "Thank you."):
        reply = asks.invoke(history)
        history.append(reply)
        history += [ToolMessage("a.py", tool_call_id=call["id"]) for call in reply.tool_calls]
        history.append(HumanMessage(text))
    among(asks.invoke(history).content, ANSWERS)


main()
