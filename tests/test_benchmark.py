"""benchmark/: suites end to end, their commands and runs, comparisons, other tools' runs."""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))

import collect  # noqa: E402
import compare  # noqa: E402
import have  # noqa: E402
import report  # noqa: E402

SUITES = [(suite, recipe) for suite, recipes in report.SUITES.items() for recipe in recipes]
TINY = {
    "ENVS": "InvertedPendulum-v4",
    "STEPS": "20480",
    "FLAGS": "--checkpoint-seconds 0 --no-compile --eval-episodes 0",
}
CARTPOLE = {
    "ENVS": "CartPole-v1",
    "SEEDS": "1",
    "STEPS": "20480",
    "FLAGS": "--checkpoint-seconds 0 --eval-episodes 0",
}


@pytest.fixture
def copy(tmp_path) -> Path:
    """The project without results."""
    folder = tmp_path / "project"
    folder.mkdir()
    for path in [*ROOT.glob("*.py"), ROOT / "README.md"]:
        shutil.copy(path, folder)
    without = shutil.ignore_patterns("results", "figures")
    shutil.copytree(ROOT / "benchmark", folder / "benchmark", ignore=without)
    return folder


def suite(folder: Path, *command: str, **variables: str) -> subprocess.Popen:
    """In a process group of its own, and with Ctrl-C even if pytest runs in the background."""
    environment = os.environ | {"PYTHON": sys.executable} | variables
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    how["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(["bash", *command], cwd=folder, env=environment, **how)


def output_of(process: subprocess.Popen, code: int = 0) -> str:
    try:
        output = process.communicate(timeout=900)[0].decode()
    finally:
        process.kill()  # which ends its runs too
    assert process.returncode == code, output
    return output


def trains(folder: Path, seed: int | None = None) -> list[int]:
    """The processes in this folder, and in no other, that train; those with this seed if given."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            here = (process / "cwd").resolve() == folder
            python, *command = (process / "cmdline").read_text().split("\0")
        except (OSError, ValueError):  # it has ended, or is not ours
            continue
        if here and command and command[0] in {f"{name}.py" for name in report.SCRIPTS}:
            if seed is None or f"--seed {seed} " in " ".join(command):
                found.append(int(process.name))
    return found


def wait_for(what: Callable, process: subprocess.Popen):
    """What it returns once that is true, of a suite that goes on."""
    deadline = time.monotonic() + 120
    while not (result := what()):
        assert process.poll() is None, process.communicate()[0].decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return result


def checkpoint_of(folder: Path, seed: int) -> int:
    """When the run's last checkpoint was written, 0 if there is none."""
    times = [path.stat().st_mtime_ns for path in folder.glob(f"runs/*__{seed}__*/checkpoint.pt")]
    return max(times, default=0)


@pytest.mark.e2e
def test_a_suite_survives_a_killed_run_and_ends_in_tables_and_figures(copy):
    """Two seeds; one is killed, the other goes on. Then the suite resumes one and skips one."""
    pytest.importorskip("mujoco")
    pytest.importorskip("matplotlib")
    process = suite(copy, "benchmark/mujoco.sh", SEEDS="21 22", **TINY)
    wait_for(lambda: checkpoint_of(copy, 22), process)
    (run,) = trains(copy, 22)
    os.kill(run, signal.SIGKILL)
    output = output_of(process, code=1)
    results = copy / "benchmark" / "results" / "mujoco" / "InvertedPendulum-v4"
    assert "FAIL InvertedPendulum-v4__ppo_continuous_mujoco__22, exit code 137" in output
    assert "\nif it is stopped: " in output and "\r" not in output  # the end of its log, readable
    assert [path.name for path in results.iterdir()] == ["ppo_continuous_mujoco__21.csv"]

    output = output_of(suite(copy, "benchmark/mujoco.sh", SEEDS="21 22", **TINY))
    folder = "benchmark/results/mujoco/InvertedPendulum-v4"
    assert f"have {folder}/ppo_continuous_mujoco__21.csv" in output
    assert "__22, resumed from runs/" in output and "complete" in output
    for seed in (21, 22):
        facts, curve = report.read_csv(results / f"ppo_continuous_mujoco__{seed}.csv")
        assert facts["steps"] == "20480" and json.loads(facts["args"])["seed"] == seed
        assert len(curve["step"]) > 90 and (np.diff(curve["seconds"]) >= 0).all()

    write = [sys.executable, copy / "benchmark" / "report.py", "--write"]
    done = subprocess.run(write, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (copy / "benchmark" / "figures" / "mujoco.png").stat().st_size > 10_000
    text = (copy / "README.md").read_text()
    section = re.search(r"(?s)<!-- report:mujoco -->(.*?)<!--", text)[1]
    assert "InvertedPendulum-v4 | published recipe" in section and "HalfCheetah" not in section
    check = [sys.executable, copy / "benchmark" / "report.py", "--check"]
    assert subprocess.run(check, capture_output=True).returncode == 0
    (results / "ppo_continuous_mujoco__22.csv").unlink()
    assert subprocess.run(check, capture_output=True).returncode == 1


@pytest.mark.e2e
def test_a_suite_that_ends_in_any_way_ends_its_run_and_resumes_it(copy):
    """Ctrl-C, SIGTERM, SIGKILL. What died before its first checkpoint is no run to resume."""
    dead = copy / "runs" / "CartPole-v1__ppo__1__9999999999"
    dead.mkdir(parents=True)
    (dead / "config.json").write_text("{")
    ends = {
        signal.SIGINT: lambda suite: os.killpg(suite.pid, signal.SIGINT),  # as a terminal does
        signal.SIGTERM: subprocess.Popen.terminate,
        signal.SIGKILL: subprocess.Popen.kill,
    }
    resumed = ""
    for signum, end in ends.items():
        process = suite(copy, "benchmark/classic.sh", **CARTPOLE)
        before = checkpoint_of(copy, 1)
        wait_for(lambda: checkpoint_of(copy, 1) > before, process)
        assert len(trains(copy)) == 1
        end(process)
        code = -signal.SIGKILL if signum == signal.SIGKILL else 130
        output = output_of(process, code)  # to its end: whoever trains holds no pipe to here
        assert f"run  CartPole-v1__ppo__1{resumed}" in output and "FAIL" not in output
        assert ("start the suite again" in output) == (signum != signal.SIGKILL)
        deadline = time.monotonic() + (10 if signum == signal.SIGKILL else 0)
        while trains(copy) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert trains(copy) == []
        resumed = ", resumed from runs/"

    (run_dir,) = [path.parent for path in copy.glob("runs/*/checkpoint.pt")]
    collect_it = [sys.executable, "benchmark/collect.py", "--suite", "classic", str(run_dir)]
    assert subprocess.run(collect_it, cwd=copy, capture_output=True).returncode == 3
    output = output_of(suite(copy, "benchmark/classic.sh", **CARTPOLE))
    assert f"resumed from {run_dir.relative_to(copy)}\n" in output and "complete" in output
    (path,) = copy.glob("benchmark/results/**/*.csv")
    facts, _ = report.read_csv(path)
    assert path.match("classic/CartPole-v1/ppo__1.csv") and facts["steps"] == "20480"

    path.rename(path.with_suffix(".old"))  # a finished run is collected, not trained again
    output = output_of(suite(copy, "benchmark/classic.sh", **CARTPOLE))
    assert "done classic/CartPole-v1/ppo__1.csv" in output and "run " not in output
    assert path.read_text() == path.with_suffix(".old").read_text()
    asked = ["benchmark/classic.sh", "--dry-run"]
    free = CARTPOLE | {"FLAGS": "--track --eval-episodes 3"}
    assert output_of(suite(copy, *asked, **free)) == f"have {path.relative_to(copy)}\n"
    changed = CARTPOLE | {"FLAGS": "--gamma 0.9"}
    output = output_of(suite(copy, *asked, **changed), code=1)
    assert output.startswith("FAIL") and "gamma 0.99 (asked for: 0.9); delete it" in output


def test_a_run_is_resumed_if_it_has_a_checkpoint_and_the_arguments_asked_for(copy):
    def run(stamp: int, checkpoint: bool, command: str = "ppo.py", **changes) -> Path:
        run_dir = copy / "runs" / f"CartPole-v1__ppo__1__{stamp}"
        run_dir.mkdir(parents=True)
        args = vars(import_module("ppo").Args(total_timesteps=20480)) | changes
        config = {"args": args, "command": command}
        (run_dir / "config.json").write_text(json.dumps(config))
        if checkpoint:
            (run_dir / "checkpoint.pt").touch()
        return run_dir

    def asked() -> list[str]:
        dry_run = suite(copy, "benchmark/classic.sh", "--dry-run", **CARTPOLE)
        command = output_of(dry_run).split()
        return command[command.index("--resume") :] if "--resume" in command else []

    run(8, checkpoint=False)
    run(7, checkpoint=True, gamma=0.9)
    run(6, checkpoint=True, of_another_version=1)
    run(5, checkpoint=True, command="another.py")
    assert asked() == []
    run(1, checkpoint=True)
    run(2, checkpoint=True, track=True, resume="runs/CartPole-v1__ppo__1__2")
    assert asked() == ["--resume", "runs/CartPole-v1__ppo__1__2"]


NEW = "# script: ppo\n# command: ppo.py --gamma 0.5\n# args: {}\nstep,return\n1,2\n"
OLD = "# script: ppo\n# command: ppo.py {}\nstep,return\n1,2\n"


@pytest.mark.parametrize(
    "stored, asked, words",
    [
        ("--gamma 0.9", "--gamma=0.90", []),
        ("--gamma 0.9", "", ["gamma 0.9 (asked for: 0.99)"]),
        ("", "--gamma 0.9", ["gamma 0.99 (asked for: 0.9)"]),
        ("--no-norm-adv --learning-rate 1e-3", "--learning-rate 0.001 --no-norm-adv", []),
        ("--no-norm-adv", "--norm-adv", ["norm_adv False (asked for: True)"]),
        ("--num-envs 16", "--num_envs 1", ["num_envs 16 (asked for: 1)"]),
        ("--seed 1 --env-id Acrobot-v1", "--env-id Acrobot-v1", []),
        ("--target-kl 0.01", "", ["target_kl 0.01 (asked for: None)"]),
        ("--checkpoint-every 10 --eval-episodes 0", "--checkpoint-seconds 1 --track --cuda", []),
        ("--recompute-advantages", "", ["recompute_advantages True (asked for: nothing)"]),
        ("--no-recompute-advantages --env-threads 2", "", []),
        ("--nonsense 3", "", ["other flags --nonsense 3 (asked for: nothing)"]),
    ],
)
def test_arguments_of_an_old_file_are_those_of_its_command(stored, asked, words, tmp_path):
    path = tmp_path / "old.csv"
    path.write_text(OLD.format(stored))
    assert have.differences(path, ROOT / "ppo.py", shlex.split(asked)) == words


@pytest.mark.parametrize(
    "stored, asked, words",
    [
        ({"gamma": 0.9}, "--gamma 0.9", []),
        ({"gamma": 0.9}, "--gamma 0.5", ["gamma 0.9 (asked for: 0.5)"]),
        ({"clip_coef": 0.1}, "--clip-coef 0.1 --seed 2", ["seed 1 (asked for: 2)"]),
        ({"track": True, "checkpoint_seconds": 9, "exp_name": "x", "resume": "runs/x"}, "", []),
        ({"recompute_advantages": False, "checkpoint_every": 9}, "", []),
        ({"recompute_advantages": True}, "", ["recompute_advantages True (asked for: nothing)"]),
        ({"gone": 1}, "", ["gone 1 (asked for: nothing)"]),
    ],
)
def test_arguments_of_a_new_file_are_in_its_header(stored, asked, words, tmp_path):
    """Whatever its command says; of a flag that is newer than the file it has the default."""
    path = tmp_path / "new.csv"
    path.write_text(NEW.replace("{}", json.dumps(stored)))
    assert have.differences(path, ROOT / "ppo.py", shlex.split(asked)) == words


def test_a_file_of_another_script_is_not_had(tmp_path):
    path = tmp_path / "old.csv"
    path.write_text(OLD.replace("# script: ppo\n", "# script: ppo_lstm\n").format(""))
    assert have.differences(path, ROOT / "ppo.py", []) == ["script ppo_lstm (asked for: ppo)"]


@pytest.mark.parametrize("script", report.SCRIPTS)
def test_flags_are_read_from_the_text_of_a_script(script):
    """Types and defaults are those of Args; what is free or gone is no typing error."""
    args = vars(import_module(script).Args())
    fields = have.fields_of(ROOT / f"{script}.py")
    assert fields.keys() == args.keys()
    for name, (kind, default) in fields.items():
        assert default == args[name] or (default is ... and name in have.FREE)  # computed
        assert args[name] is None or isinstance(args[name], kind)
    known = set().union(*(have.fields_of(ROOT / f"{name}.py") for name in report.SCRIPTS))
    assert have.FREE - {"checkpoint_every"} <= known | have.GONE.keys()


@pytest.fixture
def finished(tmp_path, monkeypatch) -> Callable:
    """`finished(**checkpoint)`: the directory of a run of three iterations; results go nearby."""
    monkeypatch.setattr(collect, "RESULTS", tmp_path / "results")
    args = {"env_id": "a:B/c-v0", "exp_name": "exp", "seed": 3, "total_timesteps": 30}
    args |= {"num_envs": 2, "num_steps": 5, "resume": "runs/x"}

    def make(**changes) -> Path:
        run_dir = tmp_path / "runs" / str(len(list(tmp_path.glob("runs/*"))))
        run_dir.mkdir(parents=True)
        command = "/somewhere/my_ppo.py --seed 3"
        config = {"args": args, "command": command, "commit": "1", "versions": {}, "hardware": "a"}
        (run_dir / "config.json").write_text(json.dumps(config | {"threads": 1, "load": 0.5}))
        (run_dir / "my_ppo.py").write_text("print()")
        (run_dir / "episodes.csv").write_text("step,return,length,seconds\n10,2,4,1\n30,4,9,3\n")
        checkpoint = {"args": args, "iteration": 3, "global_step": 30, "seconds": 3.0}
        torch.save(checkpoint | {"recent_returns": [2.0, 4.0]} | changes, run_dir / "checkpoint.pt")
        return run_dir

    return make


def test_a_results_file_says_how_its_run_was_made(finished):
    path = collect.collect(finished(), "suite")
    assert path == collect.RESULTS / "suite" / "a-B-c-v0" / "exp__3.csv"
    facts, curve = report.read_csv(path)
    assert facts["command"] == "my_ppo.py --seed 3" and facts["script"] == "my_ppo"
    assert json.loads(facts["args"])["resume"] is None and json.loads(facts["args"])["seed"] == 3
    assert facts["sha256"] == hashlib.sha256(b"print()").hexdigest() and facts["threads"] == "1"
    assert facts["load"] == "0.5" and facts["final_return"] == "3.0"
    assert curve["step"][-1] == 30 and curve["return"].tolist()[-1] == 3 and curve["return"][0] == 2
    assert [each.name for each in path.parent.iterdir()] == [path.name]  # nothing temporary


@pytest.mark.parametrize("changes", [{"iteration": 2}, {"stored": [0]}], ids=["steps", "phase"])
def test_a_run_that_is_not_finished_is_not_collected(changes, finished):
    with pytest.raises(SystemExit) as error:
        collect.collect(finished(**changes), "suite")
    assert error.value.code == 3 and not collect.RESULTS.exists()


def test_the_results_of_another_run_are_kept(finished):
    first = finished()
    path = collect.collect(first, "suite")
    text = path.read_text()
    collect.collect(first, "suite")
    with pytest.raises(SystemExit, match="holds another run"):
        collect.collect(finished(seconds=4.0), "suite")
    assert path.read_text() == text


RESULTS = {  # that exist, as the suites that made them ask for them, at least
    ("start", ""): 1,
    ("mujoco", "faithful"): 40,
    ("mujoco", "strong"): 30,
    ("mujoco", "ablation"): 39,
    ("atari", "1M"): 1,
    ("atari", "fast"): 1,
    ("lstm", "memory"): 6,
    ("lstm", "pong"): 2,
    ("multidiscrete", "published"): 9,
    ("multidiscrete", "no_mask"): 9,
    ("multidiscrete", "classic"): 6,
    ("multidiscrete", "lunar"): 3,
    ("multidiscrete", "discretized"): 3,
    ("procgen", "short_ppo"): 1,
    ("procgen", "short_ppg"): 1,
}


@pytest.mark.parametrize("name, recipe", SUITES)
def test_every_command_of_a_suite_is_valid(name, recipe, copy):
    if name == "procgen":
        pytest.importorskip("procgen")
    command = [f"benchmark/{name}.sh", *recipe.split(), "--dry-run"]
    commands = [
        line.split() for line in output_of(suite(copy, *command, PYTHON="python")).splitlines()
    ]
    names, had = set(), 0
    for python, script, *flags in commands:
        module = import_module(Path(script).stem)
        args = module.parse_args(flags)
        module.check_args(args)
        names.add((args.env_id, args.exp_name, args.seed))
        for folder in {name, f"{name}_{recipe}", f"{name}_short"}:
            path = ROOT / "benchmark" / "results" / folder / args.env_id
            path /= f"{args.exp_name}__{args.seed}.csv"
            if path.exists():
                assert have.differences(path, ROOT / script, flags) == [], path
                had += 1
    assert python == "python" and len(names) == len(commands) > 0
    assert had >= RESULTS.get((name, recipe), 0)


def test_unknown_recipes_are_refused(copy):
    for name in report.SUITES:
        assert "usage: " in output_of(suite(copy, f"benchmark/{name}.sh", "nonsense"), code=2)


@pytest.mark.parametrize("name, recipe", [("mujoco", "faithful"), ("lstm", "pong")])
def test_tasks_of_an_array_are_the_runs_of_the_plan(name, recipe, copy):
    """Each of them once; slurm.sbatch passes its number on."""
    command = [f"benchmark/{name}.sh", recipe, "--dry-run"]
    whole = output_of(suite(copy, *command, SEEDS="1 2", PYTHON="python")).splitlines()
    one_each = [
        output_of(suite(copy, *command, SEEDS="1 2", PYTHON="python", TASK=str(i)))
        for i in range(len(whole))
    ]
    assert [line.rstrip("\n") for line in one_each] == whole and len(whole) > 3
    tools = copy / "tools"
    tools.mkdir()
    (tools / "srun").write_text('#!/usr/bin/env bash\nexec "$@"\n')
    (tools / "srun").chmod(0o755)
    slurm = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_CPUS_PER_TASK": "3",
    }
    job = suite(copy, "benchmark/slurm.sbatch", *command, SEEDS="1 2", PYTHON="python", **slurm)
    assert output_of(job) == one_each[2]


def test_runs_side_by_side_have_one_gpu_each(copy):
    """A stand-in for Python says which GPU it sees; two workers, never the same one at a time."""
    (copy / "python.sh").write_text('echo "$CUDA_VISIBLE_DEVICES" >> gpus; sleep 0.5; exit 1\n')
    variables = {
        "PYTHON": "bash python.sh",
        "GPUS": "3 5",
        "WORKERS": "2",
        "SEEDS": "1 2",
        "ENVS": "Ant-v4 Hopper-v5",
    }
    output_of(suite(copy, "benchmark/mujoco.sh", **variables), code=1)
    gpus = (copy / "gpus").read_text().split()
    assert sorted(gpus) == ["3", "3", "5", "5"] and gpus[0] != gpus[1]


@pytest.mark.e2e
def test_compare_trains_both_and_reports_the_difference(copy):
    original = (copy / "ppo.py").read_text()
    (copy / "my_ppo.py").write_text(original.replace("gamma: float = 0.99", "gamma: float = 0.9"))
    command = ["benchmark/compare.sh", "ppo.py", "my_ppo.py", "--eval-episodes", "0"]
    tiny = {"ENVS": "CartPole-v1", "STEPS": "2048", "SEEDS": "1"}
    output = output_of(suite(copy, *command, **tiny))
    head, _, row = [line for line in output.splitlines() if line.startswith("|")]
    assert re.search(r"\| ppo-\w{8} \| my_ppo-\w{8} \| difference", head)
    assert row.startswith("| CartPole-v1 | 1, 1 |")
    output = output_of(suite(copy, *command, "--dry-run", **tiny))
    assert output.count("have ") == 2 == len(output.splitlines())  # what is done is not done again
    assert "are the same" in output_of(suite(copy, *command[:2], command[1], **tiny), code=2)


def test_every_figure_has_its_curves():
    """None is left over from results that are gone, none is missing."""
    drawn = {path.stem for path in (ROOT / "benchmark" / "figures").glob("*.png")}
    suites = {
        path.name
        for path in (ROOT / "benchmark" / "results").iterdir()
        if list(path.glob("*/*.csv"))
    }
    recipes = {
        suite: {exp for exps in report.read_suite(suite).values() for exp in exps}
        for suite in suites
    }
    assert drawn == {suite for suite, exps in recipes.items() if exps & report.RECIPES.keys()} - {
        "compare"
    }


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


@pytest.mark.e2e
def test_a_peer_gets_its_script_by_a_relative_path(copy):
    """CLEANRL_SCRIPT, though the peer runs in a directory of its own; ppo.py plays CleanRL's."""
    relay = 'import os, runpy\nrunpy.run_path(os.environ["CLEANRL_SCRIPT"], run_name="__main__")\n'
    (copy / "peer.py").write_text(relay)
    variables = {"CLEANRL_SCRIPT": "ppo.py", "ENV_ID": "CartPole-v1", "STEPS": "5120"}
    command = ["benchmark/speed.sh", "ppo.py", "peer.py", sys.executable, "1"]
    output_of(suite(copy, *command, **variables))
    facts, pairs = report.read_csv(copy / "benchmark" / "results" / "speed" / "ppo__peer.csv")
    assert facts["steps"] == "5120" and pairs["peer_steps_per_second"][0] > 100
