"""`openai`, Chat Completions."""

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
    USER,
    WRONG_KEY,
    among,
    case,
    main,
    raises,
    same,
)

BASH = {
    "type": "function",
    "function": {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS},
}
LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS},
}


def client(key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0)


def ask(**options):
    return client().chat.completions.create(**{"model": MODEL, "messages": USER} | options)


@case
def plain():
    reply = ask()
    among(reply.choices[0].message.content, ANSWERS)
    same(reply.choices[0].finish_reason, "stop")
    same(reply.usage.completion_tokens, 5)
    assert reply._request_id, "no request id"


@case
def stream():
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    among(text, ANSWERS)
    same(chunks[-1].usage.completion_tokens, 5)


@case
def tools():
    reply = ask(tools=[BASH])
    message = reply.choices[0].message
    same(reply.choices[0].finish_reason, "tool_calls")
    same(message.tool_calls[0].function.name, "bash")
    same(json.loads(message.tool_calls[0].function.arguments), {"command": "ls"})
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a.py"}
    reply = ask(tools=[BASH], messages=[*USER, message, result])
    among(reply.choices[0].message.content, ANSWERS)


@case
def stream_tools():
    with client().chat.completions.stream(model=MODEL, messages=USER, tools=[BASH]) as events:
        for _ in events:
            pass
        final = events.get_final_completion()
    same(final.choices[0].message.tool_calls[0].function.arguments, '{"command":"ls"}')


@case
def tool_required():
    reply = ask(tools=[BASH, LOOK], tool_choice="required", max_tokens=200)
    (call,) = reply.choices[0].message.tool_calls
    among(call.function.name, ("bash", "look"))
    among(json.loads(call.function.arguments)["command"], ("ls", "pwd"))


@case
def tool_named():
    choice = {"type": "function", "function": {"name": "look"}}
    reply = ask(tools=[BASH, LOOK], tool_choice=choice, max_tokens=200)
    (call,) = reply.choices[0].message.tool_calls
    same(call.function.name, "look")
    among(json.loads(call.function.arguments)["command"], ("ls", "pwd"))


@case
def tool_none():
    among(ask(tools=[BASH], tool_choice="none").choices[0].message.content, ANSWERS)


@case
def json_schema():
    schema = {"name": "answer", "schema": ANSWER_SCHEMA, "strict": True}
    reply = ask(response_format={"type": "json_schema", "json_schema": schema}, max_tokens=100)
    answer = json.loads(reply.choices[0].message.content)
    among(answer["passed"], (True, False))
    among(answer["grade"], ("A", "B"))


@case
def parsed():
    class Answer(pydantic.BaseModel):
        passed: bool

    reply = client().chat.completions.parse(
        model=MODEL, messages=USER, response_format=Answer, max_tokens=100
    )
    among(reply.choices[0].message.parsed.passed, (True, False))


@case
def stop():
    reply = ask(stop=[" pass"])
    same(reply.choices[0].message.content, "The tests")
    same(reply.choices[0].finish_reason, "stop")


@case
def several():
    reply = ask(n=4)
    same([choice.index for choice in reply.choices], [0, 1, 2, 3])
    for choice in reply.choices:
        among(choice.message.content, ANSWERS)


@case
def logprobs():
    reply = ask(logprobs=True, top_logprobs=2)
    tokens = reply.choices[0].logprobs.content
    same([token.token for token in tokens][:2], ["The", " tests"])
    same(sorted(one.token for one in tokens[2].top_logprobs), [" pass", " passed"])
    assert -0.8 < tokens[2].logprob < -0.6, tokens[2].logprob


@case
def max_tokens():
    reply = ask(max_completion_tokens=2)
    same(
        (reply.choices[0].message.content, reply.choices[0].finish_reason), ("The tests", "length")
    )


@case
def usual_fields():
    message = {"role": "user", "content": [{"type": "text", "text": "Fix the tests."}]}
    reply = ask(
        messages=[{"role": "developer", "content": "Be brief."}, message],
        **{"temperature": 1, "top_p": 1, "seed": 3, "user": "ann", "metadata": {"a": "b"}},
        **{"store": False, "reasoning_effort": "low", "verbosity": "low", "logit_bias": {}},
        **{"prompt_cache_key": "k", "safety_identifier": "ann", "modalities": ["text"]},
        **{"presence_penalty": 0, "frequency_penalty": 0, "service_tier": "auto", "stop": None},
        extra_body={"top_k": 50, "min_p": 0, "tools": None, "response_format": {"type": "text"}},
    )
    among(reply.choices[0].message.content, ANSWERS)


@case
def error_context():
    messages = [{"role": "user", "content": LONG}]
    error = raises(openai.BadRequestError, lambda: ask(messages=messages))
    same(error.code, "context_length_exceeded")
    assert "maximum context length" in error.message, error.message


@case
def error_auth():
    models = client(WRONG_KEY).chat.completions
    raises(openai.AuthenticationError, lambda: models.create(model=MODEL, messages=USER))


@case
def error_rate():
    models = client(SLOW_KEY).chat.completions

    def often():
        for _ in range(5):
            models.create(model=MODEL, messages=USER)

    error = raises(openai.RateLimitError, often)
    assert int(error.response.headers["retry-after"]) >= 1


@case
def error_model():
    raises(openai.NotFoundError, lambda: ask(model="no-such"))


@case
def error_value():
    raises(openai.BadRequestError, lambda: ask(temperature=-1))


@case
def model_list():
    same([one.id for one in client().models.list()], [MODEL])
    same(client().models.retrieve(MODEL).id, MODEL)


@case
def completions():
    reply = client().completions.create(model=MODEL, prompt="def add(a, b):", max_tokens=5)
    assert reply.choices[0].text.startswith("The tests"), reply.choices[0].text


@case
def session():
    messages = [*USER]
    for text in ("Go on.", "And then?", "Thank you."):
        message = ask(messages=messages, tools=[BASH]).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "a.py"})
        messages.append({"role": "user", "content": text})
    among(ask(messages=messages, tools=[BASH]).choices[0].message.content, ANSWERS)


main()
