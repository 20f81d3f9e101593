"""Every command of README.md and docs/: what trains or plays is run, with fewer and shorter
rollouts. What these pages and benchmark/README.md name, files, flags and anchors, is there.
"""

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from harness import HAS_PROCGEN, train
from registry import ROOT, SCRIPTS, pages

sys.path.insert(0, str(ROOT / "benchmark"))
from results import read_recipes  # noqa: E402


def commands_of(page: Path) -> list[str]:
    """The lines of its blocks of commands, continued lines joined."""
    blocks = re.findall(r"(?ms)^```bash\n(.*?)^```$", page.read_text())
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [" ".join(words) for line in lines if (words := shlex.split(line, comments=True))]


COMMANDS = list(dict.fromkeys(command for page in pages() for command in commands_of(page)))
RUN = re.compile(r"(.*?)uv run .*?(\w+)\.py(.*)")  # A=b uv run --with x script.py --flag
RUNS = [text for text in COMMANDS if (found := RUN.fullmatch(text)) and found[2] in SCRIPTS]
RUNS = [text for text in RUNS if "--resume" not in text]  # tests/test_form.py
OTHERS = [command for command in COMMANDS if command not in RUNS]


def shortened(args):
    """Two iterations of rollouts that are just long enough for the minibatches of `args`, one
    episode to play.
    """
    least = 4 * args.num_minibatches  # samples
    num_steps = next(T for T in (2, 4, 8, 16, 32, 64, 128) if args.num_envs * T >= least)
    fewer = {"num_steps": num_steps, "total_timesteps": 2 * args.num_envs * num_steps}
    fewer |= {"eval_episodes": min(args.eval_episodes, 1), "cuda": False}
    own = {"compile": False, "e_auxiliary": 1, "max_episode_steps": 300}
    return replace(args, **fewer, **{name: x for name, x in own.items() if hasattr(args, name)})


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:.*out of date")
@pytest.mark.parametrize("command", RUNS)
def test_command_runs(command, monkeypatch):
    """What is to be played is a tiny run of the script."""
    variables, name, flags = RUN.fullmatch(command).groups()
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.setattr(sys, "exit", sys.exit)  # wandb puts its own there
    script = SCRIPTS[name]
    try:
        if "runs/NAME" in flags:
            run_dir = train(script)
            args = script.module.parse_args(flags.replace("runs/NAME", str(run_dir)).split())
            assert len(script.module.evaluate(replace(args, eval_episodes=1), run_dir)) == 1
            assert args.capture_video == any(run_dir.glob("eval_videos_*/*.mp4"))
        else:
            args = shortened(script.module.parse_args(flags.split()))
            result = script.module.train(args)
            assert result["global_step"] == args.total_timesteps
            assert (Path(result["run_dir"]) / "checkpoint.pt").is_file()
    except (SystemExit, Exception) as error:
        if re.search("cannot render:|install", str(error)):
            pytest.skip(str(error))
        raise


def test_all_other_commands_are_known():
    """But for pip and pytest. Those of benchmark/ and of variants/ have tests of their own, and
    their words are looked at below.
    """
    tried_elsewhere = re.compile(
        r"(uv )?pip install |uv run (pytest|torchrun|continuous_lstm|broken)|git clone |cd |"
        r"diff -u |patch -o |(\w+=.* )?(bash|python|uv run( python)?) benchmark/\w+\.(sh|py)\b|"
        r"uv run \w+\.py --resume runs/NAME$"
    )
    assert {line for line in OTHERS if not tried_elsewhere.match(line)} == {
        "uvx tensorboard --logdir runs",
        "cp ppo_continuous_mujoco.py my_ppo.py",
        "diff <(sed /^# ===/q ppo.py) <(sed /^# ===/q ppo_lstm.py)",
    }


PAGES = "environment", "agents", "changes"
BLOCKS = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in PAGES)
BLOCKS = re.findall(r"(?ms)^```python\n(.*?)^```$", BLOCKS)
EXAMPLES = [block for block in BLOCKS if "agent.act(" in block]
AGENTS = {  # fields of Args of a short run, with which a wrong example plays otherwise
    "ppo": {},
    "ppo_continuous_mujoco": {"env_id": "Pendulum-v1", "scale_actions": True},
    "ppo_atari": {"max_episode_steps": 300},
    "ppo_multidiscrete": {},
}


@pytest.mark.e2e
@pytest.mark.parametrize("example", EXAMPLES, ids=AGENTS)
def test_examples_in_python_play_as_the_evaluation_does(example):
    """The same deterministic episode, with the run's copy of the script."""
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


def test_example_of_an_environment():
    """It trains, moves towards the origin and renders what it shows."""
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


def test_example_of_a_sweep(monkeypatch, capsys):
    """With runs of two iterations each."""
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
    without_peer |= {"trpo_continuous_mujoco.py"}
    assert {*pairs["ours"]} >= {f"{name}.py" for name in SCRIPTS} - without_peer
    for pair in pairs.itertuples():
        assert (ROOT / "benchmark" / "peers" / pair.adapter).exists(), pair.name
        module = import_module(pair.ours.removesuffix(".py"))
        flags = ["--env-id", pair.env, "--total-timesteps", pair.steps, *pair.ours_flags.split()]
        if HAS_PROCGEN or "procgen" not in pair.ours:
            module.parse_args([flag for flag in flags if flag != "--cuda"])  # no GPU here
