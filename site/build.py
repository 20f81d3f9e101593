"""The reference as a static site, in site/html/.

uv run --group docs python site/build.py
uv run --group docs python -m http.server --directory site/html     look at it

Markdown is taken as it is, from README.md, docs/ and benchmark/, and keeps its place, so that links
between pages hold. Made here: a page for each script, beside the cards of docs/details/, one for
each edge of their tree, and the data of the curves. MkDocs then checks every link and anchor.
"""

import logging
import os
import re
import shutil
import sys
from pathlib import Path

import plotly
from mkdocs.commands.build import build
from mkdocs.config import load_config

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "benchmark"), str(ROOT / "tests")]

import curves  # noqa: E402
from registry import ROWS  # noqa: E402
from scripts import Card, Script, annotated, diff_of, read_cards  # noqa: E402

PAGES = HERE / "pages"
LINK = re.compile(r"(\[[^\]]*\]\()([^)#:\s]*)(#[^)\s]*)?\)")
CARD = re.compile(r"(?m)^## (([A-Z]\d\d) .*)$")
WIDE = "---\nhide: [navigation, toc]\nsearch: {exclude: true}\n---\n"


# -- Markdown --
def linked(text: str, page: str, to: str) -> str:
    """Links of a page, as seen from another: to a script means to its page; files are copied."""

    def link(match: re.Match) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        path = os.path.normpath(os.path.join(os.path.dirname(page), target)) if target else page
        if path in {f"{row.name}.py" for row in ROWS}:
            path = path.replace(".py", ".md")
        elif not (ROOT / path).is_file():
            return match[0]  # MkDocs says so
        elif not path.endswith(".md"):
            (PAGES / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, PAGES / path)
        if path == to:
            return f"{words}{anchor})"
        return f"{words}{os.path.relpath(path, os.path.dirname(to) or '.')}{anchor})"

    return LINK.sub(link, text)


def as_markdown(text: str) -> str:
    """GitHub's Markdown as Python-Markdown reads it."""
    text = re.sub(r"(?m)^<!-- /?report:\w+ -->$", "", text)
    text = text.replace("<details>", "<details markdown>")
    text = re.sub(r"(?m)(?<=[\d|]) (\[[-+\d.]+,) ([-+\d.]+\])", "\u00a0\\1\u00a0\\2", text)
    width, has_code, lines = 0, False, []  # width: of the marker of a list
    for line in text.splitlines():
        if item := re.match(r"(- |\d+\. )", line):
            width = len(item[0])
            lines += [""] * has_code
        elif line and not line.startswith(" "):
            width, has_code = 0, False
        elif width and line.startswith(" " * width):  # four spaces belong to an item
            line = line.replace(" " * width, "    ", 1)
            has_code |= line.startswith("    ```")
        lines.append(line)
    text = "\n".join(lines)
    return re.sub(r"(?ms)^(    ```.*?^    ```$)", r"\n\1\n", text)


def write(page: str, text: str) -> None:
    path = PAGES / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_document(page: str, scripts: list[Script]) -> None:
    """A page of the repository; each card gets links to its lines."""
    up = os.path.relpath(".", os.path.dirname(page) or ".")

    def places(match: re.Match) -> str:
        omitted = {f"{row.name}.py" for row in ROWS if match[2] in row.omitted}
        marked = [x for x in scripts if any(match[2] in ids for ids in x.marked.values())]
        having = [x for x in marked if x.name not in omitted]
        links = ", ".join(f"[`{x.name}`]({up}/{x.page}#{match[2]})" for x in having)
        return f"{match[0]}\n\n<small>In the code: {links or 'a patch'}</small>"

    text = linked(as_markdown((ROOT / page).read_text()), page, page)
    if page.startswith("docs/details/"):
        text = CARD.sub(places, text)
    if page == "docs/results.md":
        text = text.replace("\n", "\n\nThe same as [curves to look into](../curves.md).\n", 1)
    home = "---\nhide: [navigation]\n---\n" if page == "README.md" else ""
    write(page, home + text)


# -- scripts and edges --
def tree(scripts: dict[str, Script], parent: str | None = None, depth: int = 0) -> str:
    """A nested list of the scripts that descend from a parent."""
    text = ""
    for row in ROWS:
        if row.parent == parent:
            script = scripts[row.name]
            diff = f" ([what it changes](diffs/{row.name}.md))" if parent else ""
            text += f"{'    ' * depth}- [`{script.name}`]({script.page}){diff}: {script.headline}\n"
            text += tree(scripts, row.name, depth + 1)
    return text


def write_script(row, scripts: dict[str, Script], cards: dict[str, Card]) -> None:
    """A script beside the cards of its details."""
    script = scripts[row.name]
    shutil.copyfile(ROOT / script.name, PAGES / script.name)
    intro = f"""{script.headline}

[The file]({script.name}), as it is shipped, and on this side what [the cards](docs/details.md) say
of the details that stand beside it.

"""
    if row.parent:
        intro += f"It is [`{row.parent}.py`]({row.parent}.md) and [this](diffs/{row.name}.md). "
    children = [f"[`{x.name}.py`](diffs/{x.name}.md)" for x in ROWS if x.parent == row.name]
    if children:
        intro += f"What its children change: {', '.join(children)}."

    def prose(detail: str) -> str:
        card = cards[detail]
        out = "Left out here." if detail in row.omitted else ""
        reasons = linked(as_markdown(card.reasons), card.page, script.page)
        return f"**[{card.title}]({card.page}#{card.anchor})** {out}\n\n{reasons}"

    write(script.page, f"{WIDE}# {script.name}\n\n{annotated(script, intro, prose)}")


def write_diff(row, scripts: dict[str, Script], cards: dict[str, Card]) -> None:
    """The edge of the tree that ends in a script."""
    parent, child = scripts[row.parent], scripts[row.name]
    body, removed, added = diff_of(parent, child)
    theirs, ours = (
        {x for ids in script.marked.values() for x in ids} for script in (parent, child)
    )
    news = [
        f"[{cards[x].title}](../{cards[x].page}#{cards[x].anchor})" for x in sorted(ours - theirs)
    ]
    text = f"""{WIDE}# {parent.name} → {child.name}

From [`{parent.name}`](../{parent.page}), left, to [`{child.name}`](../{child.page}), right:
{removed} lines removed and {added} added above the plumbing.

{"New: " if news else ""}{", ".join(news)}

{body}
"""
    write(f"diffs/{row.name}.md", text)


# -- the site --
def write_pages() -> list:
    """pages/, and what the nav has of the scripts."""
    shutil.rmtree(PAGES, ignore_errors=True)
    pages = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
    details = [page for page in pages if page.startswith("docs/details/")]
    cards = {x: card for page in details for x, card in read_cards(page).items()}
    scripts = {row.name: Script(row.path, cards) for row in ROWS}
    for page in [*pages, "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmark/README.md"]:
        write_document(page, [*scripts.values()])
    for row in ROWS:
        write_script(row, scripts, cards)
        if row.parent:
            write_diff(row, scripts, cards)
    write("scripts.md", f"# The tree of scripts\n\n{tree(scripts)}")
    write("curves.md", (HERE / "curves.md").read_text().replace("OPTIONS", curves.write(PAGES)))
    plot = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    for path in [HERE / "site.css", HERE / "curves.js", plot]:
        shutil.copy(path, PAGES)
    diffs = [{f"{x.parent} → {x.name}": f"diffs/{x.name}.md"} for x in ROWS if x.parent]
    beside = [{script.name: script.page} for script in scripts.values()]
    return [{"The tree": "scripts.md"}, *beside, {"What each changes": diffs}]


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    scripts = write_pages()
    config = load_config(str(HERE / "mkdocs.yml"))
    (section,) = [section for section in config["nav"] if "Scripts" in section]
    section["Scripts"] = scripts
    build(config)
    print(f"built {HERE / 'html'}")


if __name__ == "__main__":
    main()
