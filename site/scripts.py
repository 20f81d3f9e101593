"""The scripts as HTML: one beside its cards, two side by side."""

import ast
import difflib
import html
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parent.parent
RULER = "# ======"
TAG = re.compile(r"\[([A-Z]\d\d)\]")
MARKER = re.compile(r"# ~?((?:\[[A-Z]\d\d\] ?)+)")
SAME = 12  # equal lines in a row of which a diff shows the first and last three


@dataclass(frozen=True)
class Card:
    """What docs/details/ says of a detail: its page from the root, its anchor and its reasons."""

    page: str
    anchor: str
    title: str
    reasons: str  # Markdown: the paragraphs Why and Form


def read_cards(page: str) -> dict[str, Card]:
    """id -> card, of a page of docs/details/."""
    cards = {}
    for section in re.split(r"(?m)^## ", (ROOT / page).read_text())[1:]:
        title, _, text = section.partition("\n")
        if not TAG.match(f"[{title[:3]}]"):
            continue
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        reasons = re.search(r"(?s)\*\*Why\.\*\*.*?(?=\n\n\*\*(?!Form\.)|\Z)", text)
        cards[title[:3]] = Card(page, anchor, title, reasons[0] if reasons else "")
    return cards


class Script:
    """A script, its lines as HTML, and where its details stand."""

    def __init__(self, path: Path, cards: dict[str, Card]):
        self.name, self.cards = path.name, cards
        self.page = f"{path.stem}.md"
        self.source = path.read_text()
        self.lines = self.source.split("\n")[:-1]
        self.ruler = next(i for i, x in enumerate(self.lines, 1) if x.startswith(RULER))

    @cached_property
    def headline(self) -> str:
        return ast.get_docstring(ast.parse(self.source)).partition("\n")[0]

    @cached_property
    def marked(self) -> dict[int, list[str]]:
        """Line -> ids of the details that it marks, or marks as left out."""
        found = {i: MARKER.search(line) for i, line in enumerate(self.lines, 1)}
        return {i: TAG.findall(match[1]) for i, match in found.items() if match}

    @cached_property
    def coloured(self) -> list[str]:
        """The lines as HTML; the same text, coloured."""
        lexer = PythonLexer(stripnl=False, ensurenl=False)
        lines = highlight(self.source, lexer, HtmlFormatter(nowrap=True)).split("\n")[:-1]
        assert len(lines) == len(self.lines), self.name
        return lines

    def code(self, start: int, end: int, root: str, is_home: bool = True) -> str:
        """Lines start to end (from 1, inclusive) as a block; at home with anchors."""

        def card(match: re.Match) -> str:
            if match[1] not in self.cards:
                return match[0]
            card = self.cards[match[1]]
            href = f"{root}{card.page.removesuffix('.md')}.html#{card.anchor}"
            return f'<a href="{href}" title="{html.escape(card.title)}">{match[0]}</a>'

        lines = []
        for i in range(start, end + 1):
            number = f'id="L{i}" href="#L{i}"' if is_home else f'href="{root}{self.url}#L{i}"'
            line = TAG.sub(card, self.coloured[i - 1])
            for detail in self.marked.get(i, []) if is_home else []:
                line = f'<span class="marked" id="{detail}">{line}</span>'
            number += f' data-n="{i}" aria-label="line {i}" tabindex="-1"'
            number = f'<a class="number" {number}></a>'
            line = f"{number}{line}&#10;"  # all on one line: Markdown must not read it
            lines.append(line if is_home else f'<span class="line">{line}</span>')
        text = "".join(lines)
        return f'<pre class="highlight script" tabindex="0"><code>{text}</code></pre>'

    @property
    def url(self) -> str:
        return self.page.replace(".md", ".html")

    @cached_property
    def statements(self) -> list[tuple[int, int]]:
        """First and last lines."""
        nodes = ast.walk(ast.parse(self.source))
        return [(x.lineno, x.end_lineno) for x in nodes if isinstance(x, ast.stmt)]

    def start_of(self, line: int) -> int:
        """The first line of the statement that a line belongs to, with the comments above it."""
        start = line
        if not self.lines[line - 1].lstrip().startswith("#"):
            start = max(first for first, last in self.statements if first <= line <= last)
        while self.lines[start - 2].lstrip().startswith(("#", "@")):
            start -= 1
        return start

    def rows(self) -> list[tuple[int, int, list[str]]]:
        """(first line, last line, ids beside it) of the lines above the plumbing."""
        starts = {1: []}
        for line, ids in sorted(self.marked.items()):
            if line < self.ruler:
                starts.setdefault(self.start_of(line), []).extend(ids)
        bounds = [*sorted(starts), self.ruler + 1]
        return [(a, b - 1, starts[a]) for a, b in zip(bounds, bounds[1:])]


def row(prose: str, code: str) -> str:
    prose = f'<div class="prose" markdown>\n\n{prose}\n\n</div>'
    return f'<div class="row" markdown>\n{prose}\n{code}\n</div>\n'


def annotated(script: Script, intro: str, prose_of) -> str:
    """A script in rows, prose_of(id) beside its line; then the plumbing, folded."""
    parts = []
    for start, end, ids in script.rows():
        prose = "\n\n".join(prose_of(x) for x in ids) if start > 1 else intro
        parts.append(row(prose, script.code(start, end, "")))
    end = len(script.lines)
    summary = f"Plumbing, {end - script.ruler} lines: files, flags, logging, videos"
    plumbing = script.code(script.ruler + 1, end, "")
    parts.append(f"<details><summary>{summary}</summary>{plumbing}</details>\n")
    return f'<div class="annotated" markdown>\n{"".join(parts)}</div>\n'


def pair(parent: Script, child: Script, kind: str, a: range, b: range) -> str:
    """Lines of the parent and of the child, side by side; either may be none."""
    sides = ""
    for script, lines in ((parent, a), (child, b)):
        if lines:
            sides += script.code(lines[0], lines[-1], "../", is_home=False)
        else:
            sides += '<pre class="script"></pre>'
    return f'<div class="pair {kind}">{sides}</div>'


def diff_of(parent: Script, child: Script) -> tuple[str, int, int]:
    """HTML of what differs above the plumbing, and the numbers of lines removed and added."""
    ours, theirs = child.lines[: child.ruler], parent.lines[: parent.ruler]
    head = f"<span>{parent.name}</span><span>{child.name}</span>"
    parts, removed, added = [f'<div class="pair head">{head}</div>'], 0, 0
    matcher = difflib.SequenceMatcher(None, theirs, ours, autojunk=False)
    for kind, a1, a2, b1, b2 in matcher.get_opcodes():
        a, b = range(a1 + 1, a2 + 1), range(b1 + 1, b2 + 1)
        if kind != "equal":
            removed, added = removed + len(a), added + len(b)
            parts.append(pair(parent, child, kind, a, b))
        elif len(a) <= SAME:
            parts.append(pair(parent, child, kind, a, b))
        else:
            middle = pair(parent, child, kind, a[3:-3], b[3:-3])
            summary = f"{len(a) - 6} lines are the same"
            parts.append(pair(parent, child, kind, a[:3], b[:3]))
            parts.append(f"<details><summary>{summary}</summary>{middle}</details>")
            parts.append(pair(parent, child, kind, a[-3:], b[-3:]))
    return f'<div class="diff">{"".join(parts)}</div>', removed, added
