"""What training does: rollouts, updates, ends of episodes, compilation, logs, when it stops."""

import numpy as np
import pytest
import torch
from conftest import Scripted, run_tiny, tiny
from harness import known, some, train
from registry import SCRIPTS
from watch import checkpoint_of, episodes_of, flat, scalars_of, weights_of

import ppo
import ppo_continuous_mujoco as mujoco

REAL = {ppo: {"env_id": "CartPole-v1"}, mujoco: {"env_id": "Hopper-v4"}}


def rollouts_of(evaluated: list) -> list:
    """Of the calls of Agent.evaluate_actions those with a whole rollout, which has 32 samples."""
    return [call for call in evaluated if len(call[0][1]) == 32]


# -- the rollout --
def test_ppo_what_is_drawn_is_played_and_stored(spy):
    """At each step, beside the observation at which it was drawn. The actions are 2, 3 and 4."""
    acts, evaluated = spy(ppo.Agent, "act"), spy(ppo.Agent, "evaluate_actions")
    ppo.train(tiny(ppo, num_envs=1, num_steps=32, ortho_init=False))
    obs, drawn = (torch.cat(x) for x in zip(*((inputs[1], action) for inputs, action in acts)))
    rollouts = [inputs for inputs, _ in rollouts_of(evaluated)]
    assert torch.equal(torch.cat([seen for _, seen, _ in rollouts]), obs)
    assert torch.equal(torch.cat([actions for *_, actions in rollouts]), drawn)
    assert [int(action) - 2 for action in Scripted.actions] == drawn.tolist()
    assert len(obs) == 64 and set(drawn.tolist()) == {0, 1, 2}


def test_mujoco_what_is_drawn_is_stored(spy):
    """With little noise: the mean at the observation beside it."""
    evaluated = spy(mujoco.Agent, "evaluate_actions")
    flags = {"env_id": "Hopper-v4", "ortho_init": False, "learning_rate": 1e-30}
    run_tiny(mujoco, init_log_std=-8.0, **flags)
    assert len(rollouts_of(evaluated)) == 2
    for (agent, obs, actions), _ in rollouts_of(evaluated):
        means = agent.actor_mean(obs).detach()
        torch.testing.assert_close(actions, means, rtol=0, atol=2e-3)
        assert torch.pdist(means).median() > 0.02  # hardly any could stand for another


def test_mujoco_what_the_environment_gets_and_what_is_stored(spy):
    low, high = Scripted.action_space.low, Scripted.action_space.high
    functions = {
        "clip_actions": lambda stored: np.minimum(np.maximum(stored, low), high),
        "squash_actions": lambda stored: (low + high) / 2 + (high - low) / 2 * np.tanh(stored),
        "scale_actions": lambda stored: (low + high) / 2 + (high - low) / 2 * stored,
        "neither": lambda stored: stored,
    }
    evaluated = spy(mujoco.Agent, "evaluate_actions")
    for name, function in functions.items():
        Scripted.actions.clear()
        switches = {switch: switch == name for switch in functions if switch != "neither"}
        run_tiny(mujoco, init_log_std=1.0, total_timesteps=32, **switches)
        (*_, stored), _ = rollouts_of(evaluated)[-1]
        stored = stored.numpy()
        np.testing.assert_allclose(Scripted.actions, function(stored), atol=1e-5)
        assert (np.abs(stored) > 3).any()  # far outside the bounds


# -- the update --
def test_every_sample_once_an_epoch_in_another_order(script, spy):
    """A minibatch holds whole rows: what was seen, done and computed at the same moment."""
    evaluated, gae_calls = spy(script.Agent, "evaluate_actions"), spy(script, "gae")
    losses, orders = spy(script, "ppo_loss"), []
    run_tiny(script, update_epochs=3, num_steps=16, total_timesteps=64, **REAL[script])
    rollouts = zip(rollouts_of(evaluated), gae_calls, strict=True)
    for i, (((_, obs, actions), (logprobs, _, values)), (_, advantages)) in enumerate(rollouts):
        advantages = torch.from_numpy(advantages).flatten()
        rows = {"obs": obs, "actions": actions, "logprobs": logprobs, "values": values}
        rows |= {"advantages": advantages, "returns": advantages + values}
        row_of = {tuple(row): i for i, row in enumerate(obs.tolist())}
        assert len(row_of) == 32  # no observation twice
        for epoch in range(3 * i, 3 * i + 3):
            minibatches = [inputs[3] for inputs, _ in losses[4 * epoch : 4 * epoch + 4]]
            assert [len(mb["obs"]) for mb in minibatches] == [8] * 4
            order = [row_of[tuple(row)] for mb in minibatches for row in mb["obs"].tolist()]
            for name, column in rows.items():
                together = torch.cat([mb[name] for mb in minibatches])
                torch.testing.assert_close(together, column[order], msg=name)
            orders.append(tuple(order))
    assert all(sorted(order) == list(range(32)) for order in orders)
    assert len({*orders, tuple(range(32))}) == 7


# -- ends of episodes --
def test_mujoco_last_observations_are_normalized_too(spy):
    evaluated, normalized = spy(mujoco.Agent, "evaluate_actions"), spy(mujoco, "normalize_obs")
    gae_calls = spy(mujoco, "gae")
    run_tiny(mujoco, env_id="Truncating-v0", total_timesteps=32, ortho_init=False)
    last = np.stack([result for inputs, result in normalized if inputs[1].ndim == 1])
    [((_, _, next_values, terminations, dones, *_), _)] = gae_calls
    assert len(last) == dones.sum() == 6 and not terminations.any()
    assert len(np.unique(last, axis=0)) > 2
    (agent, *_), _ = evaluated[0]
    values = agent.get_value(torch.from_numpy(last)).detach().numpy()
    np.testing.assert_allclose(next_values[dones == 1], values, atol=1e-6)


# -- compilation --
@pytest.mark.e2e
@some(row for row in SCRIPTS.values() if hasattr(row.module.Args, "compile"))
def test_compiled_training_is_eager_training(script, capsys):
    """Annealed values are shown to the same graph. No step is made that eager training leaves out.

    At the default learning rate, and with Adam's small epsilon, rounding would grow.
    """
    flags = {"learning_rate": 1e-4, "adam_eps": 1e-3} | dict.fromkeys(script.annealing, True)
    flags |= known(script, init="torch", clip_coef=1e-3)  # which ratios leave
    still = {"learning_rate": 1e-30} | known(script, max_kl=1e-30)
    runs = [train(script, **flags | changes) for changes in (still, {}, {"compile": True})]
    out = capsys.readouterr().out
    assert out.count("compiling takes") == 1 and "eagerly" not in out
    ends = [checkpoint_of(run_dir) for run_dir in runs]
    start, eager, compiled = map(weights_of, runs)
    assert (compiled - eager).norm() < 1e-3 * (eager - start).norm() and (eager - start).norm() > 0
    steps = [[x["step"] for x in end["optimizer"]["state"].values()] for end in ends]
    assert steps[1] == steps[2]


@pytest.mark.e2e
def test_a_sweep_in_one_process_compiles_every_run(monkeypatch, capsys):
    """torch stops at eight versions of a function: ten runs with ten weights of the entropy."""
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, options, **how: compile(f, backend="eager", **how)
    )
    for k in range(10):
        run_tiny(mujoco, compile=True, ent_coef=0.01 * k)
    out = capsys.readouterr().out
    assert out.count("compiling takes") == 10 and "eagerly" not in out


def test_mujoco_what_does_not_compile_runs_eagerly_and_says_so(monkeypatch, capsys):
    """Whatever the reason, one line of it is shown, and the results are those of --no-compile."""
    eager = weights_of(run_tiny(mujoco)["run_dir"])
    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        raise RuntimeError("Python.h: no such file\nand a long story")

    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: fail)
    fallen_back = weights_of(run_tiny(mujoco, compile=True)["run_dir"])
    assert torch.equal(fallen_back, eager)
    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if "eagerly" in line]
    assert "Python.h: no such file" in line and "long story" not in out
    assert len(calls) == 1  # not once an iteration


# -- staggered resets --
def test_first_episodes_end_at_different_times_also_async():
    """HalfCheetah never falls: only the limit of 1,000 steps ends its episodes.

    A resumed run begins new ones, which would end together from there on.
    """
    flags = {"env_id": "HalfCheetah-v4", "num_envs": 4, "staggered_resets": True}
    flags |= {"num_steps": 650, "update_epochs": 1, "env_backend": "async", "anneal_lr": False}
    run_dir = run_tiny(mujoco, total_timesteps=4 * 1300, **flags)["run_dir"]
    run_tiny(mujoco, total_timesteps=4 * 1950, resume=str(run_dir), **flags)
    first = [(length, length) for length in (250, 500, 750, 1000)] + [(1250, 1000)]
    expected = first + [(1300 + length, length) for length in (250, 500)]
    episodes = [(step / 4, length) for step, _, length in episodes_of(run_dir)]
    assert episodes == expected


# -- what is logged --
def test_losses_are_means_over_all_minibatches(script, spy, optimizer_steps):
    """Of one epoch, too, if training stops after it. What is no whole batch is left out."""
    losses, gae_calls = spy(script, "ppo_loss"), spy(script, "gae")
    flags = {"total_timesteps": 120, "update_epochs": 3, "learning_rate": 0.01}
    for target_kl, minibatches in ((None, 12), (1e-9, 4)):
        losses.clear(), gae_calls.clear(), optimizer_steps.clear()
        result = run_tiny(script, target_kl=target_kl, max_grad_norm=0.0, **flags)
        scalars = scalars_of(result["run_dir"])
        steps = [
            stats | {"grad_norm": flat(grads).norm()}
            for (_, (_, stats)), (_, _, grads, _) in zip(losses, optimizer_steps, strict=True)
        ]
        for name in steps[0]:
            values = np.array([float(stats[name]) for stats in steps]).reshape(3, minibatches)
            at, logged = zip(*scalars[f"losses/{name}"])
            assert at == (32, 64, 96)
            np.testing.assert_allclose(logged, values.mean(1), rtol=1e-5, atol=1e-7, err_msg=name)
            if name == "approx_kl":
                largest = [value for _, value in scalars["losses/approx_kl_max"]]
                np.testing.assert_allclose(largest, values.max(1), rtol=1e-5, atol=1e-7)
        logged = [value for _, value in scalars["losses/explained_variance"]]
        for ((_, values, *_), advantages), value in zip(gae_calls, logged, strict=True):
            explained = 1 - advantages.var() / (advantages + values).var()
            assert value == pytest.approx(explained, abs=1e-4)
