"""The text of the scripts: detail markers, equal regions, flags, and the README."""

import ast
import doctest
import io
import re
import sys
import tokenize
import tomllib
from dataclasses import fields

import pytest
from registry import ROOT, RULER, SCRIPTS, pages, source_blocks

scripts = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
children = [row for row in SCRIPTS.values() if row.parent]
inherited = pytest.mark.parametrize("script", children, ids=[row.name for row in children])


def comments_of(source: str) -> list[tuple[int, str]]:
    """(line, text) of every comment; docstrings and strings are none."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def line_of(source: str, start: str) -> int:
    (line,) = [i for i, text in enumerate(source.splitlines(), 1) if text.strip().startswith(start)]
    return line


@scripts
def test_a_module_is_short_functions_and_classes(script):
    """Nothing else, so importing starts nothing and functions see no state but their arguments.

    Only main exits, so that train(args) can be called from a sweep. Ruff sees to the rest.
    """
    tree = ast.parse(script.source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    assert {name for name, length in lengths.items() if length > 40} <= {"train"}
    assert not any(isinstance(node, ast.Global) for node in ast.walk(tree))
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    _, *middle, main = tree.body
    others = [ast.unparse(node) for node in middle if not isinstance(node, kinds)]
    assert [code for code in others if "gym.register(" not in code] == []  # which adds names only
    assert ast.unparse(main) == "if __name__ == '__main__':\n    main()"
    exits = re.compile(r"\b(sys\.exit|SystemExit|os\._exit|quit|exit)\b")
    exiting = [node.name for node in middle if exits.search(ast.unparse(node))]
    assert exiting == ["Refused", "main"] and "signal" not in script.source
    assert not re.search(r"(?i)TODO|FIXME|XXX|HACK|not sure", script.source)


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


@scripts
def test_every_flag_has_its_own_help(script):
    """The comment on the line of its field."""
    comments = {line: text.removeprefix("#").strip() for line, text in comments_of(script.source)}
    (args,) = [n for n in ast.parse(script.source).body if getattr(n, "name", "") == "Args"]
    flags = [field for field in args.body if isinstance(field, ast.AnnAssign)]
    texts = {field.target.id: comments.get(field.lineno, "") for field in flags}
    assert [name for name, text in texts.items() if len(text) < 10] == []
    assert len(set(texts.values())) == len(texts) == len(fields(script.module.Args))


@scripts
def test_every_detail_is_marked_once_beside_its_code(script):
    """By an id at the start of a comment above the plumbing; behind other words it is a reference,
    to another detail of the script or to one that it omits.
    """
    code, markers = script.source.splitlines(), []
    for line, text in comments_of(script.source):
        ids = re.match(r"# ((?:\[[A-Z]\d\d\] )+)", text)
        markers += [(name, line) for name in re.findall(r"\w+", ids[1] if ids else "")]
        code[line - 1] = code[line - 1].removesuffix(text)
    assert sorted(name for name, _ in markers) == sorted(script.details)
    for name, line in markers:
        assert re.search(script.details[name], "\n".join(code[line - 1 : line + 2])), name
        assert line < line_of(script.source, RULER)
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


@pytest.mark.parametrize("piece", ["RunningMeanStd", "RunningMeanStd.update", "normalize_reward"])
def test_normalizers_are_the_same_everywhere(piece):
    """Also where the parent has none."""
    assert len({row.pieces[piece] for row in SCRIPTS.values() if piece in row.pieces}) == 1


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
    nodes = list(ast.walk(ast.parse(script.source)))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {x.name for node in nodes if isinstance(node, ast.Import) for x in node.names}
    imported = {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names)
    distributions = {"cv2": "opencv-python-headless", "ale_py": "ale-py", "jpype": "JPype1"}
    distributions |= {"procgen": "procgen-mirror"}
    needed = {distributions.get(name, name) for name in imported} - extras - {"wandb", "pygame"}
    needed |= {"tensorboard", "moviepy"}  # of torch.utils.tensorboard and of RecordVideo
    needed |= {"opencv-python-headless"} if "ResizeObservation" in script.source else set()
    needed |= {"gym-microrts"} if "jpype" in imported else set()  # its jar
    assert set(packages) == needed
    assert pyproject["dependencies"] == [
        name + packages[name] for name in "torch gymnasium numpy tensorboard tqdm tyro".split()
    ]
    if "procgen" in imported:
        assert metadata["tool"]["uv"]["override-dependencies"] == uv["override-dependencies"]


# -- README and docs/ --
# Of uv, pip, TensorBoard, torchrun, Slurm, MkDocs
OF_OTHERS = "--with --group --only-group --index-url --logdir --directory --push --no-jekyll"
OF_OTHERS += " --array --standalone --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint"


def test_pages_name_flags_that_exist():
    """Of scripts and of programs of benchmark/; those of the README's commands, too."""
    names = {field.name for row in SCRIPTS.values() for field in fields(row.module.Args)}
    known = {f"--{name.replace('_', '-')}" for name in names}
    known |= {flag.replace("--", "--no-", 1) for flag in known} | {"--help"}
    programs = "".join(path.read_text() for path in (ROOT / "benchmark").glob("*.py"))
    known |= {*re.findall(r'"(--[a-z][a-z0-9-]*)"', programs), *OF_OTHERS.split()}
    for page in [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "benchmark" / "README.md"]:
        found = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", page.read_text()))
        assert found - known == set(), page
        assert len(found) > 10 or page.name != "core.md"  # the pattern finds them


def test_readme_names_every_script():
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
