"""The text of the scripts: detail markers, budgets, no global state, flags, and the tables of the README."""

import ast
import builtins
import io
import re
import subprocess
import symtable
import sys
import tokenize
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Script -> details that it must carry, each exactly once -> what the code beside the marker must contain. "Beside" is
# the line of the marker or one of the two after it.
CORE = {
    "C01": r"for t in range\(T\)",
    "C02": "orthogonal_",
    "C03": "adam_eps",
    "C04": "learning_rate",
    "C05": "lastgaelam",
    "C06": "randperm",
    "C07": "centered",
    "C08": "torch.max",
    "C09": "clip_vloss|v_clipped",
    "C10": "ent_coef.*vf_coef",
    "C11": "max_grad_norm",
    "C12": "mean",
    "X01": "anneal_clip",
    "X03": "target_kl",
}
CONTINUOUS = {
    "C13": "shared_network",
    "M01": "Normal",
    "M02": "actor_logstd",
    "M03": r"log_prob.*sum\(1\)",
    "M04": "shared_network",
    "M05": r"action\.clip",
    "M06": r"\.mean.*\.var",
    "M07": "clip_obs",
    "M08": r"reward / np\.sqrt\(.*var",
    "M09": "clip_reward",
    "S01": "final_obs",
    "S02": "next_step_reset",
    "S03": "squash",
    "S04": "scale_actions",
}
ATARI = {
    "A01": "noop_max",
    "A02": "np.maximum",
    "A03": "< self.lives",
    "A04": r"for action in \(1, 2\)",
    "A05": "INTER_AREA",
    "A06": "np.sign",
    "A07": "frames",
    "A08": r"nature_cnn\(\)",
    "A09": "/ 255",
    "S01": "next_values",
    "S02": "next_valid",
}
LSTM = {
    "L01": r"orthogonal_\(param, 1\.0\)",
    "L02": r"lstm_state = torch\.zeros",
    "L03": r"lstm_state \* .*next_valid",
    "L04": r"(?s)env_inds.*split_episodes",
    "L05": "first == 0",
}
MULTIDISCRETE = {
    "A08": r"nn\.Conv2d\(channels, 32, 8, stride=4\)",
    "A09": "/ self.scale",
    "C13": "shared_network",
    "D01": "logprob = logprob \\+ torch.where\\(chosen",
    "X04": r"torch\.where\(mask, logits",
} | {name: CONTINUOUS[name] for name in ("M06", "M07", "M08", "M09", "S01", "S02")}
PROCGEN = {
    "A09": "/ 255",
    "M08": r"reward / np\.sqrt\(.*var",
    "M09": "clip_reward",
    "P07": r"functional\.normalize",
    "P10": "norm_reward_rollout",
}
PHASIC = {
    "P01": "aux_critic",
    "P02": "dual",
    "P03": "n_iteration",
    "P04": "e_auxiliary",
    "P05": "beta_clone",
    "P06": "centered",
    "P08": "1e-8",
    "P09": "aux_adam",
}
SCRIPTS = {
    "ppo_continuous_mujoco.py": CORE | CONTINUOUS,
    "ppo_atari.py": CORE | ATARI,
    "ppo_lstm.py": CORE | ATARI | LSTM,
    "ppo_multidiscrete.py": CORE | MULTIDISCRETE,
    "ppo_procgen.py": CORE | PROCGEN | {"C13": "shared_network"},
    "ppg_procgen.py": CORE | PROCGEN | PHASIC,
}
OMITTED = {"ppo_procgen.py": {"S01"}, "ppg_procgen.py": {"S01"}}  # `~[S01]` says why a script cannot do it
ITERATION_LINES = dict.fromkeys(SCRIPTS, 130) | {"ppg_procgen.py": 210}
# Functions, classes and methods that are the same text in every script of the row
ALL, GAMES, PAIR = list(SCRIPTS), ["ppo_atari.py", "ppo_lstm.py"], ["ppo_procgen.py", "ppg_procgen.py"]
VECTORS = ["ppo_continuous_mujoco.py", "ppo_multidiscrete.py"]
WRAPPERS = "NoopReset MaxAndSkip EpisodicLife FireReset WarpFrame ClipReward FrameStack"
LEVELS = "import_procgen game_name Procgen ResidualBlock impala_cnn evaluate"
GROUPS = {
    "gae adam_step compiled save_checkpoint load_checkpoint open_logs": ALL,
    "parse_args": [*VECTORS, *GAMES],
    f"{WRAPPERS} make_envs provenance": GAMES,
    "ppo_loss": [*VECTORS, *GAMES],  # Procgen's leaves the advantages to update
    f"{LEVELS} parse_args layer_init provenance ppo_loss part_size accumulate": PAIR,
    "load_agent": [*GAMES, *PAIR],
    "Agent.act Agent.evaluate_actions": ["ppo_atari.py", *PAIR],
    "normalize_obs load_agent": VECTORS,
    "RunningMeanStd normalize_reward": [*VECTORS, *PAIR],
    "layer_init": [*GAMES, "ppo_multidiscrete.py"],
}
SHARED = [(name, scripts) for names, scripts in GROUPS.items() for name in names.split()]
# (script, the one that it is a patch of) -> lines of their diff
DIFFS = {("ppo_lstm.py", "ppo_atari.py"): 180, ("ppg_procgen.py", "ppo_procgen.py"): 200}
# TensorBoard's tags, as tests/test_behaviour.py finds them in the event files
LOSSES = "policy_loss value_loss entropy old_approx_kl approx_kl old_approx_kl_max approx_kl_max clipfrac grad_norm"
TAGS = ["charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/learning_rate", "time/rollout"]
TAGS += [f"losses/{name}" for name in [*LOSSES.split(), "explained_variance"]] + ["time/update", "eval/episodic_return"]
TAGS += [f"losses/aux/{name}" for name in "kl_loss aux_value_loss real_value_loss grad_norm".split()]
TAGS += ["time/auxiliary"]

scripts = pytest.mark.parametrize("script", SCRIPTS)


def source_of(script: str) -> str:
    return (ROOT / script).read_text()


def comments_of(source: str) -> list[tuple[int, str]]:
    """(line, text) of every comment; docstrings and strings are none."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def markers_of(source: str) -> list[tuple[str, int]]:
    """(id, line) of every `[C05]` in a comment; `see [C05]` refers to one and `~[C05]` says what is left out."""
    marker = re.compile(r"(?<!see )(?<!~)\[([A-Z]\d\d)\]")
    return [(name, line) for line, text in comments_of(source) for name in marker.findall(text)]


@scripts
def test_every_detail_is_marked_exactly_once(script):
    names = [name for name, _ in markers_of(source_of(script))]
    assert sorted(names) == sorted(SCRIPTS[script])


@scripts
def test_code_beside_a_marker_is_what_it_says(script):
    source = source_of(script)
    code = source.splitlines()
    for line, text in comments_of(source):  # the marker's own words do not count
        code[line - 1] = code[line - 1].removesuffix(text)
    wrong = []
    for name, line in markers_of(source):
        beside = "\n".join(code[line - 1 : line + 2])
        if not re.search(SCRIPTS[script][name], beside):
            wrong.append((name, line, beside))
    assert wrong == []


@scripts
def test_references_are_to_details_of_the_script(script):
    omitted = OMITTED.get(script, set())
    assert set(re.findall(r"\[([A-Z]\d\d)\]", source_of(script))) == set(SCRIPTS[script]) | omitted
    assert set(re.findall(r"~\[([A-Z]\d\d)\]", source_of(script))) == omitted


@pytest.mark.parametrize("name, scripts", SHARED)
def test_shared_functions_are_the_same_text(name, scripts):
    texts = {ast.get_source_segment(source_of(script), definition_of(script, name)) for script in scripts}
    assert len(texts) == 1


NO_PHASES = [script for script in ALL if script not in PAIR[1:]]  # PPG's are in its time left
BLOCKS = {"# -- log --": NO_PHASES, "# -- end --": ALL, "# -- rollout --": PAIR}


@pytest.mark.parametrize("ruler", BLOCKS)
def test_shared_blocks_of_train_are_the_same_text(ruler):
    texts = {re.search(rf"(?s)\n +{ruler}\n.*?(?=\n +# -- |\nif )", source_of(script))[0] for script in BLOCKS[ruler]}
    assert len(texts) == 1 and len(texts.pop().splitlines()) > 10


def definition_of(script: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """A function, a class or, as Agent.act, a method."""
    node = ast.parse(source_of(script))
    for part in name.split("."):
        (node,) = [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == part]
    return node


@pytest.mark.parametrize("script, base", DIFFS)
def test_a_script_is_a_small_patch_of_its_base(script, base):
    by_diff = subprocess.run(["diff", ROOT / base, ROOT / script], capture_output=True, text=True).stdout.splitlines()
    changed = [line for line in by_diff if line[0] in "<>"]
    assert 0 < len(changed) <= DIFFS[script, base]


@scripts
def test_functions_are_short(script):
    functions = [node for node in ast.walk(ast.parse(source_of(script))) if isinstance(node, ast.FunctionDef)]
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions if node.name != "train"}
    assert len(lengths) > 20 and {name: length for name, length in lengths.items() if length > 40} == {}


@scripts
def test_iteration_up_to_the_last_optimizer_step_is_short(script):
    lines = source_of(script).splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.strip().startswith("for iteration in ")]
    steps = [i for i, line in enumerate(lines) if re.search(r"= (aux_)?update(_step)?\(", line)]
    assert start < steps[-1] <= start + ITERATION_LINES[script] - 1


@scripts
def test_layout(script):
    """Lines of at most 120 columns, no trailing spaces, no notes to oneself, a share of comments that helps."""
    source = source_of(script)
    lines = source.splitlines()
    assert [i for i, line in enumerate(lines, 1) if len(line) > 120 or line != line.rstrip()] == []
    assert re.findall(r"TODO|FIXME|XXX|HACK|not sure", source, re.IGNORECASE) == []
    share = len({line for line, _ in comments_of(source)}) / len(lines)
    assert 0.05 <= share <= 0.25


@scripts
def test_module_level_holds_imports_functions_and_classes_only(script):
    body = ast.parse(source_of(script)).body
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    docstring, *middle, main = [node for node in body]
    assert isinstance(docstring, ast.Expr) and ast.get_docstring(ast.parse(source_of(script)))
    assert [ast.unparse(node) for node in middle if not isinstance(node, kinds)] == []
    assert isinstance(main, ast.If) and ast.unparse(main.test) == "__name__ == '__main__'" and len(main.body) == 1


@scripts
def test_functions_use_their_arguments_imports_and_each_other_only(script):
    """Every global name in a function is a builtin, an import or a function or class of the module."""
    source = source_of(script)
    allowed = set(dir(builtins)) | {"__file__"}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            allowed |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            allowed.add(node.name)
    tables, strange = [symtable.symtable(source, script, "exec")], []
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols() if table.get_type() == "function" else []:
            if symbol.is_declared_global() or (symbol.is_global() and symbol.get_name() not in allowed):
                strange.append((table.get_name(), symbol.get_name()))
    assert strange == []


@scripts
def test_every_name_of_the_module_is_used(script):
    """No dead code: functions, classes, methods and flags are mentioned outside their definition."""
    source = source_of(script)
    tree = ast.parse(source)
    defined = [node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    defined += [field.name for field in fields(import_module(script.removesuffix(".py")).Args)]
    mentioned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    mentioned |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | {"__init__", "main"}
    mentioned |= {"forward", "observation", "close_extras"}  # called by torch and gymnasium
    mentioned |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert set(defined) - mentioned == set()


def help_texts(script: str) -> dict[str, str]:
    """Flag -> the string under its field in Args."""
    tree = ast.parse(source_of(script))
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    texts = {}
    for field, after in zip(args.body, args.body[1:]):
        if isinstance(field, ast.AnnAssign):
            texts[field.target.id] = after.value.value if isinstance(after, ast.Expr) else ""
    return texts


@scripts
def test_every_flag_has_its_own_help(script):
    texts = help_texts(script)
    assert set(texts) == {field.name for field in fields(import_module(script.removesuffix(".py")).Args)}
    assert [name for name, text in texts.items() if len(text) < 10] == []
    assert len(set(texts.values())) == len(texts)


# -- README --
def readme() -> str:
    return (ROOT / "README.md").read_text()


@scripts
def test_readme_mentions_every_flag(script):
    text = readme()
    flags = [f"--{name.replace('_', '-')}" for name in help_texts(script)]
    named = set(re.findall(r"--(?:no-)?[a-z][a-z0-9-]*", text))
    assert [flag for flag in flags if not {flag, flag.replace("--", "--no-", 1)} & named] == []


def test_readme_mentions_no_flag_that_does_not_exist():
    known = {f"--{name.replace('_', '-')}" for script in SCRIPTS for name in help_texts(script)}
    known |= {flag.replace("--", "--no-", 1) for flag in known} | {"--help"}
    commands = [line for line in readme().splitlines() if re.search(r"\b(python|run) pp[og]_\w+\.py", line)]
    used = {flag for line in commands for flag in re.findall(r"--[a-z][a-z0-9-]*", line.split(".py", 1)[1])}
    assert commands and used - known == set()


def test_readme_mentions_every_metric():
    text = readme()
    assert [tag for tag in TAGS if tag not in text] == []


@scripts
def test_readme_table_has_the_line_of_every_detail(script):
    """| C05 | title | what | [script:433](script#L433), [other:400](other#L400) | --flag | source |"""
    table = {}
    for name, row in re.findall(r"^\| ([A-Z]\d\d) \|(.*)", readme(), re.MULTILINE):
        for file, line, target, anchor in re.findall(r"\[([\w.]+):(\d+)\]\(([\w.]+)#L(\d+)\)", row):
            table[name, file] = (int(line), target, int(anchor))
    expected = {(name, script): (line, script, line) for name, line in markers_of(source_of(script))}
    assert {key: value for key, value in table.items() if key[1] == script} == expected


def test_readme_holds_the_tables_of_the_results():
    report = [sys.executable, ROOT / "benchmark" / "report.py", "--check"]
    done = subprocess.run(report, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
