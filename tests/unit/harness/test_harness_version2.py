import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.envs.harness import HARNESS_VERSION
from penstock.envs.harness.retrieval.embeddings import EmbeddingError, HttpEmbedder
from penstock.envs.harness.retrieval.index import LINES_MAX, cut
from penstock.envs.harness.retrieval.ranking import (
    WordIndex,
    cosine_scores,
    fused_scores,
    words,
)
from penstock.envs.harness.tool_calls import (
    Argument,
    ArgumentType,
    InvalidCallError,
    checked_arguments,
)
from penstock.envs.harness.tools import TOOLS_1, TOOLS_2, tool_schemas

DECLARED = {
    "text": Argument("t", bound_min=1, bound_max=5),
    "count": Argument("c", ArgumentType.INTEGER, 2, 1, 9),
    "flag": Argument("f", ArgumentType.FLAG, default=False),
}


def test_arguments_get_their_types_and_defaults():
    given = {"text": "abc", "count": "7", "flag": "true"}
    assert checked_arguments("x", DECLARED, given) == {"text": "abc", "count": 7, "flag": True}
    assert checked_arguments("x", DECLARED, {"text": "a"}) == {
        "text": "a", "count": 2, "flag": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words_of"),
    [
        ({}, "x needs text"),
        ({"text": ""}, "1 to 5 characters"),
        ({"text": "abcdef"}, "1 to 5 characters"),
        ({"text": "a\0"}, "NUL"),
        ({"text": "a", "count": "0"}, "integer from 1 to 9"),
        ({"text": "a", "count": "1.0"}, "integer"),
        ({"text": "a", "count": "٣"}, "integer"),
        ({"text": "a", "count": "9" * 5000}, "integer"),
        ({"text": "a", "flag": "True"}, "true or false"),
        ({"text": "a", "mode": "r"}, "takes no mode"),
    ],
)
def test_a_wrong_argument_says_what_was_expected(given, words_of):
    with pytest.raises(InvalidCallError, match=words_of):
        checked_arguments("x", DECLARED, given)


def test_version_1_is_untouched_and_version_2_has_every_tool():
    assert HARNESS_VERSION == "1"
    assert list(TOOLS_1) == [
        "list_dir", "read_file", "write_file", "edit_file", "delete_file", "glob", "grep",
        "run_terminal", "finish",
    ]  # fmt: skip
    assert {one["function"]["name"] for one in tool_schemas("1")} == set(TOOLS_1)
    assert set(TOOLS_2) == set(TOOLS_1) | {"codebase_search", "read_lints", "terminal_io"}


def test_schemas_are_strict():
    for schema in tool_schemas("2"):
        parameters = schema["function"]["parameters"]
        assert parameters["additionalProperties"] is False
        assert set(parameters["required"]) <= set(parameters["properties"])
        assert schema["function"]["description"].endswith(".")


def test_files_are_cut_at_definitions_with_what_belongs_to_them():
    head = "import a\nimport b\nx = 1\n"
    text = f"{head}# about f\n@deco\ndef f():\n    pass\n\nclass C:\n    y = 1\n    z = 2\n"
    pieces = [(one.first_line, one.last_line) for one in cut("a.py", text)]
    assert pieces == [(1, 3), (4, 8), (9, 11)]
    long = cut("b.txt", "line\n" * 150)
    assert [one.last_line - one.first_line + 1 for one in long] == [LINES_MAX, LINES_MAX, 30]
    assert cut("c.py", "\n\n") == []


def test_identifiers_are_taken_apart():
    assert words("parseHTTPHeaders of the snake_case2") == [
        "parse", "http", "header", "snake", "case", "2",
    ]  # fmt: skip


def test_words_rank_and_unknown_words_score_nothing():
    index = WordIndex(["def read_mail(box): ...", "def area(width): ...", "x = 1"])
    scores = index.scores("reads the mail box")
    assert np.argmax(scores) == 0 and scores[1] == 0
    assert not index.scores("zebra").any()


def test_cosine_takes_the_common_part_off():
    rows = np.array([[9, 1, 0], [9, 0, 1], [9, -1, -1]], np.float32)
    scores = cosine_scores(np.array([9, 0, 2], np.float32), rows)
    assert np.argmax(scores) == 1 and scores[2] < 0


def test_fusion_prefers_what_both_rank_high():
    first, second = np.array([3.0, 2.0, 1.0]), np.array([0.0, 3.0, 2.0])
    fused = fused_scores([first, second])
    assert np.argmax(fused) == 1
    assert fused[0] == pytest.approx(1 / 61)


async def served(answer):
    async def embeddings(request):
        body = await request.json()
        return answer(body["input"], request)

    app = web.Application()
    app.router.add_post("/v1/embeddings", embeddings)
    server = TestServer(app)
    await server.start_server()
    return server


async def test_any_endpoint_of_the_protocol_embeds():
    def answer(texts, request):
        assert request.headers["Authorization"] == "Bearer k"
        rows = [{"index": i, "embedding": [len(text), 1.0]} for i, text in enumerate(texts)]
        return web.json_response({"data": rows[::-1]})

    server = await served(answer)
    try:
        embedder = HttpEmbedder(str(server.make_url("/v1")), "m", "k")
        rows = await embedder.embed(["ab", "abc"] * 40)
    finally:
        await server.close()
    assert rows.shape == (80, 2) and rows.dtype == np.float32
    assert rows[:2].tolist() == [[2.0, 1.0], [3.0, 1.0]]


@pytest.mark.parametrize(
    "answer",
    [
        lambda texts, request: web.json_response({"data": []}),
        lambda texts, request: web.json_response({"error": "x"}),
        lambda texts, request: web.Response(status=500, text="down"),
        lambda texts, request: web.Response(text="no json"),
    ],
)
async def test_an_endpoint_that_does_not_embed_is_named(answer):
    server = await served(answer)
    try:
        with pytest.raises(EmbeddingError, match=r"127\.0\.0\.1"):
            await HttpEmbedder(str(server.make_url("/v1")), "m").embed(["a"])
    finally:
        await server.close()
