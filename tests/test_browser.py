"""The built book: every link and weight, and what a reader sees in a real browser.

The book is looked for in $TINYMLIR_BOOK, else in _build/html.
"""
import os
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import Browser, find_chromium

ROOT = Path(__file__).parents[1]
BOOK = Path(os.environ.get("TINYMLIR_BOOK", ROOT / "_build/html")).resolve()
PAGES = sorted(p.relative_to(BOOK).as_posix() for p in BOOK.rglob("*.html")
               if "_static" not in p.parts and p.name != "index.html")
HEAVY = 3_000_000  # bytes that one page may bring along, everything counted
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
THEMES = ("light", "dark")

pytestmark = pytest.mark.skipif(not PAGES, reason=f"the book is not built in {BOOK}")


# ---------------------------------------------------------------- without a browser

class Page(HTMLParser):
    """A page's anchors, links, and what it loads."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loads = set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif given.get("src"):
            self.loads.append(given["src"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(given["href"])


@cache
def page(path):
    return Page(path)


def target(here, link):
    """The file that a link leads to, and the place in it; None for another site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    path = (here.parent / unquote(parts.path)).resolve() if parts.path else here
    return path, unquote(parts.fragment)


def arrives(here, link):
    where = target(here, link)
    if where is None:
        return True
    path, place = where
    if path.name == "viewer.html" and place and place not in page(path).anchors:
        example, _, stage = place.partition("-")
        data = BOOK / f"_static/stages/{example}.js"
        return data.is_file() and f'"name":"{stage}"' in data.read_text()
    if not path.is_file():
        return False
    return not place or path.suffix != ".html" or place in page(path).anchors


@pytest.mark.parametrize("name", PAGES)
def test_links(name):
    here = BOOK / name
    assert [link for link in page(here).links if not arrives(here, link)] == []


@pytest.mark.parametrize("name", PAGES)
def test_it_loads_only_what_lies_beside_it(name):
    here = BOOK / name
    assert [load for load in page(here).loads if target(here, load) is None] == []
    assert [load for load in page(here).loads if not target(here, load)[0].is_file()] == []


def test_every_chapter_is_a_page():
    chapters = {f"notebooks/{p.stem}.html" for p in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
    assert chapters and chapters <= set(PAGES)


def test_the_whole_compiler_is_on_its_page():
    text = re.sub(r"<[^>]*>", "", (BOOK / "book/whole.html").read_text())
    for module in ("expr", "graph", "builder", "passes", "native", "jit"):
        source = (ROOT / f"src/tinymlir/{module}.py").read_text()
        names = re.findall(r"^(?:def|class) (\w+)", source, re.M)
        assert names and [name for name in names if name not in text] == []


# ---------------------------------------------------------------- in a browser

@pytest.fixture(scope="module")
def browser():
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium is installed")
    with Browser(program) as opened:
        yield opened


def settled(browser, name, theme="light", width="desktop", hash_=""):
    """Open a page and wait until its equations are drawn."""
    browser.theme(theme)
    browser.size(*WIDTHS[width])
    browser.open("about:blank")
    browser.open((BOOK / name).as_uri() + hash_)
    browser.ask("document.fonts.ready.then(() => true)")
    browser.ask("window.MathJax?.startup?.promise?.then(() => true) ?? true")
    return browser


OVERFLOWS = """[...document.querySelectorAll(`.bd-article pre, .bd-article p, .bd-article li,
  .bd-article table, .bd-article h1, .bd-article h2`)].filter((e) => e.offsetParent
  && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline"
  ).map((e) => e.textContent.trim().slice(0, 60))"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page(browser, name, width):
    settled(browser, name, width=width)
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth")
    assert browser.ask(OVERFLOWS) == []
    loaded = {Path(unquote(urlsplit(url).path)) for url in browser.requests
              if url.startswith("file:")}
    assert sum(path.stat().st_size for path in loaded if path.is_file()) < HEAVY


FAINT = r"""(() => {
  const numbers = (text) => text.match(/[\d.]+/g).map(Number);
  const part = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) =>
    .2126 * part(r / 255) + .7152 * part(g / 255) + .0722 * part(b / 255);
  const over = (a, b) => [0, 1, 2].map((i) => a[i] * (a[3] ?? 1) + b[i] * (1 - (a[3] ?? 1)));
  const colour = (text) => {
    const found = numbers(text.replace("color(srgb", ""));
    return text.startsWith("color(") ? found.map((v, i) => i < 3 ? v * 255 : v) : found;
  };
  const behind = (e) => {
    if (!e) return [255, 255, 255];
    const own = colour(getComputedStyle(e).backgroundColor);
    return (own[3] ?? 1) === 1 ? own : over(own, behind(e.parentElement));
  };
  const passed = "svg, mjx-container, script, style, .headerlink, button";
  const article = document.querySelector(".bd-article") ?? document.querySelector("main");
  const walk = document.createTreeWalker(article, NodeFilter.SHOW_TEXT), faint = {};
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !e.offsetParent || e.closest(passed)) continue;
    const ground = behind(e), ink = over(colour(getComputedStyle(e).color), ground);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) faint[`${e.tagName}.${e.className}`] = ratio.toFixed(2);
  }
  return faint;
})()"""


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", PAGES)
def test_it_can_be_read(browser, name, theme):
    settled(browser, name, theme)
    browser.ask("""document.head.insertAdjacentHTML("beforeend",
        "<style>* { transition: none !important }</style>")""")  # no colour on its way
    assert browser.ask("document.documentElement.dataset.theme") == theme
    assert browser.ask(FAINT) == {}


def test_equations_are_drawn(browser):
    for name in [name for name in PAGES if 'class="math ' in (BOOK / name).read_text()]:
        settled(browser, name)
        wanted = browser.ask("document.querySelectorAll('.bd-article .math').length")
        drawn = browser.ask("[...document.querySelectorAll('mjx-container svg')]"
                            ".filter((e) => e.querySelector('path')).length")
        assert drawn >= wanted > 0, name
        assert browser.ask("document.querySelectorAll('mjx-merror, [data-mml-node=merror]')"
                           ".length") == 0


def test_mlir_is_coloured(browser):
    settled(browser, "notebooks/02_builder.html")
    colours = browser.ask("""["nv", "s", "k"].map((kind) => getComputedStyle(
        document.querySelector(`.highlight-mlir .${kind}`)).color)""")
    assert len(set(colours)) == 3


@pytest.mark.parametrize("word", ["gelu", "bufferization"])
def test_search(browser, word):
    settled(browser, "search.html", hash_=f"?q={word}")
    browser.until("document.querySelectorAll('#search-results li a').length")
    assert browser.complaints == []
    found = browser.ask("[...document.querySelectorAll('#search-results li a')].map((a) => a.href)")
    assert any("notebooks/" in url for url in found)


def test_printing_cuts_nothing(browser):
    settled(browser, "notebooks/03_passes.html")
    try:
        browser.size(700, 1000)  # a sheet of A4 between its margins
        browser.send("Emulation.setEmulatedMedia", media="print")
        assert browser.ask(OVERFLOWS) == []
        assert browser.ask("[...document.querySelectorAll('details.solution .cell')]"
                           ".every((e) => e.offsetHeight > 0)")
        pdf = browser.send("Page.printToPDF", printBackground=True)["data"]
        assert len(pdf) > 100_000
    finally:
        browser.send("Emulation.setEmulatedMedia", media="")


# ---------------------------------------------------------------- the stage viewer

SHOWN = "document.querySelector('.tm-viewer').dataset.shown"


@pytest.fixture
def viewer(browser):
    settled(browser, "book/viewer.html")
    browser.until(SHOWN)
    return browser


def lines(browser):
    return browser.ask("document.querySelector('.tm-viewer .stage pre').textContent")


def test_the_viewer_changes_stage(viewer):
    assert viewer.ask(SHOWN) == "gelu/linalg"
    assert "linalg.generic" in lines(viewer)
    count = viewer.ask("document.querySelectorAll('.tm-viewer [role=tab]').length")
    assert count >= 9
    viewer.ask("document.querySelector('#tm-tab-scheduled').click()")
    assert viewer.ask(SHOWN) == "gelu/scheduled"
    assert "scf.for" in lines(viewer) and "linalg.generic" not in lines(viewer)
    viewer.ask("document.querySelector('#tm-tab-asm').click()")
    assert "main:" in lines(viewer)
    assert viewer.complaints == []


def test_the_viewer_obeys_the_keyboard(viewer):
    viewer.ask("document.querySelector('[aria-selected=true]').focus()")
    viewer.key("ArrowRight")
    assert viewer.ask(SHOWN) == "gelu/fused"
    viewer.key("End")
    viewer.key("ArrowRight")  # around the corner
    assert viewer.ask(SHOWN) == "gelu/numpy"
    assert viewer.ask("document.activeElement.id") == "tm-tab-numpy"


def test_the_viewer_changes_the_example(viewer):
    viewer.ask("""(() => { const e = document.querySelector('.tm-viewer select');
        e.value = 'softmax'; e.dispatchEvent(new Event('change')); })()""")
    viewer.until(f"{SHOWN} === 'softmax/linalg'")
    assert "arith.maximumf" in lines(viewer)


def test_lines_lead_to_their_numpy(browser):
    """In softmax the maximum comes from one line and the quotient from the next."""
    settled(browser, "book/viewer.html", hash_="#softmax-fused")
    browser.until(SHOWN)
    lit = """((word) => {
        const row = [...document.querySelectorAll('.tm-viewer .stage .row')].find((e) =>
          e.textContent.includes(word));
        row.click();
        const found = [...document.querySelectorAll('.tm-viewer .source .row.lit')].map((e) =>
          e.textContent);
        row.click();
        return found.join(); })"""
    assert "np.max(x" in browser.ask(f"{lit}('arith.maximumf')")
    assert "np.exp(" in browser.ask(f"{lit}('math.exp')")
    assert "return powers" in browser.ask(f"{lit}('arith.divf')")
