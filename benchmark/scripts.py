"""What the scripts' text says: a table of flags for each, and the lines of the details' markers."""

import ast
import re
from pathlib import Path

from recipes import HERE, SCRIPTS
from tables import table

SHOWN = {"True": "on", "False": "off", "None": "", "Path(__file__).stem": "the script's name"}


def flags_of(script: Path) -> dict[str, tuple[str, str]]:
    """Flag -> (default, help), the comment beside a field of Args or the string under it."""
    source = script.read_text()
    tree, lines = ast.parse(source), source.splitlines()
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    flags = {}
    for field, below in zip(args.body, [*args.body[1:], None]):
        if not isinstance(field, ast.AnnAssign):
            continue
        value = field.value  # of one line, whose text ast.get_source_segment is slow to find
        default = lines[value.lineno - 1][value.col_offset : value.end_col_offset]
        if isinstance(below, ast.Expr):
            effect = " ".join(below.value.value.split())
        else:
            effect = lines[field.end_lineno - 1][field.end_col_offset :].lstrip(" #")
        name = f"--{field.target.id.replace('_', '-')}"
        flags[name] = SHOWN.get(default, default.strip('"')), effect
    return flags


def flags_table(name: str) -> str:
    """The flags of one script."""
    flags = flags_of(HERE.parent / f"{name}.py")
    rows = [[f"`{flag}`", default, effect] for flag, (default, effect) in flags.items()]
    return table(["flag", "default", "effect"], rows, left=3)


def all_flags() -> str:
    """The tables of all scripts, one after the other."""
    return "\n\n".join(f"`{name}.py`:\n\n{flags_table(name)}" for name in SCRIPTS)


def link(detail: str, name: str) -> str:
    """To the line of a detail's marker in a script; empty if it has none."""
    # a marker is followed by words; an id at the end of a flag's help is a reference
    marker = re.compile(rf"# .*(?<!see )(?<!~)\[{detail}\]( \[\w+\])* [^\[]")
    for i, line in enumerate((HERE.parent / f"{name}.py").read_text().splitlines(), 1):
        if marker.search(line):
            return f"[{name}.py:{i}]({name}.py#L{i})"
    return ""


def line_links(text: str) -> str:
    """The text with the links of today in `| C05 | title | what | links | ...`, one a script."""

    def refreshed(match: re.Match) -> str:
        links = [link(match[2], name) for name in SCRIPTS]
        return f"{match[1]} {'<br>'.join(filter(None, links))} |"

    return re.sub(r"(?m)^(\| ([A-Z]\d\d) \|(?:[^|]*\|){2})[^|]*\|", refreshed, text)
