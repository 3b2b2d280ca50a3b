"""Pages that need no network and weigh little: only what they use, all of it beside them."""
from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

MATHJAX = ("startup", "core", "input/tex", "output/svg", "output/svg/fonts/tex",
           "a11y/assistive-mml")  # each needs those before it
DRAWN = re.compile(r',(\d{6}):"[^"]*"')  # a letter of the mathematical alphabets
KEPT = [(0x1D400, 0x1D468), (0x1D538, 0x1D56C), (0x1D5A0, 0x1D5D4), (0x1D6A8, 0x1D71C)]
""" ... upright bold, italic; double-struck; sans-serif; Greek.  No script, no Fraktur. """


ICON = re.compile(r"(?<=[}])(?:\.fa-[a-z0-9-]+:before,?)+\{content:\"[^\"]*\"\}")
NAME = re.compile(r"fa-[a-z0-9-]+")
SHOWN = """sun moon circle-half-stroke bars list magnifying-glass expand arrow-up download
    file file-pdf angle-right angle-left angle-up angle-down chevron-right chevron-left
    chevron-down chevron-up rocket code xmark check copy link lightbulb pencil circle-info
    triangle-exclamation"""
ICONS = {f"fa-{name}" for name in SHOWN.split()}


def mathjax(app: Any) -> None:
    """MathJax as one file of the parts that we use: drawn letters, no web fonts, no menu."""
    spec = importlib.util.find_spec("sphinx-mathjax-offline")
    if spec is None or spec.origin is None:
        return
    source = Path(spec.origin).parent / "static/mathjax"
    target = Path(app.outdir) / "_static/mathjax.js"
    target.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join((source / f"{name}.js").read_text() for name in MATHJAX)
    target.write_text(DRAWN.sub(lambda m: m[0] if kept(int(m[1])) else "", text))
    app.config.mathjax_path = "mathjax.js"
    app.config.mathjax3_config = {
        **(app.config.mathjax3_config or {}), "loader": {"load": []},
        "options": {"processHtmlClass": "tex2jax_process|mathjax_process|math|output_area",
                    "enableMenu": False}}


def kept(letter: int) -> bool:
    return letter < KEPT[0][0] or any(low <= letter < high for low, high in KEPT)


def no_unused_icons(css: str) -> str:
    """The theme's style sheet without the names of a thousand icons that no page shows."""
    return ICON.sub(lambda m: m[0] if set(NAME.findall(m[0])) & ICONS else "", css)


def light_scripts(app: Any, page: str, template: str, context: dict[str, Any],
                  doctree: Any) -> None:
    """Leave out Thebe: it is never started, and says everything twice."""
    for kind in ("script_files", "css_files"):
        context[kind] = [file for file in context.get(kind, []) if not about_thebe(file)]
    context["default_mode"] = "auto"  # the theme complains of an empty one


def about_thebe(file: Any) -> bool:
    body = getattr(file, "attributes", {}).get("body") or ""
    return "thebe" in f"{getattr(file, 'filename', file)} {body}".lower()


def no_icons_twice(app: Any, error: Exception | None) -> None:
    """The style sheet has all icons as a font; the script has them again, in 1.5 MB."""
    script = Path(app.outdir) / "_static/scripts/fontawesome.js"
    if error is not None:
        return
    css = script.parents[1] / "styles/pydata-sphinx-theme.css"
    css.write_text(no_unused_icons(css.read_text()))
    if script.exists():
        script.write_text("/* the icons are those of the font */\n")
        script.with_name("fontawesome.js.map").unlink(missing_ok=True)


PLAIN = re.compile(r'<span class="(?:n|p|w|o)">([^<]*)</span>')


def fewer_spans(app: Any, page: str, template: str, context: dict, doctree: Any) -> None:
    """Names, commas and spaces have the colour of text: half of a listing's weight."""
    if "body" in context:
        context["body"] = PLAIN.sub(r"\1", context["body"])


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", mathjax)
    app.connect("html-page-context", fewer_spans)
    app.connect("html-page-context", light_scripts, priority=900)
    app.connect("build-finished", no_icons_twice)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
