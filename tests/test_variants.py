"""The patches of variants/: each fits its script, runs, and changes what it says."""

import importlib.util
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from registry import ROOT, SCRIPTS, TINY
from torch.nn.utils import parameters_to_vector
from torch.optim.optimizer import register_optimizer_step_pre_hook
from watch import checkpoint_of, episodes_of, flat, scalars_of

sys.path.insert(0, str(ROOT / "benchmark"))

import patches  # noqa: E402
import results  # noqa: E402

import ppo_lstm  # noqa: E402

PATCHES = {patch.stem: patch for patch in sorted((ROOT / "variants").rglob("*.patch"))}
all_patches = pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)


def load(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def variant(tmp_path):
    """`variant(name)`: the patched script as a module; `train(**changes)` runs it for a moment."""

    def make(name: str):
        module = load(f"variant_{name}", patches.patched(PATCHES[name], tmp_path / "patched"))
        tiny = SCRIPTS[patches.original_of(PATCHES[name]).removesuffix(".py")].tiny

        def run(**changes) -> Path:
            known = {field.name for field in fields(module.Args)}  # a patch may take one away
            given = {name: value for name, value in (tiny | changes).items() if name in known}
            return Path(module.train(module.Args(**given))["run_dir"]).resolve()

        return module, run

    yield make
    for name in [name for name in sys.modules if name.startswith("variant_")]:
        del sys.modules[name]


def weights_of(run_dir: Path) -> torch.Tensor:
    return torch.cat([weight.flatten() for weight in checkpoint_of(run_dir)["agent"].values()])


def short_cart_pole() -> str:
    """Its time is up after four steps, before it can fall."""
    name, entry = "ShortCartPole-v0", "gymnasium.envs.classic_control:CartPoleEnv"
    if name not in gym.registry:
        gym.register(name, entry, max_episode_steps=4)
    return name


# -- all --
def test_no_two_patches_have_one_name():
    """Whatever their folders: runs and results are called by it."""
    assert len(PATCHES) == len([*(ROOT / "variants").rglob("*.patch")]) > 0


@all_patches
def test_a_patch_fits_its_script_and_says_what_it_is(patch, tmp_path):
    """At the place that it names, without fuzz."""
    text = patch.read_text()
    why, _, body = text.partition("\n--- ")
    assert 60 < len(why) and all(len(line) <= 100 for line in why.splitlines())
    changed = [line for line in body.splitlines()[2:] if line[0] in "+-"]
    *made, last = patches.patched(patch, tmp_path).read_text().splitlines()
    assert last == f"# changed by {patch.name}, digest {patches.digest_of(patch)}"
    original = (ROOT / patches.original_of(patch)).read_text().splitlines()
    left = [line for line in made if line not in original]
    assert left == [line[1:] for line in changed if line[0] == "+" and line[1:] not in original]
    assert made != original and max(map(len, [*made, last])) <= 100


@all_patches
def test_a_patched_script_trains_and_differs(patch, variant, monkeypatch):
    """Three iterations of it and of the original, with the same seed."""
    small = {"total_timesteps": 192, "num_envs": 4, "num_steps": 16}
    module, run = variant(patch.stem)
    if "staggered" in patch.stem:
        small |= {"env_id": "HalfCheetah-v4", "num_steps": 260, "total_timesteps": 3120}
    if patch.stem == "two_masks":
        small |= {"env_id": "MicrortsRandomEnemyShapedReward3-v1"}
    if patch.stem.endswith("no_ratio_clip"):
        small |= {"learning_rate": 0.02}  # so that ratios leave the range
    if patch.stem == "time_limit_terminates":
        small |= {"env_id": short_cart_pole()}
    if patch.stem == "clipped_action_stored":
        small |= {"init_log_std": 3.0}  # so that actions leave the bounds
    row = SCRIPTS[patches.original_of(patch).removesuffix(".py")]
    runs = [run(**small)]
    original = row.module.train(row.module.Args(**row.tiny | small))["run_dir"]
    runs.append(Path(original).resolve())
    assert [checkpoint_of(run_dir)["iteration"] for run_dir in runs] == [3, 3]
    alone = patch.stem.startswith("multigpu")  # one process is the original
    alone |= patch.stem == "normalizer_not_loaded"  # which is of the evaluation
    assert torch.equal(*map(weights_of, runs)) == alone


def test_every_patch_has_a_row_and_every_row_a_patch():
    """But those of combine/, which are no ideas to compare; two run a recipe."""
    rows = results.read_recipes()
    named = set(rows["script"][rows["script"].str.endswith(".patch")])
    named -= {f"variants/combine/{name}.patch" for name in ("multigpu_ppg", "continuous_lstm")}
    assert named == {
        str(patch.relative_to(ROOT)) for patch in PATCHES.values() if patch.parent.name != "combine"
    }
    presets = rows["recipe"].str.startswith("study")  # which share their patches
    for _, row in rows[rows["script"].isin(named) & ~presets].iterrows():
        assert row["experiment"] == Path(row["script"]).stem


def test_a_patch_is_not_taken_back_where_its_idea_is_in_the_script(tmp_path, monkeypatch):
    """As `patch --batch` would."""
    patch = PATCHES["spo"]
    changed = patches.patched(patch, tmp_path)
    monkeypatch.setattr(patches, "ROOT", tmp_path)
    changed.rename(tmp_path / patches.original_of(patch))
    with pytest.raises(ValueError, match="does not fit"):
        patches.patched(patch, tmp_path / "made")


def test_a_patch_that_does_not_fit_is_named(tmp_path):
    patch = tmp_path / "bad.patch"
    text = PATCHES["spo"].read_text()
    patch.write_text(text.replace("-    pg_loss1", "-    pg_loss9"))
    with pytest.raises(ValueError, match="bad.patch does not fit ppo_continuous_mujoco.py"):
        patches.patched(patch, tmp_path / "made")
    assert list((tmp_path / "made").iterdir()) == []


def test_a_patch_is_made_as_the_page_says(tmp_path):
    """`diff -u` of a changed copy."""
    source = (ROOT / "ppo.py").read_text()
    (tmp_path / "my_ppo.py").write_text(source.replace("gamma: float = 0.99", "gamma: float = 0.9"))
    (tmp_path / "ppo.py").write_text(source)
    diff = subprocess.run(
        ["diff", "-u", "ppo.py", "my_ppo.py"], cwd=tmp_path, capture_output=True, text=True
    )
    (tmp_path / "mine.patch").write_text("A shorter horizon.\n" + diff.stdout)
    made = patches.patched(tmp_path / "mine.patch", tmp_path / "made")
    *lines, _ = made.read_text().splitlines(keepends=True)
    assert made.name == "mine.py" and "".join(lines) == (tmp_path / "my_ppo.py").read_text()


@pytest.mark.e2e
def test_variant_sh_trains_both_and_reports_them(tmp_path):
    """Tiny runs; what is done is not done again."""
    for name in ("benchmark", "variants"):
        leave = shutil.ignore_patterns("results", "figures")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=leave)
    shutil.copy(ROOT / "ppo_continuous_mujoco.py", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    variables = {"PYTHON": sys.executable, "ENVS": "InvertedPendulum-v4", "SEEDS": "1 2"}
    variables |= {"STEPS": "4096", "FLAGS": "--no-compile --eval-episodes 0"}
    command = ["bash", "benchmark/variant.sh", "spo"]
    how = {"cwd": tmp_path, "env": os.environ | variables, "capture_output": True, "text": True}
    done = subprocess.run(command, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    made = tmp_path / "benchmark" / "results" / "variants" / "InvertedPendulum-v4"
    names = {"baseline__1.csv", "baseline__2.csv", "spo__1.csv", "spo__2.csv"}
    assert {path.name for path in made.iterdir()} == names
    assert "SPO's penalty instead of the clip | 2 |" in done.stdout
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    again = subprocess.run(command, **how)
    assert again.returncode == 0, again.stdout + again.stderr
    assert before == {path: path.stat().st_mtime_ns for path in made.iterdir()}
    assert len([*(tmp_path / "runs").rglob("config.json")]) == 4


# -- one by one --
THEIRS = ["implementation_matters", "trpo_implementation_matters"]


@pytest.mark.parametrize("name", THEIRS)
def test_xaviers_weights_are_uniform_up_to_his_bound(name, variant):
    """sqrt(6 / (inputs + outputs)); biases are 0, and the orthogonal weights stay."""
    module, _ = variant(name)
    torch.manual_seed(0)
    layer = module.layer_init(torch.nn.Linear(100, 200), 3.0, module.Args(ortho_init=False))
    bound = (6 / 300) ** 0.5
    assert 0.99 * bound < layer.weight.abs().max() <= bound and not layer.bias.any()
    assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    layer = module.layer_init(torch.nn.Linear(100, 200), 3.0, module.Args())
    torch.testing.assert_close(layer.weight.T @ layer.weight, 9 * torch.eye(100))
    assert not layer.bias.any()


@pytest.mark.parametrize("name", THEIRS)
def test_rollouts_begin_with_new_episodes_and_end_in_their_last_value(name, variant, monkeypatch):
    """HalfCheetah never falls: no episode of 1,000 steps fits into 600."""
    module, run = variant(name)
    seen, gae = [], module.gae

    def watched(rewards, values, next_values, *others):
        seen.append((values, next_values))
        return gae(rewards, values, next_values, *others)

    monkeypatch.setattr(module, "gae", watched)
    long = {"env_id": "HalfCheetah-v4", "num_envs": 1, "num_steps": 600, "update_epochs": 1}
    assert episodes_of(run(**long, total_timesteps=1800)) == [] and len(seen) == 3
    for values, next_values in seen:
        np.testing.assert_array_equal(next_values[-1], values[-1])
        assert not np.isclose(next_values[:-1], values[:-1]).any()


@pytest.mark.parametrize("name", THEIRS)
def test_last_steps_of_episodes_are_not_in_the_value_loss(name, variant):
    """A plain mean over the others; the value may leave its old one by 0.2."""
    module, _ = variant(name)
    value, returns = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 5.0, 30.0])
    mb = {"returns": returns, "values": torch.tensor([1.5, 2.0, 3.0]), "advantages": returns}
    mb |= {"goes_on": torch.tensor([1.0, 1.0, 0.0]), "logprobs": torch.zeros(3)}
    for clip, first in ((False, 1.0), (True, 1.3**2)):
        args = module.Args(clip_vloss=clip)
        if name == "implementation_matters":
            large = torch.tensor(1e32)
            _, stats = module.ppo_loss(torch.zeros(3), torch.zeros(3), value, mb, large, args)
        else:  # with an agent whose value of observation i is value[i]
            critic, rows = torch.nn.ParameterList([value]), torch.arange(3)
            agent = SimpleNamespace(critic=critic, get_value=lambda i: critic[0][i])
            _, stats = module.loss_and_grad(agent, mb | {"obs": rows}, rows, args)
        assert stats["value_loss"].item() == pytest.approx((first + 9) / 2)


def test_policy_and_value_have_rates_of_their_own(variant):
    """Annealed together."""
    module, run = variant("implementation_matters")
    run_dir = run(learning_rate=0.4, value_learning_rate=0.8, ent_coef=-0.01)
    optimizer = checkpoint_of(run_dir)["optimizer"]
    assert [group["lr"] for group in optimizer["param_groups"]] == pytest.approx([0.1, 0.2])
    agent = checkpoint_of(run_dir)["agent"]
    value = sum(x.numel() for name, x in agent.items() if name.startswith("critic"))
    sizes = [state["exp_avg"].numel() for state in optimizer["state"].values()]
    assert sizes == [sum(x.numel() for x in agent.values()) - value, value]


def test_only_the_policys_gradient_is_clipped(variant):
    module, _ = variant("implementation_matters")
    row = SCRIPTS["ppo_continuous_mujoco"]
    args = module.Args(**row.tiny | {"max_grad_norm": 0.0})
    envs = module.make_envs(args, Path("unused"), 1)
    torch.manual_seed(0)
    agent = module.Agent(envs.single_observation_space, envs.single_action_space, args)
    obs, actions = torch.randn(8, *envs.single_observation_space.shape), torch.randn(8, 1)
    batch = {"obs": obs, "actions": actions, "goes_on": torch.ones(8)}
    batch |= {name: torch.randn(8) for name in ("logprobs", "values", "advantages", "returns")}
    inds, clip_coef = torch.arange(8), torch.tensor(0.2)
    whole, stats = module.loss_and_grad(agent, batch, inds, clip_coef, args)
    args.max_grad_norm = stats["grad_norm"].item() / 2
    clipped, _ = module.loss_and_grad(agent, batch, inds, clip_coef, args)
    value = sum(x.numel() for x in agent.critic.parameters())
    torch.testing.assert_close(clipped[:-value], whole[:-value] / 2)
    torch.testing.assert_close(clipped[-value:], whole[-value:], rtol=0, atol=0)


def test_rewards_are_divided_by_their_own_deviation(variant):
    """About their mean, which they keep."""
    module, run = variant("implementation_matters")
    rms = module.RunningMeanStd(np.array(2.0), np.array(4.0))
    args = module.Args(norm_reward_by="rewards", clip_reward=2.5)
    np.testing.assert_allclose(module.normalize_reward(rms, np.array([1.0, 9.0]), args), [1.5, 2.5])
    np.testing.assert_allclose(module.normalize_reward(rms, np.array([1.0]), module.Args()), 0.5)
    mean, var, _ = checkpoint_of(run(norm_reward_by="rewards"))["return_rms"]
    assert mean.item() == pytest.approx(1, abs=1e-3) and var.item() < 1e-3  # a pendulum's is 1


def test_the_line_search_asks_for_a_tenth_of_the_gain(variant):
    """Of a step along the gradient the whole gain is expected; of more than ten times it, none."""
    module, _ = variant("trpo_implementation_matters")
    args = module.Args(**SCRIPTS["trpo_continuous_mujoco"].tiny)
    envs = module.make_envs(args, Path("unused"), 1)
    torch.manual_seed(0)
    agent = module.Agent(envs.single_observation_space, envs.single_action_space, args)
    params = parameters_to_vector(agent.policy_parameters()).detach()
    torch.nn.utils.vector_to_parameters(params, agent.policy_parameters())
    obs = torch.randn(64, *envs.single_observation_space.shape)
    policy = agent.get_policy(obs)
    old = torch.distributions.Normal(policy.mean.detach(), policy.stddev.detach())
    actions = agent.act(obs)
    batch = {"obs": obs, "actions": actions, "advantages": torch.randn(64)}
    batch["logprobs"] = agent.evaluate_actions(obs, actions)[0].detach()
    loss, _ = module.trpo_loss(agent, old, batch, args)
    gradient = parameters_to_vector(torch.autograd.grad(loss, agent.policy_parameters()))
    step = -1e-3 * gradient
    gain = -gradient @ step
    for share, fraction in ((1, 1.0), (9, 1.0), (11, 0.0)):
        params_before = params.clone()
        stats = module.line_search(agent, params, step, share * gain, old, batch, 1.0, args)
        assert stats["step_fraction"] == fraction
        assert torch.equal(params, params_before) == (fraction == 0)
        with torch.no_grad():
            params.copy_(params_before)


def test_staggered_environments_begin_at_other_ages(variant):
    """HalfCheetah never falls: its first episodes end at the limit, which comes sooner."""
    _, run = variant("staggered_resets")
    first = {"env_id": "HalfCheetah-v4", "num_envs": 4, "num_steps": 800, "update_epochs": 1}
    run_dir = run(**first, total_timesteps=3200)
    assert [length for _, _, length in episodes_of(run_dir)] == [250, 500, 750]


def test_a_resumed_runs_new_episodes_are_staggered_again(variant):
    """Of two environments, after 400 steps of each."""
    _, run = variant("staggered_resets")
    flags = {"env_id": "HalfCheetah-v4", "num_steps": 400, "update_epochs": 1, "anneal_lr": False}
    run_dir = run(**flags, total_timesteps=800)
    assert episodes_of(run_dir) == []
    run(**flags, total_timesteps=2400, resume=str(run_dir))
    assert [(step, length) for step, _, length in episodes_of(run_dir)] == [(1800, 500)]


def test_the_flag_for_staggered_resets_does_what_the_patch_does(variant):
    """So that figures of the one are those of the other."""
    _, run = variant("staggered_resets")
    small = {"env_id": "HalfCheetah-v4", "num_envs": 4, "num_steps": 260, "total_timesteps": 3120}
    row = SCRIPTS["ppo_continuous_mujoco"]
    args = row.module.Args(**row.tiny | small, staggered_resets=True)
    runs = [run(**small), Path(row.module.train(args)["run_dir"])]
    assert torch.equal(*map(weights_of, runs))
    assert episodes_of(runs[0]) == episodes_of(runs[1]) != []


def test_adams_count_begins_anew(variant):
    """Four minibatches an iteration, of four iterations."""
    _, run = variant("adam_reset")
    (state,) = checkpoint_of(run())["optimizer"]["state"].values()
    assert state["step"] == TINY["num_minibatches"] * TINY["update_epochs"]
    assert state["exp_avg"].norm() > 0


@pytest.mark.parametrize("name", ["no_ratio_clip", "ppo_no_ratio_clip"])
def test_the_ratio_alone_is_freed(name, variant):
    """A ratio of 2 counts in full, and a value that has moved by 1 is still held to 0.2."""
    module, _ = variant(name)
    args = module.Args(norm_adv=False, ent_coef=0, vf_coef=1)
    zero = torch.zeros(1, dtype=torch.float64)
    mb = {"advantages": zero + 3, "logprobs": zero, "returns": zero + 1, "values": zero}
    loss, stats = module.ppo_loss(zero + math.log(2), zero, zero + 1, mb, 0.2, args)
    assert stats["policy_loss"].item() == pytest.approx(-6)
    assert loss.item() == pytest.approx(-6 + 0.5 * 0.8**2)


@pytest.mark.parametrize("advantage", [2.0, -3.0])
def test_spo_has_its_minimum_at_the_edge_of_the_clip_range(advantage, variant):
    """At a ratio of 1.2 where the advantage is positive, of 0.8 where it is not."""
    module, _ = variant("spo")
    ratios = torch.linspace(0.5, 1.5, 1001, dtype=torch.float64)
    args = module.Args(norm_adv=False)
    zero = torch.zeros(1, dtype=torch.float64)
    mb = {"advantages": zero + advantage, "logprobs": zero, "returns": zero, "values": zero}
    losses = [module.ppo_loss(x.log()[None], zero, zero, mb, 0.2, args)[0].item() for x in ratios]
    best = ratios[int(np.argmin(losses))].item()
    assert best == pytest.approx(1.2 if advantage > 0 else 0.8, abs=1e-3)
    expected = [abs(advantage) / 0.4 * (r - 1) ** 2 - r * advantage for r in ratios.tolist()]
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


def test_weights_decay(variant):
    _, run = variant("weight_decay")
    (group,) = checkpoint_of(run())["optimizer"]["param_groups"]
    assert group["weight_decay"] == 1e-6


def test_the_rate_is_half_a_cosine(variant):
    _, run = variant("cosine_annealing")
    logged = [rate for _, rate in scalars_of(run(learning_rate=0.1))["charts/learning_rate"]]
    expected = [0.1 * (1 + math.cos(math.pi * i / 4)) / 2 for i in range(4)]
    assert logged == pytest.approx(expected)


def test_memories_of_the_variants(variant, monkeypatch):
    """What rollouts begin with, where episodes begin in training, and with what memory."""
    seen = {}
    for name in ("lstm_empty_rollouts", "lstm_no_reset", "lstm_stale_start"):
        module, run = variant(name)
        calls, evaluate_actions = [], module.Agent.evaluate_actions

        def watched(agent, obs, actions, *before, original=evaluate_actions, calls=calls):
            calls.append((torch.is_grad_enabled(), *(x.clone() for x in before)))
            return original(agent, obs, actions, *before)

        monkeypatch.setattr(module.Agent, "evaluate_actions", watched)
        run(env_id="MaskedCartPole-v1", num_envs=2)
        seen[name] = calls

    def total(name: str, training: bool, which: int) -> float:
        return sum(call[which].abs().sum().item() for call in seen[name] if call[0] == training)

    resets = {name: sum(c[1][1:].sum().item() for c in calls) for name, calls in seen.items()}
    assert total("lstm_empty_rollouts", False, 2) == 0 < total("lstm_stale_start", False, 2)
    assert resets["lstm_no_reset"] == 0 < resets["lstm_stale_start"]
    assert total("lstm_stale_start", True, 2) == 0 < total("lstm_no_reset", True, 2)


def test_continuous_lstm_remembers_as_ppo_lstm_does(variant):
    """By the same lines, but for the head; and every ratio is 1 while the weights stay."""
    module, run = variant("continuous_lstm")
    text = inspect.getsource(module.Agent.forward)
    for here, there in (("Means (T, n, A)", "Logits (T, n, A)"), ("actor_mean", "actor")):
        text = text.replace(here, there)
    assert text == inspect.getsource(ppo_lstm.Agent.forward)
    still = {"learning_rate": 1e-30, "ortho_init": False, "num_envs": 4, "num_minibatches": 2}
    run_dir = run(env_id="MaskedInvertedPendulum-v4", **still)
    assert len(episodes_of(run_dir)) > 4
    assert all(abs(kl) < 1e-6 for _, kl in scalars_of(run_dir)["losses/approx_kl_max"])


def test_json_of_the_config_names_the_patched_script(variant, monkeypatch):
    """By which results files tell a variant from its original."""
    module, run = variant("spo")
    monkeypatch.setattr(sys, "argv", [module.__file__, "--seed", "1"])
    run_dir = run(total_timesteps=64)
    config = json.loads((run_dir / "config.json").read_text())
    assert Path(config["command"].split()[0]).stem == "spo" and (run_dir / "spo.py").is_file()


def test_two_masks_are_those_of_the_acting_cell_and_of_the_attacked_one(variant):
    module, _ = variant("two_masks")
    args = module.Args(env_id="MicrortsRandomEnemyShapedReward3-v1", num_envs=1)
    original = SCRIPTS["ppo_microrts"].module
    (ours,), (theirs,) = (
        script.MicroRTS(args).reset(seed=1)[1]["action_mask"] for script in (original, module)
    )
    waiting = ours[:, 0]
    assert waiting.any() and (theirs[:, 0] == waiting).all()
    assert theirs[waiting, 1:-49].all() and not ours[waiting, 1:-49].all()
    assert (theirs[:, -49:] == ours[:, -49:]).all() and not theirs[~waiting].any()


def test_glorot_weights_are_those_of_the_network_and_not_of_the_heads(variant):
    """Uniform up to sqrt(6 / (inputs + outputs)); a convolution counts nine pixels of each."""
    module, run = variant("glorot_init")
    weights = checkpoint_of(run(learning_rate=1e-38))["agent"]
    for name, weight in weights.items():
        if name.endswith("bias"):
            assert weight.abs().max() < 1e-30
        elif name.startswith("network"):
            bound = math.sqrt(6 / (sum(weight.shape[:2]) * weight[0, 0].numel()))
            assert 0.95 * bound < weight.abs().max() <= bound * (1 + 1e-6)
            assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert weights["actor.weight"].norm(dim=1).numpy() == pytest.approx(0.01, rel=1e-4)


# -- broken/: the check that docs/broken.md names; True where all is well --
BROKEN = [name for name, patch in PATCHES.items() if patch.parent.name == "broken"]
BROKEN += ["lstm_no_reset"]


def column(*x: float) -> np.ndarray:
    return np.array(x, float)[:, None]


def policy_loss(module, ratios, advantages, entropy=0.0) -> float:
    """PPO's loss without that of the value, on samples with these ratios and advantages."""
    ratios, advantages = (torch.tensor(x, dtype=torch.float64) for x in (ratios, advantages))
    zeros = torch.zeros_like(ratios)
    mb = {"advantages": advantages, "logprobs": zeros, "values": zeros, "returns": zeros}
    args = module.Args(norm_adv=False, ent_coef=0.5)
    return module.ppo_loss(ratios.log(), zeros + entropy, zeros, mb, 0.2, args)[0].item()


def gae_keeps_episodes_apart(module, run, spy) -> bool:
    """The rewards of an episode are in no advantage of the one before it."""
    zeros, ends = column(0, 0, 0), column(1, 0, 0)
    advantages = module.gae(column(1, 5, 5), zeros, zeros, ends, ends, 1.0, 1.0)
    return advantages.tolist() == [[1], [10], [5]]


def time_limits_terminate_nothing(module, run, spy) -> bool:
    calls = spy(module, "gae")
    run(env_id=short_cart_pole())
    return not any(terminations.any() for (_, _, _, terminations, *_), _ in calls)


def values_have_the_shape_of_returns(module, run, spy) -> bool:
    calls = spy(module, "ppo_loss")
    run()
    return all(value.shape == mb["returns"].shape for (_, _, value, mb, *_), _ in calls)


def loss_is_the_mean_over_samples(module, run, spy) -> bool:
    """Of advantage times clipped ratio, 1.2 and -1."""
    return policy_loss(module, [2.0, 1.0], [1.0, -1.0]) == pytest.approx(-(1.2 - 1) / 2)


def returns_are_advantages_plus_values(module, run, spy) -> bool:
    """Advantages as `gae` gave them."""
    advantages, losses = spy(module, "gae"), spy(module, "ppo_loss")
    run(num_minibatches=1)
    mb, expected = losses[0][0][3], advantages[0][1]
    found = (mb["returns"] - mb["values"]).sort()[0].numpy()
    return np.allclose(found, np.sort(expected.ravel()), atol=1e-5)


def ratios_leave_one(module, run, spy) -> bool:
    """After a step of a large learning rate."""
    return scalars_of(run(learning_rate=0.1))["losses/approx_kl_max"][0][1] > 0


def entropy_lowers_the_loss(module, run, spy) -> bool:
    return policy_loss(module, [1.0], [0.0], entropy=1.0) < policy_loss(module, [1.0], [0.0])


def large_weights_make_a_sure_policy(module, run, spy) -> bool:
    args = module.Args()
    env = module.make_env(args)
    torch.manual_seed(0)
    agent = module.Agent(env.observation_space, env.action_space, args)
    with torch.no_grad():
        agent.actor[4].weight *= 1e5
    _, entropy, _ = agent.evaluate_actions(torch.randn(99, 4), torch.zeros(99))
    return entropy.min().item() < 0.01


def minibatches_have_gradients_of_their_own(module, run, spy) -> bool:
    """Those of two halves have the mean of the whole, while the weights stay."""
    flags = {"learning_rate": 1e-30, "update_epochs": 1, "norm_adv": False, "max_grad_norm": 0.0}
    found = []

    def keep(optimizer, *_):
        found.append(flat(weight.grad for weight in optimizer.param_groups[0]["params"]))

    hook = register_optimizer_step_pre_hook(keep)
    for number in (1, 2):
        run(**flags, num_minibatches=number, total_timesteps=64)
    hook.remove()
    whole, first, second = found
    return torch.allclose((first + second) / 2, whole, rtol=1e-3, atol=1e-5)


def observations_differ(module, run, spy) -> bool:
    """Those of a rollout of two environments."""
    calls = spy(module.Agent, "evaluate_actions")
    run()
    return len(np.unique(calls[0][0][1].numpy(), axis=0)) > 2


def environments_begin_apart(module, run, spy) -> bool:
    calls = spy(module.Agent, "act")
    run()
    first, second = calls[0][0][1]
    return not torch.equal(first, second)


def evaluation_has_the_statistics_of_training(module, run, spy) -> bool:
    run_dir = run()
    calls = spy(module, "normalize_obs")
    module.evaluate(module.Args(env_id="InvertedPendulum-v4", eval_episodes=1), run_dir)
    mean = checkpoint_of(run_dir)["obs_rms"][0].numpy()
    return all(np.array_equal(rms.mean, mean) for (rms, *_), _ in calls)


def a_wide_policy_leaves_the_bounds(module, run, spy) -> bool:
    """Those of InvertedPendulum's actions are -3 and 3."""
    calls = spy(module.Agent, "evaluate_actions")
    run(init_log_std=3.0)
    return calls[0][0][2].abs().max().item() > 3


def training_sees_where_episodes_begin(module, run, spy) -> bool:
    calls = spy(module.Agent, "evaluate_actions")
    run()
    return calls[0][0][3][1:].any().item()


CHECKS = {
    "dones_shifted": gae_keeps_episodes_apart,
    "across_ends": gae_keeps_episodes_apart,
    "time_limit_terminates": time_limits_terminate_nothing,
    "value_shape": values_have_the_shape_of_returns,
    "advantage_shape": loss_is_the_mean_over_samples,
    "normalized_returns": returns_are_advantages_plus_values,
    "new_logprobs": ratios_leave_one,
    "entropy_sign": entropy_lowers_the_loss,
    "softmax_twice": large_weights_make_a_sure_policy,
    "gradients_add_up": minibatches_have_gradients_of_their_own,
    "obs_by_reference": observations_differ,
    "one_seed": environments_begin_apart,
    "normalizer_not_loaded": evaluation_has_the_statistics_of_training,
    "clipped_action_stored": a_wide_policy_leaves_the_bounds,
    "lstm_no_reset": training_sees_where_episodes_begin,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_check_catches_the_mistake_and_lets_the_script_pass(name, variant, spy):
    row = SCRIPTS[patches.original_of(PATCHES[name]).removesuffix(".py")]

    def original(**changes) -> Path:
        return Path(row.module.train(row.module.Args(**row.tiny | changes))["run_dir"]).resolve()

    assert CHECKS[name](row.module, original, spy)
    assert not CHECKS[name](*variant(name), spy)


def test_the_page_has_an_entry_and_a_check_for_each_mistake():
    text = (ROOT / "docs" / "broken.md").read_text()
    assert re.findall(r"(?m)^### `(\w+)`", text) == re.findall(r"<!-- report:broken_(\w+)", text)
    assert sorted(re.findall(r"(?m)^### `(\w+)`", text)) == sorted(BROKEN) == sorted(CHECKS)
    assert all(f"`{check.__name__}`" in text for check in CHECKS.values())
