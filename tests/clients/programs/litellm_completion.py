"""`litellm`: its own form of Chat Completions, its own exceptions."""

import json
import logging

import litellm
from cases import (
    ANSWER_SCHEMA,
    ANSWERS,
    KEY,
    LONG,
    MODEL,
    PARAMETERS,
    SLOW_KEY,
    URL,
    USER,
    WRONG_KEY,
    among,
    case,
    main,
    raises,
    same,
)

litellm.suppress_debug_info = True
logging.getLogger("LiteLLM").setLevel(logging.CRITICAL)
BASH = {
    "type": "function",
    "function": {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS},
}


def ask(**options):
    defaults = {"model": f"openai/{MODEL}", "messages": USER, "api_key": KEY, "num_retries": 0}
    return litellm.completion(**defaults | {"api_base": f"{URL}/v1"} | options)


@case
def plain():
    reply = ask()
    among(reply.choices[0].message.content, ANSWERS)
    same(reply.usage.completion_tokens, 5)


@case
def stream():
    chunks = list(ask(stream=True))
    among("".join(chunk.choices[0].delta.content or "" for chunk in chunks), ANSWERS)


@case
def tools():
    message = ask(tools=[BASH]).choices[0].message
    same(json.loads(message.tool_calls[0].function.arguments), {"command": "ls"})
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a.py"}
    reply = ask(tools=[BASH], messages=[*USER, message.model_dump(), result])
    among(reply.choices[0].message.content, ANSWERS)


@case
def tool_required():
    reply = ask(tools=[BASH], tool_choice="required", max_tokens=200)
    among(
        json.loads(reply.choices[0].message.tool_calls[0].function.arguments)["command"],
        ("ls", "pwd"),
    )


@case
def json_schema():
    schema = {"name": "answer", "schema": ANSWER_SCHEMA, "strict": True}
    reply = ask(response_format={"type": "json_schema", "json_schema": schema}, max_tokens=100)
    among(json.loads(reply.choices[0].message.content)["grade"], ("A", "B"))


@case
def stop():
    same(ask(stop=[" pass"]).choices[0].message.content, "The tests")


@case
def several():
    same(len(ask(n=3).choices), 3)


@case
def logprobs():
    reply = ask(logprobs=True, top_logprobs=2)
    same(len(reply.choices[0].logprobs.content), 5)


@case
def error_context():
    messages = [{"role": "user", "content": LONG}]
    raises(litellm.ContextWindowExceededError, lambda: ask(messages=messages))


@case
def error_auth():
    raises(litellm.AuthenticationError, lambda: ask(api_key=WRONG_KEY))


@case
def error_rate():
    raises(litellm.RateLimitError, lambda: [ask(api_key=SLOW_KEY) for _ in range(5)])


@case
def responses():
    reply = litellm.responses(
        model=f"openai/{MODEL}", input="Fix the tests.", api_key=KEY, api_base=f"{URL}/v1"
    )
    among(reply.output[0].content[0].text, ANSWERS)


@case
def messages():
    reply = litellm.completion(
        model=f"anthropic/{MODEL}", messages=USER, api_key=KEY, api_base=URL, max_tokens=64
    )
    among(reply.choices[0].message.content, ANSWERS)


@case
def session():
    history = [*USER]
    for text in ("Go on.", "And then?", "Thank you."):
        message = ask(messages=history, tools=[BASH]).choices[0].message
        history.append(message.model_dump())
        for call in message.tool_calls or ():
            history.append({"role": "tool", "tool_call_id": call.id, "content": "a.py"})
        history.append({"role": "user", "content": text})
    among(ask(messages=history, tools=[BASH]).choices[0].message.content, ANSWERS)


main()
