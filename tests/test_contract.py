"""What every script of the old form promises: each row of OLD in tests/registry.py.

A promise that the same bytes keep in several scripts is tested with the first that has them
(`one_of_each_text`), and longer cases of the same promise are `e2e`. Seeds, kills, resumption, bad
input, bad checkpoints, full disks, evaluation, logs. A kill is an exception that nothing catches;
real SIGKILLs are in the tests marked `e2e`, which start processes.
"""

import importlib.util
import itertools
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from harness import (
    SPOILT,
    Hostile,
    are_steps,
    check_flags_of_cleanrl,
    command,
    contents,
    flag_of,
    flags_of,
    killed,
    lacks,
    message_of,
    other_value,
    process,
    resume,
    seeds_of_resets,
    spoil,
    the_run,
    train,
    wait_for,
)
from registry import OLD, SCRIPTS, Script, one_of_each_text
from watch import assert_same_run, checkpoint_of, episodes_of, scalars_of

scripts = pytest.mark.parametrize("script", OLD.values(), ids=OLD)


def scripts_with(attribute: str):
    """Those of which the registry has one."""
    rows = {name: row for name, row in OLD.items() if getattr(row, attribute) is not None}
    return pytest.mark.parametrize("script", rows.values(), ids=rows)


def each_text_of(*names: str, lines: str | None = None, also: dict[str, str] | None = None):
    """A script for each text of these pieces, and those that `also` gives a reason for."""
    chosen = one_of_each_text(OLD, *names, lines=lines)
    rows = {name: row for name, row in OLD.items() if name in chosen or name in (also or {})}
    return pytest.mark.parametrize("script", rows.values(), ids=rows)


def cases_of(attribute: str, quick: int | None = None):
    """(script, fields) of every case of a dictionary of the registry; after `quick` ones e2e."""
    cases = []
    for script in OLD.values():
        for i, (name, value) in enumerate(getattr(script, attribute).items()):
            marks = [pytest.mark.e2e] if quick is not None and i >= quick else []
            cases.append(pytest.param(script, value, id=f"{script.name}-{name}", marks=marks))
    return pytest.mark.parametrize("script, case", cases)


# -- environments --
class ChangedCartPole(CartPoleEnv):
    """A class of the user's own may hold more state than the one that it comes from."""


gym.register("ChangedCartPole-v0", ChangedCartPole, max_episode_steps=100)
CARTPOLE = gym.spec("CartPole-v1").entry_point
gym.register("EndlessCartPole-v0", CARTPOLE)
counting = {"additional_wrappers": (gym.wrappers.TimeAwareObservation.wrapper_spec(),)}
gym.register("CountingCartPole-v0", CARTPOLE, max_episode_steps=100, **counting)

OWN_ENV = """
import gymnasium as gym
import numpy as np

class Own(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (3,))

    def __init__(self, action_space, render_mode=None):
        self.action_space, self.render_mode = action_space, render_mode

    def reset(self, seed=None, options=None):
        self.t = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        return np.full(3, self.t / 7, np.float32), 2.0, self.t == 7, False, {}

discrete, box = gym.spaces.Discrete(3, start=5), gym.spaces.Box(-1, 1)
gym.register("OwnDiscrete-v0", Own, kwargs={"action_space": discrete})
gym.register("OwnBox-v0", Own, kwargs={"action_space": box})
"""


# -- runs --


# -- seeds --


@scripts
def test_same_seed_same_run_another_seed_another(script, folder, monkeypatch):
    """Another one of the environments, of the weights and of what is drawn."""
    runs, seeds = [], seeds_of_resets(script, monkeypatch)
    for name, seed in (("one", 3), ("other", 3), ("another", 4)):
        folder(name)
        runs.append(train(script, seed=seed, learning_rate=1e-30))  # weights stay what they were
    assert_same_run(runs[0], runs[1])
    assert seeds == [3, 3, 4] and episodes_of(runs[0]) != episodes_of(runs[2])
    one, _, another = (checkpoint_of(run) for run in runs)
    weights = [name for name in one["agent"] if name.endswith("weight")]
    assert all(not torch.equal(one["agent"][name], another["agent"][name]) for name in weights)
    assert not torch.equal(one["rng"], another["rng"])


# -- kills --


@cases_of("exact", quick=1)
def test_killed_and_resumed_is_never_stopped(script, case, folder):
    """Five kills of one run; with --checkpoint-seconds 0 one is written in every iteration."""
    folder("whole")
    whole = train(script, **case)
    folder("killed")
    flags = script.tiny | case
    draw = random.Random(zlib.crc32(repr((script.name, case)).encode())).randint
    kills = [
        ("writing", 2),  # the checkpoint of iteration 2; that of 1 stays
        ("rollout", draw(1, flags["num_steps"])),  # of 2
        ("before renaming", 2),  # the checkpoint of 3; that of 2 stays
        ("update", draw(1, flags["num_minibatches"] * flags.get(script.epochs, 1))),  # of 3
        ("after renaming", 1),  # the checkpoint of 3
    ]
    kept = []
    run_dir = killed(script, *kills[0], lambda: train(script, **case))
    for kill in kills[1:]:
        kept.append(checkpoint_of(run_dir)["iteration"])
        (run_dir / "checkpoint.tmp").write_bytes(b"left by another crash")
        with open(run_dir / "episodes.csv", "a") as file:
            file.write("1,2,3,4\n1,2")  # half a line, too
        killed(script, *kill, lambda: resume(script, run_dir))
    assert [*kept, checkpoint_of(run_dir)["iteration"]] == [1, 1, 2, 2, 3]
    resume(script, run_dir)
    assert_same_run(run_dir, whole)
    assert not (run_dir / "checkpoint.tmp").exists()


@each_text_of("save_checkpoint", "load_checkpoint", "main")
def test_a_kill_before_the_first_checkpoint_leaves_nothing_to_resume(script):
    run_dir = killed(script, "writing", 1, lambda: train(script))
    assert (run_dir / "checkpoint.tmp").stat().st_size > 1000
    message = message_of(script, "--resume", str(run_dir))
    assert lacks(message, ["no checkpoint", str(run_dir)]) == []


@scripts
def test_optimizers_and_cudnn_have_the_flags_given(script, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # put back in the end
    flags = {"anneal_lr": False, "learning_rate": 3e-3, "adam_eps": 3e-4}
    flags |= {"torch_deterministic": False}
    checkpoint = checkpoint_of(train(script, **flags))
    for name in checkpoint.keys() & {"optimizer", "aux_optimizer"}:
        (group,) = checkpoint[name]["param_groups"]
        assert (group["lr"], group["eps"]) == (3e-3, 3e-4), name
    assert not torch.backends.cudnn.deterministic


@pytest.mark.parametrize("name", [name for name in OLD if "X02" in OLD[name].details])
def test_what_is_drawn_is_played(name, spy, monkeypatch):
    """At each step the actions of that step, drawn with its noise."""
    module, played = SCRIPTS[name].module, []
    make = module.make_envs
    acts, noises = spy(module.Agent, "act"), spy(module.Agent, "draw_noise")

    def watched(*args):
        envs = make(*args)
        step = envs.step
        envs.step = lambda action: played.append(action.copy()) or step(action)
        return envs

    monkeypatch.setattr(module, "make_envs", watched)
    args = module.Args(**SCRIPTS[name].tiny)
    train(SCRIPTS[name], total_timesteps=args.batch_size, eval_episodes=0)
    assert len(played) == args.num_steps > 8
    for t, ((_, *inputs), result) in enumerate(acts[: args.num_steps]):
        assert torch.equal(inputs[-1], noises[0][1][t])
        assert (result[0].numpy() == played[t]).all()


@cases_of("inexact", quick=1)
def test_where_the_state_cannot_be_saved_a_run_goes_on_with_new_episodes(script, case, monkeypatch):
    run_dir = killed(script, "after renaming", 3, lambda: train(script, **case))
    before, checkpoint = episodes_of(run_dir), checkpoint_of(run_dir)
    assert checkpoint["envs"] is None and checkpoint["iteration"] == 3
    seeds = seeds_of_resets(script, monkeypatch)
    result = resume(script, run_dir)
    args = script.module.Args(**script.tiny | case)
    assert seeds[-1] >= args.seed + 3 * args.num_envs  # not those of an earlier start again
    episodes = episodes_of(run_dir)
    assert episodes[: len(before)] == before
    assert len(episodes) > len(before)
    for step, _, length in episodes[len(before) :]:  # lengths begin with the environments
        since = step - checkpoint["global_step"]
        assert length * (1 if script.reset_rows else args.num_envs) <= since
    assert checkpoint_of(run_dir)["iteration"] == args.num_iterations
    steps = [step for step, _ in scalars_of(run_dir)["losses/policy_loss"]]
    rows = [args.batch_size * i for i in range(1, args.num_iterations + 1)]
    assert steps[-1] == result["global_step"] and are_steps(script, steps, rows)


@each_text_of(lines="> args.checkpoint_seconds|last_checkpoint = |ending = ")
def test_checkpoints_are_of_the_first_and_last_iteration_if_the_clock_allows_no_more(
    script, monkeypatch
):
    """tests/test_behaviour.py has other clocks; that all are saved is seen by the kills above."""
    saved, save = [], script.module.save_checkpoint
    both = lambda run_dir, state: saved.append(state["iteration"]) or save(run_dir, state)  # noqa: E731
    monkeypatch.setattr(script.module, "save_checkpoint", both)
    train(script, checkpoint_seconds=60)
    assert saved == sorted({1, 4, *script.saved})


# -- finished runs --
@scripts
def test_a_finished_run_is_refused_and_left_alone(script, finished, monkeypatch):
    run_dir = finished(script)
    before = contents(Path())
    assert lacks(message_of(script, "--resume", str(run_dir)), ["--evaluate", str(run_dir)]) == []
    args = script.module.Args(**script.tiny | {"exp_name": "small", "resume": str(run_dir)})
    monkeypatch.setattr(script.module, "make_envs", None)  # which would make a directory of videos
    with pytest.raises(script.module.UserError, match="is done"):
        script.module.train(args)
    assert contents(Path()) == before


@each_text_of(lines='annealed|"total_timesteps"')
def test_a_longer_total_extends_a_run_that_anneals_nothing(script, folder):
    constant = dict.fromkeys(script.annealing, False)
    folder("long")
    long = train(script, **constant)
    folder("short")
    half = script.tiny["total_timesteps"] // 2
    short = train(script, **constant, total_timesteps=half)
    resume(script, short, "--total-timesteps", str(2 * half))
    assert_same_run(short, long)


@scripts
def test_nothing_else_changes_the_length_of_a_run(script, finished):
    """Each switch that anneals alone, then a shorter run where none does, by the stored flags."""
    run_dir, total = finished(script), script.tiny["total_timesteps"]
    checkpoint, constant = checkpoint_of(run_dir), dict.fromkeys(script.annealing, False)
    for changes, asked in [*(({name: True}, 9999) for name in script.annealing), ({}, 128)]:
        checkpoint["args"] |= constant | changes
        torch.save(checkpoint, run_dir / "checkpoint.pt")
        message = message_of(script, "--resume", str(run_dir), "--total-timesteps", str(asked))
        assert f"total_timesteps ({total} to {asked})" in message
        assert ("annealing" in message) == bool(changes)
    args = script.module.parse_args(["--resume", str(run_dir), "--total-timesteps", str(2 * total)])
    assert args.total_timesteps == 2 * total  # where nothing anneals


# -- configuration of a run --


@scripts
@pytest.mark.parametrize("how", ["--resume", "--evaluate"])
def test_a_run_keeps_its_configuration(script, how, finished, everything_is_there):
    """Flag by flag: what does not change what is learned may differ, the rest may not."""
    run_dir = finished(script)
    before, module = contents(Path()), script.module
    stored = checkpoint_of(run_dir)["args"]
    wrong, defaults = [], vars(module.Args())
    free = script.free | (script.free_to_play if how == "--evaluate" else set())
    assert any(stored[name] != defaults[name] for name in stored)
    for field in fields(module.Args):
        name, old = field.name, stored[field.name]
        if name in ("resume", "evaluate"):
            continue
        optional = {"target_kl": 0.5, "wandb_entity": "team", "discretize_actions": 3}
        optional |= {"reward_gamma": 0.5, "max_kl_final": 0.5}
        new = optional[name] if name in optional else other_value(field, old)
        try:
            args = module.parse_args([how, str(run_dir), *flag_of(name, new)])
            kept = vars(args) | {"resume": None, "evaluate": None}
            if name not in free or kept != stored | {name: new}:
                wrong.append((name, "accepted", kept[name]))
        except module.UserError as error:
            if name in free or f" {name} ({old} to {new})" not in str(error):
                wrong.append((name, str(error)))
    assert wrong == [] and contents(Path()) == before


@scripts
@pytest.mark.parametrize("how", ["--resume", "--evaluate"])
def test_a_run_of_another_script_is_refused(script, how, finished):
    """Of a changed copy, say, whose flags are the same."""
    run_dir = finished(script)
    (run_dir / f"{script.name}.py").rename(run_dir / "my_ppo.py")
    message = message_of(script, how, str(run_dir))
    assert lacks(message, [str(run_dir), "another script", f"{script.name}.py"]) == []


@scripts
def test_a_default_is_a_change_where_the_run_has_another_value(script, finished):
    run_dir = finished(script)
    defaults = script.module.Args()
    default, gamma = defaults.num_steps, defaults.gamma
    flags = ["--num-steps", str(default), "--gamma", "0.5"]
    message = message_of(script, "--resume", str(run_dir), *flags)
    assert lacks(message, [f"num_steps (32 to {default})", f"gamma ({gamma} to 0.5)"]) == []


# -- bad flags --
@scripts
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "-inf"])
def test_every_number_is_checked(script, value, tmp_path, capsys):
    """A flag takes 0 or less only where the registry says that it means something."""
    wrong, module = [], script.module
    optional = ("target_kl", "reward_gamma", "max_kl_final")  # numbers or None
    numbers = [f for f in fields(module.Args) if f.type in (int, float) or f.name in optional]
    assert len(numbers) > 15
    for field in numbers:
        flag = f"--{field.name.replace('_', '-')}"
        allowed = value == "0" and field.name in script.zero
        allowed |= value == "-1" and field.name in script.negative
        try:
            args = module.parse_args([flag, value])
            if not allowed or getattr(args, field.name) != float(value):
                wrong.append((flag, "accepted"))
        except module.UserError as error:
            number = str(field.type(value) if field.type is int else float(value))
            if allowed or lacks(str(error), [f"{flag} ({number})"]):
                wrong.append((flag, str(error)))
        except SystemExit as stop:  # tyro: nan is no int
            said = "".join(capsys.readouterr())
            if field.type is not int or "n" not in value or flag not in said or stop.code == 0:
                wrong.append((flag, "tyro", said))
    assert wrong == [] and list(tmp_path.iterdir()) == []


BAD_FLAGS = {
    "--num-envs 3 --num-steps 5 --num-minibatches 4": ["3 * 5", "15", "--num-minibatches (4)"],
    "--num-minibatches 9999999": ["--num-minibatches (9999999)"],
    "--num-envs 2 --num-steps 32 --total-timesteps 63 --num-minibatches 1": [
        "--total-timesteps (63)",
        "2 * 32",
        "64",
    ],
    "--gamma 1.5": ["--gamma (1.5)"],
    "--gae-lambda 1.01": ["--gae-lambda (1.01)"],
    "--clip-coef 1e39": ["--clip-coef (1e+39)"],  # more than a float32 holds
    "--seed 18446744073709551616": ["--seed (18446744073709551616)"],  # torch's seeds have 64 bits
    "--resume nowhere": ["no checkpoint", "nowhere"],
    "--evaluate nowhere": ["no checkpoint", "nowhere"],
    "--resume ''": ["--resume", "directory"],  # a shell's variable that is not set
    "--evaluate ''": ["--evaluate", "directory"],
}


@scripts
@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_bad_flags_are_named_with_their_numbers_and_nothing_is_written(script, flags, tmp_path):
    words = BAD_FLAGS[flags]
    if script.whole_sequences and "--num-envs 3" in flags:
        words = ["--num-envs (3)", "--num-minibatches (4)"]
    message = message_of(script, *shlex.split(flags))
    assert lacks(message, words) == [] and list(tmp_path.iterdir()) == []


@cases_of("bad_flags")
def test_unknown_choices_and_flags_end_in_the_parser(script, case, capsys, tmp_path):
    """Every string of Literal, and what is no flag, is tyro's to refuse."""
    bad_flags = {flags: words for flags, words in script.bad_flags.items() if words is case}
    for flags, words in ({"--no-such-flag 1": ["--no-such-flag"]} | bad_flags).items():
        with pytest.raises(SystemExit) as stop:
            script.module.parse_args(flags.split())
        assert stop.value.code == 2 and lacks("".join(capsys.readouterr()), words) == []
    assert list(tmp_path.iterdir()) == []


@scripts
def test_environments_that_do_not_fit_are_named(script, tmp_path):
    unknown = {
        "Nothing-v0": ["Nothing-v0"],
        "CartPole-v99": ["CartPole-v99"],
        "no_such_module:CartPole-v1": ["no_such_module"],
        "json:Nothing-v0": ["json:Nothing-v0"],
    }
    for env_id, words in (unknown | script.wrong_env).items():
        flags = [*flags_of(script), "--env-id", *env_id.split()]
        assert lacks(message_of(script, *flags), words) == [], env_id
    assert list(tmp_path.iterdir()) == []


VECTORS = [SCRIPTS["ppo_lstm"]]


@pytest.mark.parametrize("script", VECTORS, ids=lambda script: script.name)
def test_no_folder_of_videos_is_made_for_an_environment_that_does_not_fit(script, tmp_path):
    for env_id, words in script.wrong_env.items():
        flags = [*flags_of(script, capture_video=True), "--env-id", *env_id.split()]
        assert lacks(message_of(script, *flags), words) == [], env_id
    assert list(tmp_path.iterdir()) == []


@scripts
def test_what_is_asked_for_and_not_there_is_an_error(script, monkeypatch, tmp_path, finished):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert lacks(message_of(script, *flags_of(script, cuda=True)), ["--cuda", "GPU"]) == []
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert lacks(message_of(script, *flags_of(script, track=True)), ["--track", "wandb"]) == []
    monkeypatch.setitem(sys.modules, "moviepy", None)
    assert "moviepy" in message_of(script, *flags_of(script, capture_video=True)).lower()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    flags = ["--evaluate", str(finished(script)), "--eval-episodes", "0"]
    assert "--eval-episodes" in message_of(script, *flags)


@each_text_of("open_logs", "main")
def test_a_blocked_run_directory_is_one_line(script):
    Path("runs").write_text("a file")
    assert "runs" in message_of(script, *flags_of(script))
    assert Path("runs").read_text() == "a file"


@scripts
def test_flags_of_cleanrl_parse_in_its_order(script, everything_is_there):
    check_flags_of_cleanrl(script)


@scripts
def test_help_shows_every_flag_with_its_own_words(script, capsys):
    with pytest.raises(SystemExit) as stop:
        script.module.parse_args(["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert stop.value.code in (0, None)
    for field in fields(script.module.Args):
        assert re.search(f"--{field.name.replace('_', '-')}[ ,]", shown), field.name
    assert "learning rate of Adam" in shown


# -- bad checkpoints --


@each_text_of("load_checkpoint", "main", lines=r"load_checkpoint\(")
@pytest.mark.parametrize("how", SPOILT)
def test_a_bad_checkpoint_is_refused_in_one_line_and_left_alone(script, how, finished):
    run_dir = finished(script)
    spoil(run_dir, how)
    before = contents(Path())
    for flag in ("--resume", "--evaluate"):
        assert str(run_dir / "checkpoint.pt") in message_of(script, flag, str(run_dir))
    with pytest.raises(script.module.UserError):
        script.module.train(script.module.Args(**script.tiny | {"resume": str(run_dir)}))
    assert contents(Path()) == before and not Path("owned").exists()


def test_a_hostile_checkpoint_would_have_run():
    """The same file does its damage when it is read the usual way: the test above can fail."""
    torch.save(Hostile(), "hostile.pt")
    torch.load("hostile.pt", weights_only=False)
    assert Path("owned").is_dir()


@scripts
def test_a_checkpoint_of_another_shape_is_refused(script, finished):
    run_dir = finished(script)
    checkpoint = checkpoint_of(run_dir)
    other = next(case.get("env_id") for case in reversed(script.exact.values()))
    checkpoint["args"] |= script.other_shape or {"env_id": other}
    checkpoint["args"] |= {"total_timesteps": 960, "eval_episodes": 1}
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    before = contents(Path())
    for flag in ("--resume", "--evaluate"):
        assert "does not fit" in message_of(script, flag, str(run_dir))
        assert contents(Path()) == before


# -- disks --
@each_text_of("save_checkpoint", "main")
@pytest.mark.parametrize("nth", [1, 3])
def test_a_full_disk_is_one_line_and_keeps_the_checkpoint_before(script, nth, monkeypatch):
    """No file may grow past 4 kB from the n-th checkpoint on, which is larger."""
    limits, calls = resource.getrlimit(resource.RLIMIT_FSIZE), itertools.count(1)
    save = script.module.save_checkpoint

    def full(*args):
        if next(calls) == nth:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        save(*args)

    monkeypatch.setattr(script.module, "save_checkpoint", full)
    try:
        message_of(script, *flags_of(script))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    run_dir = the_run().resolve()
    if nth == 1:
        assert not (run_dir / "checkpoint.pt").exists()
        return
    assert checkpoint_of(run_dir)["iteration"] == nth - 1
    monkeypatch.undo()
    monkeypatch.chdir(run_dir)
    resume(script, run_dir)
    assert checkpoint_of(run_dir)["iteration"] == 4


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files")
@each_text_of("save_checkpoint")
def test_what_a_checkpoint_says_is_on_the_disk_before_it(script, folder, monkeypatch):
    """Also after a power cut, which keeps only what was synchronized."""
    fsync, names = os.fsync, []

    def watched(file):
        names.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    monkeypatch.setattr(script.module.os, "fsync", watched)
    result = script.module.train(script.module.Args(**script.tiny | {"total_timesteps": 64}))
    names = [name for name in names if name in ("episodes.csv", "checkpoint.tmp")]
    assert names and names == ["episodes.csv", "checkpoint.tmp"] * (len(names) // 2)
    assert checkpoint_of(Path(result["run_dir"]))["episodes_size"] > 20


@each_text_of("check_args", "check_unchanged")
def test_train_checks_what_it_is_called_with(script, finished):
    """Without a command line too: in a sweep or a notebook."""
    module, run_dir = script.module, finished(script)
    before = contents(Path())
    wrong = [("gamma", 2.0), ("total_timesteps", 1), ("num_envs", 0), ("resume", str(run_dir))]
    wrong += [("total_timesteps", 1e3), ("num_envs", True)]
    wrong += [("gamma", np.float64(0.9)), ("num_envs", np.int64(2))]  # in no checkpoint
    wrong += [("gamma", "0.9"), ("gamma", None), ("anneal_lr", "False"), ("env_id", None)]
    for name, value in wrong:
        fields = script.tiny | {name: value, "seed": 3}
        words = "cannot change .*seed" if name == "resume" else f"--{name.replace('_', '-')}"
        with pytest.raises(module.UserError, match=words):
            module.train(module.Args(**fields))
    assert contents(Path()) == before


@each_text_of("open_logs")
def test_a_resumed_run_says_with_what(script, finished, tmp_path, monkeypatch, capsys):
    """Its configuration and hardware from there on, and whether the script was changed."""
    run_dir = finished(script)
    script.module.save_checkpoint(run_dir, checkpoint_of(run_dir) | {"iteration": 3})
    (changed := tmp_path / script.path.name).write_text(script.source + "# changed")
    for file, notes in ((script.path, 0), (changed, 1)):
        monkeypatch.setattr(script.module, "__file__", str(file))
        args = script.module.Args(**checkpoint_of(run_dir)["args"] | {"resume": str(run_dir)})
        for log in script.module.open_logs(args, run_dir, checkpoint_of(run_dir)):
            log.close()
        assert capsys.readouterr().out.count("another text of this script") == notes
    config = json.loads((run_dir / "config_3.json").read_text())
    assert config["args"]["resume"] == str(run_dir) and config["threads"] > 0
    assert json.loads((run_dir / "config.json").read_text())["args"]["resume"] is None
    assert (run_dir / script.path.name).read_text() == script.source


@each_text_of("open_logs")
def test_a_checkpoint_without_its_episodes_is_refused(script, finished):
    """Copied alone into another directory, say."""
    run_dir = finished(script)
    episodes = (run_dir / "episodes.csv").read_bytes()
    state = checkpoint_of(run_dir)
    script.module.save_checkpoint(run_dir, state | {"iteration": 1})
    (run_dir / "episodes.csv").write_bytes(episodes[:-2])
    message = message_of(script, "--resume", str(run_dir))
    assert lacks(message, ["episodes.csv", "checkpoint"]) == []
    assert (run_dir / "episodes.csv").read_bytes() == episodes[:-2]


@each_text_of("open_logs", lines="run_(dir|name) = ")
def test_two_runs_of_one_second_never_share_a_directory(script, monkeypatch):
    clock = itertools.count(1_700_000_000_000_000)  # microseconds
    times = SimpleNamespace(time=lambda: next(clock) / 1e6, sleep=time.sleep)
    monkeypatch.setattr(script.module, "time", times)
    run_dir = train(script)
    before = contents(Path())
    assert run_dir.name in message_of(script, *flags_of(script))
    assert contents(Path()) == before
    assert train(script, seed=2) != run_dir


# -- numbers --
@scripts_with("poisoned")
def test_losses_that_are_not_finite_stop_the_run(script):
    """The reward is NaN from step 40, in iteration 2, on."""
    with pytest.raises(script.module.UserError, match="iteration 2 .*not finite.*nan"):
        train(script, **script.poisoned)
    (run_dir,) = Path("runs").iterdir()
    checkpoint = checkpoint_of(run_dir)
    assert checkpoint["iteration"] == 1
    assert all(weights.isfinite().all() for weights in checkpoint["agent"].values())


@scripts
def test_tags_are_those_documented(script):
    run_dir = train(script, eval_episodes=1)
    scalars = scalars_of(run_dir)
    assert scalars.keys() == script.tags
    steps = [step for step, _ in scalars["losses/policy_loss"]]
    assert are_steps(script, steps, [64, 128, 192, 256])
    assert [step for step, _ in scalars["eval/episodic_return"]] == steps[-1:]
    assert all(math.isfinite(value) for tag in scalars.values() for _, value in tag)
    steps, returns, lengths = zip(*episodes_of(run_dir))
    for name, values in (("return", returns), ("length", lengths)):
        logged = zip(*scalars[f"charts/episodic_{name}"])
        assert next(logged) == steps and next(logged) == pytest.approx(values)


@each_text_of("open_logs", "provenance")
def test_a_run_writes_down_how_to_repeat_it(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py", "--seed", "1"])
    run_dir = train(script)
    config = json.loads((run_dir / "config.json").read_text())
    assert config["args"] == vars(script.module.Args(**script.tiny))
    assert config["command"] == "script.py --seed 1"
    assert config["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert config["versions"]["gymnasium"] == gym.__version__
    assert config["threads"] == 1 and "core" in config["hardware"] and config["load"] >= 0
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|", config["commit"])
    assert (run_dir / script.path.name).read_bytes() == script.path.read_bytes()
    files = {file.name.split(".tfevents")[0] for file in run_dir.iterdir()}
    expected = {"config.json", "episodes.csv", "checkpoint.pt", script.path.name, "events.out"}
    assert files == expected
    name = rf"{script.tiny['env_id']}__{script.name}__1__\d{{10}}"
    assert re.fullmatch(name, run_dir.name) and run_dir.parent.name == "runs"
    assert re.match(r"step,return,length,seconds\n\d+,", (run_dir / "episodes.csv").read_text())


# -- evaluation --
def play(script: Script, run_dir: Path, *flags: str) -> list[float]:
    args = script.module.parse_args(["--evaluate", str(run_dir), *flags])
    return script.module.evaluate(args, Path(args.evaluate))


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


@scripts_with("by_hand")
def test_evaluation_plays_the_checkpoint_with_its_statistics(script, finished):
    """Greedy episodes by hand: the network in NumPy, observations normalized as stored."""
    run_dir = finished(script)
    returns = play(script, run_dir, "--eval-episodes", "3", "--eval-deterministic")
    checkpoint = checkpoint_of(run_dir)
    weights = {name: tensor.double().numpy() for name, tensor in checkpoint["agent"].items()}
    env, expected = gym.make(script.tiny["env_id"]), []
    for episode in range(3):
        obs, over, total = env.reset(seed=1_000_000 + episode)[0], False, 0.0
        while not over:
            action = script.by_hand(weights, checkpoint, obs.astype(np.float64))
            obs, reward, terminated, truncated, _ = env.step(action)
            over, total = terminated or truncated, total + reward
        expected.append(total)
    assert returns == pytest.approx(expected)


# -- commands, environments and services --
@each_text_of("open_logs")
@pytest.mark.parametrize("uv", [True, False])
def test_the_printed_command_starts_as_the_script_was_started(script, uv, monkeypatch, capsys):
    if uv:
        monkeypatch.setenv("UV", "uv")
    else:
        monkeypatch.delenv("UV", raising=False)
    run_dir = train(script, exp_name="two words")
    out = capsys.readouterr().out
    (command,) = [line for line in out.splitlines() if "--resume" in line]
    words = shlex.split(command.partition(": ")[2])
    assert words[:-3] == (["uv", "run"] if uv else [sys.executable])
    assert Path(words[-3]).resolve() == script.path and words[-2] == "--resume"
    assert Path(words[-1]).resolve() == run_dir and "CPU" in out


@scripts_with("own")
def test_an_environment_of_ones_own(script, tmp_path, monkeypatch):
    """In a module beside, without a time limit, with the actions that it names."""
    module = f"own_env_of_{script.name}"
    (tmp_path / f"{module}.py").write_text(OWN_ENV)
    monkeypatch.syspath_prepend(tmp_path)
    env_id = f"{module}:{script.own['env_id']}"
    run_dir = train(script, **script.own | {"env_id": env_id, "eval_episodes": 1})
    assert ":" not in run_dir.name and module in run_dir.name
    episodes = [(value, length) for _, value, length in episodes_of(run_dir)]
    rows = 7 + script.reset_rows
    assert episodes == [(14.0, 7)] * (2 * (128 // rows))
    assert scalars_of(run_dir)["eval/episodic_return"] == [(256 * 7 // rows, 14.0)]
    assert play(script, run_dir, "--eval-episodes", "2") == [14.0, 14.0]


@scripts_with("own")
def test_an_environment_that_cannot_be_filmed_is_refused(
    script, tmp_path, monkeypatch, everything_is_there
):
    """Before a directory is made: it has no `render`."""
    module = f"blind_env_of_{script.name}"
    (tmp_path / f"{module}.py").write_text(OWN_ENV)
    monkeypatch.syspath_prepend(tmp_path)
    env_id = f"{module}:{script.own['env_id']}"
    flags = flags_of(script, **script.own | {"env_id": env_id, "capture_video": True})
    assert "--capture-video" in message_of(script, *flags) and not Path("runs").exists()


def test_a_film_without_what_draws_it_is_refused(monkeypatch, everything_is_there):
    """CartPole needs pygame; before a directory is made."""
    monkeypatch.setitem(sys.modules, "pygame", None)
    flags = flags_of(SCRIPTS["ppo_lstm"], env_id="CartPole-v1", capture_video=True)
    assert "pygame is not installed" in message_of(SCRIPTS["ppo_lstm"], *flags)
    assert not Path("runs").exists()


@each_text_of("open_logs")
def test_a_resumed_run_goes_on_in_the_same_wandb_run(
    script, everything_is_there, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # it is wandb that is there
    calls = []
    everything_is_there.init = lambda **kwargs: calls.append(kwargs)
    names = {"wandb_project_name": "project", "wandb_entity": "team", "track": True}
    monkeypatch.setenv("UV", "uv")
    run_dir = killed(script, "after renaming", 2, lambda: train(script, **names))
    assert f"uv run --with wandb {script.path} --resume" in capsys.readouterr().out
    resume_off = script.module.parse_args(["--resume", str(run_dir), "--no-track"])
    assert not resume_off.track
    monkeypatch.chdir(run_dir)
    resume(script, Path("."))
    first, second = calls
    assert (first["project"], first["entity"]) == ("project", "team")
    assert first["id"] == second["id"] == run_dir.name and second["resume"] in ("allow", "must")
    assert first["sync_tensorboard"] and first["config"]["num_steps"] == 32


@scripts
def test_importing_a_script_starts_nothing(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py", "--no-such-flag"])
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a process"))
    before = (
        torch.get_rng_state(),
        torch.get_num_threads(),
        threading.active_count(),
        sorted(os.environ),
    )
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    spec = importlib.util.spec_from_file_location("imported_again", script.path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "imported_again", module)
    spec.loader.exec_module(module)
    after = (
        torch.get_rng_state(),
        torch.get_num_threads(),
        threading.active_count(),
        sorted(os.environ),
    )
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert list(tmp_path.iterdir()) == [] and "".join(capsys.readouterr()) == ""
    assert module.Args().exp_name == script.name


# -- processes --


@pytest.mark.e2e
@each_text_of("save_checkpoint", "open_logs")
def test_sigkill_at_random_moments(script, folder):
    """Three processes are killed within some iterations; the printed command resumes the run.

    What a checkpoint holds differs from script to script: all are killed and resumed above, within
    this process.
    """
    total = script.steps_of_seconds
    case = list(script.exact.values())[1] | {"total_timesteps": total}
    flags = flags_of(script, **case)
    home = folder("killed")
    draw = random.Random(script.name)
    words = command(script, *flags)
    for kill in range(3):
        with open("out.txt", "w") as out:
            running = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
        path = home / "runs"
        age = lambda: max((f.stat().st_mtime_ns for f in path.glob("*/checkpoint.pt")), default=0)  # noqa: E731
        ages = [age()]
        for _ in range(4):  # checkpoints, of which there are 50 in the run or more
            wait_for(lambda: age() > ages[-1], running)
            ages.append(age())
        time.sleep(draw.uniform(0, 5) * min(np.diff(ages[1:])) / 1e9)  # a stall is no iteration
        running.kill()
        assert running.wait() == -signal.SIGKILL
        checkpoint = checkpoint_of(the_run())
        assert 1 <= checkpoint["iteration"] and checkpoint["global_step"] < 0.9 * total
        (line,) = [line for line in Path("out.txt").read_text().splitlines() if "--resume" in line]
        words = shlex.split(line.partition(": ")[2])
        here = ["uv", "run"] if "UV" in os.environ else [sys.executable]
        assert words[: len(here)] == here
        words[: len(here)] = [sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = the_run().resolve()
    folder("whole")
    assert_same_run(run_dir, train(script, **case))


@pytest.mark.e2e
@each_text_of("main", also={"ppo_atari": "EnvPool's"})
def test_ctrl_c_is_one_line(script, tmp_path):
    """A terminal sends SIGINT to the whole process group, workers included."""
    case = list((script.inexact or script.exact).values())[-1]
    flags = flags_of(script, **case | {"total_timesteps": 10_000_000})
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how |= {"start_new_session": True}
    how["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # jobs may ignore it
    running = subprocess.Popen(command(script, *flags), **how)
    wait_for(lambda: list(tmp_path.glob("runs/*/checkpoint.pt")), running)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=60)
    # Gymnasium's destructor complains where its workers answered Ctrl-C before this process did
    ours, _, _ = err.partition("Exception ignored in: <function AsyncVectorEnv")
    assert running.returncode == 1 and "Traceback" not in ours, err
    assert re.search("stopped$", err, re.MULTILINE), err  # perhaps behind the bar
    script.module.load_checkpoint(the_run())


@pytest.mark.e2e
@scripts
def test_a_script_runs_alone_in_an_empty_directory(script, tmp_path):
    shutil.copy(script.path, tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    flags = flags_of(script, eval_episodes=1)
    done = process(script, *flags, path=Path(script.path.name), env=environment)
    assert done.returncode == 0 and "evaluation" in done.stdout, done.stdout + done.stderr
    assert not re.search(r"(?<!Deprecation)Warning|Error|Traceback", done.stderr), done.stderr
    names = {file.name for file in tmp_path.iterdir()}
    assert names <= {script.path.name, "runs", "__pycache__"}
    assert (the_run() / script.path.name).read_bytes() == script.path.read_bytes()
    done = process(script, "--evaluate", str(the_run()), path=Path(script.path.name))
    assert done.returncode == 0 and "evaluation" in done.stdout, done.stdout + done.stderr


@pytest.mark.e2e
@each_text_of("main")
def test_bad_input_ends_a_process_with_one_line_and_an_exit_code(script, tmp_path):
    done = process(script, "--num-minibatches", "9999999")
    assert done.returncode == 1 and done.stdout == "" and list(tmp_path.iterdir()) == []
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.e2e
@each_text_of("open_logs")
def test_tracking_works_offline(script):
    """With the real wandb: two processes, one run."""
    pytest.importorskip("wandb")
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    environment.pop("WANDB_SERVICE", None)  # of a tracked run in this process
    constant = dict.fromkeys(script.annealing, False)
    done = process(script, *flags_of(script, track=True, **constant), env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    longer = ["--resume", str(the_run()), "--total-timesteps", "512"]
    done = process(script, *longer, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    files = list(the_run().glob("wandb/offline-run-*/*.wandb"))
    assert {file.name for file in files} == {f"run-{the_run().name}.wandb"}


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore::UserWarning")
@scripts
def test_videos_of_training_and_evaluation(script):
    environment = os.environ | {"SDL_VIDEODRIVER": "dummy"}
    done = process(script, *flags_of(script, capture_video=True, eval_episodes=1), env=environment)
    if "cannot make" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    for pattern in ("videos_*", "eval_videos_*"):
        (video,) = the_run().glob(f"{pattern}/rl-video-episode-0.mp4")
        assert video.stat().st_size > 1000


RENDERERS = [script for script in OLD.values() if hasattr(script.module, "record_videos")]


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="EGL is Linux's way without a screen")
@pytest.mark.parametrize("script", RENDERERS, ids=[script.name for script in RENDERERS])
def test_no_gl_names_the_package(script, tmp_path):
    """A graphics driver that does not exist: MuJoCo cannot render."""
    hidden = ("DISPLAY", "MUJOCO_GL")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["__EGL_VENDOR_LIBRARY_FILENAMES"] = "/nonexistent"
    flags = ["--env-id", "InvertedPendulum-v4", "--capture-video"]
    if "discretize_actions" in vars(script.module.Args()):
        flags += ["--discretize-actions", "3"]
    done = process(script, *flags, env=environment)
    assert done.returncode == 1 and "libegl1" in done.stderr and not (tmp_path / "runs").exists()
