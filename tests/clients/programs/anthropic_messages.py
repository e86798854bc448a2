"""`anthropic`, Messages."""

import anthropic
from cases import (
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

BASH = {"name": "bash", "description": "Run a command.", "input_schema": PARAMETERS}
LOOK = BASH | {"name": "look"}


def client(key: str = KEY) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=URL, api_key=key, max_retries=0)


def ask(**options):
    return client().messages.create(
        **{"model": MODEL, "messages": USER, "max_tokens": 64} | options
    )


@case
def plain():
    reply = ask(system="Be brief.")
    among(reply.content[0].text, ANSWERS)
    same((reply.stop_reason, reply.usage.output_tokens), ("end_turn", 5))


@case
def stream():
    with client().messages.stream(model=MODEL, messages=USER, max_tokens=64) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    among(text, ANSWERS)
    same((final.content[0].text, final.usage.output_tokens), (text, 5))


@case
def tools():
    reply = ask(tools=[BASH])
    (call,) = reply.content
    same((reply.stop_reason, call.name, call.input), ("tool_use", "bash", {"command": "ls"}))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "a.py"}
    messages = [
        *USER,
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [result]},
    ]
    among(ask(tools=[BASH], messages=messages).content[0].text, ANSWERS)


@case
def stream_tools():
    options = {"model": MODEL, "messages": USER, "max_tokens": 64, "tools": [BASH]}
    with client().messages.stream(**options) as events:
        final = events.get_final_message()
    same((final.stop_reason, final.content[0].input), ("tool_use", {"command": "ls"}))


@case
def tool_required():
    reply = ask(tools=[BASH, LOOK], tool_choice={"type": "any"}, max_tokens=200)
    (call,) = reply.content
    among(call.input["command"], ("ls", "pwd"))


@case
def tool_named():
    choice = {"type": "tool", "name": "look"}
    (call,) = ask(tools=[BASH, LOOK], tool_choice=choice, max_tokens=200).content
    same(call.name, "look")


@case
def stop():
    reply = ask(stop_sequences=[" pass"])
    same((reply.content[0].text, reply.stop_reason), ("The tests", "stop_sequence"))
    same(reply.stop_sequence, " pass")


@case
def max_tokens():
    reply = ask(max_tokens=2)
    same((reply.content[0].text, reply.stop_reason), ("The tests", "max_tokens"))


@case
def usual_fields():
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [cached | {"text": "Fix the tests."}]}
    reply = ask(
        system=[cached],
        messages=[message],
        **{"metadata": {"user_id": "ann"}, "service_tier": "auto"},
        extra_body={"temperature": 1.0, "top_k": 5, "top_p": 1.0, "thinking": {"type": "disabled"}},
    )
    among(reply.content[0].text, ANSWERS)


@case
def count_tokens():
    options = {"model": MODEL, "messages": USER}
    found = client().messages.count_tokens(**options).input_tokens
    same(found, ask().usage.input_tokens)


@case
def error_context():
    messages = [{"role": "user", "content": LONG}]
    error = raises(anthropic.BadRequestError, lambda: ask(messages=messages))
    assert "prompt is too long" in str(error), str(error)


@case
def error_auth():
    options = {"model": MODEL, "messages": USER, "max_tokens": 8}
    raises(anthropic.AuthenticationError, lambda: client(WRONG_KEY).messages.create(**options))


@case
def error_rate():
    options = {"model": MODEL, "messages": USER, "max_tokens": 8}
    slow = client(SLOW_KEY).messages
    raises(anthropic.RateLimitError, lambda: [slow.create(**options) for _ in range(5)])


@case
def session():
    messages = [*USER]
    for text in ("Go on.", "And then?", "Thank you."):
        reply = ask(messages=messages, tools=[BASH])
        messages.append({"role": "assistant", "content": [b.model_dump() for b in reply.content]})
        content = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "a.py"}
            for block in reply.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": [*content, {"type": "text", "text": text}]})
    among(ask(messages=messages, tools=[BASH]).content[0].text, ANSWERS)


main()
