"""Listings whose long lines go on below, indented, where a page is too narrow for them."""
from __future__ import annotations

import re
from typing import Any

LISTING = re.compile(r'(<div class="highlight"><pre>(?:<span></span>)?)(.*?)(</pre>)', re.S)
SPACE = re.compile(r'<span class="w">(\s*)</span>')  # space needs no colour
TAG = re.compile(r"<[^>]*>")


def hanging(text: str) -> str:
    """Each line of a highlighted listing in a box of its own, which knows its indent."""
    lines = SPACE.sub(r"\1", text).split("\n")
    last = lines.pop() if lines and not lines[-1] else None
    boxes = [line_box(line) for line in lines]
    return "".join(boxes) + (last or "")


def line_box(line: str) -> str:
    plain = TAG.sub("", line)
    if not plain.strip():
        return "\n"
    indent = len(plain) - len(plain.lstrip(" "))
    style = f' style="--i:{indent}"' if indent else ""
    return f'<span class="tl"{style}>{line}<i>\n</i></span>'  # what is copied has lines too


def in_page(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if context.get("body"):
        context["body"] = LISTING.sub(lambda m: m[1] + hanging(m[2]) + m[3], context["body"])


def setup(app: Any) -> dict[str, bool]:
    app.connect("html-page-context", in_page, priority=800)  # after the links are in
    return {"parallel_read_safe": True, "parallel_write_safe": True}
