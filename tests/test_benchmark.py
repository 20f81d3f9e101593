"""benchmark/: suites end to end, their commands, one run of a plan, comparisons, other tools' runs."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

import ppg_procgen
import ppo_atari
import ppo_continuous_mujoco
import ppo_lstm
import ppo_multidiscrete
import ppo_procgen

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))

import compare  # noqa: E402
import report  # noqa: E402

SCRIPTS = (ppo_continuous_mujoco, ppo_atari, ppo_lstm, ppo_multidiscrete, ppo_procgen, ppg_procgen)
MODULES = {f"{module.__name__}.py": module for module in SCRIPTS}
SUITES = [(suite, recipe) for suite, recipes in report.SUITES.items() for recipe in recipes]


@pytest.fixture
def copy(tmp_path) -> Path:
    """The project without results."""
    folder = tmp_path / "project"
    folder.mkdir()
    for path in [*ROOT.glob("*.py"), ROOT / "README.md"]:
        shutil.copy(path, folder)
    shutil.copytree(ROOT / "benchmark", folder / "benchmark", ignore=shutil.ignore_patterns("results", "figures"))
    return folder


def suite(folder: Path, *command: str, **variables: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHON": sys.executable} | variables
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(["bash", *command], cwd=folder, env=environment, start_new_session=True, **pipes)


def output_of(process: subprocess.Popen, code: int = 0) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def process_of(folder: Path, seed: int) -> int:
    """The process that trains with this seed, once its run has a checkpoint."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = subprocess.run(
            ["pgrep", "-f", f"^{sys.executable} ppo.*--seed {seed} "], capture_output=True, text=True
        )
        if found.stdout and list(folder.glob(f"runs/*__{seed}__*/checkpoint.pt")):
            return int(found.stdout.split()[0])
        time.sleep(0.01)
    pytest.fail(f"the run with seed {seed} did not start")


TINY = {"ENVS": "InvertedPendulum-v4", "STEPS": "20480", "FLAGS": "--checkpoint-every 1 --no-compile --eval-episodes 0"}


def test_a_suite_survives_a_killed_run_and_ends_in_tables_and_figures(copy):
    """Two seeds; one is killed and shown, the other goes on. Started again, the suite resumes one and skips one."""
    pytest.importorskip("mujoco")
    pytest.importorskip("matplotlib")
    process = suite(copy, "benchmark/mujoco.sh", SEEDS="21 22", **TINY)
    os.kill(process_of(copy, 22), signal.SIGKILL)
    output = output_of(process, code=1)
    results = copy / "benchmark" / "results" / "mujoco" / "InvertedPendulum-v4"
    assert "FAIL InvertedPendulum-v4__ppo_continuous_mujoco__22, exit code 137" in output
    assert [path.name for path in results.iterdir()] == ["ppo_continuous_mujoco__21.csv"]

    output = output_of(suite(copy, "benchmark/mujoco.sh", SEEDS="21 22", **TINY))
    assert "have benchmark/results/mujoco/InvertedPendulum-v4/ppo_continuous_mujoco__21.csv" in output
    assert "__22, resumed from runs/" in output and "complete" in output
    for seed in (21, 22):
        facts, curve = report.read_csv(results / f"ppo_continuous_mujoco__{seed}.csv")
        assert facts["steps"] == "20480" and len(curve["step"]) > 90 and (np.diff(curve["seconds"]) >= 0).all()

    done = subprocess.run([sys.executable, copy / "benchmark" / "report.py", "--write"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (copy / "benchmark" / "figures" / "mujoco.png").stat().st_size > 10_000
    section = re.search(r"(?s)<!-- report:mujoco -->(.*?)<!--", (copy / "README.md").read_text())[1]
    assert "InvertedPendulum-v4 | published recipe" in section and "HalfCheetah" not in section
    check = [sys.executable, copy / "benchmark" / "report.py", "--check"]
    assert subprocess.run(check, capture_output=True).returncode == 0
    (results / "ppo_continuous_mujoco__22.csv").unlink()
    assert subprocess.run(check, capture_output=True).returncode == 1


@pytest.mark.parametrize("name, recipe", SUITES)
def test_every_command_of_a_suite_is_valid(name, recipe, copy):
    if name == "procgen":
        pytest.importorskip("procgen")
    output = output_of(suite(copy, f"benchmark/{name}.sh", *recipe.split(), "--dry-run", PYTHON="python"))
    commands = [line.split() for line in output.splitlines()]
    names = set()
    for python, script, *flags in commands:
        args = MODULES[script].parse_args(flags)
        MODULES[script].check_args(args)
        names.add((args.env_id, args.exp_name, args.seed))
    assert python == "python" and len(names) == len(commands) > 0


def test_unknown_recipes_are_refused(copy):
    for name in report.SUITES:
        assert "usage: " in output_of(suite(copy, f"benchmark/{name}.sh", "nonsense"), code=2)


@pytest.mark.parametrize("name, recipe", [("mujoco", "faithful"), ("lstm", "pong")])
def test_tasks_of_an_array_are_the_runs_of_the_plan(name, recipe, copy):
    """Each of them once; slurm.sbatch passes its number on."""
    command = [f"benchmark/{name}.sh", recipe, "--dry-run"]
    whole = output_of(suite(copy, *command, SEEDS="1 2", PYTHON="python")).splitlines()
    one_each = [output_of(suite(copy, *command, SEEDS="1 2", PYTHON="python", TASK=str(i))) for i in range(len(whole))]
    assert [line.rstrip("\n") for line in one_each] == whole and len(whole) > 3
    tools = copy / "tools"
    tools.mkdir()
    (tools / "srun").write_text('#!/usr/bin/env bash\nexec "$@"\n')
    (tools / "srun").chmod(0o755)
    slurm = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "2", "SLURM_CPUS_PER_TASK": "3"}
    job = suite(copy, "benchmark/slurm.sbatch", *command, SEEDS="1 2", PYTHON="python", **slurm)
    assert output_of(job) == one_each[2]


def test_runs_side_by_side_have_one_gpu_each(copy):
    """A stand-in for Python says which GPU it sees; two workers, never the same one at a time."""
    (copy / "python.sh").write_text('echo "$CUDA_VISIBLE_DEVICES" >> gpus; sleep 0.5; exit 1\n')
    variables = {"PYTHON": "bash python.sh", "GPUS": "3 5", "WORKERS": "2", "SEEDS": "1 2", "ENVS": "Ant-v4 Hopper-v5"}
    output_of(suite(copy, "benchmark/mujoco.sh", **variables), code=1)
    gpus = (copy / "gpus").read_text().split()
    assert sorted(gpus) == ["3", "3", "5", "5"] and gpus[0] != gpus[1]


def test_compare_trains_both_and_reports_the_difference(copy):
    pytest.importorskip("mujoco")
    original = (copy / "ppo_continuous_mujoco.py").read_text()
    (copy / "my_ppo.py").write_text(original.replace("gamma: float = 0.99", "gamma: float = 0.9"))
    command = ["benchmark/compare.sh", "ppo_continuous_mujoco.py", "my_ppo.py", "--no-compile", "--eval-episodes", "0"]
    tiny = {"ENVS": "InvertedPendulum-v4", "STEPS": "4096", "SEEDS": "1 2"}
    output = output_of(suite(copy, *command, **tiny))
    head, _, row = [line for line in output.splitlines() if line.startswith("|")]
    assert re.search(r"ppo_continuous_mujoco-\w{8} \| my_ppo-\w{8} \| difference", head)
    assert row.startswith("| InvertedPendulum-v4 | 2, 2 |")
    assert "have " in output_of(suite(copy, *command, **tiny))  # what is done is not done again
    assert "are the same" in output_of(suite(copy, *command[:2], command[1], **tiny), code=2)


def test_every_figure_has_its_curves():
    """None is left over from results that are gone, none is missing."""
    drawn = {path.stem for path in (ROOT / "benchmark" / "figures").glob("*.png")}
    suites = {path.name for path in (ROOT / "benchmark" / "results").iterdir() if list(path.glob("*/*.csv"))}
    recipes = {suite: {exp for exps in report.read_suite(suite).values() for exp in exps} for suite in suites}
    assert drawn == {suite for suite, exps in recipes.items() if exps & report.RECIPES.keys()} - {"compare"}


def test_a_figure_without_results_goes(copy, monkeypatch):
    monkeypatch.setattr(report, "HERE", copy / "benchmark")
    figure = copy / "benchmark" / "figures" / "mujoco.png"
    figure.parent.mkdir()
    figure.write_bytes(b"old")
    report.draw("mujoco")
    assert not figure.exists()


def test_difference_is_welchs_with_a_careful_number_of_degrees():
    x, y = np.array([1.0, 2.0, 3.0]), np.array([4.0, 6.0, 8.0, 10.0])
    mean, low, high = compare.difference(x, y)
    half = 4.3027 * (1 / 3 + (20 / 3) / 4) ** 0.5  # Student's t for two degrees
    assert (mean, low, high) == pytest.approx((5, 5 - half, 5 + half), rel=1e-4)


def test_summary_is_that_of_its_definitions():
    scores = {"a": np.array([1.0, 2.0, 3.0, 100.0]), "b": np.array([0.0, 4.0, 5.0, 6.0])}
    assert report.interquartile_mean(scores) == pytest.approx((2 + 3 + 4 + 5) / 4)
    better = {"a": np.array([2.0, 200.0]), "b": np.array([-1.0]), "c": np.array([9.0])}
    assert report.improvement(scores, better) == pytest.approx((((1.5 + 4) / 8) + 0) / 2)


def test_runs_of_other_tools_are_read_by_their_tags(tmp_path):
    for exp, seed, value in (("theirs", 1, 10.0), ("theirs", 2, 14.0), ("ours", 1, 3.0)):
        with SummaryWriter(tmp_path / f"Hopper-v4__{exp}__{seed}__1700000000") as writer:
            for step in range(150):  # the first 50 are not among the last 100
                writer.add_scalar("charts/episodic_return", value if step >= 50 else 0.0, step)
    with SummaryWriter(tmp_path / "unnamed") as writer:
        writer.add_scalar("charts/episodic_return", 1.0, 0)
    rows = report.tensorboard(tmp_path).splitlines()[2:]
    assert rows[0] == "| Hopper-v4 | ours | 1 | 3.0 |"
    assert rows[1].startswith("| Hopper-v4 | theirs | 2 | 12.0 [-13.4, 37.4] |") and len(rows) == 2
