"""benchmark/: suites as a user starts them, plans, results files, tables, statistics, figures."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from harness import wait_for
from registry import ROOT
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(ROOT / "benchmark"))

import collect  # noqa: E402
import figures  # noqa: E402
import patches  # noqa: E402
import plot  # noqa: E402
import report  # noqa: E402
import results  # noqa: E402
import run  # noqa: E402
import stats  # noqa: E402
import tables  # noqa: E402

RECIPES = list(results.read_recipes().groupby(["suite", "recipe"], sort=False).groups)
VARIABLES = "ENVS SEEDS STEPS SUFFIX FLAGS WORKERS THREADS GPUS TASK".split()
CARTPOLE = {
    "ENVS": "CartPole-v1",
    "SEEDS": "1",
    "STEPS": "20480",
    "FLAGS": "--checkpoint-seconds 0 --eval-episodes 0",
}


# -- suites, as a user starts them --
@pytest.fixture
def project(tmp_path) -> Path:
    """The project without results."""
    folder = tmp_path / "project"
    folder.mkdir()
    for path in [*ROOT.glob("*.py"), ROOT / "README.md"]:
        shutil.copy(path, folder)
    without = shutil.ignore_patterns("results", "figures")
    shutil.copytree(ROOT / "benchmark", folder / "benchmark", ignore=without)
    for name in ("docs", "variants"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


def start(folder: Path, *command: str, **variables: str) -> subprocess.Popen:
    """A shell command of benchmark/, with Ctrl-C even if pytest runs in the background."""
    environment = {name: x for name, x in os.environ.items() if name not in VARIABLES}
    environment |= {"PYTHON": sys.executable} | variables
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    how["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(["bash", *command], cwd=folder, env=environment, **how)


def output_of(process: subprocess.Popen, code: int = 0) -> str:
    """What it printed, once it has ended with this exit code."""
    try:
        output = process.communicate(timeout=900)[0].decode()
    finally:
        process.kill()  # which ends its runs, too
    assert process.returncode == code, output
    return output


def trains(folder: Path) -> list[int]:
    """The processes below this folder that train."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            here = folder in (process / "cwd").resolve().parents
            command = (process / "cmdline").read_text().split("\0")
        except OSError:  # it has ended, or is not ours
            continue
        if here and "--seed" in command:
            found.append(int(process.name))
    return found


def checkpoint_of(folder: Path) -> int:
    """When the run's last checkpoint was written, 0 if there is none."""
    paths = folder.glob("runs/*/runs/*/checkpoint.pt")
    return max((path.stat().st_mtime_ns for path in paths), default=0)


@pytest.mark.e2e
def test_a_suite_that_ends_in_any_way_ends_its_run_and_resumes_it(project):
    """Ctrl-C, SIGTERM, SIGKILL; in the end there are a table and a figure. What died before its
    first checkpoint is no run to resume.
    """
    command, mine = "benchmark/classic.sh", CARTPOLE | {"SUFFIX": "_mine"}
    dead = project / "runs" / "classic_mine" / "runs" / "CartPole-v1__ppo__1__9999999999"
    dead.mkdir(parents=True)
    (dead / "config.json").write_text("{")
    resumed = ""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process = start(project, command, **mine)
        before = checkpoint_of(project)
        wait_for(lambda: checkpoint_of(project) > before, process)
        process.send_signal(signum)
        output = output_of(process, code=-9 if signum == signal.SIGKILL else 1)
        assert f"run  CartPole-v1__ppo__1{resumed}" in output and "FAIL" not in output
        assert ("start the suite again" in output) == (signum != signal.SIGKILL)
        deadline = time.monotonic() + 60
        while trains(project) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert trains(project) == []
        resumed = ", resumed from "

    output = output_of(start(project, command, **mine))
    assert "0 of 1 runs left" in output
    assert re.search(r"\| CartPole-v1 \| default \| .* \| 1 \|", output)
    assert (project / "benchmark/figures/classic_mine.png").stat().st_size > 10_000
    (path,) = project.glob("benchmark/results/**/*.csv")
    facts, curve = results.read_facts(path), results.read_curve(path)
    assert facts["steps"] == "20480" and (np.diff(curve["seconds"]) >= 0).all()
    path.rename(path.with_suffix(".old"))  # a finished run is collected, not trained again
    output = output_of(start(project, command, **mine))
    assert "done benchmark/results/classic_mine/CartPole-v1/ppo__1.csv" in output
    assert path.read_text() == path.with_suffix(".old").read_text()
    longer = start(project, command, "--dry-run", **mine | {"STEPS": "40960"})
    assert "total_timesteps 20480 (asked for: 40960); delete it" in output_of(longer, code=1)


@pytest.mark.e2e
def test_compare_trains_both_and_prints_the_difference(project):
    source = (project / "ppo.py").read_text()
    mine = source.replace("gamma: float = 0.99", "gamma: float = 0.9")
    (project / "my ppo (copy).py").write_text(mine)
    command = ["benchmark/compare.sh", "ppo.py", "my ppo (copy).py", "--eval-episodes", "0"]
    tiny = {"STEPS": "2048", "SEEDS": "1"}  # CartPole is ppo.py's own
    output = output_of(start(project, *command, **tiny))
    head, _, row = [line for line in output.splitlines() if line.startswith("|")]
    assert re.search(r"\| ppo-\w{8} \| my_ppo_copy_-\w{8} \| difference", head)
    assert row.startswith("| CartPole-v1 | 1; 1 |")
    tiny["ENVS"] = "CartPole-v1 Acrobot-v1"
    output = output_of(start(project, *command, "--dry-run", **tiny))
    assert output.count("have ") == output.count(" --env-id Acrobot-v1 ") == 2
    assert "are the same" in output_of(start(project, *command[:2], "ppo.py", **tiny), code=1)
    wrong = output_of(start(project, *command[:2], "no.py"), code=1)
    assert "no file no.py" in wrong and "Traceback" not in wrong


@pytest.mark.e2e
def test_speed_of_two_scripts_in_turns(project):
    """A peer that is our own script."""
    pairs = (project / "benchmark" / "pairs.csv").read_text()
    peer = "cleanrl/ppo.py,--no-cuda,CartPole-v1,327680"
    assert peer in pairs
    pairs = pairs.replace(peer, "ppo.py,,CartPole-v1,20480")
    (project / "benchmark" / "pairs.csv").write_text(pairs)
    command = ["benchmark/speed.sh", "ppo_cleanrl", ".", sys.executable, "--pairs", "2"]
    assert "shorter than 30 s" in output_of(start(project, *command, "--max-load", "99"), code=1)
    assert "wait, or give" in output_of(start(project, *command, "--max-load", "-1"), code=1)
    command += ["--short", "--max-load", "99"]
    output_of(start(project, *command, SUFFIX="_mine"))
    path = project / "benchmark/results/speed_mine/ppo_cleanrl.csv"
    facts, data = results.read_facts(path), results.read_curve(path)
    assert facts["peer_source"].startswith("ppo.py, commit") and facts["short"] == "yes"
    assert len(data) == 2 and (data["peer_wall_seconds"] > 0).all()
    assert "exists" in output_of(start(project, *command, SUFFIX="_mine"), code=1)


@pytest.mark.e2e
def test_a_variant_and_its_baseline_are_trained_once(project):
    tiny = {"ENVS": "InvertedPendulum-v4", "SEEDS": "1", "STEPS": "4096"}
    tiny["FLAGS"] = "--no-compile --eval-episodes 0"
    output = output_of(start(project, "benchmark/variant.sh", "spo", **tiny))
    assert "| SPO's penalty instead of the clip | 1 |" in output
    output = output_of(start(project, "benchmark/variant.sh", "spo", "--dry-run", **tiny))
    assert re.findall(r"have .*/(\w+).csv", output) == ["baseline__1", "spo__1"]


# -- plans --
@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Results and runs in an empty folder, no variables of a suite."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in run.THREADS:  # put back in the end
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(figures, "FIGURES", tmp_path / "figures")
    return tmp_path


def test_the_run_of_init_from_is_found_from_where_the_command_was_given(here, monkeypatch):
    monkeypatch.chdir(here)
    monkeypatch.setenv("SUFFIX", "_mine")
    for flags in ("--init-from runs/x", "--init-from=runs/x"):
        monkeypatch.setenv("FLAGS", f"{flags} --num-envs 8")
        each = run.with_flags(run.plan("classic", ["default"]))[0]
        asked = run.asked_by(each)
        assert asked["init_from"] == str(here / "runs" / "x") and asked["num_envs"] == 8


def test_a_script_may_import_what_lies_beside_it(here):
    """And a patch may be one of git."""
    (here / "beside.py").write_text("GAMMA = 0.5")
    (here / "copy_of_ppo.py").write_text("from beside import GAMMA")
    assert run.load(here / "copy_of_ppo.py").GAMMA == 0.5
    (here / "idea.patch").write_text("--- a/ppo.py\n+++ b/ppo.py\n")
    assert patches.original_of(here / "idea.patch") == "ppo.py"
    (here / "idea.patch").write_text("+++ ppo.py\n")
    with pytest.raises(ValueError, match="no line `--- SCRIPT.py`"):
        patches.original_of(here / "idea.patch")


@pytest.mark.parametrize("suite", dict(RECIPES))
def test_recipes_have_valid_commands_and_the_results_asked_for(suite):
    if suite == "procgen":
        pytest.importorskip("procgen")
    for recipe in [recipe for name, recipe in RECIPES if name == suite]:
        runs = run.plan(suite, [recipe])
        assert runs and all(run.asked_by(each)["env_id"] == each.env for each in runs)
        for each in [each for each in runs if each.csv.exists()]:
            found = run.differs(each)
            # A patch follows its script's lines; a file names the commit that has its own
            assert all(text.startswith(("unfinished", "patch")) for text in found), each.csv


def test_every_results_file_is_reached_by_a_row():
    reached = {each.csv for suite, recipe in RECIPES for each in run.plan(suite, [recipe])}
    files = {path for path in results.RESULTS.glob("*/*/*.csv") if "_mine" not in path.parts[-3]}
    assert {path for path in files if path.parts[-3] != "compare"} <= reached


REFUSED = [
    ({"FLAGS": "--gamma 0.9"}, "FLAGS change gamma: with SUFFIX"),
    ({"FLAGS": "--seed 7", "SUFFIX": "_mine"}, "FLAGS may not have seed"),
    ({"FLAGS": "--exp-name=ppo", "SUFFIX": "_mine"}, "FLAGS may not have exp_name"),  # as it is
    ({"FLAGS": "--no-such-flag"}, "Unrecognized options: --no-such-flag"),
    ({"SEEDS": "1,2"}, r"SEEDS \(1,2\) are numbers"),
    ({"SEEDS": ""}, "leave no run"),
    ({"TASK": "99"}, r"no run has the number TASK \(99\)"),
    ({"SUFFIX": "_1M"}, "atari_1M is the folder of another recipe"),
]


@pytest.mark.parametrize("variables, words", REFUSED)
def test_what_would_go_wrong_unnoticed_is_refused(variables, words, here, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(run.Refused, match=words):
        run.train_all(run.with_flags(run.plan("atari", ["default"])), dry_run=True)
    with pytest.raises(run.Refused, match="recipes of atari: default, bf16, 1M, fast"):
        run.plan("atari", ["nonsense"])


def test_runs_side_by_side_share_cards_and_cores(here, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    one, every = run.plan("classic", ["default"])[:1], run.plan("atari", ["default"])
    wanted = [(one, "", 8, "1"), (every, "", 1, "8"), (one, "0 1", 8, "1"), (every, "0 1", 2, "4")]
    for runs, gpus, workers, threads in wanted:
        monkeypatch.setenv("GPUS", gpus)
        pool = run.Pool(runs)
        assert (pool.workers, pool.threads) == (workers, threads)


def test_the_last_words_of_a_run_are_its_own():
    bar = " 50%|##   | 5/10 [00:01<00:01, 5step/s]"
    refusal, wandb = "error: losses are not finite", "wandb: Find logs at: wandb/run/logs\n"
    assert run.last_words(f"run: x\n{bar}\r{bar}{refusal}\n{wandb}") == refusal
    crash = "Traceback (most recent call last):\n  here\nmy.module.OddError: no\n"
    assert run.last_words(f"{crash}{bar}\n{wandb}") == "my.module.OddError: no"
    assert run.last_words(f"Killed\n{bar}") == "Killed"
    assert run.last_words("") == "it printed nothing"


def test_what_breaks_one_run_is_one_line(here, monkeypatch):
    """A script that changed after the plan was made, an error of our own, a disk without locks."""
    runs = run.plan("classic", ["default"])[:2]
    pool = run.Pool(runs)
    pool.texts[runs[0].script] += b"another"
    assert "ppo.py has changed since" in pool.train(runs[0])

    def no_locks(file, how):
        raise OSError("no locks")

    monkeypatch.setattr(run.fcntl, "flock", no_locks)
    monkeypatch.setattr(run.Pool, "wait_for", lambda *_: 1)
    pool = run.Pool(runs)
    monkeypatch.setattr(run, "newest_run", lambda each, to_resume: {"CartPole-v1": None}[each.env])
    ends = sorted(pool.work())
    assert ends[0] == "FAIL Acrobot-v1__ppo__1: KeyError('Acrobot-v1')"
    assert ends[1].startswith("FAIL CartPole-v1__ppo__1, exit code 1: it printed nothing")


@pytest.mark.e2e
def test_a_run_that_fails_is_one_line_and_holds_up_no_others(here, monkeypatch, capsys):
    """Side by side, each on a GPU of its own."""
    variables = {"ENVS": "CartPole-v1 NoSuch-v0", "SEEDS": "1", "STEPS": "4096", "SUFFIX": "_mine"}
    variables |= {"FLAGS": "--eval-episodes 0", "GPUS": "3 5", "WORKERS": "2", "THREADS": "7"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    started, popen = [], subprocess.Popen
    keep = lambda *args, **how: started.append(how) or popen(*args, **how)  # noqa: E731
    monkeypatch.setattr(subprocess, "Popen", keep)
    runs = run.with_flags(run.plan("classic", ["default"]))
    with pytest.raises(SystemExit, match="not every run has a result"):
        run.train_all(runs, dry_run=False)
    environments = [how["env"] for how in started if how.get("env")]
    assert sorted(env["CUDA_VISIBLE_DEVICES"] for env in environments) == ["3", "5"]
    assert {env[name] for env in environments for name in run.THREADS} == {"7"}
    assert "FAIL NoSuch-v0__ppo__1, exit code 1: error: " in capsys.readouterr().out
    assert run.had(runs[0]).startswith("have ")


@pytest.mark.e2e
def test_losses_that_are_not_finite_are_a_result(here, monkeypatch):
    monkeypatch.setenv("FLAGS", "--learning-rate 1e30")
    monkeypatch.setenv("SUFFIX", "_mine")
    each = run.with_flags(run.plan("classic", ["default"]))[0]
    run.train_all([each], dry_run=False)
    facts, curve = results.read_facts(each.csv), results.read_curve(each.csv)
    assert facts["final_return"] == facts["return_of_iterations"] == "0.0"
    step = int(facts["steps"])
    assert facts["diverged"] == f"losses not finite, last episode at step {step}"
    assert 0 < step <= 512 and curve.iloc[-1][["step", "return"]].tolist() == [step, 0]
    assert run.had(each).startswith("have ") and tables.seeds_cell([1], 1) == "1, 1 diverged"


# -- results files --
@pytest.fixture
def finished(here) -> Callable:
    """`finished(**checkpoint)`: the directory of a run of three iterations."""
    args = {"env_id": "a:B/c-v0", "exp_name": "exp", "seed": 3, "total_timesteps": 30}
    args |= {"num_envs": 2, "num_steps": 5, "resume": "runs/x"}

    def make(**changes) -> Path:
        run_dir = here / "runs" / str(len(list(here.glob("runs/*"))))
        run_dir.mkdir(parents=True)
        config = {"args": args, "command": "/somewhere/my_ppo.py --seed 3", "commit": "1"}
        config |= {"versions": {"torch": "2"}}
        (run_dir / "config.json").write_text(json.dumps(config))
        (run_dir / "my_ppo.py").write_text("print()")
        (run_dir / "episodes.csv").write_text("step,return,length,seconds\n10,2,4,1\n30,4,9,3\n")
        checkpoint = {"args": args, "iteration": 3, "global_step": 30, "seconds": 3.0}
        torch.save(checkpoint | {"recent_returns": [2.0, 4.0]} | changes, run_dir / "checkpoint.pt")
        return run_dir

    return make


def test_a_results_file_says_how_its_run_was_made(finished):
    """Also with other versions, if it went on with them; in the order of its parts."""
    run_dir = finished()
    config = json.loads((run_dir / "config.json").read_text())
    for iteration, torch_version in ((9, "3"), (10, "4")):
        text = json.dumps(config | {"versions": {"torch": torch_version}})
        (run_dir / f"config_{iteration}.json").write_text(text)
        os.utime(run_dir / f"config_{iteration}.json", (2e9 + iteration, 2e9 + iteration))
    path = collect.collect(run_dir, "suite")
    assert path == results.RESULTS / "suite" / "a-B-c-v0" / "exp__3.csv"
    facts, curve = results.read_facts(path), results.read_curve(path)
    assert facts["command"] == "my_ppo.py --seed 3" and facts["script"] == "my_ppo"
    assert json.loads(facts["args"])["resume"] is None and json.loads(facts["args"])["seed"] == 3
    assert facts["sha256"] == hashlib.sha256(b"print()").hexdigest()
    assert facts["versions"] == "torch 2; then torch 3; then torch 4"
    assert facts["final_return"] == facts["return_of_iterations"] == "3.0"
    assert curve["step"].iloc[-1] == 30 and curve["return"].tolist()[-1] == 3
    text = path.read_text()
    collect.collect(run_dir, "suite")  # the same run again
    with pytest.raises(SystemExit, match="holds another run"):
        collect.collect(finished(seconds=4.0), "suite")
    assert path.read_text() == text


def test_a_broken_run_has_its_diagnostics_beside_its_returns(finished):
    """At steps between two iterations what lies between them."""
    run_dir = finished()
    with SummaryWriter(run_dir) as writer:
        for name in results.DIAGNOSTICS:
            for step in (10, 30):
                writer.add_scalar(f"losses/{name}", step / 10, step)
        writer.add_scalar("eval/episodic_return", 7.5, 30)
    path = collect.collect(run_dir, "broken_mine")
    curve = results.read_curve(path)
    assert list(curve) == ["step", "return", "seconds", *results.DIAGNOSTICS]
    for name in results.DIAGNOSTICS:
        np.testing.assert_allclose(curve[name], curve["step"] / 10)
    assert results.read_facts(path)["eval_return"] == "7.5"


def test_a_curve_is_the_mean_of_the_100_episodes_before():
    """At a hundred points of the run, of those so far if they are fewer."""
    steps, returns = np.arange(1, 301), np.random.default_rng(0).normal(size=300)
    facts = {"total_timesteps": 300, "steps": 300, "seconds": 30.0}
    rows = collect.curve_of(facts, np.stack([steps, returns, steps / 10]))
    rows = [[float(x) for x in row.split(",")] for row in rows]
    assert [row[0] for row in rows] == list(range(3, 301, 3))
    for step, mean, seconds in rows:
        last = returns[max(0, int(step) - 100) : int(step)]
        assert mean == pytest.approx(last.mean(), rel=1e-4, abs=1e-5) and seconds == step / 10


def test_what_is_no_whole_run_is_not_collected_unless_asked(finished):
    """An unfinished one up to its checkpoint; the tables say how far it came."""
    with pytest.raises(SystemExit, match="disagree on the last 100 returns"):
        collect.collect(finished(recent_returns=[2.0, 5.0]), "suite")
    for has_diverged, words in ((False, "no finished episode"), (True, "before an episode")):
        run_dir = finished()
        (run_dir / "episodes.csv").write_text("step,return,length,seconds\n")
        with pytest.raises(SystemExit, match=words):
            collect.collect(run_dir, "suite", has_diverged)
    run_dir = finished(iteration=2, global_step=20, seconds=2.0, recent_returns=[2.0])
    with pytest.raises(SystemExit, match="is not finished"):
        collect.collect(run_dir, "suite")
    assert not results.RESULTS.exists()
    path = collect.collect(run_dir, "suite", unfinished=True)
    assert results.read_facts(path)["unfinished"] == "20 of 30 steps"
    assert results.read_curve(path).iloc[-1].tolist() == [20, 2, 2]
    assert "exp, 20 of 30 steps" in tables.folder_section("suite")


# -- tables, of results that are made up --
@pytest.fixture
def put(here) -> Callable:
    """`put(folder, env, exp, returns)`: a results file for each seed."""

    def write(folder: str, env: str, exp: str, returns: list[float], **more) -> None:
        for seed, value in enumerate(returns, 1):
            path = results.file_of(folder, env, exp, seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            facts = {"script": "s", "env": env, "exp": exp, "seed": seed, "commit": "1"}
            facts |= {"total_timesteps": 10, "steps": 10, "seconds": 1.0, "final_return": value}
            facts |= {"hardware": "a", "versions": "b", "return_of_iterations": value + 5} | more
            lines = [f"# {name}: {fact}" for name, fact in facts.items()]
            path.write_text("\n".join([*lines, "step,return,seconds", f"10,{value},1"]) + "\n")
        results.read_facts.cache_clear()

    return write


@pytest.mark.parametrize("name", ["script", "patch", "total_timesteps"])
def test_seeds_of_different_runs_are_refused(name, put):
    """And a copy of a results file is no seed."""
    put("variants", "Hopper-v4", "spo", [1, 2])
    folder = results.RESULTS / "variants" / "Hopper-v4"
    copy = shutil.copy(folder / "spo__2.csv", folder / "spo__2 (copy).csv")
    with pytest.raises(SystemExit, match="is a copy, or has another name than its run"):
        results.read_runs("variants")
    copy.unlink()
    put("variants", "Hopper-v4", "spo", [3], **{name: 7})
    with pytest.raises(SystemExit, match=f"seeds of spo on Hopper-v4 .* differ in {name}$"):
        results.read_runs("variants")


def test_indices_of_the_study_are_the_largest_differences(put):
    """Published ones are the paper's, but for Hopper's ACLI: it prints 421, its means make 423."""
    means = {"ppo": 3000, "ppo_m": 2000, "ppo_noclip": 2500, "trpo": 1900, "trpo_plus": 2600}
    for exp, mean in means.items():
        put("ablation_study", "Hopper-v4", exp, [mean - 10, mean + 10])
    lines = tables.study_section().splitlines()
    rows = {line.split(" | ")[0]: set(line.strip("| ").split(" | ")) for line in lines}
    assert {"400", "242", "99", "224"} < rows["| AAI, the algorithm"]
    assert {"1000", "557", "423", "444"} < rows["| ACLI, the code-level details"]
    assert {"3005 (2995, 3015)", "2513 [2391, 2632]"} < rows["| PPO"]


def test_differences_are_from_the_first_row_of_their_table(put):
    put("ablation_details", "Hopper-v4", "published", [1000.0, 1200.0])
    put("ablation_details", "Hopper-v4", "no_norm_obs", [600.0, 400.0, 800.0])
    put("ablation_details", "Hopper-v4", "relu", [0.0], diverged="losses not finite")
    put("ablation_details", "CartPole-v1", "published", [400.0, 500.0])
    put("ablation_details", "CartPole-v1", "one_env", [500.0])
    found = tables.changes_section("ablation_details")
    assert "| M06 | raw observations | 3 | -500 (-500, -700, -300) | 0.00 |" in found
    assert "| `published` | as published | 2 | 1100 (1000, 1200) | - |" in found
    assert "| relu instead of tanh | 1, 1 diverged |" in found and "No runs yet: C01" in found
    assert "| C01 | one environment of 512 steps | 1 | +50 |" in found


def test_every_switch_of_the_continuous_script_is_in_the_details():
    import ppo_continuous_mujoco as script

    flags = " ".join(results.read_recipes().query("recipe == 'details'")["flags"]).split()
    others = "torch_deterministic cuda track capture_video compile eval_deterministic".split()
    others += ["staggered_resets"]  # nothing to the one environment of the recipe
    for name, default in vars(script.Args()).items():
        if isinstance(default, bool) and name not in others:
            assert f"--{'no-' if default else ''}{name.replace('_', '-')}" in flags


# -- statistics --
def test_intervals_are_students_and_welchs():
    """Few seeds are listed instead."""
    x, y = np.array([1.0, 2.0, 3.0]), np.array([4.0, 6.0, 8.0, 10.0])
    for seeds in (np.c_[x, x**2], np.c_[y, -y]):
        mean, error = seeds.mean(axis=0), scipy.stats.sem(seeds)
        expected = scipy.stats.t.interval(0.95, len(seeds) - 1, mean, error)
        np.testing.assert_allclose(stats.mean_interval(seeds), expected)
    variances = 1 / 3, (20 / 3) / 4  # of the means
    degrees = sum(variances) ** 2 / (variances[0] ** 2 / 2 + variances[1] ** 2 / 3)
    half = scipy.stats.t.ppf(0.975, degrees) * sum(variances) ** 0.5
    assert stats.difference(x, y) == pytest.approx((5, 5 - half, 5 + half))
    assert np.isnan(stats.mean_interval(x[:1, None])).all()
    assert np.isnan(stats.difference(x[:1], y)[1:]).all()
    exact = np.array([12.0, 12.0])
    interval = np.array(stats.difference(exact, y)) / 12
    assert stats.relative_difference([(exact, y)]) == pytest.approx(tuple(interval))
    assert tables.difference_cell(np.arange(5.0), np.arange(6.0) + 10) == "+10.5 [+8.1, +12.9]"
    assert tables.mean_cell(exact[:1]) == "12.0"
    assert tables.mean_cell(25 * y) == "175 (100, 150, 200, 250)"
    assert tables.mean_cell(np.full(5, 3.0)) == "3.0 [3.0, 3.0]"


@pytest.mark.parametrize("factor", [0.1, 2])
def test_the_interval_of_a_relative_difference_covers(factor):
    """95 of 100 times, over 2,000 draws of three tasks with five seeds each."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        x, y = rng.normal(100, 25, (3, 5)), factor * rng.normal(100, 25, (3, 5))
        _, low, high = stats.relative_difference(list(zip(x, y)))
        hits += low <= factor - 1 <= high
    assert 0.93 < hits / 2000 < 0.975


def test_the_probability_of_improvement_is_rliables():
    metrics = pytest.importorskip("rliable.metrics")
    rng = np.random.default_rng(0)
    for seeds, tasks in ((5, 5), (3, 1), (10, 6)):
        old = rng.integers(6, size=(seeds, tasks)).astype(float)  # with ties
        new = rng.integers(9, size=(seeds + 1, tasks)).astype(float)
        value, low, high = stats.improvement(new, old)
        assert value == pytest.approx(metrics.probability_of_improvement(new, old))
        assert low <= value <= high


# -- figures, documents, plots of one's own runs --
@pytest.mark.parametrize("seeds, bands, lines", [(1, 0, 1), (4, 0, 5), (5, 1, 1)])
def test_a_band_needs_five_seeds(seeds, bands, lines):
    fig, ax = figures.plt.subplots()
    y = np.random.default_rng(0).random((seeds, 3))
    figures.draw_seeds(ax, np.arange(3.0), y, "red")
    assert (len(ax.collections), len(ax.lines)) == (bands, lines)
    figures.plt.close(fig)


def test_the_documents_hold_what_the_results_make(monkeypatch):
    made = {name: maker() for name, maker in report.sections().items()}
    placed = set()
    for document in report.documents():
        assert report.filled(document, made) == document.read_text(), document
        placed |= {match[2] for match in report.MARKER.finditer(document.read_text())}
    assert placed == made.keys()
    makers = {name: lambda name=name: made[name] for name in made}
    monkeypatch.setattr(report, "sections", lambda: makers)
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    report.main()
    made["speed"] += "|"
    with pytest.raises(SystemExit, match="is not what benchmark/report.py --write makes"):
        report.main()


def test_speeds_keep_their_own_rule():
    """Five pairs of half a minute on a quiet machine, on a GPU one; their ratio is that of the
    speeds beside it.
    """
    paths = list(results.RESULTS.glob("speed/*.csv"))
    for path in paths:
        facts, data = results.read_facts(path), results.read_curve(path)
        if "NVIDIA" not in facts["hardware"]:
            windows = data.filter(like="window_seconds").median().min()
            assert len(data) >= 5 and windows >= 30 and float(facts["load_before"]) <= 0.5, path
    found = re.findall(r"\| ([\d.]+) \([^|]*\) \| ([\d.]+) / ([\d.]+) \|", report.speed_section())
    assert len(found) == len(paths)
    for ratio, ours, peer in found:
        assert float(ratio) == pytest.approx(float(ours) / float(peer), abs=0.01)


def test_a_plot_of_ones_own_runs(tmp_path, capsys, monkeypatch):
    """Of our scripts, and of others that log CleanRL's tags; of a seed's runs the newest. A run may
    be shorter, and have another name.
    """
    ours = [("ours", 1, 1, 3.0), ("ours", 2, 1, 9.0), ("ours", 2, 2, 5.0)]
    for exp, seed, at, value in [*ours, ("cut", 1, 1, 3.0), ("cut", 2, 1, 3.0)]:
        run_dir = tmp_path / "runs" / f"Hopper-v4__{exp}__{seed}__{at}"
        run_dir.mkdir(parents=True)
        config = {"args": {"env_id": "Hopper-v4", "exp_name": exp, "seed": seed}}
        (run_dir / "config.json").write_text(json.dumps(config))
        rows = [f"{step},{0.0 if step < 50 else value},9,{step / 10}" for step in range(150)]
        rows[60] = f"60,{value + 100},9,6.0"  # one of the last 100
        (run_dir / "episodes.csv").write_text("\n".join(["step,return,length,seconds", *rows]))
    (run_dir / "episodes.csv").write_text("\n".join(["step,return,length,seconds", *rows[:100]]))
    run_dir.rename(tmp_path / "runs" / "renamed")
    with SummaryWriter(tmp_path / "runs" / "Hopper-v4__theirs__1__1700000000") as writer:
        for step in range(150):
            writer.add_scalar("charts/episodic_return", 14.0 if step >= 50 else 0.0, step)
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path), "--out", str(tmp_path / "a.png")])
    plot.main()
    assert (tmp_path / "a.png").stat().st_size > 10_000
    out, err = capsys.readouterr()
    assert "left out 1 older runs" in err
    rows = [line for line in out.splitlines() if line.startswith("| Hopper")]
    assert rows[0].startswith("| Hopper-v4 | cut | 2 | 99 to 149 | 3.2 (4.0, 2.5) |")
    assert rows[1].startswith("| Hopper-v4 | ours | 2 | 149 | 5.0 (4.0, 6.0) |")
    assert rows[2].startswith("| Hopper-v4 | theirs | 1 | 149 | 14.0 |")
