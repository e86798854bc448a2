"""The report of a what-if: one HTML file with its curves beside the run's own."""

from importlib.resources import files
from typing import Any

import msgspec

from penstock.gateway.page.live_page import script_json


def render(answer: dict[str, Any]) -> str:
    """Return the page, readable without a server and without a network."""
    page = files("penstock.gateway.page")
    parts = {
        "/*STYLE*/": page / "page.css",
        "/*CHARTS*/": page / "charts.js",
        "/*VIEW*/": files("penstock.infra.what_if") / "report.js",
    }
    text = (files("penstock.infra.what_if") / "report.html").read_text(encoding="utf-8")
    for mark, file in parts.items():
        text = text.replace(mark, file.read_text(encoding="utf-8"))
    return text.replace("/*ANSWER*/null", script_json(msgspec.json.encode(answer)))
