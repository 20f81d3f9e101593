"""benchmark/: suites end to end, their commands and runs, comparisons, other tools' runs."""

import argparse
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
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from torch.utils.tensorboard import SummaryWriter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))

import ablation  # noqa: E402
import collect  # noqa: E402
import compare  # noqa: E402
import have  # noqa: E402
import patches  # noqa: E402
import provenance  # noqa: E402
import recipes  # noqa: E402
import report  # noqa: E402
import results  # noqa: E402
import scripts  # noqa: E402
import stats  # noqa: E402
import tables  # noqa: E402
import timing  # noqa: E402
import win_rate  # noqa: E402

SUITES = [(suite, recipe) for suite, names in recipes.suites().items() for recipe in names]
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
    for name in ("docs", "variants"):
        shutil.copytree(ROOT / name, folder / name)
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
        if here and command and command[0] in {f"{name}.py" for name in recipes.SCRIPTS}:
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
    made = copy / "benchmark" / "results" / "mujoco" / "InvertedPendulum-v4"
    assert "FAIL InvertedPendulum-v4__ppo_continuous_mujoco__22, exit code 137" in output
    assert "\nif it is stopped: " in output and "\r" not in output  # the end of its log, readable
    assert [path.name for path in made.iterdir()] == ["ppo_continuous_mujoco__21.csv"]

    output = output_of(suite(copy, "benchmark/mujoco.sh", SEEDS="21 22", **TINY))
    folder = "benchmark/results/mujoco/InvertedPendulum-v4"
    assert f"have {folder}/ppo_continuous_mujoco__21.csv" in output
    assert "__22, resumed from runs/" in output and "complete" in output
    for seed in (21, 22):
        path = made / f"ppo_continuous_mujoco__{seed}.csv"
        facts, curve = results.read_facts(path), results.read_curve(path)
        assert facts["steps"] == "20480" and json.loads(facts["args"])["seed"] == seed
        assert len(curve["step"]) > 90 and (np.diff(curve["seconds"]) >= 0).all()

    write = [sys.executable, copy / "benchmark" / "report.py", "--write"]
    done = subprocess.run(write, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (copy / "benchmark" / "figures" / "mujoco.png").stat().st_size > 10_000
    text = (copy / "docs" / "results.md").read_text()
    section = re.search(r"(?s)<!-- report:mujoco -->(.*?)<!--", text)[1]
    assert (
        "InvertedPendulum-v4 | default (bootstraps time limits)" in section
        and "HalfCheetah" not in section
    )
    check = [sys.executable, copy / "benchmark" / "report.py", "--check"]
    assert subprocess.run(check, capture_output=True).returncode == 0
    (made / "ppo_continuous_mujoco__22.csv").unlink()
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
        deadline = time.monotonic() + (60 if signum == signal.SIGKILL else 0)
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
    facts = results.read_facts(path)
    assert path.match("classic/CartPole-v1/ppo__1.csv") and facts["steps"] == "20480"

    path.rename(path.with_suffix(".old"))  # a finished run is collected, not trained again
    output = output_of(suite(copy, "benchmark/classic.sh", **CARTPOLE))
    assert "done classic/CartPole-v1/ppo__1.csv" in output and "run " not in output
    assert path.read_text() == path.with_suffix(".old").read_text()
    asked = ["benchmark/classic.sh", "--dry-run"]
    free = CARTPOLE | {"FLAGS": "--track --eval-episodes 3"}
    assert output_of(suite(copy, *asked, **free)) == f"have {path.relative_to(copy)}\n"
    output = output_of(suite(copy, *asked, **CARTPOLE | {"STEPS": "40960"}), code=1)
    assert output.startswith("FAIL") and "timesteps 20480 (asked for: 40960); delete it" in output


def results_file(copy: Path, folder: str, **changes) -> Path:
    """That of a run of ppo.py with its defaults, but for the changes."""
    args = vars(import_module("ppo").Args(total_timesteps=20480)) | changes
    path = copy / "benchmark" / "results" / folder / "CartPole-v1" / "ppo__1.csv"
    path.parent.mkdir(parents=True)
    path.write_text(NEW.replace("{}", json.dumps(args)))
    return path


@pytest.mark.parametrize("flags", ["", "--track --no-cuda"])
@pytest.mark.parametrize("changes, code", [({}, 0), ({"gamma": 0.9}, 1), ({"seed": 2}, 1)])
def test_a_foreign_results_file_is_not_had(changes, code, flags, copy):
    """That of a run with other arguments, under the name of the default recipe."""
    path = results_file(copy, "classic", **changes).relative_to(copy)
    asked = suite(copy, "benchmark/classic.sh", "--dry-run", **CARTPOLE | {"FLAGS": flags})
    output = output_of(asked, code=code)
    assert output.startswith(f"FAIL {path} is of another run" if code else f"have {path}\n")


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--gamma 0.9", "gamma 0.9"),
        ("--gamma 0.99", "gamma 0.99"),  # the default, but not of every recipe
        ("--track --vf-coef 7 --no-norm-adv", "vf_coef 7.0, norm_adv False"),
        ("--no-such-flag", "other flags --no-such-flag"),
    ],
)
def test_what_changes_learning_is_no_flag_for_a_whole_suite(flags, words, copy):
    """Unless its results go to a folder of their own."""
    variables = CARTPOLE | {"FLAGS": flags}
    command = ["benchmark/classic.sh", "--dry-run"]
    output = output_of(suite(copy, *command, **variables), code=2)
    assert f"FLAGS may not have {words} for ppo.py;" in output
    output = output_of(suite(copy, *command, SUFFIX="_other", **variables))
    assert flags in output and "--exp-name ppo" in output


@pytest.mark.parametrize("suffix", ["", "_other"])
@pytest.mark.parametrize("flags", ["--seed 7", "--track --exp-name=other", "--env_id Acrobot-v1"])
def test_what_names_a_run_is_no_flag_for_a_whole_suite(flags, suffix, copy):
    variables = CARTPOLE | {"FLAGS": flags, "SUFFIX": suffix}
    output = output_of(suite(copy, "benchmark/classic.sh", "--dry-run", **variables), code=2)
    assert output.startswith("error: FLAGS may not have ")


@pytest.mark.parametrize("seeds", ["01 02", "1,2", "-1", "one"])
def test_seeds_are_plain_numbers(seeds, copy):
    variables = CARTPOLE | {"SEEDS": seeds}
    output = output_of(suite(copy, "benchmark/classic.sh", "--dry-run", **variables), code=2)
    assert output == f"error: SEEDS ({seeds}) are numbers such as 1 2 10\n"


@pytest.mark.parametrize("flags, code", [("", 1), ("--track", 2)])
def test_a_python_that_does_not_start_is_no_foreign_result(flags, code, copy):
    results_file(copy, "classic")
    variables = CARTPOLE | {"PYTHON": "/no/python", "FLAGS": flags}
    output = output_of(suite(copy, "benchmark/classic.sh", "--dry-run", **variables), code=code)
    assert "/no/python" in output and "delete" not in output and "FLAGS" not in output


def test_flags_come_after_those_of_the_recipe(copy):
    """The last one counts: LunarLander's recipe has a gamma of its own."""
    variables = {"FLAGS": "--gamma 0.9", "SUFFIX": "_other", "SEEDS": "11"}
    output = output_of(suite(copy, "benchmark/classic.sh", "lunar", "--dry-run", **variables))
    assert re.findall(r"--gamma (\S+)", output) == ["0.999", "0.9"]


def test_flags_are_checked_for_all_scripts_before_the_first_run(copy):
    """ppo.py, of the last plans, does not compile."""
    command = ["benchmark/ablation.sh", "--dry-run"]
    output = output_of(suite(copy, *command, FLAGS="--no-compile", SEEDS="1"), code=2)
    assert output.startswith("error: FLAGS may not have") and "for ppo.py" in output
    assert "no SUFFIX" in output_of(
        suite(copy, "benchmark/compare.sh", "ppo.py", "ppo_atari.py", SUFFIX="_x"), code=2
    )


def test_results_of_another_patch_are_not_had(tmp_path):
    """A variant is its text: that of its changed lines is in the results file."""
    patch, script = tmp_path / "mine.patch", tmp_path / "made" / "mine.py"
    found = {}
    for name in ("0.9", "0.8"):
        changed = (
            (ROOT / "ppo.py").read_text().replace("gamma: float = 0.99", f"gamma: float = {name}")
        )
        (tmp_path / "ppo.py").write_text(changed)
        command = ["diff", "-u", ROOT / "ppo.py", tmp_path / "ppo.py"]
        diff = subprocess.run(command, capture_output=True, text=True).stdout
        patch.write_text(re.sub(r"(?m)^(---|\+\+\+) \S+/", r"\1 ", diff))
        found[name] = patches.patched(patch, tmp_path / "made").read_text()
    assert have.patch_in(ROOT / "ppo.py") == {}
    args = {name: default for name, (_, default) in have.fields_of(script).items()}
    args |= {"exp_name": "mine"}
    file = tmp_path / "mine__1.csv"
    for name, differs in (("0.8", []), ("0.9", ["patch"])):
        (tmp_path / "copy.py").write_text(found[name])
        digest = have.patch_in(tmp_path / "copy.py")["patch"]
        file.write_text(f"# script: mine\n# args: {json.dumps(args)}\n# patch: {digest}\nstep\n")
        assert [text.split()[0] for text in have.differences(file, script, [])] == differs


def test_a_run_is_resumed_if_it_has_a_checkpoint_the_script_and_the_arguments_asked_for(copy):
    today = (copy / "ppo.py").read_text()

    def run(stamp: int, checkpoint: bool, command="ppo.py", text=today, **changes) -> Path:
        run_dir = copy / "runs" / f"CartPole-v1__ppo__1__{stamp}"
        run_dir.mkdir(parents=True)
        args = vars(import_module("ppo").Args(total_timesteps=20480)) | changes
        config = {"args": args, "command": command}
        (run_dir / "config.json").write_text(json.dumps(config))
        (run_dir / command).write_text(text)
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
    run(4, checkpoint=True, text=today + "# changed since\n")
    assert asked() == []
    run(1, checkpoint=True)
    run(2, checkpoint=True, track=True, resume="runs/CartPole-v1__ppo__1__2")
    assert asked() == ["--resume", "runs/CartPole-v1__ppo__1__2"]


# A stand-in for Python that runs benchmark/*.py, and whose training takes no time, unless HOLD
# names a file to wait for. With NAN its losses are not finite. With FAIL=late it fails after its
# first checkpoint, with FAIL=early before it has said anything.
TRAINS = """
import json, os, runpy, shutil, sys, time
from pathlib import Path
sys.argv.pop(0)
sys.path.insert(0, "benchmark")
if sys.argv[0].startswith("benchmark"):
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()
import have, torch
script = Path(sys.argv[0])
fields = have.fields_of(script)
args = have.parse(sys.argv[1:], fields)
args = {name: False if value is ... else value for name, value in args.items()}
name = f"{args['env_id']}__{args['exp_name']}__{args['seed']}__{os.getpid()}"
run = Path(args["resume"] or f"runs/{name}")
if os.environ.get("FAIL") == "early":
    sys.exit("no memory")
run.mkdir(parents=True, exist_ok=True)
print(f"run: {run}, on CPU", flush=True)
config = {"args": args, "command": " ".join(sys.argv)}
config |= {"commit": "1", "versions": {}, "hardware": "a"}
(run / "config.json").write_text(json.dumps(config))
shutil.copy(script, run)
(run / "episodes.csv").write_text(f"step,return,length,seconds\\n10,{args['num_envs']},4,1\\n")
checkpoint = {"args": args, "iteration": 1, "global_step": 10, "seconds": 1.0}
checkpoint["recent_returns"] = [args["num_envs"]]
torch.save(checkpoint, run / "checkpoint.pt")
if os.environ.get("FAIL") == "late":
    sys.exit("no memory")
end = time.time() + 120
while "HOLD" in os.environ and not Path(os.environ["HOLD"]).exists() and time.time() < end:
    time.sleep(0.01)
if "NAN" in os.environ:
    sys.exit("\\r 1%|error: losses of iteration 2 are not finite: {}")
torch.save(checkpoint | {"iteration": 10**9}, run / "checkpoint.pt")
"""


@pytest.fixture
def quick(copy) -> Callable:
    """`quick(*command, **variables)`: a suite whose runs are those of the stand-in."""
    (copy / "trains.py").write_text(TRAINS)
    there = {"PYTHON": f"{sys.executable} trains.py", "ENVS": "InvertedPendulum-v4"}
    return lambda *command, **variables: suite(copy, *command, **there | {"SEEDS": "1"} | variables)


def test_suites_side_by_side_keep_their_runs_apart(quick, copy):
    """Of one name: another suite's run is not resumed, one's own is not begun twice."""
    flags, hold = "--num-envs 16", {"HOLD": str(copy / "hold")}
    first = quick("benchmark/mujoco.sh", "strong", **hold)
    wait_for(lambda: list(copy.glob("runs/*/checkpoint.pt")), first)
    output = output_of(quick("benchmark/mujoco.sh", "strong"), code=1)
    assert "FAIL InvertedPendulum-v4__strong__1 is just being run by another suite" in output
    output = output_of(quick("benchmark/mujoco.sh", "strong", SUFFIX="_b", FLAGS=flags))
    assert "resumed" not in output
    output = output_of(quick("benchmark/mujoco.sh", "strong", SUFFIX="_c", SEEDS="1 1"))
    assert "resumed" not in output and output.count("run  ") == 1
    (copy / "hold").touch()
    output_of(first)
    for folder, num_envs in (("mujoco", 64), ("mujoco_b", 16), ("mujoco_c", 64)):
        path = copy / "benchmark/results" / folder / "InvertedPendulum-v4" / "strong__1.csv"
        facts = results.read_facts(path)
        assert json.loads(facts["args"])["num_envs"] == num_envs == float(facts["final_return"])


def test_a_resumed_run_that_fails_at_once_remains_its_suites(quick, copy):
    command = ("benchmark/mujoco.sh", "strong")
    assert "no memory" in output_of(quick(*command, FAIL="late"), code=1)
    assert "resumed from runs/" in output_of(quick(*command, FAIL="early"), code=1)
    assert "resumed" not in output_of(quick(*command, SUFFIX="_b"))
    assert "strong__1, resumed from runs/" in output_of(quick(*command))


def test_a_run_whose_losses_are_not_finite_is_a_result(quick, copy):
    """Of 0, however well it did before; the suite does not run it again."""
    command = ("benchmark/mujoco.sh", "strong")
    assert "FAIL" not in output_of(quick(*command, NAN="1"))
    path = copy / "benchmark/results/mujoco/InvertedPendulum-v4/strong__1.csv"
    facts, curve = results.read_facts(path), results.read_curve(path)
    assert facts["final_return"] == facts["return_of_iterations"] == "0.0"
    assert facts["diverged"] == "losses not finite, last episode at step 10"
    assert curve["return"].iloc[-1] == 0 and curve["step"].iloc[-1] == 10
    assert output_of(quick(*command)).startswith(f"have {path.relative_to(copy)}")


def test_a_word_too_many_starts_nothing(copy):
    for name, word in (("ablation", "study"), ("variant", "spo"), ("mujoco", "strong")):
        output = output_of(suite(copy, f"benchmark/{name}.sh", word, "--dryrun"), code=2)
        assert output.startswith("usage: ")
    for flag in ("--seed 3", "--env-id Ant-v4", "--total_timesteps=9"):
        command = ["benchmark/compare.sh", "ppo.py", "ppo_atari.py", *flag.split()]
        assert "SEEDS, ENVS and STEPS" in output_of(suite(copy, *command), code=2)
    output = output_of(suite(copy, "benchmark/selection.sh", STEPS="9"), code=2)
    assert output == "error: no ENVS, SEEDS and STEPS here: the plan has them\n"


def test_a_patch_that_does_not_fit_stops_a_suite_before_its_first_run(copy):
    patch = copy / "variants" / "no_ratio_clip.patch"
    patch.write_text(re.sub(r"(?m)^-    pg_loss", "-    no_such_loss", patch.read_text()))
    assert "no_such_loss" in patch.read_text()
    output = output_of(suite(copy, "benchmark/ablation.sh", "details", "--dry-run"), code=2)
    assert "no_ratio_clip.patch does not fit" in output and "--env-id" not in output


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
        ("--ent-coef -1e-3 --vf-coef -.5", "--ent-coef=-0.001 --vf-coef -0.5", []),
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


@pytest.mark.parametrize("given, differs", [({}, []), ({"reward_gamma": 0.99}, ["reward_gamma"])])
def test_flags_that_a_script_has_no_more(given, differs, tmp_path):
    """A run that had them at what the script does without them is one of today's."""
    script = ROOT / "ppo_procgen.py"
    args = {"env_id": "starpilot", "init": "torch", "layer_norm": False}
    args |= {"norm_reward_rollout": False, "reward_gamma": None} | given
    (tmp_path / "run.csv").write_text(f"# script: ppo_procgen\n# args: {json.dumps(args)}\n")
    found = have.differences(tmp_path / "run.csv", script, [])
    assert [text.split()[0] for text in found] == differs


@pytest.mark.parametrize("script", recipes.SCRIPTS)
def test_flags_are_read_from_the_text_of_a_script(script):
    """Types and defaults are those of Args; what is free or gone is no typing error."""
    args = vars(import_module(script).Args())
    fields = have.fields_of(ROOT / f"{script}.py")
    assert fields.keys() == args.keys()
    for name, (kind, default) in fields.items():
        assert default == args[name] or (default is ... and name in have.FREE)  # computed
        assert args[name] is None or isinstance(args[name], kind)
    known = set().union(*(have.fields_of(ROOT / f"{name}.py") for name in recipes.SCRIPTS))
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


def test_an_iteration_of_one_long_episode_counts_as_much_as_one_of_many(finished):
    """Iterations of 10 steps: nothing ends in the fifth; the last five others have a return."""
    ends = {5: 9.0, 10: 1.0, 11: 2.0, 12: 4.0, 20: 6.0, 30: 5.0, 31: 7.0, 55: 8.0, 60: 10.0}
    episodes = np.array([list(ends), list(ends.values()), [0.0] * len(ends)])
    assert collect.mean_of_iterations(episodes, 10) == np.mean([5, 4, 5, 7, 9])
    assert collect.mean_of_iterations(episodes, 10, last=2) == np.mean([7, 9])
    facts = results.read_facts(collect.collect(finished(), "suite"))
    assert facts["return_of_iterations"] == "3.0"


def test_a_results_file_says_how_its_run_was_made(finished):
    path = collect.collect(finished(), "suite")
    assert path == collect.RESULTS / "suite" / "a-B-c-v0" / "exp__3.csv"
    facts, curve = results.read_facts(path), results.read_curve(path)
    assert facts["command"] == "my_ppo.py --seed 3" and facts["script"] == "my_ppo"
    assert json.loads(facts["args"])["resume"] is None and json.loads(facts["args"])["seed"] == 3
    assert facts["sha256"] == hashlib.sha256(b"print()").hexdigest() and facts["threads"] == "1"
    assert facts["load"] == "0.5" and facts["final_return"] == "3.0"
    assert curve["step"].iloc[-1] == 30
    assert curve["return"].tolist()[-1] == 3 and curve["return"].iloc[0] == 2
    assert [each.name for each in path.parent.iterdir()] == [path.name]  # nothing temporary


def test_a_curve_is_the_mean_of_the_100_episodes_before(finished):
    """At a hundred points of the run, of those so far if they are fewer."""
    steps, returns = np.arange(1, 301), np.random.default_rng(0).normal(size=300)
    episodes = np.stack([steps, returns, steps / 10])
    facts = {"total_timesteps": 300, "steps": 300, "seconds": 30.0}
    rows = [[float(x) for x in row.split(",")] for row in collect.curve_of(facts, episodes)]
    assert [row[0] for row in rows] == list(range(3, 301, 3))
    for step, mean, seconds in rows:
        last = returns[max(0, int(step) - 100) : int(step)]
        assert mean == pytest.approx(last.mean(), rel=1e-4, abs=1e-5) and seconds == step / 10


def test_a_checkpoint_and_episodes_that_disagree_are_not_collected(finished):
    with pytest.raises(SystemExit, match="disagree on the last 100 returns"):
        collect.collect(finished(recent_returns=[2.0, 5.0]), "suite")
    run_dir = finished()
    (run_dir / "episodes.csv").write_text("step,return,length,seconds\n")
    with pytest.raises(SystemExit, match="no finished episode"):
        collect.collect(run_dir, "suite")
    assert not collect.RESULTS.exists()


GAMES = """
from dataclasses import dataclass
import numpy as np

@dataclass
class Args:
    num_envs: int
    seed: int = 1
    action_mask: bool = True

class MicroRTS:  # game n ends after 1 + n % 3 steps: lost, drawn, won, lost; a second one is won
    reward_names = ["WinLoss", "Resources"]
    single_observation_space = single_action_space = None

    def __init__(self, args):
        self.n, self.t, self.weights = np.arange(args.num_envs), 0, np.ones(2)

    def reset(self, seed):
        return np.zeros((len(self.n), 2)), {}

    def step(self, action):
        assert (action == self.n).all()
        self.t += 1
        ends = self.t % (1 + self.n % 3) == 0
        first = self.t <= 1 + self.n % 3
        win_loss = np.where(ends, np.where(first, 10 * (self.n % 4 % 3 - 1), 20), 0)
        reward = np.stack([win_loss, np.full(len(self.n), 5)], axis=1) @ self.weights
        drawn = ends & first & (self.n % 4 % 3 == 1)  # by the time limit
        return np.zeros((len(self.n), 2)), reward, ends & ~drawn, drawn, {}

    def close(self):
        pass

class Agent:
    nvec = (2,)

    def __init__(self, *spaces_and_args):
        pass

    def draw_noise(self, n):
        return np.arange(n)

    def act(self, obs, options, noise):
        return noise, None

RunningMeanStd = lambda *moments: None
load_weights = lambda agent, checkpoint: None
normalize_obs = lambda rms, obs, args: obs
action_options = lambda *args: None
"""


def test_a_game_counts_once_and_by_who_has_won(finished, monkeypatch):
    """Other rewards do not count, nor does the game after it."""
    monkeypatch.setattr(win_rate, "RESULTS", collect.RESULTS / "wins")
    run_dir = finished()
    (run_dir / "my_ppo.py").write_text(GAMES)
    config = (run_dir / "config.json").read_text().replace("a:B/c-v0", "MicrortsMining-v1")
    (run_dir / "config.json").write_text(config)
    checkpoint = {"args": {"num_envs": 2}, "obs_rms": []}
    monkeypatch.setattr(win_rate, "finished", lambda run_dir: checkpoint)
    outcome = win_rate.play(run_dir)
    assert outcome.tolist() == [n % 4 % 3 - 1 for n in range(100)]
    written = win_rate.write(run_dir, outcome)
    assert results.read_curve(written)["outcome"].tolist() == outcome.tolist()
    assert win_rate.write(run_dir, outcome) == written
    with pytest.raises(SystemExit, match="holds other games"):
        win_rate.write(run_dir, -outcome)


@pytest.mark.parametrize(
    "rows, worst, step", [("", 0, 0), ("10,2,4,1\n", 0, 10), ("9,-3,4,1\n", -3, 9)]
)
def test_a_diverged_run_counts_as_0_or_less(rows, worst, step, finished, monkeypatch):
    """One that never finished an episode too."""
    monkeypatch.setattr(results, "RESULTS", collect.RESULTS)
    run_dir = finished()
    (run_dir / "checkpoint.pt").unlink()
    (run_dir / "episodes.csv").write_text(f"step,return,length,seconds\n{rows}")
    path = collect.collect(run_dir, "suite", has_diverged=True)
    facts, curve = results.read_facts(path), results.read_curve(path)
    assert float(facts["final_return"]) == float(facts["return_of_iterations"]) == worst
    assert facts["steps"] == str(step) and "diverged" in facts
    assert curve.iloc[-1].tolist()[:2] == [step, worst]
    (run,) = results.read_runs("suite").to_dict("records")
    assert run["diverged"] and tables.seeds_cell([1], 1) == "1, 1 diverged"


def test_a_run_that_is_not_finished_is_not_collected(finished):
    with pytest.raises(SystemExit) as error:
        collect.collect(finished(iteration=2), "suite")
    assert error.value.code == 3 and not collect.RESULTS.exists()


def test_a_run_that_is_not_finished_is_a_result_if_asked(finished, monkeypatch):
    """Up to its checkpoint; no suite takes it for a whole one, and tables say how far it came."""
    monkeypatch.setattr(results, "RESULTS", collect.RESULTS)
    run_dir = finished(iteration=2, global_step=20, seconds=2.0, recent_returns=[2.0])
    path = collect.collect(run_dir, "suite", unfinished=True)
    facts, curve = results.read_facts(path), results.read_curve(path)
    assert facts["unfinished"] == "20 of 30 steps"
    assert curve.iloc[-1].tolist() == [20, 2, 2] and curve["return"].max() == 2
    monkeypatch.setattr(have, "fields_of", lambda script: {})
    assert "unfinished: 20 of 30 steps" in have.differences(path, Path("my_ppo.py"), [])
    label, *_ = tables.recipe_cells("suite", results.read_runs("suite"))
    assert label == "exp, 20 of 30 steps"
    assert "unfinished" not in results.read_facts(collect.collect(finished(), "whole"))
    runs = pd.DataFrame({"unfinished": ["", "20 of 30 steps"]})
    assert results.differing(runs) == ["unfinished"]


def test_a_resumed_run_names_all_its_machines(finished):
    """In their order; not one that resumed it and reached no checkpoint."""
    run_dir = finished()
    config = json.loads((run_dir / "config.json").read_text())
    for after, hardware, torch_version in ((1, "b", "2.9"), (2, "a", "2.10"), (3, "c", "2.11")):
        changed = config | {"hardware": hardware, "versions": {"torch": torch_version}}
        (run_dir / f"config_{after}.json").write_text(json.dumps(changed))
    (run_dir / "config.json").write_text(json.dumps(config | {"versions": {"torch": "2.9"}}))
    facts = results.read_facts(collect.collect(run_dir, "suite"))
    assert facts["hardware"] == "a; then b; then a"
    assert facts["versions"] == "torch 2.9; then torch 2.10"


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
    ("mujoco", "default"): 40,
    ("mujoco", "strong"): 30,
    ("mujoco", "ablation"): 39,
    ("atari", "1M"): 1,
    ("atari", "fast"): 1,
    ("lstm", "memory"): 6,
    ("lstm", "pong"): 2,
    ("multidiscrete", "default"): 9,
    ("multidiscrete", "no_mask"): 9,
    ("multidiscrete", "classic"): 6,
    ("multidiscrete", "lunar"): 3,
    ("multidiscrete", "discretized"): 3,
    ("procgen", "short_ppo"): 1,
    ("procgen", "short_ppg"): 1,
    ("variant", "baseline"): 3,
    ("variant", "spo"): 3,
}


@pytest.mark.parametrize("name, recipe", SUITES)
def test_every_command_of_a_suite_is_valid(name, recipe, copy, monkeypatch):
    if name == "procgen":
        pytest.importorskip("procgen")
    python = {"PYTHON": sys.executable if name in ("ablation", "variant") else "python"}
    python |= {"SEEDS": "1"} if name in ("ablation", "variant") else {}  # hundreds of runs
    command = [f"benchmark/{name}.sh", *recipe.split(), "--dry-run"]
    commands = [line.split() for line in output_of(suite(copy, *command, **python)).splitlines()]
    monkeypatch.syspath_prepend(copy / "runs" / "variants")  # where patched scripts are
    names, had = set(), 0
    for python, *words in commands:
        if words[0] == "-m":  # torch.distributed.run --standalone --nproc-per-node N
            words = words[5:]
        script, *flags = words
        module = import_module(Path(script).stem)
        args = module.parse_args(flags)
        module.check_args(args)
        names.add((args.env_id, args.exp_name, args.seed))
        assert (copy / script).is_file()
        for folder in {name, f"{name}_{recipe}", f"{name}_short", f"{name}_details", f"{name}s"}:
            path = ROOT / "benchmark" / "results" / folder / args.env_id
            path /= f"{args.exp_name}__{args.seed}.csv"
            if path.exists():
                found = have.differences(path, copy / script, flags)
                assert not [text for text in found if "unfinished: " not in text], path
                had += 1
    assert python in ("python", sys.executable) and len(names) == len(commands) > 0
    assert had >= RESULTS.get((name, recipe), 0)


REFUSED = {  # command -> variables, words of the error
    "atari.sh": ({"SUFFIX": "_1M"}, "the runs of another recipe are in atari_1M"),
    "mujoco.sh": ({"SUFFIX": "_selection"}, "another recipe are in mujoco_selection"),
    "selection.sh": ({"SUFFIX": "_results"}, "another recipe are in selection_results"),
    "procgen.sh": ({"SUFFIX": "_short2"}, "another recipe are in procgen_short"),
    "selection.sh results": ({"SEEDS": "7"}, "no ENVS, SEEDS and STEPS here"),
    "classic.sh": ({"TASK": "99"}, "no run has the number TASK (99)"),
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_would_go_wrong_unnoticed_is_refused(command, copy):
    variables, words = REFUSED[command]
    command = f"benchmark/{command} --dry-run".split()
    assert words in output_of(suite(copy, *command, **variables), code=2)


@pytest.mark.parametrize("name", ["it's", "READ*", "a\\b"])
def test_what_xargs_would_change_is_refused(name, copy):
    (copy / "mine.py").write_text((copy / "ppo.py").read_text() + "\n")
    command = ["benchmark/compare.sh", "ppo.py", "mine.py", "--dry-run", "--wandb-entity"]
    (odd,) = set(name) & set("'*\\")
    assert f"no {odd} in flags" in output_of(suite(copy, *command, name), code=2)


def test_variables_of_its_own_that_a_suite_finds_are_not_taken(copy):
    """Of a shell in which one of its functions was called, say."""
    there = {"PROCESSES": "2", "PLANNED": "3", "TASK": "0"}
    plain = output_of(suite(copy, "benchmark/classic.sh", "--dry-run", TASK="0"))
    assert output_of(suite(copy, "benchmark/classic.sh", "--dry-run", **there)) == plain != ""


def test_unknown_recipes_are_refused(copy):
    for name in recipes.suites():
        assert "usage: " in output_of(suite(copy, f"benchmark/{name}.sh", "nonsense"), code=2)


@pytest.mark.parametrize("name, recipe", [("mujoco", "default"), ("lstm", "pong")])
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
    srun = '#!/usr/bin/env bash\n[[ $1 == --cpus-per-task=3 ]] && exec "${@:2}"\n'
    (tools / "srun").write_text(srun)
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
    stub = "gpu=$CUDA_VISIBLE_DEVICES; echo +$gpu >> gpus; sleep 0.5; echo -$gpu >> gpus; exit 1\n"
    (copy / "python.sh").write_text(stub)
    variables = {
        "PYTHON": "bash python.sh",
        "GPUS": "3 5",
        "WORKERS": "2",
        "SEEDS": "1 2",
        "ENVS": "Ant-v4 Hopper-v5",
    }
    output_of(suite(copy, "benchmark/mujoco.sh", **variables), code=1)
    at_work = []
    lines = (copy / "gpus").read_text().split()
    for begins, gpu in lines:
        if begins == "+":
            assert gpu not in at_work
            at_work.append(gpu)
        else:
            at_work.remove(gpu)
    assert len(lines) == 2 * 4 and {gpu for _, gpu in lines} == {"3", "5"}


def test_all_cores_are_those_of_the_machine(copy):
    """Whatever OMP_NUM_THREADS says; and what one recipe asks for is not the next one's."""
    (copy / "python.sh").write_text("echo $OMP_NUM_THREADS >> threads; exit 1\n")
    cores = subprocess.check_output(["nproc"], env={"PATH": os.environ["PATH"]}, text=True).strip()
    script = "source benchmark/run.sh; STEPS=1000000 SEEDS=1\n"
    script += "".join(f"run_recipe {name} default\n" for name in ("atari", "mujoco", "atari"))
    script += "ENVS=starpilot run_recipe procgen openai\n"
    there = {"PYTHON": "bash python.sh", "OMP_NUM_THREADS": "1", "ENVS": "Pong-v5"}
    output_of(suite(copy, "-c", script, **there))
    of_four = str(-(-int(cores) // 4))  # processes of each run
    assert (copy / "threads").read_text().split() == [cores, "1", cores, of_four]


def test_a_picture_needs_the_run_itself(copy):
    """Its results alone are no agent that could play, and no reason to train another one."""
    there = copy / "benchmark" / "results" / "start" / "HalfCheetah-v4"
    shutil.copytree(ROOT / "benchmark" / "results" / "start" / "HalfCheetah-v4", there)
    output = output_of(suite(copy, "benchmark/start.sh"), code=1)
    assert "have " in output and "error: the run itself is not here" in output
    assert not (copy / "runs").exists()


def test_runs_that_fail_hold_up_no_others(copy):
    """A suite of two scripts whose runs all fail starts all of them, and fails at its end."""
    stub = (
        f'case $1 in benchmark/*) exec {sys.executable} "$@" ;; esac\necho $1 >> started; exit 1\n'
    )
    (copy / "python.sh").write_text(stub)
    variables = {"PYTHON": "bash python.sh", "SEEDS": "1", "ENVS": "Hopper-v4"}
    output = output_of(suite(copy, "benchmark/ablation.sh", "study", **variables), code=1)
    started = Counter((copy / "started").read_text().split())
    made = "runs/variants/implementation_matters.py", "runs/variants/trpo_implementation_matters.py"
    assert started == dict(zip(made, (3, 2))) and output.count("FAIL") == 5


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
    del tiny["ENVS"]  # ppo.py's own
    assert output_of(suite(copy, *command, "--dry-run", **tiny)) == output
    assert "are the same" in output_of(suite(copy, *command[:2], command[1], **tiny), code=2)


# -- recipes.csv --
def test_recipes_can_be_read_by_bash():
    """No field is quoted or has a comma, and the rows of a recipe agree on what it has once."""
    text = (ROOT / "benchmark" / "recipes.csv").read_text()
    assert '"' not in text and {line.count(",") for line in text.splitlines()} == {11}
    for _, rows in recipes.read_recipes().groupby(["suite", "recipe"]):
        for column in ("folder", "seeds", "steps", "cores"):
            assert rows[column].nunique() == 1
    for _, rows in recipes.read_recipes().groupby("folder"):
        runs = [
            (env, row["experiment"], row["label"])
            for _, row in rows.iterrows()
            for env in recipes.environments_of(row)
        ]
        for names in ([run[:2] for run in runs], [(env, label) for env, _, label in runs]):
            assert len(set(names)) == len(names)
        looks = rows[["experiment", "colour"]].drop_duplicates()
        assert looks["experiment"].is_unique
        assert looks["colour"][looks["colour"] != ""].is_unique


def test_the_recipes_of_our_own_are_the_same_everywhere():
    """The picture has chosen, which is strong and two flags; the variants and ablations strong."""
    rows = recipes.read_recipes().set_index("experiment")
    strong = rows["flags"]["strong"]
    readme = (ROOT / "README.md").read_text().replace("\\\n", "")
    quick_start = re.search(r"uv run ppo_continuous_mujoco.py (--num-envs 64 .*?) +#", readme)[1]
    both = [*strong.split(), "--gae-lambda", "0.9", "--staggered-resets"]
    for flags in [*rows["flags"].loc[["start", "chosen"]], quick_start]:
        assert flags.split() == both
    assert set(rows["flags"][rows["suite"] == "variant"]) == {strong}
    ablations = rows[rows["recipe"] == "ablation"]
    taken_back = []
    for flags in ablations["flags"]:
        words = flags.split()
        taken_back += [word for word in strong.split() if word not in words]
        assert [word for word in strong.split() if word in words] == words
    assert sorted(taken_back) == sorted(strong.split())


def test_the_published_recipe_is_that_without_bootstrapping():
    rows = recipes.read_recipes()
    rows = rows[~rows["script"].str.endswith(".patch")]
    assert set(rows["label"][rows["flags"] == "--no-bootstrap-truncation"]) == {"published"}
    plain = rows[(rows["flags"] == "") & ~rows["script"].str.contains("procgen")]
    default = "default (bootstraps time limits)"
    assert (plain["label"][plain["experiment"] == plain["script"].str[:-3]] == default).all()


# -- figures --
def test_every_figure_has_its_curves():
    """None is left over from results that are gone, none is missing."""
    folders = {"time_to_score"}
    for folder in results.folders():
        drawn = recipes.recipes_of(folder)["colour"]
        if set(results.read_runs(folder)["exp"]) & set(drawn.index[drawn != ""]):
            folders.add(folder)
    folders |= {"ablation_details"} if ablation.effects() else set()
    assert {path.stem for path in (ROOT / "benchmark" / "figures").glob("*.png")} == folders


def test_a_figure_without_results_goes(tmp_path, monkeypatch):
    figures = import_module("figures")
    monkeypatch.setattr(figures, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    figures.FIGURES.mkdir()
    for name in ("mujoco", figures.TIME):
        (figures.FIGURES / f"{name}.png").write_bytes(b"old")
        figures.draw(name)
    assert list(figures.FIGURES.iterdir()) == []


@pytest.mark.parametrize("seeds, bands, lines", [(1, 0, 1), (4, 0, 5), (5, 1, 1)])
def test_a_band_needs_five_seeds(seeds, bands, lines):
    figures = import_module("figures")
    fig, ax = figures.plt.subplots()
    figures.draw_recipe(ax, np.arange(3.0), np.random.default_rng(0).random((seeds, 3)), "red")
    assert (len(ax.collections), len(ax.lines)) == (bands, lines)
    figures.plt.close(fig)


def test_a_seed_that_diverged_keeps_its_last_value(tmp_path):
    figures, paths = import_module("figures"), [tmp_path / "1.csv", tmp_path / "2.csv"]
    paths[0].write_text("step,return,seconds\n10,1,1\n100,11,10\n")
    paths[1].write_text("step,return,seconds\n10,3,1\n20,0,2\n")
    grid, y = figures.seed_curves(pd.DataFrame({"path": paths}), "step")
    assert (grid[0], grid[-1]) == (10, 100) and (y[0][-1], y[1][-1]) == (11, 0)


def test_a_legend_has_seeds_and_one_colour_for_each_entry():
    figures = import_module("figures")
    entries = {("a", "red"): [5, 10], ("b", "blue"): [1], ("published", "black"): [None, None]}
    handles = figures.handles_of(entries)
    labels = [handle.get_label() for handle in handles]
    assert labels == ["a, 5 to 10 seeds", "b, 1 seed", "published"]
    assert len({handle.get_color() for handle in handles}) == 3


@pytest.mark.parametrize("letters, columns", [(10, 2), (60, 1)])
def test_a_legend_fits_its_figure(letters, columns):
    figures = import_module("figures")
    fig, _ = figures.plt.subplots(figsize=(figures.WIDTH, 4))
    handles = figures.handles_of({(letters * name, "red"): [1] for name in "abcd"})
    figures.add_legend(fig, handles, 2)
    legend, inside = fig.legends[0], fig.bbox
    box = legend.get_window_extent()
    assert inside.x0 <= box.x0 and box.x1 <= inside.x1
    assert legend._ncols == columns and len(legend.get_texts()) == 4
    figures.plt.close(fig)


def test_published_curves_are_drawn_as_far_as_runs_go():
    figures = import_module("figures")
    curves = results.published_curves("procgen_short_patch", "starpilot", 1_015_808)
    assert list(curves) == ["openai/train-procgen easy-all, 3 runs"]
    assert curves["openai/train-procgen easy-all, 3 runs"]["step"].tolist() == [507904, 1015808]
    for folder, env in (("atari", "Gravitar-v5"), ("mujoco", "Hopper-v4")):
        assert results.published_curves(folder, env, 10**7) == {}
    runs = results.read_runs("atari_fast")
    fig, ax = figures.plt.subplots()
    entries = figures.draw_environment(ax, "atari_fast", runs, "step", 1e6)
    labels = [label for label, _ in entries]
    assert labels[-2:] == [
        "openai/baselines ppo2 (benchmarks_atari10M), 6 runs",
        "SB3 (rl-zoo), 1 run",
    ]
    drawn = [line.get_xdata().tolist() for line in ax.lines if line.get_marker() == "o"]
    assert [len(points) for points in drawn] == [4, 4] and drawn[1] == [0.4, 1, 2, 3]
    figures.plt.close(fig)


def test_windows_are_means_of_their_points(tmp_path, monkeypatch):
    windows = import_module("windows")
    steps = pd.Series([100_000, 500_000, 500_001, 900_000, 1_000_000, 1_400_000])
    means = windows.means_of(steps, pd.Series([1.0, 2.0, 10.0, 20.0, 30.0, 99.0]))
    assert means == {500_000: 1.5, 1_000_000: 20.0}  # the third window is not complete
    for run in range(3):
        folder = tmp_path / f"train_procgen/results/easy-all-run{run}"
        folder.mkdir(parents=True)
        log = pd.DataFrame({"misc/total_timesteps": steps, "eprewmean": 3.0 + run})
        log.to_csv(folder / "progress-starpilot.csv")
    monkeypatch.setattr(windows, "PUBLISHED", tmp_path / "published_windows.csv")
    windows.write_published(tmp_path)
    rows = pd.read_csv(windows.PUBLISHED)
    assert rows["mean"].tolist() == [3, 3, 4, 4, 5, 5] and set(rows["end"]) == set(means)
    first = windows.windows_section().splitlines()[2]
    assert first.startswith("| to 0.5M |") and first.endswith("| 3.0, 4.0, 5.0 |")


# -- statistics --
@pytest.mark.parametrize("n", [2, 5, 10, 30])
def test_interval_is_students(n):
    x = np.random.default_rng(n).normal(size=(n, 3))
    low, high = stats.mean_interval(x)
    expected = scipy.stats.t.interval(0.95, n - 1, x.mean(axis=0), scipy.stats.sem(x))
    np.testing.assert_allclose([low, high], expected)
    assert np.isnan(stats.mean_interval(x[:1])).all()


def test_difference_is_welchs():
    x, y = np.array([1.0, 2.0, 3.0]), np.array([4.0, 6.0, 8.0, 10.0])
    variances = 1 / 3, (20 / 3) / 4  # of the means
    degrees = sum(variances) ** 2 / (variances[0] ** 2 / 2 + variances[1] ** 2 / 3)
    half = scipy.stats.t.ppf(0.975, degrees) * sum(variances) ** 0.5
    assert stats.difference(x, y) == pytest.approx((5, 5 - half, 5 + half))
    same = np.array([500.0, 500.0])
    assert stats.difference(same, same - 1) == (-1, -1, -1)
    assert np.isnan(stats.difference(x[:1], y)[1:]).all()
    row = compare.row_of("Hopper-v4", x, y)
    text = f"+5.0 ({', '.join(f'{value - 2:+.1f}' for value in y)})"
    assert row == ["Hopper-v4", "3, 4", "2.0 (1.0, 2.0, 3.0)", tables.mean_cell(y), text, "1.00"]
    row = compare.row_of("Hopper-v4", np.arange(5.0), np.arange(6.0) + 10)
    assert row[4:] == ["+10.5 [+8.1, +12.9]", "1.00 [1.00, 1.00]"]


def test_few_seeds_are_listed():
    assert tables.mean_cell(np.array([250.0])) == "250"
    assert tables.mean_cell(np.array([100.0, 200.0, 300.0, 400.0])) == "250 (100, 200, 300, 400)"
    assert tables.mean_cell(np.full(5, 3.0)) == "3.0 [3.0, 3.0]"


def test_aggregates_are_rliables():
    metrics = pytest.importorskip("rliable.metrics")
    rng = np.random.default_rng(0)
    for seeds, tasks in ((5, 5), (5, 3), (3, 1), (10, 6)):
        old = rng.integers(6, size=(seeds, tasks)).astype(float)  # with ties
        new = rng.integers(9, size=(seeds + 1, tasks)).astype(float)
        assert stats.interquartile_mean(old) == pytest.approx(metrics.aggregate_iqm(old))
        expected = metrics.probability_of_improvement(new, old)
        assert stats.improvement(new, old) == pytest.approx(expected)


def test_intervals_of_aggregates_draw_seeds_of_each_task():
    """With published means of no spread that is rliable's stratified bootstrap."""
    x = np.random.default_rng(0).normal(10.0, [0.1, 0.1, 3.0], size=(5, 3))
    figures = [[{"mean": 5.0, "std": 0.0, "seeds": 3}]] * 3
    value, low, high = stats.normalized(x, figures)
    draws = stats.resample(x, np.random.default_rng(1))
    assert draws.shape == (stats.RESAMPLES, 5, 3)
    assert all(set(draws[:, :, task].ravel()) == set(x[:, task]) for task in range(3))
    expected = np.quantile([stats.interquartile_mean(draw) / 5 for draw in draws], [0.025, 0.975])
    assert value == pytest.approx(stats.interquartile_mean(x / 5))
    assert (low, high) == pytest.approx(tuple(expected), rel=0.01)
    wide = [[{"mean": 5.0, "std": 3.0, "seeds": 3}]] * 3
    assert stats.normalized(x, wide)[0] == value and stats.normalized(x, wide)[2] > high
    wide = [[{"mean": 5.0, "std": 0.9, "seeds": 3}]] * 3  # the mean of three seeds is surer
    divisors = np.random.default_rng(2).normal(5.0, 0.9 / 3**0.5, (stats.RESAMPLES, 1, 3))
    expected = np.quantile(stats.interquartile_mean(draws / divisors), [0.025, 0.975])
    assert stats.normalized(x, wide)[1:] == pytest.approx(tuple(expected), rel=0.02)
    for level in (0.95, 0.99):
        new, old = (
            stats.resample(y, np.random.default_rng(3 + i)) for i, y in enumerate((x + 0.2, x))
        )
        expected = np.quantile(stats.improvement(new, old), [(1 - level) / 2, (1 + level) / 2])
        better, low, high = stats.improvement_interval(x + 0.2, x, level)
        assert better == stats.improvement(x + 0.2, x) and 0.5 < low < better < high < 1
        assert (low, high) == pytest.approx(tuple(expected), abs=0.014)  # a pair of 75
    ends = stats.with_interval(0.5, np.linspace(0, 1, 1001), 0.99)
    assert ends == pytest.approx((0.5, 0.005, 0.995))


def test_published_figures_are_pooled_with_their_spread():
    """As if all their seeds were known."""
    seeds = np.array([[1.0, 2.0, 4.0], [10.0, 20.0, 21.0]])
    figures = [{"mean": x.mean(), "std": x.std(ddof=1), "seeds": len(x)} for x in seeds]
    expected = seeds.mean(), seeds.std(ddof=1), 6
    assert stats.pooled(figures) == pytest.approx(expected)


def test_the_aggregate_has_the_first_five_seeds_of_each_task():
    runs = results.read_runs("mujoco")
    scores = tables.first_seeds(runs, "ppo_continuous_mujoco", 5)
    assert {len(x) for x in scores.values()} == {5} and "Humanoid-v4" in scores
    humanoid = runs[(runs["env"] == "Humanoid-v4") & (runs["exp"] == "ppo_continuous_mujoco")]
    first = humanoid[humanoid["seed"] <= 5]["final_return"]
    assert sorted(scores["Humanoid-v4"]) == sorted(first) and len(humanoid) == 10


def test_ablations_stand_beside_the_same_seeds():
    """`strong` has five seeds, its ablations three; a folder of one's own may lack it."""
    runs = results.read_runs("mujoco")
    lines = tables.ablation_table(runs).splitlines()
    walker = lines[0].split(" | ").index("Walker2d-v4")
    strong = runs[(runs["env"] == "Walker2d-v4") & (runs["exp"] == "strong")]
    three = strong[strong["seed"] <= 13]["final_return"].to_numpy()
    assert len(strong) == 5 and lines[2].split(" | ")[walker] == tables.mean_cell(three)
    assert len(tables.ablation_table(runs[runs["exp"] != "strong"]).splitlines()) == len(lines) - 1


def test_the_aggregate_compares_what_both_recipes_have():
    """Without three environments of the first recipe there is nothing to compare with."""
    runs = results.read_runs("mujoco")
    row = tables.aggregate_row("mujoco", runs, "strong", "ppo_continuous_mujoco", 5)
    assert row[1] == "5" and "environments" not in row[-1]
    of_first = runs["exp"] == "ppo_continuous_mujoco"
    for gone, last in (({"Hopper-v4"}, " (4 environments)"), (set(runs["env"]), "-")):
        some = runs[~(of_first & runs["env"].isin(gone))]
        row = tables.aggregate_row("mujoco", some, "strong", "ppo_continuous_mujoco", 5)
        assert row[-1].endswith(last) and row[1] == "5"
    left = {"Hopper-v4", "HalfCheetah-v4"}
    others = runs[runs["exp"] == "strong"]
    others = pd.concat([others, others.assign(exp="no_bootstrap")])
    few = pd.concat([runs[of_first & runs["env"].isin(left)], others])
    enough = pd.concat([runs[of_first], others])
    assert tables.aggregate_section("mujoco", enough).count("\n| ") == 5  # three recipes
    assert tables.aggregate_section("mujoco", few) == ""


# -- where results are from --
@pytest.mark.parametrize(
    "facts, found",
    [
        ({}, []),
        ({"exp": "other"}, ["name edited by hand"]),
        ({"command": "ppo.py --exp-name=other", "exp": "other"}, []),
        ({"command": "ppo.py --exp-name other"}, ["name edited by hand"]),
        ({"commit": "1234567-dirty"}, ["commit unknown", "dirty tree"]),
        ({"commit": "7654321-dirty"}, ["dirty tree"]),
    ],
)
def test_what_cannot_be_traced_is_named(facts, found, monkeypatch):
    monkeypatch.setattr(provenance, "unknown_commits", lambda: {"1234567"})
    run = {"command": "ppo.py --seed 1", "exp": "ppo", "commit": "7654321"}
    assert provenance.problems(run | facts) == found
    cells = "; ".join(f"{problem} (1 of 2)" for problem in found)
    assert provenance.labels([run | facts, run]) == cells


def test_what_cannot_be_traced_is_counted():
    text = provenance.summary()
    assert "mujoco_selection: 80 files, name edited by hand" in text
    assert "all: 36 files, commit unknown" in text and "all: 16 files, dirty tree" in text
    if provenance.history_is_whole():
        assert provenance.missing_commits() == provenance.unknown_commits()


# -- the documents --
def test_blocks_and_links_are_those_of_each_document(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    old = "<!-- report:a -->\nold\n<!-- /report:a -->\n<!-- report:b -->\nold\n<!-- /report:b -->"
    made = {"a": "![x](benchmark/figures/x.png)", "b": "[here](#b)"}
    at = {"README.md": "benchmark/figures", "docs/a.md": "../benchmark/figures"}
    at["benchmark/README.md"] = "figures"
    for name, folder in at.items():
        text = report.filled(tmp_path / name, old, made, None)
        assert f"-->\n![x]({folder}/x.png)\n<!--" in text and "-->\n[here](#b)\n<!--" in text
        assert report.filled(tmp_path / name, text, made, None) == text
        alone = report.filled(tmp_path / name, old, made, "b")
        assert "[here]" in alone and "![x]" not in alone
    assert "No results yet." in report.filled(tmp_path / "README.md", old, {}, None)


def test_links_to_details_are_seen_from_the_page():
    table = scripts.where_table()
    line = int(re.search(r"\| C05 \| \[(\d+)\]\(ppo.py#L\1\)", table)[1])
    assert "[C05]" in (ROOT / "ppo.py").read_text().splitlines()[line - 1]
    assert f"[{line}](../ppo.py#L{line})" in report.relinked(table, ROOT / "docs" / "details.md")


@pytest.mark.parametrize("script", recipes.SCRIPTS)
def test_the_table_of_a_script_has_its_flags(script):
    rows = scripts.flags_table(script).splitlines()
    assert rows[0] == "| flag | default | choices | effect |" and "; or:" not in "".join(rows)
    cells = [row.strip("| ").split(" | ") for row in rows[2:]]
    args = import_module(script).Args
    types = get_type_hints(args)
    assert [row[0].strip("`-").replace("-", "_") for row in cells] == list(vars(args()))
    for row, kind in zip(cells, types.values()):
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        assert row[2].strip() == ", ".join(choices) and row[3]


FOLDERS = {"mujoco_mine": "mujoco", "atari_1M_patch": "atari_1M", "lstm_games": "lstm_games"}
FOLDERS |= {"selection_results": "mujoco"}
FOLDERS |= {name: name for name in ("mujoco", "mujoco_selection", "ablation_study_flags", "wins")}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_with_a_suffix_has_the_recipes_of_its_suite(folder):
    assert recipes.without_suffix(folder) == FOLDERS[folder]
    assert recipes.recipes_of(folder).equals(recipes.recipes_of(FOLDERS[folder]))
    assert results.published(folder).equals(results.published(FOLDERS[folder]))


def test_one_block_can_be_made_alone(copy):
    shutil.copytree(ROOT / "benchmark/results/lstm_patch", copy / "benchmark/results/lstm_patch")
    command = [sys.executable, "benchmark/report.py", "--only", "lstm_patch"]
    how = {"cwd": copy, "capture_output": True, "text": True}
    printed = subprocess.run(command, **how)
    assert printed.returncode == 0 and printed.stdout.count("## ") == 1
    stale = subprocess.run([*command, "--check"], **how)
    assert stale.returncode == 1 and "is not what" in stale.stderr
    assert subprocess.run([*command, "--write"], **how).returncode == 0
    assert [path.name for path in copy.glob("benchmark/figures/*")] == ["lstm_patch.png"]
    assert subprocess.run([*command, "--check"], **how).returncode == 0
    wrong = subprocess.run([*command[:3], "nonsense"], **how)
    assert wrong.returncode == 1 and "--only knows" in wrong.stderr


# -- time and speed --
def test_time_to_a_score_is_that_of_the_first_point_there(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("# env: x\nstep,return,seconds\n1,5,1.5\n2,20,2.5\n3,10,3.5\n")
    assert timing.seconds_to(10, path) == 2.5 and timing.seconds_to(21, path) == np.inf


def test_who_never_gets_to_a_score_is_slower_than_all_others():
    seconds = np.array([3.0, np.inf, 1.0])
    returns = np.array([10.0, 9.0, 11.0])
    race = timing.Race("Hopper-v4", "strong", "strong", 10.0, [], seconds, returns)
    assert timing.race_row(race) == ["strong", "3", "1 to 3", "2 of 3"]
    race.returns = np.array([12.0, 9.0, 9.9])
    assert timing.race_row(race)[-1] == "2 of 3, 1 end below it"
    race.returns = returns
    race.seconds = np.array([3.0, np.inf, np.inf])
    assert timing.race_row(race) == ["strong", "too few reach it", "3, one seed", "1 of 3"]


def test_a_cell_of_the_race_has_its_median_and_how_much_sooner_that_is():
    seconds = np.array([30.0, np.inf, 10.0])
    race = timing.Race("Hopper-v4", "strong", "strong", 10.0, [], seconds, seconds)
    assert timing.race_cell(race, None) == "30 (2 of 3)"
    assert timing.race_cell(race, 4.75) == "30 (9.5×, 2 of 3)"
    assert timing.race_cell(race, 10.0) == "30 (20×, 2 of 3)"
    race.seconds = np.array([30.0, np.inf, np.inf])
    assert timing.race_cell(race, 10.0) == "- (1 of 3)"


@pytest.mark.parametrize(
    "changes, same", [({}, True), ({"compile": True}, False), ({"compile": ...}, False)]
)
def test_minutes_are_of_runs_that_compute_the_same_as_fast(changes, same):
    """A file that does not say whether its run was compiled stands for nothing."""
    asked = {"gamma": 0.9, "compile": False, "cuda": False, "seed": 1, "track": False}
    args = asked | {"seed": 2, "track": True}
    assert timing.same_work(asked, args | changes) == same
    assert not timing.same_work(asked, args | {"gamma": 0.8})


def test_weak_measurements_are_labelled():
    facts = {"steps": "40960", "load_before": "3.14", "commit": "1"}
    columns = {"ours_steps_per_second": [10_000.0] * 5, "peer_steps_per_second": [1000.0] * 5}
    data = pd.DataFrame(columns)
    assert timing.conditions(facts, data) == "short windows; busy machine"
    data["ours_window_seconds"] = data["peer_window_seconds"] = 60.0
    assert timing.conditions(facts | {"load_before": "0.2"}, data) == ""
    assert timing.conditions(facts | {"load_before": "0.2"}, data[:4]) == "few pairs"


def test_runs_of_other_tools_are_read_by_their_tags(tmp_path):
    for exp, seed, at, value in (
        ("theirs", 1, 1700000000, 10.0),
        ("theirs", 2, 1700000000, 99.0),  # stopped, and begun again
        ("theirs", 2, 1700000001, 14.0),
        ("ours", 1, 1700000000, 3.0),
    ):
        with SummaryWriter(tmp_path / f"Hopper-v4__{exp}__{seed}__{at}") as writer:
            for step in range(150):  # the first 50 are not among the last 100
                writer.add_scalar("charts/episodic_return", value if step >= 50 else 0.0, step)
    with SummaryWriter(tmp_path / "unnamed") as writer:
        writer.add_scalar("charts/episodic_return", 1.0, 0)
    rows = tables.tensorboard(tmp_path).splitlines()[2:]
    assert rows[0] == "| Hopper-v4 | ours | 1 | 3.0 |"
    assert rows[1] == "| Hopper-v4 | theirs | 2 | 12.0 (10.0, 14.0) |" and len(rows) == 2


FAKE = """
import json, os, pathlib, sys, time
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
run = pathlib.Path("runs/x")
run.mkdir(parents=True)
(run / "config.json").write_text(json.dumps({"commit": "1", "hardware": "a"}))
writer = EventFileWriter(str(run))
for i in range(1, 21):  # a step takes SECONDS
    value = Summary.Value(tag="charts/SPS", simple_value=1.0)
    wall = 1000 + i * SECONDS
    for late in (0, SECONDS / 2):  # two of a step, as PPG has after a phase: the last one counts
        writer.add_event(Event(wall_time=wall + late, step=i, summary=Summary(value=[value])))
writer.close()
"""
RELAY = 'import os, runpy\nrunpy.run_path(os.environ["CLEANRL_SCRIPT"], run_name="__main__")\n'


@pytest.fixture
def measured(copy) -> Callable:
    """`measured(*flags)`: speed.sh with two scripts that only say how fast they are."""
    (copy / "ours.py").write_text(FAKE.replace("SECONDS", "2"))
    (copy / "theirs.py").write_text(FAKE.replace("SECONDS", "6"))
    (copy / "peer.py").write_text(RELAY)

    def run(*flags: str, code: int = 0, **variables: str) -> str:
        command = ["benchmark/speed.sh", "ours.py", "peer.py", sys.executable, "1", *flags]
        variables = {"CLEANRL_SCRIPT": "theirs.py", "STEPS": "20"} | variables
        return output_of(suite(copy, *command, **variables), code=code)

    return run


def test_a_measurement_is_written_once(measured, copy):
    """With the peer's script by a relative path, and wall times of whole processes."""
    path = copy / "benchmark" / "results" / "speed" / "ours__peer.csv"
    output = measured("--max-load", "1000")
    facts, pairs = results.read_facts(path), results.read_curve(path)
    assert facts["steps"] == "20" and facts["max_load"] == "1000.0" and facts["short"] == "no"
    assert re.fullmatch(r"\d+ seconds for 20 steps", facts["peer_whole_process"])
    assert facts["peer_whole_process"] in output and facts["ratio"].startswith("3.000")
    digest = hashlib.sha256((copy / "theirs.py").read_bytes()).hexdigest()[:12]
    assert facts["peer_source"] == f"theirs.py, commit unknown, sha256 {digest}"
    assert pairs["ours_window_seconds"].tolist() == [36] and pairs["ours_wall_seconds"][0] > 0
    text = path.read_text()
    assert "exists: give another NAME" in measured("--max-load", "1000", code=1)
    assert path.read_text() == text
    measured("--max-load", "1000", "--replace")


def test_who_runs_first_alternates(monkeypatch):
    speed, order = import_module("speed"), []

    def measure(command: list[str], short: bool) -> tuple[dict, dict]:
        order.append(command[0])
        return {"steps_per_second": len(order)}, {"of": command[0]}

    monkeypatch.setattr(speed, "measure", measure)
    args = argparse.Namespace(env_id="CartPole-v1", steps=10, repetitions=3, short=False)
    programs = {"ours": ("a", "ppo.py", ""), "peer": ("b", "ppo.py", "")}
    rows, config = speed.measure_pairs(args, programs)
    assert order == ["a", "b", "b", "a", "a", "b"] and config == {"of": "a"}
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    assert [row["ours_steps_per_second"] for row in rows] == [1, 4, 5]


def test_short_windows_and_busy_machines_are_refused(measured, copy):
    (copy / "ours.py").write_text(FAKE.replace("SECONDS", "1"))
    assert "above -1.0: wait until it is quiet" in measured("--max-load", "-1", code=1)
    assert "18.0 s is shorter than 30 s" in measured("--max-load", "1000", code=1)
    assert not (copy / "benchmark" / "results").exists()
    measured("--max-load", "1000", "--short", NAME="short")
    facts = results.read_facts(copy / "benchmark" / "results" / "speed" / "short.csv")
    assert facts["short"] == "yes"


def test_the_speed_of_what_was_not_compiled_is_refused(measured, copy):
    said = "act cannot be compiled here and runs eagerly: no compiler"
    (copy / "ours.py").write_text(FAKE.replace("SECONDS", "2") + f"print({said!r})\n")
    assert f"error: not what its flags say: {said}" in measured("--max-load", "1000", code=1)
    assert not (copy / "benchmark" / "results").exists()
