"""Launch buttons: switched on by one setting, the address of the repository."""
from __future__ import annotations

import html
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

BRANCH = "main"


def address(app: Any) -> str:
    """`repository_url` of _config.yml, without an ending; "" where there is none."""
    return (app.config.tinymlir_repository or "").rstrip("/").removesuffix(".git")


def switch_on(app: Any, config: Any) -> None:
    """The theme shows its buttons for a notebook as soon as it knows where that is."""
    if not address(app):
        return
    config.html_theme_options = {
        **config.html_theme_options, "repository_url": address(app),
        "repository_branch": BRANCH, "use_repository_button": True,
        "launch_buttons": {"binderhub_url": "https://mybinder.org",
                           "colab_url": "https://colab.research.google.com",
                           "notebook_interface": "jupyterlab"}}


def setup_cell(app: Any) -> str:
    """What the first cell of a hosted notebook has to be."""
    return f"%pip install -q git+{address(app) or 'ADDRESS-OF-THE-REPOSITORY'}"


def show_setup(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Under the title of each chapter, once there are buttons: the cell to run first."""
    if not address(app) or not page.startswith("notebooks/") or not context.get("body"):
        return
    told = (f'<p class="tm-setup">On Colab, run this cell first: '
            f"<code>{html.escape(setup_cell(app))}</code></p>")
    context["body"] = context["body"].replace("</h1>", f"</h1>{told}", 1)


class Setup(SphinxDirective):
    """```{launch-setup}```: what the first cell of a hosted notebook has to be."""

    def run(self) -> list[nodes.Node]:
        code = setup_cell(self.env.app)
        return [nodes.literal_block(code, code, language="ipython3")]


def setup(app: Any) -> dict[str, bool]:
    app.add_config_value("tinymlir_repository", "", "env")
    app.add_directive("launch-setup", Setup)
    app.connect("config-inited", switch_on, priority=100)
    app.connect("html-page-context", show_setup, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
