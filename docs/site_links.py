"""Hooks of the documentation site: two pages from the top of the repository, and links to files outside of docs/."""

import os
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
SHOWN = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}  # page of the site -> file of the repository


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Returns the text of a page. Links to files outside of docs/ lead to the repository."""
    source = SHOWN.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    if page.file.src_uri in SHOWN:
        markdown = (ROOT / source).read_text()

    def link(match: re.Match) -> str:
        path, mark, anchor = match[1].partition("#")
        if ":" in path or not path:
            return match[0]
        full = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if not full.startswith("docs/"):
            return f"]({config.repo_url}/blob/main/{full}{mark}{anchor})"
        return f"]({os.path.relpath(full[5:], os.path.dirname(page.file.src_uri) or '.')}{mark}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", link, markdown)
