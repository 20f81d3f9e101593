"""What training does: switches, ends of episodes, updates, compilation, logs, when it stops."""

import numpy as np
import pytest
import torch
from conftest import Scripted, tiny
from watch import checkpoint_of, episodes_of, flat, scalars_of

import ppo
import ppo_continuous_mujoco as mujoco
import ppo_microrts
import ppo_multidiscrete

REAL = {ppo: {"env_id": "CartPole-v1"}, mujoco: {"env_id": "Hopper-v4"}}


def weights_of(result: dict) -> torch.Tensor:
    return flat(checkpoint_of(result["run_dir"])["agent"].values())


# -- the rollout --
def test_ppo_what_is_drawn_is_played_and_stored(watch, spy):
    """At each step, beside the observation at which it was drawn. The actions are 2, 3 and 4."""
    acts, seen = spy(ppo.Agent, "act"), watch(ppo)
    ppo.train(tiny(ppo, num_envs=1, num_steps=32, ortho_init=False))
    obs, drawn = (torch.cat(x) for x in zip(*((inputs[1], action) for inputs, action in acts)))
    assert torch.equal(torch.cat([rollout.obs for rollout in seen.rollouts]), obs)
    assert torch.equal(torch.cat([rollout.actions for rollout in seen.rollouts]), drawn)
    assert [int(action) - 2 for action in Scripted.actions] == drawn.tolist()
    assert len(obs) == 64 and set(drawn.tolist()) == {0, 1, 2}


def test_mujoco_what_is_drawn_is_stored(run_mujoco, watch):
    """With little noise: the mean at the observation beside it."""
    seen = watch(mujoco)
    flags = {"env_id": "Hopper-v4", "ortho_init": False, "learning_rate": 1e-30}
    run_mujoco(init_log_std=-8.0, **flags)
    assert len(seen.rollouts) == 2
    for rollout in seen.rollouts:
        means = rollout.agent.actor_mean(rollout.obs).detach()
        torch.testing.assert_close(rollout.actions, means, rtol=0, atol=2e-3)
        assert torch.pdist(means).median() > 0.02  # hardly any could stand for another


def test_mujoco_what_the_environment_gets_and_what_is_stored(run_mujoco, watch):
    low, high = Scripted.action_space.low, Scripted.action_space.high
    functions = {
        "clip_actions": lambda stored: np.minimum(np.maximum(stored, low), high),
        "squash_actions": lambda stored: (low + high) / 2 + (high - low) / 2 * np.tanh(stored),
        "scale_actions": lambda stored: (low + high) / 2 + (high - low) / 2 * stored,
        "neither": lambda stored: stored,
    }
    seen = watch(mujoco)
    for name, function in functions.items():
        Scripted.actions.clear()
        switches = {switch: switch == name for switch in functions if switch != "neither"}
        run_mujoco(init_log_std=1.0, total_timesteps=32, **switches)
        stored = seen.rollouts[-1].actions.numpy()
        np.testing.assert_allclose(Scripted.actions, function(stored), atol=1e-5)
        assert (np.abs(stored) > 3).any()  # far outside the bounds


# -- switches --
# What may differ: terminations, obs, actions, env_actions, logprobs, values, next_values, rewards
# and advantages of the first rollout, the diagnostics of the first optimizer step, the gradient
# that Adam gets then, and the weights after the run. Observations and rewards of the scripted
# environment do not depend on the actions. At ratio 1 the policy loss is the mean advantage: 0 if
# normalized.
TARGETS = {"advantages", "value_loss", "grad", "weights"}
NETWORK = TARGETS | {"actions", "env_actions", "logprobs", "values", "next_values"}
SWITCHES = [
    ({"norm_adv": False}, {"policy_loss", "grad", "weights"}),
    ({"clip_vloss": False}, {"weights"}),
    ({"clip_coef": 0.05}, {"weights"}),
    ({"ent_coef": 0.5}, {"grad", "weights"}),
    ({"vf_coef": 2.0}, {"grad", "weights"}),
    ({"max_grad_norm": 0.0}, {"grad", "weights"}),
    ({"adam_eps": 1e-2}, {"weights"}),
    ({"learning_rate": 0.02}, {"weights"}),
    ({"anneal_lr": False}, {"weights"}),
    ({"anneal_clip": True}, {"weights"}),
    ({"target_kl": 1e-9}, {"weights"}),
    ({"update_epochs": 3}, {"weights"}),
    ({"num_minibatches": 2}, {"value_loss", "grad", "weights"}),
    ({"gae_lambda": 0.5}, TARGETS),
    ({"bootstrap_truncation": False}, TARGETS | {"terminations"}),
    ({"gamma": 0.9}, TARGETS),
    ({"torch_deterministic": False}, set()),
    # these draw other random numbers: other weights, other noise, other minibatches
    ({"ortho_init": False}, NETWORK),
    ({"shared_network": True}, NETWORK),
    ({"seed": 2}, NETWORK),
]
OWN = {ppo: []}
OWN[mujoco] = [
    ({"norm_reward": False}, TARGETS | {"rewards"}),
    ({"clip_reward": 0.0}, TARGETS | {"rewards"}),
    ({"clip_reward": 0.1}, TARGETS | {"rewards"}),
    ({"norm_obs": False}, NETWORK - {"logprobs"} | {"obs"}),
    ({"clip_obs": 0.1}, NETWORK - {"logprobs"} | {"obs"}),
    ({"activation": "relu"}, NETWORK - {"logprobs"}),
    ({"clip_actions": False}, {"env_actions"}),
    ({"scale_actions": True}, {"env_actions"}),
    # ratios stay the same; its entropy draws noise, so the minibatches are others
    ({"squash_actions": True}, {"env_actions", "logprobs", "entropy", *(TARGETS - {"advantages"})}),
    ({"init_log_std": -1.0}, {"actions", "env_actions", "logprobs", "entropy", "grad", "weights"}),
]
# An untrained softmax is almost uniform, unless torch initializes it; gamma scales rewards, too.
EXCEPTIONS = {(ppo, "ortho_init"): NETWORK | {"entropy"}, (mujoco, "gamma"): TARGETS | {"rewards"}}


def first_update(run_script, seen, changes) -> dict:
    """What enters the first optimizer step, what it reports, and the weights after the run."""
    seen.rollouts.clear()
    Scripted.actions.clear()
    result = run_script(env_id="Truncating-v0", **({"learning_rate": 0.01} | changes))
    rollout = seen.rollouts[0]
    names = "obs actions logprobs values next_values rewards terminations advantages".split()
    parts = {name: torch.as_tensor(getattr(rollout, name)) for name in names}
    parts["env_actions"] = torch.tensor(np.array(Scripted.actions[:32]))
    first = rollout.steps[0]
    parts |= {name: first.stats[name] for name in ("policy_loss", "value_loss", "entropy")}
    return parts | {"grad": first.grad, "weights": weights_of(result)}


def test_a_switch_changes_what_it_should_and_nothing_else(script, run_script, watch):
    seen = watch(script)
    base = first_update(run_script, seen, {})
    for changes, expected in SWITCHES + OWN[script]:
        other = first_update(run_script, seen, changes)
        different = set()
        for name, a in base.items():
            b = other[name]
            if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-4, atol=1e-6):
                different.add(name)
        [switch] = changes
        assert different == EXCEPTIONS.get((script, switch), expected), changes


# -- the update --
def test_every_sample_once_an_epoch_in_another_order(script, run_script, watch):
    """A minibatch holds whole rows: what was seen, done and computed at the same moment."""
    seen = watch(script)
    run_script(update_epochs=3, num_steps=16, total_timesteps=64, **REAL[script])
    orders = []
    for rollout in seen.rollouts:
        advantages = torch.from_numpy(rollout.advantages).flatten()
        rows = {name: getattr(rollout, name) for name in ("obs", "actions", "logprobs", "values")}
        rows |= {"advantages": advantages, "returns": advantages + rollout.values}
        row_of = {tuple(row): i for i, row in enumerate(rollout.obs.tolist())}
        assert len(row_of) == 32  # no observation twice
        for epoch in range(3):
            minibatches = [step.mb for step in rollout.steps[4 * epoch : 4 * epoch + 4]]
            assert [len(mb["obs"]) for mb in minibatches] == [8] * 4
            order = [row_of[tuple(row)] for mb in minibatches for row in mb["obs"].tolist()]
            for name, column in rows.items():
                together = torch.cat([mb[name] for mb in minibatches])
                torch.testing.assert_close(together, column[order], msg=name)
            orders.append(tuple(order))
    assert all(sorted(order) == list(range(32)) for order in orders)
    assert len({*orders, tuple(range(32))}) == 7


# -- ends of episodes --
@pytest.mark.parametrize("script", [ppo, mujoco, ppo_multidiscrete, ppo_microrts])
@pytest.mark.parametrize("env_id, on, off", [("Truncating-v0", 0, 6), ("Terminating-v0", 6, 6)])
def test_next_values_are_those_of_the_states_that_followed(
    env_id, on, off, script, run_script, watch
):
    """`on`, `off`: steps that cut the bootstrap with and without bootstrap_truncation."""
    seen = watch(script)
    flags = {"total_timesteps": 32, "ortho_init": False}
    flags |= {"norm_obs": False} if script is mujoco else {}
    for bootstrap, cut in ((True, on), (False, off)):
        seen.rollouts.clear()
        run_script(env_id=env_id, bootstrap_truncation=bootstrap, **flags)
        [rollout] = seen.rollouts
        assert np.flatnonzero(rollout.dones[:, 0]).tolist() == [4, 9, 14]
        assert rollout.terminations.sum() == cut and rollout.dones.sum() == 6
        following = torch.tensor([[t % 5 + 1.0, t // 5] for t in range(16)])
        truth = rollout.agent.get_value(following).detach().numpy()
        np.testing.assert_allclose(rollout.next_values, truth[:, None].repeat(2, 1), atol=1e-6)
        assert len(np.unique(truth.round(4))) == 16  # none could stand for another


def test_mujoco_last_observations_are_normalized_too(run_mujoco, watch, spy):
    seen, normalized = watch(mujoco), spy(mujoco, "normalize_obs")
    run_mujoco(env_id="Truncating-v0", total_timesteps=32, ortho_init=False)
    last = np.stack([result for inputs, result in normalized if inputs[1].ndim == 1])
    [rollout] = seen.rollouts
    assert len(last) == rollout.dones.sum() == 6 and not rollout.terminations.any()
    assert len(np.unique(last, axis=0)) > 2
    values = rollout.agent.get_value(torch.from_numpy(last)).detach().numpy()
    np.testing.assert_allclose(rollout.next_values[rollout.dones == 1], values, atol=1e-6)


# -- compilation --
COMPILED = {"env_id": "Hopper-v4", "num_steps": 64, "total_timesteps": 256, "num_minibatches": 4}
COMPILED |= {"learning_rate": 1e-3, "ent_coef": 0.01, "anneal_clip": True}


@pytest.mark.e2e
def test_mujoco_compiled_training_is_eager_training(run_mujoco, capsys, watch):
    """Two iterations on Hopper; the second shows the annealed values to the same graph."""
    results = [run_mujoco(compile=compile, **COMPILED) for compile in (False, True)]
    out = capsys.readouterr().out
    assert out.count("compiling takes") == 1 and "eagerly" not in out
    eager, compiled = map(weights_of, results)
    start = weights_of(run_mujoco(**COMPILED | {"learning_rate": 1e-30, "total_timesteps": 128}))
    moved, differ = (eager - start).abs(), (compiled - eager).abs()
    assert moved.max() > 5e-3 and moved.mean() > 1e-3
    assert differ.max() < 1e-4 and differ.mean() < 1e-6


@pytest.mark.e2e
def test_a_sweep_in_one_process_compiles_every_run(run_mujoco, monkeypatch, capsys):
    """torch stops at eight versions of a function: ten runs with ten weights of the entropy."""
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, options, **how: compile(f, backend="eager", **how)
    )
    for k in range(10):
        run_mujoco(compile=True, ent_coef=0.01 * k)
    out = capsys.readouterr().out
    assert out.count("compiling takes") == 10 and "eagerly" not in out


def test_mujoco_what_does_not_compile_runs_eagerly_and_says_so(run_mujoco, monkeypatch, capsys):
    """Whatever the reason, one line of it is shown, and the results are those of --no-compile."""
    eager = weights_of(run_mujoco())
    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        raise RuntimeError("Python.h: no such file\nand a long story")

    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: fail)
    fallen_back = weights_of(run_mujoco(compile=True))
    assert torch.equal(fallen_back, eager)
    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if "eagerly" in line]
    assert "Python.h: no such file" in line and "long story" not in out
    assert len(calls) == 1  # not once an iteration


# -- staggered resets --
def test_first_episodes_end_at_different_times_also_async(run_mujoco):
    """HalfCheetah never falls: only the limit of 1,000 steps ends its episodes.

    A resumed run begins new ones, which would end together from there on.
    """
    flags = {"env_id": "HalfCheetah-v4", "num_envs": 4, "staggered_resets": True}
    flags |= {"num_steps": 650, "update_epochs": 1, "env_backend": "async", "anneal_lr": False}
    run_dir = run_mujoco(total_timesteps=4 * 1300, **flags)["run_dir"]
    run_mujoco(total_timesteps=4 * 1950, resume=str(run_dir), **flags)
    first = [(length, length) for length in (250, 500, 750, 1000)] + [(1250, 1000)]
    expected = first + [(1300 + length, length) for length in (250, 500)]
    episodes = [(step / 4, length) for step, _, length in episodes_of(run_dir)]
    assert episodes == expected


# -- what is logged --
def test_losses_are_means_over_all_minibatches(script, run_script, watch):
    """Of one epoch, too, if training stops after it. What is no whole batch is left out."""
    seen = watch(script)
    flags = {"total_timesteps": 120, "update_epochs": 3, "learning_rate": 0.01}
    for target_kl, minibatches in ((None, 12), (1e-9, 4)):
        seen.rollouts.clear()
        result = run_script(target_kl=target_kl, max_grad_norm=0.0, **flags)
        scalars = scalars_of(result["run_dir"])
        rows = [
            [step.stats | {"grad_norm": step.grad.norm()} for step in rollout.steps]
            for rollout in seen.rollouts
        ]
        for name in rows[0][0]:
            values = np.array([[float(stats[name]) for stats in row] for row in rows])
            assert values.shape == (3, minibatches)
            steps, logged = zip(*scalars[f"losses/{name}"])
            assert steps == (32, 64, 96)
            np.testing.assert_allclose(logged, values.mean(1), rtol=1e-5, atol=1e-7, err_msg=name)
            if name == "approx_kl":
                largest = [value for _, value in scalars["losses/approx_kl_max"]]
                np.testing.assert_allclose(largest, values.max(1), rtol=1e-5, atol=1e-7)
        for rollout, (_, logged) in zip(seen.rollouts, scalars["losses/explained_variance"]):
            returns = rollout.advantages + rollout.values.view(16, 2).numpy()
            explained = 1 - rollout.advantages.var() / returns.var()
            assert logged == pytest.approx(explained, abs=1e-4)
