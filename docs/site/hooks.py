"""Hooks of MkDocs: the pages that are files of the root, the API reference, llms.txt.

Sources stay as GitHub shows them; what MkDocs reads differently is changed on the way.
"""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {  # of the root's files, the page's name
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "SPECIFICATION.md": "specification.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
PACKAGES = {  # of the reference, the modules below each: a pattern and a line of introduction
    "messages": (
        "messages/**/*.py",
        "Every event, request and answer: what actors say to each other.",
    ),
    "settings": ("**/config.py", "Sections of a run's TOML file, by actor."),
}
_FENCE = re.compile(r"^\s*(```|~~~)")
_LIST = re.compile(r"^([-*]|\d+\.) ")
_MENTION = re.compile(
    r"(?<![\w/(\[`])(?:docs/([\w-]+)|(" + "|".join(n[:-3] for n in PAGES) + r"))\.md\b"
)
_CODE = re.compile(r"\[([^\]]+)\]\((?:own_parts|quickstart|[\w/]+\.py)\)")
_markdown: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what does not lie in `docs/` as Markdown."""
    for name, page in PAGES.items():
        files.append(
            File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8"))
        )
    files.append(File.generated(config, "reference/api.md", content=_api_page()))
    for name, (pattern, about) in PACKAGES.items():
        content = _modules_page(name, pattern, about)
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the page as Python-Markdown needs it, its links within the site."""
    if page.file.src_uri.startswith("reference/"):
        return markdown
    lines: list[str] = []
    is_code = False
    for line in markdown.splitlines():
        is_fence = bool(_FENCE.match(line))
        if is_code or is_fence:
            is_code ^= is_fence
            lines.append(line)
            continue
        if lines and _starts_block(line, lines[-1]):
            lines.append("")
        lines.append(_within_site(line))
    text = "\n".join(lines)
    _markdown[page.file.src_uri] = text
    return text


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt, an index for language models, and llms-full.txt, the pages themselves."""
    site = Path(config.site_dir)
    (site / "llms.txt").write_text(_llms_index(config), encoding="utf-8")
    pages = [_markdown[name] for _, name in _entries(config.nav or []) if name in _markdown]
    (site / "llms-full.txt").write_text("\n\n".join(pages), encoding="utf-8")


def _starts_block(line: str, before: str) -> bool:
    """Return whether a list or table interrupts a paragraph, which Python-Markdown overlooks."""
    if not before.strip() or before.startswith("#"):
        return False
    if _LIST.match(line):
        return not (_LIST.match(before) or before.startswith(" "))
    return line.startswith("|") and not before.startswith("|")


def _within_site(line: str) -> str:
    line = re.sub(
        r"\]\((?:\.\./)?LICENSE\)", "](https://www.apache.org/licenses/LICENSE-2.0)", line
    )
    line = re.sub(r"\]\((?:\.\./)?docs/", "](", line)
    line = _CODE.sub(r"`\1`", line)
    for name, page in PAGES.items():
        line = re.sub(rf"\]\((?:\.\./)?{re.escape(name)}(?=[#)])", f"]({page}", line)
    parts = re.split(r"(`[^`]*`|\[[^\]]*\]\([^)]*\))", line)  # code and links stay as they are
    parts[::2] = [_MENTION.sub(_mention, part) for part in parts[::2]]
    return "".join(parts)


def _mention(match: re.Match[str]) -> str:
    if match[2]:
        return f"[{match[0]}]({PAGES[match[0]]})"
    return f"[{match[1]}]({match[1]}.md)"


def _entries(nav: list[Any], title: str = "") -> list[tuple[str, str]]:
    """Return title and file of each entry of the navigation, in its order."""
    found: list[tuple[str, str]] = []
    for entry in nav:
        for name, value in entry.items() if isinstance(entry, dict) else [(title, entry)]:
            found += _entries(value, name) if isinstance(value, list) else [(name, value)]
    return found


def _llms_index(config: MkDocsConfig) -> str:
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in config.nav or []:
        [(title, value)] = section.items()
        entries = _entries(value, title) if isinstance(value, list) else [(title, value)]
        address = config.site_url or ""
        links = [f"- [{name}]({address}{page.removesuffix('.md')}.html)" for name, page in entries]
        lines += [f"## {title}", "", *links, ""]
    return "\n".join(lines)


def _api_page() -> str:
    tree = ast.parse((ROOT / "infra/api/names.py").read_text(encoding="utf-8"))
    [value] = [node.value for node in tree.body if isinstance(node, ast.AnnAssign)]
    names: dict[str, tuple[str, str]] = ast.literal_eval(value)
    parts = [
        "# `import penstock`",
        "",
        "Each name is imported when it is first used; [Own parts](../extend.md) uses them.",
        "",
    ]
    for name, (module, attribute) in names.items():
        parts += [
            f"## `penstock.{name}`",
            "",
            f"::: {module}.{attribute}",
            "    options: {show_root_heading: false}",
            "",
        ]
    return "\n".join(parts)


def _modules_page(name: str, pattern: str, about: str) -> str:
    parts = [f"# {name.capitalize()}", "", about, ""]
    for path in sorted(ROOT.glob(pattern)):
        relative = path.relative_to(ROOT)
        if (
            relative.parts[0].startswith(".")
            or relative.parts[0] == "tests"
            or path.name == "__init__.py"
        ):
            continue
        module = ".".join(relative.with_suffix("").parts)
        parts += [
            f"## `{module}`",
            "",
            f"::: penstock.{module}",
            "    options: {show_root_heading: false}",
            "",
        ]
    return "\n".join(parts)
