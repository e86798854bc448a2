"""`openai`, Responses."""

import json

import openai
import pydantic
from cases import (
    ANSWER_SCHEMA,
    ANSWERS,
    KEY,
    LONG,
    MODEL,
    PARAMETERS,
    SLOW_KEY,
    URL,
    WRONG_KEY,
    among,
    case,
    main,
    raises,
    same,
)

BASH = {
    "type": "function",
    "name": "bash",
    "description": "Run a command.",
    "parameters": PARAMETERS,
    "strict": True,
}
LOOK = BASH | {"name": "look"}


def client(key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0)


def ask(**options):
    return client().responses.create(**{"model": MODEL, "input": "Fix the tests."} | options)


@case
def plain():
    reply = ask(instructions="Be brief.")
    among(reply.output_text, ANSWERS)
    same((reply.status, reply.usage.output_tokens), ("completed", 5))


@case
def stream():
    events = list(ask(stream=True))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    among(text, ANSWERS)
    same((events[0].type, events[-1].type), ("response.created", "response.completed"))
    same([event.sequence_number for event in events], list(range(len(events))))
    same(events[-1].response.output_text, text)


@case
def tools():
    first = {"role": "user", "content": "Fix the tests."}
    reply = ask(input=[first], tools=[BASH])
    (call,) = reply.output
    same((call.type, call.name), ("function_call", "bash"))
    among(json.loads(call.arguments)["command"], ("ls", "pwd"))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "a.py"}
    reply = ask(input=[first, call, result], tools=[BASH])
    among(reply.output_text, ANSWERS)


@case
def stream_tools():
    with client().responses.stream(model=MODEL, input="Fix.", tools=[BASH]) as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert "response.function_call_arguments.done" in kinds, kinds
    among(json.loads(final.output[0].arguments)["command"], ("ls", "pwd"))


@case
def tool_required():
    (call,) = ask(tools=[BASH, LOOK], tool_choice="required", max_output_tokens=200).output
    among(json.loads(call.arguments)["command"], ("ls", "pwd"))


@case
def tool_named():
    choice = {"type": "function", "name": "look"}
    (call,) = ask(tools=[BASH, LOOK], tool_choice=choice, max_output_tokens=200).output
    same(call.name, "look")


@case
def json_schema():
    form = {"type": "json_schema", "name": "answer", "schema": ANSWER_SCHEMA, "strict": True}
    reply = ask(text={"format": form}, max_output_tokens=100)
    among(json.loads(reply.output_text)["grade"], ("A", "B"))


@case
def parsed():
    class Answer(pydantic.BaseModel):
        passed: bool

    reply = client().responses.parse(
        model=MODEL, input="Fix.", text_format=Answer, max_output_tokens=100
    )
    among(reply.output_parsed.passed, (True, False))


@case
def max_tokens():
    reply = ask(max_output_tokens=2)
    same((reply.status, reply.incomplete_details.reason), ("incomplete", "max_output_tokens"))


@case
def usual_fields():
    reply = ask(
        **{"temperature": 1, "top_p": 1, "user": "ann", "metadata": {"a": "b"}, "store": False},
        **{"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "truncation": "disabled"},
        **{"prompt_cache_key": "k", "include": ["reasoning.encrypted_content"]},
        **{"parallel_tool_calls": True, "tool_choice": "auto", "service_tier": "auto"},
    )
    among(reply.output_text, ANSWERS)


@case
def error_context():
    error = raises(openai.BadRequestError, lambda: ask(input=LONG))
    same(error.code, "context_length_exceeded")


@case
def error_auth():
    responses = client(WRONG_KEY).responses
    raises(openai.AuthenticationError, lambda: responses.create(model=MODEL, input="Fix."))


@case
def error_rate():
    responses = client(SLOW_KEY).responses

    def often():
        for _ in range(5):
            responses.create(model=MODEL, input="Fix.")

    raises(openai.RateLimitError, often)


@case
def session():
    items = [{"role": "user", "content": "Fix the tests."}]
    for text in ("Go on.", "And then?", "Thank you."):
        reply = ask(input=items, tools=[BASH], store=False)
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        for item in reply.output:
            if item.type == "function_call":
                done = {"type": "function_call_output", "call_id": item.call_id, "output": "a.py"}
                items.append(done)
        items.append({"role": "user", "content": text})
    among(ask(input=items, tools=[BASH]).output_text, ANSWERS)


main()
