"""Renders the live page: one HTML file that follows the gateway, or is frozen in a report."""

import base64
import gzip
from functools import cache
from importlib.resources import files

from aiohttp import web

from penstock.gateway.services import PAGE_COOKIE, Services

# No request leaves for another site, whatever a string in the state may say.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:"
)


def render_page(state_json: bytes = b"null", episodes: tuple[bytes, bytes] | None = None) -> str:
    """Return the page as HTML.

    Args:
        state_json: State to show; `null` makes the page follow its gateway.
        episodes: Episodes to embed in a report, as JSON in the gateway's format: a list of rows,
            newest first, and an object of full episodes by rollout id.

    """
    page = _template().replace("/*STATE*/null", script_json(state_json))
    rows, views = episodes or (b"[]", b"{}")
    return page.replace("<!--EPISODES-->", _packed("rows", rows) + _packed("views", views))


def _packed(name: str, data: bytes) -> str:
    # Without a time stamp: equal runs have equal reports.
    text = base64.b64encode(gzip.compress(data, mtime=0)).decode()
    return f'<script type="application/gzip" data-name="{name}">{text}</script>\n'


def script_json(data: bytes) -> str:
    """Return JSON that is safe inside a `<script>` element, whatever its strings contain."""
    # In JSON, `<` occurs only in strings. Escaped, none of them can end the script element or begin
    # an HTML comment in it; the two separators below would end a line of JavaScript.
    text = data.decode("utf-8", "replace").replace("<", "\\u003c")
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


async def live_page(services: Services, request: web.Request) -> web.Response:
    """Return the page that follows this gateway; a link's code becomes the browser's cookie."""
    code = request.query.get("code", "")
    if code and services.config.is_local and (cookie := services.door.enter(code)):
        reply = web.Response(
            status=303, headers={"Location": "/", "Referrer-Policy": "no-referrer"}
        )
        reply.set_cookie(PAGE_COOKIE, cookie, httponly=True, samesite="Strict")
        return reply
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
        "/*EPISODES*/": "episodes.js",
        "/*VIEW*/": "page.js",
    }
    text = (folder / "page.html").read_text(encoding="utf-8")
    for mark, name in parts.items():
        text = text.replace(mark, (folder / name).read_text(encoding="utf-8"))
    return text
