"""The page that the dashboard's findings link to, made of `docs/reading-a-run.md`.

An installed service has no docs; this page travels with its static files. Links to other pages of
the docs become their names, and pictures are left out.
"""

import re
from pathlib import Path

import markdown

SOURCE = Path(__file__).parent / "reading-a-run.md"
PAGE = Path(__file__).parents[1] / "api" / "dashboard" / "static" / "help" / "reading-a-run.html"
MADE = "Written by `make reference` from docs/reading-a-run.md; change that instead."
HEAD = f"""<!doctype html>
<!-- {MADE} -->
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Reading a run · Ratchet</title>
<link rel="icon" href="../icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="../css/base.css">
<link rel="stylesheet" href="../css/pages.css">
<script src="../js/theme-early.js"></script>
</head>
<body>
<header class="bar"><a class="brand" href="../#/runs"><img src="../icon.svg" alt="" width="22" height="22">Ratchet</a></header>
<main id="main" class="help">
"""  # noqa: E501
FOOT = "</main>\n</body>\n</html>\n"


def page() -> str:
    """The HTML page."""
    text = re.sub(r"^!\[.*\]\(.*\)\n+", "", SOURCE.read_text(), flags=re.M)
    text = re.sub(r"\[([^\]]+)\]\(([\w/-]+\.md)[^)]*\)", r"\1 (`docs/\2`)", text)
    made = markdown.markdown(text, extensions=["tables", "toc", "sane_lists"])
    return f"{HEAD}{made}\n{FOOT}"
