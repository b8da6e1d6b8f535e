"""What MkDocs calls while it builds the site (mkdocs.yml)."""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.docs.tables import with_tables  # MkDocs runs this file by itself

_KIND = re.compile(r"^(```\w+) .+$", re.MULTILINE)
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)\s]+)\)")
_TABLES = "openai-parameters.md"


def on_config(config: Any) -> Any:
    """The tables of every parameter are in the site where `make docs` has written them."""
    if Path(config.docs_dir, _TABLES).exists():
        reference = next(section["Reference"] for section in config.nav if "Reference" in section)
        reference.append({"OpenAI's parameters": _TABLES})
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Tables of the code take the place of their marks. Links that leave docs/ lead to the repository, or become plain
    text where the site has none. Of a block's opening line the language is left: MkDocs knows no second word, which in
    runbooks says where its commands belong."""

    def link(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), target))
        if path.startswith("docs/"):
            return found[0]
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else text

    return _OUTSIDE.sub(link, _KIND.sub(r"\1", with_tables(markdown)))
