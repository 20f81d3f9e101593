"""What a script promises: each row of SCRIPTS in tests/registry.py.

A promise that the same bytes keep in several scripts is tested with the first that has them
(`each_text_of`). The environments are those of tests/envs.py; a script for games of which each
reset takes a row plays `envs.Frames` there, with one layer, and its games in test_atari.py and in
what starts processes, which is `e2e`. So are longer cases of the same promise.
"""

import errno
import fcntl
import importlib
import json
import math
import os
import pickle
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from importlib.machinery import ModuleSpec
from itertools import count
from pathlib import Path
from typing import get_args

import envs
import gymnasium as gym
import numpy as np
import pytest
import torch
from harness import (
    command,
    contents,
    each_text_of,
    flags_of,
    killed,
    known,
    lacks,
    message_of,
    process,
    refusal,
    resume,
    small_games,
    some,
    steady,
    the_run,
    train,
    wait_for,
)
from registry import SCRIPTS, Script
from watch import assert_same_run, checkpoint_of, episodes_of, flat, scalars_of, weights_of

pytestmark = pytest.mark.usefixtures("small")
scripts = some(SCRIPTS.values())
filmed = pytest.mark.filterwarnings("ignore::UserWarning")


# Those of which an environment may be one's own, and those whose resumed runs begin new episodes
OWN = {name: row for name, row in SCRIPTS.items() if not row.games}
SEEDED = {name: row for name, row in SCRIPTS.items() if not row.games or row.reset_rows}
VECTORS = {name: row for name, row in OWN.items() if not row.images}
ROBOTS = {name: row for name, row in SCRIPTS.items() if "M06" in row.details}
WORKERS = [row for row in OWN.values() if hasattr(row.module.Args, "env_backend")]  # processes


def own(script: Script, name: str) -> dict:
    """The field of a run in this environment of tests/envs.py; of games there is no other."""
    return {} if script.games else {"env_id": script.env(name)}


def play(script: Script, run_dir: Path, *flags: str) -> list[float]:
    args = script.module.parse_args(["--evaluate", str(run_dir), *flags])
    return script.module.evaluate(args, Path(args.evaluate))


# -- seeds --
@scripts
def test_another_seed_is_another_run(script, finished):
    """Of the weights, of the episodes and of what is drawn. The same seed: when killed, below."""
    runs = [finished(script), train(script, seed=3)]
    assert episodes_of(runs[0]) != episodes_of(runs[1])
    one, other = map(checkpoint_of, runs)
    weights = [name for name in one["agent"] if name.endswith("weight")]
    assert all(not torch.equal(one["agent"][name], other["agent"][name]) for name in weights)
    assert not torch.equal(one["rng"], other["rng"])


@each_text_of("env_seed", rows=SEEDED, lines=r"env_seed\(|first_seed")
def test_environments_of_neighbouring_runs_share_no_seed(script, folder):
    """In training, in evaluation and after a resumption."""
    seen, env = envs.Seeds.seen, own(script, "Seeds") | {"num_envs": 4, "num_steps": 16}
    for seed in (2, 3):
        run_dir = train(script, seed=seed, eval_episodes=3, **env)
    folder("resumed")
    stop = killed(script, "after renaming", 2, lambda: train(script, seed=9, **env))
    resume(script, stop)
    assert len(set(seen)) == len(seen) == 2 * (4 + 3) + 2 * 4
    expected = seen[11:13]
    seen.clear()
    play(script, run_dir, "--eval-episodes", "2")
    assert seen == expected  # those of the evaluation again
    one, two = (script.module.env_seed(script.module.Args(seed=seed)) for seed in (1, 2))
    assert two - one > 1_000_000  # room for as many environments


@each_text_of("env_seed", "seed_everything")
def test_any_seed_is_one(script):
    for seed in (0, 2**31 - 1, 2**40):
        train(script, seed=seed, total_timesteps=64)


@each_text_of("make_envs", "seed_everything", rows=OWN)
def test_async_workers_draw_different_numbers_and_the_same_again(script, spy):
    """From the generators of Python, NumPy and torch; with the script's way of environments."""
    obs = spy(script.module.Agent, "evaluate_actions")
    flags = known(script, env_backend="async", norm_obs=False, frame_stack=1)
    flags |= {"env_id": script.env("Coin"), "num_envs": 4, "total_timesteps": 128}
    shown = []
    for seed in (1, 1, 2):
        obs.clear()
        train(script, seed=seed, exp_name=f"{len(shown)}", **flags)
        (_, first, *_), _ = obs[0]
        shown.append(first.reshape(len(first), -1)[:, -3:].numpy())
    one, again, other = shown
    for source in range(3):
        assert len(np.unique(one[:, source])) == len(one) > 50
    np.testing.assert_array_equal(one, again)
    assert not np.isin(other, one).any()


# -- the first update --
OPTIONAL = ("target_kl", "max_kl_final", "reward_gamma")  # numbers that may be None


def other_value(field, value):
    """A valid value of the flag that is not this one."""
    if isinstance(value, bool):
        return not value
    if value is None:
        return 0.5 if field.name in OPTIONAL else "x"
    options = [x for x in get_args(field.type) if isinstance(x, str) and x != value]
    new = {int: lambda x: 2 * x or 1, float: lambda x: x / 2 + 0.2, str: lambda x: x + "x"}
    return options[0] if options else new[type(value)](value)


def switches_of(script: Script) -> dict:
    """Every field of Args that is no number, every optional one and what may be 0 -> a value."""
    elsewhere = "env_id exp_name init_from resume evaluate compile render_as_observation cuda track"
    elsewhere += " wandb_project_name wandb_entity capture_video env_backend"
    found = {}
    for each in fields(script.module.Args):
        value = getattr(script.module.Args(), each.name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            found[each.name] = other_value(each, value)
        elif isinstance(value, float) and each.name in script.zero:
            found[each.name] = 0.0
    return {name: value for name, value in found.items() if name not in elsewhere.split()}


@scripts
def test_first_ratio_is_one_whatever_is_switched(script, folder):
    """Of the first minibatch: then and there the policy is that of the rollout.

    With each switch that the parent lacks, and with all together that are on or off (bfloat16
    alone, and actions are squashed, not scaled).
    """
    switches = switches_of(script)
    of_parent = SCRIPTS[script.parent].module.Args() if script.parent else object()
    names = ("games",) if script.games else ("Terminating", "Truncating")
    cases = [own(script, name) for name in names]
    apart = ("scale_actions", "bf16")
    cases += [{k: x for k, x in switches.items() if isinstance(x, bool) and k not in apart}]
    cases += [{name: x} for name, x in switches.items() if not hasattr(of_parent, name)]
    first = {"num_minibatches": 1, script.epochs: 1, "total_timesteps": 128, "learning_rate": 0.01}
    for i, changes in enumerate(cases):
        folder(f"{i}")
        run_dir = train(script, **first | changes)
        checkpoint, scalars = checkpoint_of(run_dir), scalars_of(run_dir)
        assert checkpoint["args"] | changes == checkpoint["args"] and checkpoint["iteration"] == 2
        assert torch.isfinite(weights_of(run_dir)).all(), changes
        if "losses/clipfrac" not in script.tags or changes.get("bf16"):
            continue  # the trust region has no minibatches; sums of bfloat16 are less exact
        assert [value for _, value in scalars["losses/clipfrac"]] == [0] * 2, changes
        for name in ("old_approx_kl", "approx_kl", "approx_kl_max"):
            assert all(abs(kl) < 1e-6 for _, kl in scalars[f"losses/{name}"]), (name, changes)


# -- kills and resumption --
@scripts
def test_killed_and_resumed_is_never_stopped(script, folder):
    """To the bit, in an environment whose episodes end with the rollouts. Three kills of a run."""
    ends = steady(script)
    folder("whole")
    whole = train(script, **ends)
    folder("killed")
    draw = random.Random(script.name).randint
    kills = [
        ("writing", 2),  # the checkpoint of iteration 2; that of 1 stays
        ("rollout", draw(1, 32)) if draw(0, 1) else ("update", draw(1, 2)),  # of 2
        ("after renaming", 1),  # the checkpoint of 2
    ]
    kept = []
    run_dir = killed(script, *kills[0], lambda: train(script, **ends))
    for kill in kills[1:]:
        kept.append(checkpoint_of(run_dir)["iteration"])
        (run_dir / "checkpoint.tmp").write_bytes(b"left by another crash")
        with open(run_dir / "episodes.csv", "a") as file:
            file.write("1,2,3,4\n1,2")  # half a line, too
        killed(script, *kill, lambda: resume(script, run_dir))
    assert [*kept, checkpoint_of(run_dir)["iteration"]] == [1, 1, 2]
    result, args = resume(script, run_dir), script.module.Args(**script.tiny | ends)
    assert_same_run(run_dir, whole)
    assert result["global_step"] == args.total_timesteps
    length = (7 if script.reset_rows else 8) if script.name in SEEDED else None
    assert_whole(run_dir, args, length, script.reset_rows)
    assert not (run_dir / "checkpoint.tmp").exists()
    assert {"config.json", "config_1.json", "config_2.json"} <= {x.name for x in run_dir.iterdir()}


def assert_whole(run_dir: Path, args, length: int | None = None, resets: bool = False) -> None:
    """All iterations once, and episodes.csv without gaps or repeats.

    Steps are rows, of which a reset may take one; lengths are of real steps.
    """
    scalars = scalars_of(run_dir)
    rows = [args.batch_size * i for i in range(1, args.num_iterations + 1)]
    for tag in ("losses/policy_loss", "charts/SPS", "charts/learning_rate"):
        assert [step for step, _ in scalars[tag]] == rows, tag
    episodes = episodes_of(run_dir)
    steps = [step for step, _, _ in episodes]
    assert steps == sorted(steps)
    assert [step for step, _ in scalars["charts/episodic_return"]] == steps
    if length:
        rows = (length + resets) * args.num_envs
        each = range(length * args.num_envs, args.total_timesteps + 1, rows)
        assert episodes and steps == [step for step in each for _ in range(args.num_envs)]
        assert {x for _, _, x in episodes} == {length}


@each_text_of("Log.__init__")
def test_one_process_trains_a_run(script):
    """The other is refused before it has written anything."""
    run_dir = killed(script, "after renaming", 2, lambda: train(script))
    before = contents(Path())
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX)"
    code += "; print('locked', flush=True); input()"
    other = [sys.executable, "-c", code, str(run_dir / "episodes.csv")]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout.readline() == "locked\n"
        message = message_of(script, "--resume", str(run_dir))
        assert lacks(message, ["another process is training", str(run_dir)]) == []
        assert contents(Path()) == before
    resume(script, run_dir)


@each_text_of("Log.checkpoint_is_due", "Log.__init__", "save_checkpoint")
@pytest.mark.parametrize("seconds, expected", [(0, [1, 2, 3, 4]), (3600, [1, 4]), (60, [1, 3, 4])])
def test_checkpoints_come_after_the_first_iteration_and_as_asked(
    script, seconds, expected, monkeypatch, spy
):
    """By a clock by which each iteration takes 40 seconds."""
    updates, saved, save = spy(script.module, "gae"), [], script.module.save_checkpoint
    monkeypatch.setattr(script.module.time, "time", lambda: 1e9 + 40 * len(updates))
    both = lambda args, state, log: saved.append(state["iteration"]) or save(args, state, log)  # noqa: E731
    monkeypatch.setattr(script.module, "save_checkpoint", both)
    train(script, checkpoint_seconds=seconds)
    assert saved == expected


@each_text_of("lock")
def test_a_disk_that_cannot_lock_is_said(script, monkeypatch, capsys):
    def no_locks(*inputs):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    train(script)
    assert "episodes.csv cannot be locked" in capsys.readouterr().out


@each_text_of("main", "save_checkpoint")
def test_ctrl_c_says_how_to_go_on(script):
    def said(name: str, nth: int, *flags: str) -> str:
        """At the n-th call of this function, in a process that has just begun."""
        original, calls = getattr(script.module, name), count(1)

        def interrupted(*inputs):
            if next(calls) == nth:
                raise KeyboardInterrupt
            return original(*inputs)

        flags = flags or flags_of(script, eval_episodes=1)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
            patch.setattr(script.module, name, interrupted)
            patch.setattr(script.module.Log, "newest", None)
            patch.setattr(sys, "argv", [script.path.name, *flags])
            script.module.main()
        return stop.value.code

    assert said("gae", 1) == "stopped before the first checkpoint: start again"
    message = message_of(script, "--resume", str(the_run()))
    assert lacks(message, ["no checkpoint", str(the_run())]) == []
    shutil.rmtree("runs")
    step = script.tiny["num_envs"] * script.tiny["num_steps"]
    stopped = said("gae", 2)
    run_dir = str(the_run())
    assert stopped == f"stopped; --resume {run_dir} goes on from step {step}"
    script.module.load_checkpoint(run_dir)
    assert said("check_runs", 1, "--resume", run_dir) == stopped
    assert said("load_weights", 1, "--evaluate", run_dir) == "stopped"
    shutil.rmtree("runs")
    assert said("evaluate", 1).startswith("stopped; training is finished, and --evaluate runs/")


# -- longer runs, finished runs, other runs' weights --
@some(row for row in SCRIPTS.values() if row.name in ("ppo", "ppo_atari", "ppg_procgen"))
def test_without_annealing_a_run_can_be_made_longer(script, folder):
    """It ends where one that was meant to be as long from the start ends."""
    ends = steady(script) | dict.fromkeys(script.annealing, False)
    folder("long")
    long = train(script, **ends)
    folder("short")
    short = train(script, **ends, total_timesteps=128)
    before = contents(Path())
    message = message_of(script, "--resume", str(short))
    assert lacks(message, ["finished", "--evaluate", "more --total-timesteps go on with it"]) == []
    assert contents(Path()) == before
    resume(script, short, "--total-timesteps", "256")
    assert_same_run(short, long)


@each_text_of("check_runs")
def test_what_anneals_cannot_be_made_longer_and_the_message_says_how(script, finished):
    run_dir = finished(script)
    assert "finished" in message_of(script, "--resume", str(run_dir))
    checkpoint, constant = checkpoint_of(run_dir), dict.fromkeys(script.annealing, False)
    for name in script.annealing:
        checkpoint["args"] |= constant | {name: True}
        torch.save(checkpoint, run_dir / "checkpoint.pt")
        message = message_of(script, "--resume", str(run_dir), "--total-timesteps", "9999")
        assert lacks(message, ["--total-timesteps", "--no-anneal-lr"]) == [], name
    torch.save(checkpoint | {"args": checkpoint["args"] | constant}, run_dir / "checkpoint.pt")
    message = message_of(script, "--resume", str(run_dir), "--total-timesteps", "128")
    assert "total_timesteps (256 to 128)" in message  # shorter it cannot be either


@each_text_of("load_weights", lines=r"\binitial\b")
def test_init_from_begins_with_weights_and_statistics_of_another_run(script, finished, folder):
    """And with nothing else: its own steps, its own rates, another length; --resume wins."""
    small = finished(script).resolve()
    folder("second")
    first = checkpoint_of(small)
    still = {"init_from": str(small), "learning_rate": 1e-30, "exp_name": "second"}
    still |= {"max_kl": 1e-30} if "max_kl" in vars(script.module.Args()) else {}
    still |= {"num_envs": 4, "total_timesteps": 512}
    run_dir = killed(script, "after renaming", 2, lambda: train(script, **still))
    resume(script, run_dir)
    second = checkpoint_of(run_dir)
    assert second["iteration"] == 4
    for name, weight in first["agent"].items():
        torch.testing.assert_close(second["agent"][name], weight, rtol=0, atol=1e-6)
    for name in {"obs_rms", "return_rms"} & first.keys():
        assert second[name][2] > first[name][2] + 500  # counts of samples: it goes on from there
    assert second["args"]["init_from"] == still["init_from"]


# -- configuration of a run --
@each_text_of("check_runs")
@pytest.mark.parametrize("how", ["resume", "evaluate"])
def test_a_run_keeps_its_configuration(script, how, finished, request):
    """Flag by flag: what does not change what is learned may differ, the rest may not."""
    run_dir = finished(script)
    request.getfixturevalue("everything_is_there")  # after training, which has no GPU
    module, wrong = script.module, []
    checkpoint = checkpoint_of(run_dir)
    torch.save(checkpoint | {"iteration": 2}, run_dir / "checkpoint.pt")  # not finished
    stored = checkpoint["args"]
    free = script.free | (script.free_to_play if how == "evaluate" else set())
    for field in fields(module.Args):
        name, old = field.name, stored[field.name]
        if name in ("resume", "evaluate"):
            continue
        new = other_value(field, old) if name != "num_minibatches" else 1  # it divides --num-envs
        try:
            args = module.Args(**stored | {how: str(run_dir), name: new})
            if name != "env_id":
                module.check_args(args)
            module.check_runs(args, module.load_checkpoint(run_dir), None)
            if name not in free:
                wrong.append((name, "accepted"))
        except module.Refused as error:
            named = f"{name} ({old} to {new})" in str(error) or name == "total_timesteps"
            if name in free or not named:
                wrong.append((name, str(error)))
    assert wrong == []


# -- bad input --
@scripts
def test_every_number_is_checked(script):
    """A flag takes 0 or less only where the registry says that it means something."""
    wrong, module = [], script.module
    numbers = [f.name for f in fields(module.Args) if f.type in (int, float) or f.name in OPTIONAL]
    assert len(numbers) > 15
    for name in numbers:
        for value in (0, -1, math.nan, math.inf, -math.inf):
            flag = f"--{name.replace('_', '-')}"
            allowed = value == 0 and name in script.zero
            allowed |= value == -1 and name in script.negative
            try:
                module.check_args(module.Args(**{name: value}))
                if not allowed:
                    wrong.append((flag, value, "accepted"))
            except module.Refused as error:
                if allowed or flag not in str(error):
                    wrong.append((flag, value, str(error)))
    assert wrong == []


ALONE = "--num-envs 2 --num-steps 4 --num-minibatches 8 --norm-adv"  # its advantage would be 0
BAD_FLAGS = {
    "--num-envs 3 --num-steps 5 --num-minibatches 4": ["(3", "--num-minibatches (4)"],
    "--num-minibatches 9999999": ["--num-minibatches (9999999)"],
    "--num-envs 2 --num-steps 32 --total-timesteps 63 --num-minibatches 1": ["(63)", "2 * 32"],
    "--gamma 1.5": ["--gamma (1.5)"],
    "--gae-lambda 1.01": ["--gae-lambda (1.01)"],
    "--env-id ./my_env:Own-v0": ["--env-id (./my_env:Own-v0)"],
    "--env-id my:env:Own-v0": ["--env-id (my:env:Own-v0)"],
    "--env-id :Own-v0": ["--env-id (:Own-v0)"],
    "--resume nowhere": ["no checkpoint", "nowhere"],
    "--evaluate nowhere": ["no checkpoint", "nowhere"],
    "--resume ''": ["--resume", "directory"],  # a shell's variable that is not set
    "--evaluate ''": ["--evaluate", "directory"],
    "--init-from nowhere": ["no checkpoint", "nowhere"],
}


@scripts
def test_bad_flags_are_named_with_their_numbers(script):
    for flags, words in BAD_FLAGS.items():
        message = message_of(script, *flags_of(script), *shlex.split(flags))
        assert lacks(message, words) == [], flags
    for flags, words in script.bad_values.items():
        with pytest.raises(script.module.Refused) as stop:
            script.module.parse_args(shlex.split(flags))
        assert lacks(str(stop.value), words) == [] and "\n" not in str(stop.value), flags
    if "C08" in script.details and not script.whole_sequences:
        message = message_of(script, *flags_of(script), *ALONE.split())
        assert lacks(message, ["2 * 4", "--no-norm-adv"]) == []
        for fits in ("--num-minibatches 4", "--no-norm-adv"):
            script.module.parse_args([*flags_of(script), *ALONE.split(), *fits.split()])
    assert not list(Path().glob("runs/*"))


UNKNOWN = {
    "Nothing-v0": ["--env-id", "Nothing-v0"],
    "CartPole-v99": ["--env-id", "CartPole-v99"],
    "no_such_module:CartPole-v1": ["--env-id", "no_such_module"],
    "json:Nothing-v0": ["--env-id", "json:Nothing-v0"],
}


@scripts
def test_environments_that_do_not_fit_are_named_and_nothing_stays(script):
    for env_id, words in (UNKNOWN | script.wrong_env).items():
        flags = [*flags_of(script, capture_video=True), "--env-id", *env_id.split()]
        assert lacks(message_of(script, *flags), words) == [], env_id
    assert contents(Path()) == {} and not list(Path().glob("runs/*"))


@pytest.mark.timeout(60)  # where it is not refused it hangs
@each_text_of("check_args")
def test_what_is_asked_for_and_not_there_is_an_error(script, monkeypatch, finished):
    run_dir = finished(script)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert lacks(message_of(script, *flags_of(script, cuda=True)), ["--cuda", "GPU"]) == []
    folder = ModuleSpec("wandb", None)  # which a tracked run leaves: Python takes it for a package
    monkeypatch.setattr(script.module, "find_spec", lambda name: folder)
    assert lacks(message_of(script, *flags_of(script, track=True)), ["--track", "wandb"]) == []
    script.module.parse_args(["--evaluate", str(run_dir), "--track"])  # as a tracked run asks
    monkeypatch.setattr(script.module, "find_spec", lambda name: None)
    assert "moviepy" in message_of(script, *flags_of(script, capture_video=True))
    flags = ["--evaluate", str(run_dir), "--eval-episodes", "0"]
    assert "--eval-episodes" in message_of(script, *flags)
    message = message_of(script, "--evaluate", str(run_dir), "--resume", str(run_dir))
    assert lacks(message, ["--resume", "--evaluate"]) == []
    if script in WORKERS:  # a renderer that is forked hangs
        flags = flags_of(script, env_backend="async", capture_video=True)
        assert lacks(message_of(script, *flags), ["--capture-video", "--env-backend sync"]) == []


# In their order. save_model, upload_model and hf_entity are left out (a checkpoint is always
# written), and batch_size, minibatch_size and num_iterations, which only CleanRL itself fills.
CLEANRL = """
exp_name seed torch_deterministic cuda track wandb_project_name wandb_entity capture_video
env_id total_timesteps learning_rate num_envs num_steps anneal_lr gamma gae_lambda num_minibatches
update_epochs norm_adv clip_coef clip_vloss ent_coef vf_coef max_grad_norm target_kl
"""


@scripts
def test_flags_of_cleanrl_parse_in_its_order(script, everything_is_there):
    """Some stand for others, and some mean nothing here."""
    module, of_script = script.module, {"update_epochs": script.epochs}
    names = [of_script.get(name, name) for name in CLEANRL.split() if name not in script.lacks]
    assert [field.name for field in fields(module.Args) if field.name in names] == names
    given = {name: getattr(module.Args(), name) for name in names} | {"wandb_entity": "team"}
    given |= {name: 0.01 for name in names if name == "target_kl"}
    given |= {"env_backend": "gymnasium"} if script.reset_rows else {}  # EnvPool makes no videos
    given |= {"env_id": script.tiny["env_id"]}
    for switches in (True, False):
        given |= {name: switches for name, value in given.items() if isinstance(value, bool)}
        args = module.parse_args(flags_of(replace(script, tiny={}), **given))
        assert {name: getattr(args, name) for name in given} == given


ATARI = (10_000_000, 2.5e-4, 8, 128, 4, 4, 0.01, 0.1)
PUBLISHED = {  # total_timesteps learning_rate num_envs num_steps num_minibatches update_epochs ...
    "ppo": (500_000, 2.5e-4, 4, 128, 4, 4, 0.01, 0.2),
    "ppo_continuous_mujoco": (1_000_000, 3e-4, 1, 2048, 32, 10, 0.0, 0.2),
    "ppo_atari": ATARI,
    "ppo_atari_lstm": ATARI,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_those_of_cleanrl(name):
    names = "total_timesteps learning_rate num_envs num_steps num_minibatches update_epochs"
    names += " ent_coef clip_coef gamma gae_lambda vf_coef max_grad_norm"
    names += " anneal_lr norm_adv clip_vloss target_kl"
    rest = (0.99, 0.95, 0.5, 0.5, True, True, True, None)
    args = SCRIPTS[name].module.Args()
    assert tuple(getattr(args, name) for name in names.split()) == PUBLISHED[name] + rest


@each_text_of("require")
def test_what_is_refused_in_a_pool_or_a_sweep_is_an_exception(script):
    """A SystemExit alone would end a worker of a pool, which would wait for ever."""
    caught = []
    for gamma in (2.0, 0.9):
        try:
            train(script, gamma=gamma, total_timesteps=64)
        except Exception as error:
            caught.append(error)
    again = pickle.loads(pickle.dumps(caught[0]))  # as a pool returns it
    assert len(caught) == 1 and isinstance(again, SystemExit) and "--gamma (2.0)" in str(again)


# -- bad checkpoints, disks --
class Hostile:
    def __reduce__(self):
        return os.mkdir, ("owned",)


@each_text_of("load_checkpoint", "main")
def test_a_bad_checkpoint_is_refused_in_one_line_and_left_alone(script, finished):
    run_dir = finished(script)
    path, checkpoint = run_dir / "checkpoint.pt", checkpoint_of(run_dir)
    half, args = path.read_bytes()[: path.stat().st_size // 2], checkpoint["args"]
    other_script = checkpoint | {"args": args | {"of_another": 1.0}}
    for content in (half, checkpoint | {"args": Hostile()}, other_script, {"args": args}):
        if content is half:
            path.write_bytes(content)
        else:
            torch.save(content, path)
        before = contents(Path())
        for flag in ("--resume", "--evaluate"):
            assert str(path) in message_of(script, flag, str(run_dir))
        assert "checkpoint.pt" in refusal(script, resume=str(run_dir))
        assert contents(Path()) == before and not Path("owned").exists()


@scripts
def test_a_checkpoint_of_another_shape_or_script_is_refused(script, finished):
    run_dir = finished(script)
    checkpoint = checkpoint_of(run_dir)
    changes = script.other_shape or {"env_id": script.env("Steady")}
    args = checkpoint["args"] | changes | {"eval_episodes": 1}
    torch.save(checkpoint | {"args": args, "iteration": 2}, run_dir / "checkpoint.pt")
    before = contents(Path())
    other = next(row for row in SCRIPTS.values() if row is not script)
    for flag in ("--resume", "--evaluate"):
        assert "another network" in message_of(script, flag, str(run_dir))
        message_of(other, flag, str(run_dir))  # one line
    assert "another" in refusal(script, **changes, init_from=str(run_dir))
    assert contents(Path()) == before and len([*Path("runs").iterdir()]) == 1


@each_text_of("save_checkpoint", "Log.episode")
def test_a_full_disk_keeps_the_checkpoint_before(script, monkeypatch):
    """No file may grow past 4 kB from the third checkpoint on, which is larger."""
    limits, calls = resource.getrlimit(resource.RLIMIT_FSIZE), count(1)
    save = script.module.save_checkpoint

    def full(*args):
        if next(calls) == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        save(*args)

    monkeypatch.setattr(script.module, "save_checkpoint", full)
    try:
        with pytest.raises((OSError, RuntimeError)):
            train(script)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint_of(the_run())["iteration"] == 2


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files")
@each_text_of("save_checkpoint")
def test_what_a_checkpoint_says_is_on_the_disk_before_it(script, monkeypatch):
    """Also after a power cut, which keeps only what was synchronized."""
    fsync, names = os.fsync, []

    def watched(file):
        names.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    monkeypatch.setattr(script.module.os, "fsync", watched)
    run_dir = train(script, total_timesteps=128)
    assert names == ["episodes.csv", "checkpoint.tmp"] * 2
    assert checkpoint_of(run_dir)["episodes_size"] > 20


@each_text_of("Log.__init__")
def test_a_checkpoint_without_its_episodes_is_refused(script):
    """Copied alone into another directory, say."""
    run_dir = killed(script, "after renaming", 3, lambda: train(script))
    episodes = (run_dir / "episodes.csv").read_bytes()
    size = checkpoint_of(run_dir)["episodes_size"]
    (run_dir / "episodes.csv").write_bytes(episodes[: size - 2])
    assert "episodes.csv" in message_of(script, "--resume", str(run_dir))
    assert (run_dir / "episodes.csv").read_bytes() == episodes[: size - 2]


# -- names and files --
NAMES = ["lr=3e-4,clip=0.1", "try#2", "try#2", "../../outside", "x" * 300, "", "a/b", "é: ü\n"]


@each_text_of("new_run_dir")
def test_a_name_of_any_characters_makes_one_directory_below_runs(
    script, folder, tmp_path, monkeypatch
):
    """Also runs of one name and of one second, each its own."""
    clock = count(1_700_000_000_000_000)  # microseconds
    monkeypatch.setattr(script.module.time, "time", lambda: next(clock) / 1e6)
    below = folder("below")
    for i, name in enumerate(NAMES, 1):
        run_dir = train(script, exp_name=name, total_timesteps=64)
        assert run_dir.parent == below / "runs" and len([*run_dir.parent.iterdir()]) == i
        assert re.fullmatch(r"[^/\\#?%:]{1,128}", run_dir.name)  # what W&B takes as an id
    assert [*tmp_path.iterdir()] == [below] and [*below.iterdir()] == [below / "runs"]


@each_text_of("new_run_dir")
def test_a_link_to_a_disk_that_is_not_there_stops_a_run(script):
    Path("runs").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        train(script, total_timesteps=64)


@each_text_of("Log.__init__", "provenance", "new_run_dir", "save_checkpoint")
def test_a_run_writes_down_how_to_repeat_it(script, monkeypatch):
    """And leaves the settings of a sweep as they were; without git there is no commit."""
    monkeypatch.setattr(sys, "argv", ["script.py", "--exp-name", "two words"])
    args = script.module.Args(**script.tiny)
    run_dir = Path(script.module.train(args)["run_dir"])
    config = json.loads((run_dir / "config.json").read_text())
    assert config["args"] == vars(args) == vars(script.module.Args(**script.tiny))
    assert config["command"] == "script.py --exp-name 'two words'"
    assert config["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert config["versions"]["gymnasium"] == gym.__version__
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|", config["commit"])
    files = {file.name.split(".tfevents")[0]: file.read_bytes() for file in run_dir.iterdir()}
    names = {"config.json", "episodes.csv", "checkpoint.pt", script.path.name, "events.out"}
    assert files.keys() == names and files[script.path.name] == script.path.read_bytes()
    assert re.match(rb"step,return,length,seconds\n\d+,", files["episodes.csv"])
    assert b"|num_steps|32|" in files["events.out"]  # the hyperparameters as text
    name = rf"runs/{script.tiny['env_id']}__{script.name}__1__\d{{10}}"
    assert re.fullmatch(name, str(run_dir))
    monkeypatch.setenv("PATH", "nowhere")
    assert script.module.provenance(args)["commit"] == ""


@each_text_of("plain_numbers", "plain_args", "save_checkpoint", lines=r"plain_(args|numbers)\(")
def test_a_sweep_may_give_numpys_numbers(script):
    numbers = {"seed": np.int64(2), "learning_rate": np.float64(1e-3), "gamma": np.float32(0.5)}
    run_dir = train(script, **numbers, num_envs=np.int64(script.tiny["num_envs"]))
    assert len(play(script, run_dir, "--eval-episodes", "2")) == 2


@each_text_of("Log.iteration", "Log.episode", "Log.close", "train: log and checkpoint")
def test_tags_are_those_documented(script):
    run_dir = train(script, eval_episodes=1)
    scalars = scalars_of(run_dir)
    assert scalars.keys() == script.tags
    assert [step for step, _ in scalars["losses/policy_loss"]] == [64, 128, 192, 256]
    assert [step for step, _ in scalars["eval/episodic_return"]] == [256]
    assert all(math.isfinite(value) for tag in scalars.values() for _, value in tag)
    returns, lengths = scalars["charts/episodic_return"], scalars["charts/episodic_length"]
    logged = [(*pair, length) for pair, (_, length) in zip(returns, lengths, strict=True)]
    assert logged == [pytest.approx(episode) for episode in episodes_of(run_dir)]


@each_text_of("Log.iteration", rows=OWN)
def test_losses_that_are_not_finite_stop_the_run(script):
    """The reward is NaN from step 40, in iteration 2, on."""
    message = refusal(script, env_id=script.env("Poisoned"))
    assert message.startswith("error: the losses are not finite: ") and "nan" in message
    checkpoint = checkpoint_of(the_run())
    assert checkpoint["iteration"] == 1
    assert all(weights.isfinite().all() for weights in checkpoint["agent"].values())


# -- a copy of one's own --
MINE = {  # lines at the end of its `Args`: a word of the command line, and its value
    "my_coef: float = 0.0": ("-0.5", -0.5),
    "warmup: int = -1": ("-3", -3),
    "tag: str = ''": ("x y", "x y"),
    "schedule: tuple[int, ...] = ()": ("3", (3,)),
}


@some(row for row in SCRIPTS.values() if row.name in ("ppo", "ppg_procgen"))
def test_flags_of_ones_own_work_in_a_copy(script, tmp_path, monkeypatch):
    """Any name, any value: no list in the script has to know them."""
    path, end = tmp_path / f"my_{script.name}.py", "\n    @property\n    def batch_size"
    lines = "".join(f"    {line}  # mine\n" for line in MINE)
    path.write_text(script.source.replace(end, f"{lines}{end}"))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(path.stem)
    small_games(script, monkeypatch, module)
    flags, values = flags_of(script, **dict.fromkeys(script.annealing, False)), {}
    for line, (word, value) in MINE.items():
        name = line.split(":")[0]
        flags += [f"--{name.replace('_', '-')}", word]
        values[name] = value
    args = module.parse_args(flags)
    assert vars(args) | values == vars(args) and path.stem == args.exp_name
    run_dir = Path(module.train(args)["run_dir"])
    longer = ["--resume", str(run_dir), "--total-timesteps", "512"]
    assert module.parse_args(longer).warmup == -3
    module.train(module.parse_args(longer))
    for name in values:
        with pytest.raises(module.Refused, match=f"cannot change {name} "):
            module.train(module.parse_args([*longer, f"--{name.replace('_', '-')}", "7"]))
    args = module.parse_args(["--evaluate", str(run_dir), "--eval-episodes", "1"])
    assert len(module.evaluate(args, run_dir)) == 1


# -- what an environment may return --
PLAIN = ("PlainEnv.reset", "PlainEnv.step", "PlainEnv.plain")


@each_text_of(*PLAIN, rows=OWN)
def test_infos_of_any_type_and_rewards_of_any_shape_of_one_number(script):
    """In training and in evaluation. tests/envs.py asserts that actions are of its own space."""
    for name in ("Infos", "RewardArray", "RewardTensor", "RewardBool"):
        run_dir = train(script, env_id=script.env(name), exp_name=name, eval_episodes=2)
        assert_whole(run_dir, script.module.Args(**script.tiny), length=8)
        if name != "Infos":
            assert {value for _, value, _ in episodes_of(run_dir)} == {8.0}
            assert scalars_of(run_dir)["eval/episodic_return"] == [(256, 8.0)]


@each_text_of(*PLAIN, "make_envs", rows={row.name: row for row in WORKERS})
def test_what_async_workers_return_is_the_same(script, folder):
    runs = []
    for backend in ("sync", "async"):
        folder(backend)
        runs.append(train(script, env_id=script.env("Infos"), env_backend=backend))
    assert torch.equal(*map(weights_of, runs)) and len(episodes_of(runs[1])) == 32


@each_text_of(*PLAIN, rows=VECTORS)
def test_observations_and_rewards_of_odd_shape_and_dtype(script, monkeypatch):
    """The networks see the same in training and in evaluation, or one line says why not."""
    seen = []
    for name in ("act", "get_value"):

        def watched(agent, obs, *rest, original=getattr(script.module.Agent, name), **greedy):
            seen.append(obs.clone())
            return original(agent, obs, *rest, **greedy)

        monkeypatch.setattr(script.module.Agent, name, watched)
    tiny = {"total_timesteps": 64, "eval_episodes": 1} | known(script, norm_obs=False)
    for i, (kind, (space, _, meant)) in enumerate(envs.Odd.KINDS.items()):
        env = {"env_id": script.env(f"Odd{i}"), "exp_name": kind}
        if meant is None:
            assert lacks(refusal(script, **env), ["shape", f"{space.shape}"]) == [], kind
            continue
        seen.clear()
        train(script, **env, **tiny)
        assert len(seen) > 8
        for obs in seen:
            assert obs.dtype == torch.float32
            np.testing.assert_array_equal(obs, np.broadcast_to(np.float32(meant), obs.shape), kind)
    reward = refusal(script, env_id=script.env("RewardPair"))
    assert lacks(reward, ["(2,)", "shape"]) == []


@each_text_of("PlainEnv.__init__", "PlainEnv.step", rows=OWN)
def test_actions_have_the_type_of_their_space(script):
    train(script, env_id=script.env("Narrow"), total_timesteps=64)  # which asks `contains`


@each_text_of("make_envs", "main", rows=OWN)
def test_an_exception_of_the_environment_keeps_its_traceback(script, monkeypatch):
    """It is the user's own and no line of ours."""
    for name, error in (("Failing", FileNotFoundError), ("Broken", ConnectionRefusedError)):
        flags = flags_of(script, env_id=script.env(name), exp_name=name)
        monkeypatch.setattr(sys, "argv", [script.path.name, *flags])
        with pytest.raises(error) as caught:
            script.module.main()
        assert any(frame.name in ("reset", "__init__") for frame in caught.traceback)


# -- evaluation --
@scripts
def test_evaluation_repeats_itself_and_changes_nothing(script, finished, capsys):
    run_dir = finished(script)
    before = contents(Path())
    at_the_end = scalars_of(run_dir)["eval/episodic_return"]  # of two episodes
    sampled, again = (play(script, run_dir, "--eval-episodes", "6") for _ in range(2))
    assert sampled == again and len(sampled) == 6 and len(set(sampled)) > 1
    assert f"{np.mean(sampled):.1f}" in capsys.readouterr().out
    two = play(script, run_dir, "--eval-episodes", "2")
    assert [value for _, value in at_the_end] == pytest.approx([np.mean(two)])
    assert contents(Path()) == before


@scripts
def test_evaluation_plays_the_stored_weights_and_modes(script, finished, monkeypatch):
    """At what each step led to. In the same way as examples in docs/agents.md: test_commands.py."""
    run_dir, agent_class, seen = finished(script), script.module.Agent, []
    act = agent_class.act

    def watched(agent, *inputs, **named):
        weights, greedy = flat(agent.state_dict().values()), named.get("greedy", inputs[-1])
        seen.append((weights, greedy, inputs[0].clone()))
        return act(agent, *inputs, **named)

    monkeypatch.setattr(agent_class, "act", watched)
    stored = weights_of(run_dir)
    for flags, greedy in (((), False), (["--eval-deterministic"], True)):
        seen.clear()
        play(script, run_dir, "--eval-episodes", "1", *flags)
        weights, modes, obs = zip(*seen)
        assert all(torch.equal(x, stored) for x in weights) and {*modes} == {greedy}
        assert len(torch.stack(obs).unique(dim=0)) > 1


# -- pictures --
def frames_of(script: Script, name: str, steps: int, monkeypatch) -> list[list[int]]:
    """Brightness of the frames of each video of some steps of an environment."""
    args = script.module.Args(**script.tiny | {"env_id": script.env(name), "capture_video": True})
    videos = []

    def stop_recording(video) -> None:
        videos.append([int(frame.max()) for frame in video.recorded_frames])
        video.recorded_frames, video.recording = [], False  # instead of encoding them

    monkeypatch.setattr(script.module.Video, "stop_recording", stop_recording)
    env = script.module.film(script.module.make_env(args, True), Path(), "videos")
    env.reset(seed=1)
    for _ in range(steps):
        action = 0 if script.discrete or script.images else np.zeros(2, np.float32)
        *_, terminated, _, _ = env.step(action)
        if terminated:
            env.reset()
    env.close()
    return videos


@filmed
@each_text_of("PlainEnv.render", "Video.step", "film", rows=OWN)
def test_videos_have_each_frame_as_it_was_drawn_and_are_bounded(script, monkeypatch):
    """The environments draw into one buffer; one does not say that it draws, one never ends."""
    for name in ("Steady", "Silent"):
        (video, *_) = frames_of(script, name, 8, monkeypatch)
        assert video == [20 * t for t in range(9)]
    (video,) = frames_of(script, "Endless", 1600, monkeypatch)
    assert 1490 <= len(video) <= 1510


@each_text_of("make_env", "try_env", rows=OWN)
def test_an_environment_that_cannot_be_filmed_is_refused_in_one_line(script):
    """And nothing is written."""
    for name in ("Blind", "BlindToo", "BlindInSecret"):
        flags = flags_of(script, env_id=script.env(name), capture_video=True)
        assert "--capture-video" in message_of(script, *flags)
        assert not Path("runs").exists()
    train(script, env_id=script.env(name), total_timesteps=64)


# -- processes --
@pytest.mark.e2e
@scripts
def test_a_script_alone_in_a_directory_is_killed_twice_and_resumed(script, tmp_path):
    """By the command line alone."""
    shutil.copy(script.path, tmp_path)
    size = {"env_id": f"envs:{script.env('Steady')}", "total_timesteps": 25_600}
    size = {"total_timesteps": 2048} if script.games else size  # real games are slower
    how = {
        "path": Path(script.path.name),
        "env": os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
    }
    draw, words = random.Random(script.name), flags_of(script, **size, eval_episodes=1)
    checkpoints = lambda: [x.stat().st_mtime_ns for x in tmp_path.glob("runs/*/checkpoint.pt")]  # noqa: E731
    for _ in range(2):
        start = command(script, *words, path=how["path"])
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        running = subprocess.Popen(start, env=how["env"], **pipes)
        for _ in range(3):
            last = checkpoints()
            wait_for(lambda: checkpoints() != last, running)
        time.sleep(draw.uniform(0, 0.05))
        running.kill()
        running.communicate()
        assert running.returncode == -signal.SIGKILL
        assert checkpoint_of(the_run())["iteration"] < size["total_timesteps"] / 64
        words = ["--resume", str(the_run())]
    done = process(script, *words, **how)
    assert done.returncode == 0 and "evaluation" in done.stdout, done.stdout + done.stderr
    assert not re.search(r"(?<!Deprecation)Warning|Error|Traceback", done.stderr), done.stderr
    assert f"--resume runs/{the_run().name}" in done.stdout
    args = script.module.Args(**script.tiny | size)
    assert checkpoint_of(the_run())["iteration"] == args.num_iterations
    assert_whole(the_run(), args, length=None if script.games else 8)
    assert {file.name for file in tmp_path.iterdir()} <= {script.path.name, "runs", "__pycache__"}
    done = process(script, "--evaluate", str(the_run()), **how)
    assert done.returncode == 0 and "evaluation" in done.stdout, done.stdout + done.stderr


@pytest.mark.e2e
@some(row for row in SCRIPTS.values() if row.name in ("ppo", "ppo_continuous_mujoco", "ppo_atari"))
def test_ctrl_c_is_one_line(script, tmp_path):
    """A terminal sends SIGINT to the whole process group, workers included."""
    backend = {"env_backend": "async"} if script in WORKERS else {}
    backend |= {"env_backend": "envpool"} if script.reset_rows else {}  # with its threads
    flags = flags_of(script, total_timesteps=10_000_000, **backend)
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how |= {"start_new_session": True}
    how["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # jobs may ignore it
    running = subprocess.Popen(command(script, *flags), **how)
    wait_for(lambda: list(tmp_path.glob("runs/*/checkpoint.pt")), running)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=60)
    # Gymnasium's workers or its destructor complain where a worker was the first to answer Ctrl-C
    ours = re.split("ERROR: Traceback|Exception ignored in: <function AsyncVectorEnv", err)[0]
    assert running.returncode == 1 and "Traceback" not in ours, err
    assert f"stopped; --resume runs/{the_run().name} goes on from step " in err
    script.module.load_checkpoint(the_run())


@pytest.mark.e2e
@each_text_of("start_wandb", "Log.__init__")
def test_tracking_works_offline(script, tmp_path):
    """With the real wandb, and nothing of it in what TensorBoard reads.

    Two runs of one process are two of W&B; a resumed one goes on in its own.
    """
    pytest.importorskip("wandb")
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    environment |= {"PYTHONPATH": str(script.path.parent)}
    environment.pop("WANDB_SERVICE", None)  # of a tracked run in this process
    flags = script.tiny | {"track": True, "exp_name": "lr=3e-4,clip:0.1"}
    flags |= dict.fromkeys(script.annealing, False)
    sweep = f"import {script.name} as ppo; "
    sweep += f"[ppo.train(ppo.Args(seed=seed, **{flags})) for seed in (1, 2)]; "
    sweep += "import wandb; assert wandb.run is None"
    how = {"env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", sweep], **how)
    assert done.returncode == 0, done.stdout + done.stderr
    one, other = sorted(Path("runs").iterdir())  # by their seeds
    done = process(script, "--resume", str(one), "--total-timesteps", "512", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "wandb"}
    files = [path for path in Path("runs").glob("**/*") if path.is_file()]
    events = sorted(path.parent for path in files if "tfevents" in path.name)
    assert events == [one, one, other] and sum(x.stat().st_size for x in files) < 2_000_000
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert sorted(path.name for path in files) == [
        f"run-{run.name}.wandb" for run in (one, one, other)
    ]
    assert all(b"losses/value_loss" in file.read_bytes() for file in files)
    assert_whole(one, script.module.Args(**script.tiny | {"total_timesteps": 512}))


@pytest.mark.e2e
@each_text_of("try_env", rows=OWN)
def test_a_run_that_renders_can_be_killed(script):
    """SDL, which pygame draws with, would take SIGTERM for itself."""
    env_id = "CartPole-v1" if script.discrete or script.images else "Pendulum-v1"
    code = f"import os, time, {script.name} as script; "
    code += f"script.try_env(script.Args(env_id='{env_id}', capture_video=True), None); "
    code += "os.kill(os.getpid(), 15); time.sleep(10)"
    environment = os.environ | {"PYTHONPATH": str(script.path.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == -signal.SIGTERM, done.stderr


@pytest.mark.e2e
@filmed
@each_text_of("film", "try_env")
def test_videos_of_training_and_evaluation(script):
    environment = os.environ | {"SDL_VIDEODRIVER": "dummy"}
    done = process(script, *flags_of(script, capture_video=True, eval_episodes=1), env=environment)
    if "cannot render" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    for pattern in ("videos_*", "eval_videos_*"):
        (video,) = the_run().glob(f"{pattern}/rl-video-episode-0.mp4")
        assert video.stat().st_size > 1000
    assert str(video.parent) in done.stdout


@pytest.mark.e2e
@each_text_of("film", rows=ROBOTS)
def test_videos_follow_the_robot(script, tmp_path):
    """HalfCheetah is orange on a blue floor: as many orange pixels 20 m from the start."""
    args = script.module.parse_args(["--env-id", "HalfCheetah-v4"])
    try:
        script.module.try_env(replace(args, capture_video=True), None)
        env = script.module.film(script.module.make_env(args, True), tmp_path, "videos")
    except script.module.Refused as error:
        assert "cannot render" in str(error)
        pytest.skip("MuJoCo cannot render here")
    orange = []
    for x in (0, 20):
        env.reset(seed=0)
        data = env.unwrapped.data
        env.unwrapped.set_state(data.qpos + x * np.eye(9)[0], data.qvel)
        image = env.unwrapped.render().astype(int)
        orange.append(np.count_nonzero(image[..., 0] > image[..., 2] + 40))
    env.close()
    assert orange[0] > 1000 and orange[1] > orange[0] / 2


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="EGL is Linux's way without a screen")
@each_text_of("try_env", rows=ROBOTS)
def test_no_gl_names_the_package(script, tmp_path):
    """A graphics driver that does not exist: MuJoCo cannot render."""
    hidden = ("DISPLAY", "MUJOCO_GL")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["__EGL_VENDOR_LIBRARY_FILENAMES"] = "/nonexistent"
    flags = ["--env-id", "InvertedPendulum-v4", "--capture-video"]
    done = process(script, *flags, env=environment)
    ours, _, _ = done.stderr.partition("Exception ignored in: <function OffScreenViewer")
    assert done.returncode == 1 and "Traceback" not in ours  # but Gymnasium's destructor's
    assert re.search("(?m)^error: --capture-video .*libegl1", done.stderr), done.stderr
    assert not (tmp_path / "runs").exists()
