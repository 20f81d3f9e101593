"""The patches of variants/: each fits its script, runs, and changes what it says."""

import inspect
import math
import re
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from harness import HAS_PROCGEN
from registry import ROOT, SCRIPTS, TINY
from torch.optim.optimizer import register_optimizer_step_pre_hook
from watch import checkpoint_of, episodes_of, flat, scalars_of, weights_of

sys.path.insert(0, str(ROOT / "benchmark"))

import patches  # noqa: E402
import results  # noqa: E402
from run import load  # noqa: E402

import ppo_lstm  # noqa: E402

# Its time is up after four steps, before it can fall
ENTRY = "gymnasium.envs.classic_control:CartPoleEnv"
gym.register("ShortCartPole-v0", ENTRY, max_episode_steps=4)
PATCHES = {patch.stem: patch for patch in sorted((ROOT / "variants").rglob("*.patch"))}
BROKEN = [name for name, patch in PATCHES.items() if patch.parent.name == "broken"]


@pytest.fixture
def variant(tmp_path):
    """`variant(name)`: the patched script as a module; `train(**changes)` runs it for a moment."""

    def make(name: str):
        if "procgen" in patches.original_of(PATCHES[name]) and not HAS_PROCGEN:
            pytest.skip("procgen-mirror is not installed")
        module = load(patches.patched(PATCHES[name], tmp_path / "patched"))
        tiny = SCRIPTS[patches.original_of(PATCHES[name]).removesuffix(".py")].tiny

        def run(**changes) -> Path:
            known = {field.name for field in fields(module.Args)}  # a patch may take one away
            given = {name: value for name, value in (tiny | changes).items() if name in known}
            return Path(module.train(module.Args(**given))["run_dir"]).resolve()

        return module, run

    return make


def train_original(patch: Path, **changes) -> Path:
    """A tiny run of the script that the patch changes."""
    row = SCRIPTS[patches.original_of(patch).removesuffix(".py")]
    return Path(row.module.train(row.module.Args(**row.tiny | changes))["run_dir"]).resolve()


def are_same(runs: list[Path]) -> bool:
    """Have the agents the same weights?"""
    return torch.equal(*map(weights_of, runs))


def policy_loss(module, ratios, advantages, entropy=0.0) -> float:
    """PPO's loss without that of the value, on samples with these ratios and advantages."""
    ratios, advantages = (torch.tensor(x, dtype=torch.float64) for x in (ratios, advantages))
    zeros = torch.zeros_like(ratios)
    mb = {"advantages": advantages, "logprobs": zeros, "values": zeros, "returns": zeros}
    args = module.Args(norm_adv=False, ent_coef=0.5)
    return module.ppo_loss(ratios.log(), zeros + entropy, zeros, mb, 0.2, args)[0].item()


# -- all --
@pytest.mark.parametrize("name", sorted({*PATCHES} - {*BROKEN}))
def test_a_patch_fits_its_script_trains_and_differs(name, variant):
    """Three iterations of it and of the original, with the same seed."""
    patch = PATCHES[name]
    module, run = variant(name)
    lines = Path(module.__file__).read_text().splitlines()
    assert lines[-1] == f"# changed by {patch.name}, digest {patches.digest_of(patch)}"
    assert max(map(len, lines)) <= 100
    small = {"total_timesteps": 192, "num_envs": 4, "num_steps": 16}
    if name == "staggered_resets":
        small |= {"env_id": "HalfCheetah-v4", "num_steps": 260, "total_timesteps": 3120}
    if name == "two_masks":
        small |= {"env_id": "MicrortsRandomEnemyShapedReward3-v1"}
    if name.endswith("no_ratio_clip"):
        small |= {"learning_rate": 0.02}  # so that ratios leave the range
    runs = [run(**small), train_original(patch, **small)]
    assert [checkpoint_of(run_dir)["iteration"] for run_dir in runs] == [3, 3]
    alone = name.startswith("multigpu")  # one process is the original
    assert are_same(runs) == alone


def test_patches_say_what_they_are_and_have_names_of_their_own():
    """Whatever their folders: runs and results are called by it."""
    assert len(PATCHES) == len([*(ROOT / "variants").rglob("*.patch")]) > 0
    for name, patch in PATCHES.items():
        why = patch.read_text().partition("\n--- ")[0]
        assert 60 < len(why) and all(len(line) <= 100 for line in why.splitlines()), name


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


def test_a_patch_that_does_not_fit_is_named(tmp_path, monkeypatch):
    """Nor is it taken back where its idea is in the script, as by `patch --batch`."""
    bad = tmp_path / "bad.patch"
    bad.write_text(PATCHES["spo"].read_text().replace("-    pg_loss1", "-    pg_loss9"))
    with pytest.raises(ValueError, match="bad.patch does not fit ppo_continuous_mujoco.py"):
        patches.patched(bad, tmp_path / "made")
    assert list((tmp_path / "made").iterdir()) == []
    changed = patches.patched(PATCHES["spo"], tmp_path)
    monkeypatch.setattr(patches, "ROOT", tmp_path)
    changed.rename(tmp_path / "ppo_continuous_mujoco.py")
    with pytest.raises(ValueError, match="does not fit"):
        patches.patched(PATCHES["spo"], tmp_path / "made")


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


# -- one by one; more of those of Implementation Matters: tests/test_equal.py --
def test_the_flag_for_staggered_resets_does_what_the_patch_does(variant):
    """So that figures of the one are those of the other."""
    _, run = variant("staggered_resets")
    small = {"env_id": "HalfCheetah-v4", "num_envs": 4, "num_steps": 260, "total_timesteps": 3120}
    runs = [
        run(**small),
        train_original(PATCHES["staggered_resets"], **small, staggered_resets=True),
    ]
    assert are_same(runs)
    assert episodes_of(runs[0]) == episodes_of(runs[1]) != []


def test_the_line_search_asks_for_a_tenth_of_the_gain(variant, monkeypatch):
    """Of the original authors' TRPO; the loss falls by 1 along the whole step."""
    module, _ = variant("trpo_implementation_matters")
    params, stats = torch.zeros(1), {"approx_kl": torch.tensor(0.0)}
    monkeypatch.setattr(module, "trpo_loss", lambda *_: (-params.sum(), stats))
    for gain, fraction in ((1, 1), (9, 1), (11, 0)):
        params.zero_()
        inputs = None, params, torch.ones(1), gain, None, None, 1.0, module.Args()
        assert module.line_search(*inputs)["step_fraction"] == params == fraction


def test_optimizers_of_the_variants(variant):
    """Adam counts the four minibatches of the last iteration alone, weights decay, and the rate is
    half a cosine.
    """
    _, run = variant("adam_reset")
    (state,) = checkpoint_of(run())["optimizer"]["state"].values()
    assert state["step"] == TINY["num_minibatches"] * TINY["update_epochs"]
    assert state["exp_avg"].norm() > 0
    _, run = variant("weight_decay")
    assert checkpoint_of(run())["optimizer"]["param_groups"][0]["weight_decay"] == 1e-6
    _, run = variant("cosine_annealing")
    logged = [rate for _, rate in scalars_of(run(learning_rate=0.1))["charts/learning_rate"]]
    assert logged == pytest.approx([0.05 * (1 + math.cos(math.pi * i / 4)) for i in range(4)])


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
    ratios = np.linspace(0.5, 1.5, 1001)
    losses = [policy_loss(module, [ratio], [advantage]) for ratio in ratios]
    assert ratios[np.argmin(losses)] == pytest.approx(1.2 if advantage > 0 else 0.8, abs=1e-3)
    assert losses[500] == pytest.approx(-advantage)  # at a ratio of 1


def test_memories_of_the_variants(variant, spy):
    """What rollouts begin with, where episodes begin in training, and with what memory."""
    seen = {}
    for name in ("lstm_empty_rollouts", "lstm_no_reset", "lstm_stale_start"):
        module, run = variant(name)
        calls = spy(module.Agent, "evaluate_actions")
        run(env_id="MaskedCartPole-v1", num_envs=2)
        seen[name] = [inputs for inputs, _ in calls]

    def memory(name: str, n: int) -> float:
        """Of rollouts of two environments, or of minibatches of one."""
        return sum(x.abs().sum().item() for _, obs, *_, x in seen[name] if obs.shape[1] == n)

    resets = {name: sum(x[1:].sum() for *_, x, _ in calls) for name, calls in seen.items()}
    assert memory("lstm_empty_rollouts", 2) == 0 < memory("lstm_stale_start", 2)
    assert resets["lstm_no_reset"] == 0 < resets["lstm_stale_start"]
    assert memory("lstm_stale_start", 1) == 0 < memory("lstm_no_reset", 1)


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
def gae_keeps_episodes_apart(module, run, spy) -> bool:
    """The rewards of an episode are in no advantage of the one before it."""
    rewards, ends, zeros = np.array([[1.0, 5, 5], [1, 0, 0], [0, 0, 0]])[..., None]
    advantages = module.gae(rewards, zeros, zeros, ends, ends, 1.0, 1.0)
    return advantages.tolist() == [[1], [10], [5]]


def time_limits_terminate_nothing(module, run, spy) -> bool:
    calls = spy(module, "gae")
    run(env_id="ShortCartPole-v0")
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
    return len(calls) > 0 and all(np.array_equal(rms.mean, mean) for (rms, *_), _ in calls)


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


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_catches_the_mistake_and_lets_the_script_pass(name, variant, spy):
    original = SCRIPTS[patches.original_of(PATCHES[name]).removesuffix(".py")].module
    assert CHECKS[name](original, partial(train_original, PATCHES[name]), spy)
    assert not CHECKS[name](*variant(name), spy)


def test_the_page_has_an_entry_and_a_check_for_each_mistake():
    text = (ROOT / "docs" / "broken.md").read_text()
    assert re.findall(r"(?m)^### `(\w+)`", text) == re.findall(r"<!-- report:broken_(\w+)", text)
    assert sorted(re.findall(r"(?m)^### `(\w+)`", text)) == sorted(CHECKS)
    assert sorted(CHECKS) == sorted([*BROKEN, "lstm_no_reset"])
    assert all(f"`{check.__name__}`" in text for check in CHECKS.values())
