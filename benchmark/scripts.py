"""What scripts and patches say: flags, the lines of the details' markers, what a patch does."""

import ast
import re
from pathlib import Path

from patches import original_of
from recipes import HERE, SCRIPTS
from tables import table

SHOWN = {"True": "on", "False": "off", "None": "", "Path(__file__).stem": "the script's name"}


def choices_of(annotation: ast.expr) -> str:
    """What a flag of type `Literal[...]` may be; empty for other types."""
    if not isinstance(annotation, ast.Subscript) or annotation.value.id != "Literal":
        return ""
    return ", ".join(str(choice) for choice in ast.literal_eval(annotation.slice))


def flags_of(script: Path) -> dict[str, tuple[str, str, str]]:
    """Flag -> default, choices and help: the comment beside a field of Args."""
    source = script.read_text()
    tree, lines = ast.parse(source), source.splitlines()
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    flags = {}
    for field in args.body:
        if not isinstance(field, ast.AnnAssign):
            continue
        value = field.value  # of one line, whose text ast.get_source_segment is slow to find
        default = lines[value.lineno - 1][value.col_offset : value.end_col_offset]
        effect = lines[field.end_lineno - 1][field.end_col_offset :].lstrip(" #")
        name = f"--{field.target.id.replace('_', '-')}"
        shown = SHOWN.get(default, default.strip('"'))
        flags[name] = shown, choices_of(field.annotation), effect
    return flags


def flags_table(name: str) -> str:
    """The flags of one script."""
    flags = flags_of(HERE.parent / f"{name}.py")
    rows = [[f"`{flag}`", *facts] for flag, facts in flags.items()]
    return table(["flag", "default", "choices", "effect"], rows, left=4)


def all_flags() -> str:
    """The tables of all scripts, one after the other."""
    return "\n\n".join(f"`{name}.py`:\n\n{flags_table(name)}" for name in SCRIPTS)


def patches_table() -> str:
    """What stands above each patch of variants/, and the script that it changes."""
    rows = []
    for patch in sorted((HERE.parent / "variants").glob("*.patch")):
        what, _, _ = patch.read_text().partition("\n--- ")
        rows.append([f"`{patch.stem}`", f"`{original_of(patch)}`", " ".join(what.split())])
    return table(["patch", "changes", "how"], rows, left=3)


def marker_lines(name: str) -> dict[str, int]:
    """Detail -> the line of its marker, which comes first in a comment."""
    found = {}
    for i, line in enumerate((HERE.parent / f"{name}.py").read_text().splitlines(), 1):
        if ids := re.search(r"# ((?:\[[A-Z]\d\d\] )+)", line):
            found |= dict.fromkeys(re.findall(r"\w+", ids[1]), i)
    return found


def where_table() -> str:
    """One row for each detail, one link for each script that has it."""
    lines = {name: marker_lines(name) for name in SCRIPTS}
    families = "CAMLDPXS"
    details = sorted(
        {d for of in lines.values() for d in of}, key=lambda d: (families.index(d[0]), d)
    )
    rows = []
    for detail in details:
        cells = [
            f"[{lines[n][detail]}]({n}.py#L{lines[n][detail]})" if detail in lines[n] else ""
            for n in SCRIPTS
        ]
        rows.append([detail, *cells])
    return table(["id", *(f"{name}.py" for name in SCRIPTS)], rows)
