"""The live page: one self-contained HTML, live from the gateway or frozen in a report."""

from functools import cache
from importlib.resources import files

from aiohttp import web

from penstock.gateway.services import Services

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:"
)


def render_page(state_json: bytes = b"null") -> str:
    """Return the page with a state inside; `null` makes it follow its gateway."""
    return _template().replace("/*STATE*/null", script_json(state_json))


def script_json(data: bytes) -> str:
    """Return JSON that a page may hold in a `<script>`, whatever its strings say.

    `<` occurs in strings alone; escaped, no string ends the script or begins a comment in it.
    """
    text = data.decode("utf-8", "replace").replace("<", "\\u003c")
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


async def live_page(services: Services, request: web.Request) -> web.Response:
    """Serve the page that follows this gateway."""
    services.admit_viewer(request)
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
    return web.Response(text=render_page(), content_type="text/html", headers=headers)


@cache
def _template() -> str:
    folder = files("penstock.gateway.page")
    parts = {
        "/*STYLE*/": "page.css",
        "/*CHARTS*/": "charts.js",
        "/*REGIONS*/": "regions.js",
        "/*GATES*/": "gates.js",
        "/*BEHAVIOR*/": "behavior.js",
        "/*TASKS*/": "tasks.js",
        "/*OBJECTIVE*/": "objective.js",
        "/*VIEW*/": "page.js",
    }
    text = (folder / "page.html").read_text(encoding="utf-8")
    for mark, name in parts.items():
        text = text.replace(mark, (folder / name).read_text(encoding="utf-8"))
    return text
