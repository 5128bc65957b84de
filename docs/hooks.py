"""Puts the pages at the top of the checkout, README.md first, into the site that is built of docs.

Links lead where the pages go, so that the build checks those of the README, too. A page of the site
cannot link to other files of the checkout: what it names there is code, not a link.
"""

import re
from pathlib import Path
from typing import Any

from properdocs.structure.files import File, Files

TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
}


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages."""
    root = Path(config.config_file_path).parent
    for name, page in TOP.items():
        text = re.sub(r"\]\(docs/", "](", (root / name).read_text())
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Has links to pages at the top lead to where these went."""
    up = "../" * page.file.src_uri.count("/")
    for name, goes in TOP.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(name)}", f"]({up}{goes}", markdown)
    return markdown
