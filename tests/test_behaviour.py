"""What training does: every switch, both reset conventions, all backends, what it logs and when it stops."""

import copy
import multiprocessing
import signal
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_continuous_mujoco as ppo

STATS = "policy_loss value_loss entropy old_approx_kl approx_kl clipfrac grad_norm".split()


def stats_of(updates: list) -> np.ndarray:
    """The diagnostics that each call of `update` returned, (calls, 7)."""
    return np.array([result.numpy() for _, result in updates])


def checkpoint_of(result: dict) -> dict:
    return torch.load(result["run_dir"] / "checkpoint.pt", weights_only=True)


def weights_of(result: dict) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in checkpoint_of(result)["agent"].values()])


def scalars_of(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every TensorBoard scalar by tag."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# -- the first minibatch --
VARIANTS = {
    "plain": {},
    "squashed": {"squash_actions": True},
    "shared": {"shared_network": True},
    "recompute": {"recompute_advantages": True},
    "relu": {"activation": "relu", "norm_obs": False},
    "not clipped": {"clip_actions": False, "init_log_std": 1.0},
    "time limit": {"env_id": "Truncating-v0"},
    "mujoco": {"env_id": "Hopper-v4", "num_steps": 64, "total_timesteps": 128},
    "async": {"env_backend": "async"},
    "envpool": {"env_backend": "envpool", "env_id": "Hopper-v4", "num_steps": 64, "total_timesteps": 128},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_first_minibatch_has_ratio_one(variant, run, spy):
    if variant == "envpool":
        pytest.importorskip("envpool")
    updates = spy(ppo, "update")
    run(ortho_init=False, learning_rate=0.01, **VARIANTS[variant])
    first, second = (dict(zip(STATS, stats)) for stats in stats_of(updates)[:2])
    assert abs(first["old_approx_kl"]) < 1e-6 and abs(first["approx_kl"]) < 1e-6 and first["clipfrac"] == 0
    assert second["approx_kl"] > 1e-5  # one step later the policy has moved


@pytest.mark.parametrize("backend", ["sync", "async", "envpool"])
def test_stored_actions_belong_to_the_observations_beside_them(backend, run, spy):
    """With a deviation of exp(-20) the stored action is the policy's mean at the stored observation."""
    if backend == "envpool":
        pytest.importorskip("envpool")
    updates = spy(ppo, "update")
    few = {"num_minibatches": 1, "update_epochs": 1, "num_steps": 64, "total_timesteps": 128}
    run(env_id="Hopper-v4", env_backend=backend, init_log_std=-20.0, ortho_init=False, **few)
    (agent, _, batch, *_), _ = updates[0]
    mean = agent.actor_mean(batch["obs"]).detach()
    torch.testing.assert_close(batch["actions"], mean, rtol=0, atol=1e-6)
    assert mean.std(0).min() > 1e-3  # neighbours differ by more than the tolerance


def test_action_noise_is_standard_normal_and_scaled_by_the_deviation(run, spy):
    updates = spy(ppo, "update")
    run(num_steps=2048, total_timesteps=8192, init_log_std=-1.0, num_minibatches=1, update_epochs=1)
    noise = []
    for (agent, _, batch, *_), _ in updates:
        std = agent.actor_logstd.detach().exp()
        noise.append((batch["actions"] - agent.actor_mean(batch["obs"]).detach()) / std)
    z = torch.cat(noise).flatten()
    assert len(z) == 16384 and abs(z.mean()) < 4 / len(z) ** 0.5 and abs(z.var() - 1) < 4 * (2 / len(z)) ** 0.5
    assert not torch.isclose(noise[0], noise[1]).any(1).all()  # every rollout draws its own


# -- switches --
# What may differ: `valid terminations obs actions env_actions logprobs values rewards advantages returns` of the first
# rollout, the diagnostics of the first optimizer step and the weights after the run. Observations and rewards of the
# scripted environment do not depend on the actions. At ratio 1 the policy loss is the mean advantage: 0 if normalized.
TARGETS = {"advantages", "returns", "value_loss", "grad_norm", "weights"}
NETWORK = TARGETS | {"actions", "env_actions", "values"}
SWITCHES = [
    ({"norm_adv": False}, {"policy_loss", "grad_norm", "weights"}),
    ({"clip_vloss": False}, {"weights"}),
    ({"clip_coef": 0.05}, {"weights"}),
    ({"ent_coef": 0.5}, {"grad_norm", "weights"}),
    ({"vf_coef": 2.0}, {"grad_norm", "weights"}),
    ({"max_grad_norm": 0.0}, {"weights"}),
    ({"adam_eps": 1e-2}, {"weights"}),
    ({"learning_rate": 0.02}, {"weights"}),
    ({"anneal_lr": False}, {"weights"}),
    ({"anneal_clip": True}, {"weights"}),
    ({"target_kl": 1e-9}, {"weights"}),
    ({"update_epochs": 3}, {"weights"}),
    ({"recompute_advantages": True}, {"weights"}),
    ({"gae_lambda": 0.5}, TARGETS),
    ({"bootstrap_truncation": False}, TARGETS | {"terminations"}),
    ({"gamma": 0.9}, TARGETS | {"rewards"}),
    ({"norm_reward": False}, TARGETS | {"rewards"}),
    ({"clip_reward": 0.0}, TARGETS | {"rewards"}),
    ({"clip_reward": 0.1}, TARGETS | {"rewards"}),
    ({"norm_obs": False}, NETWORK | {"obs"}),
    ({"clip_obs": 0.1}, NETWORK | {"obs"}),
    ({"activation": "relu"}, NETWORK),
    ({"clip_actions": False}, {"env_actions"}),
    ({"scale_actions": True}, {"env_actions"}),
    ({"init_log_std": -1.0}, {"actions", "env_actions", "logprobs", "entropy", "grad_norm", "weights"}),
    # these draw other random numbers, so that the minibatches (squash_actions) or the noise differ as well
    ({"squash_actions": True}, {"env_actions", "logprobs", "entropy", "value_loss", "grad_norm", "weights"}),
    ({"ortho_init": False}, NETWORK | {"logprobs"}),
    ({"shared_network": True}, NETWORK | {"logprobs"}),
    ({"seed": 2}, NETWORK | {"logprobs"}),
    ({"torch_deterministic": False}, set()),
]


def first_update(run, monkeypatch, changes) -> dict:
    """All that enters the first optimizer step, what it reports, and the weights at the end of the run."""
    with monkeypatch.context() as patch:
        seen, update, gae, env_action = {}, ppo.update, ppo.gae, ppo.Agent.env_action

        def watch_update(agent, adam, batch, *rest):
            before = copy.deepcopy(batch)
            stats = update(agent, adam, batch, *rest)
            for name, value in (before | dict(zip(STATS, stats))).items():
                seen.setdefault(name, value)
            return stats

        def watch_gae(rewards, values, next_values, terminations, *rest):
            seen.setdefault("rewards", torch.tensor(rewards))
            seen.setdefault("terminations", torch.tensor(terminations))
            return gae(rewards, values, next_values, terminations, *rest)

        def watch_env_action(agent, action):
            result = env_action(agent, action)
            seen.setdefault("env_actions", []).append(torch.tensor(result))
            return result

        patch.setattr(ppo, "update", watch_update)
        patch.setattr(ppo, "gae", watch_gae)
        patch.setattr(ppo.Agent, "env_action", watch_env_action)
        result = run(env_id="Truncating-v0", **({"learning_rate": 0.05} | changes))
    seen["env_actions"] = torch.stack(seen["env_actions"][:16])
    return seen | {"weights": weights_of(result)}


@pytest.mark.parametrize("changes, expected", SWITCHES, ids=[str(changes) for changes, _ in SWITCHES])
def test_a_switch_changes_what_it_should_and_nothing_else(changes, expected, run, monkeypatch):
    base, other = (first_update(run, monkeypatch, c) for c in ({}, changes))
    different = set()
    for name in base.keys() & other.keys():
        a, b = base[name], other[name]
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-4, atol=1e-6):
            different.add(name)
    assert different - {"old_approx_kl", "approx_kl", "noise"} == expected
    assert base.keys() ^ other.keys() == ({"noise"} if "squash_actions" in changes else set())


def test_value_clipping_shows_after_the_first_step_and_leaves_the_policy_loss(run, spy):
    """Same rollout and, while gradients are not clipped, same policy: only the value loss and its gradient differ."""
    updates = spy(ppo, "update")
    for clip_vloss in (True, False):
        run(clip_vloss=clip_vloss, clip_coef=0.01, max_grad_norm=0.0, learning_rate=0.01, total_timesteps=32)
    clipped, unclipped = stats_of(updates).reshape(2, 8, 7)
    np.testing.assert_allclose(clipped[:, 0], unclipped[:, 0], rtol=1e-4, atol=1e-6)
    assert clipped[0, 1] == pytest.approx(unclipped[0, 1])
    assert (clipped[2:, 1] > unclipped[2:, 1] + 1e-4).any()


def test_first_normalized_advantages_have_mean_zero(script, spy):
    ppo, run = script
    updates = spy(ppo, "update")
    run(norm_adv=True)
    assert abs(updates[0][1][0]) < 1e-6  # -mean(A) at ratio 1
    updates.clear()
    run(norm_adv=False)
    (_, _, batch, mb_inds, *_), stats = updates[0]
    assert stats[0].item() == pytest.approx(-batch["advantages"][mb_inds].mean().item(), rel=1e-5)


@pytest.mark.parametrize("anneal", [True, False])
def test_annealing_starts_full_and_ends_at_one_iteration_above_zero(anneal, script, spy):
    ppo, run = script
    updates = spy(ppo, "update")
    result = run(anneal_lr=anneal, anneal_clip=anneal, learning_rate=0.1, clip_coef=0.2, total_timesteps=4 * 32)
    lr, clip = np.array([[a[4].item(), a[5].item()] for a, _ in updates]).reshape(4, 8, 2).transpose(2, 0, 1)
    fractions = np.array([1, 0.75, 0.5, 0.25] if anneal else [1, 1, 1, 1])[:, None]
    np.testing.assert_allclose(lr, np.broadcast_to(0.1 * fractions, lr.shape), rtol=1e-6)
    np.testing.assert_allclose(clip, np.broadcast_to(0.2 * fractions, clip.shape), rtol=1e-6)
    logged = [value for _, value in scalars_of(result["run_dir"])["charts/learning_rate"]]
    np.testing.assert_allclose(logged, 0.1 * fractions[:, 0], rtol=1e-6)


@pytest.mark.parametrize("target_kl, epochs", [(1e-9, 1), (1e9, 5), (None, 5)])
def test_target_kl_ends_the_epochs(target_kl, epochs, script, spy):
    ppo, run = script
    updates = spy(ppo, "update")
    run(target_kl=target_kl, update_epochs=5, learning_rate=0.01)
    assert len(updates) == 2 * epochs * 4


def test_target_kl_looks_at_the_mean_of_an_epoch(script, spy):
    """A target between the means of epochs 2 and 3 stops after epoch 3, whatever its last minibatch says."""
    ppo, run = script
    updates = spy(ppo, "update")
    run(update_epochs=6, learning_rate=0.002, total_timesteps=32)
    means = stats_of(updates)[:, 4].reshape(6, 4).mean(1)
    assert means[0] < means[1] < means[2]
    updates.clear()
    run(update_epochs=6, learning_rate=0.002, total_timesteps=32, target_kl=float(means[1:3].mean()))
    assert len(updates) == 3 * 4


@pytest.mark.parametrize("max_grad_norm", [0.0, 1e-3])
def test_max_grad_norm_bounds_what_adam_sees(max_grad_norm, script, spy):
    """Adam's first moment after its first step is a tenth of the gradient; the logged norm is the unclipped one."""
    ppo, run = script
    updates = spy(ppo, "update")
    run(max_grad_norm=max_grad_norm)
    norm = updates[0][1][6].item()
    assert norm > 0.01
    first_moment = updates[1][0][1]["exp_avg"].norm().item()
    assert first_moment == pytest.approx(0.1 * (max_grad_norm or norm), rel=1e-2)


def test_every_sample_once_an_epoch_in_another_order(script, spy):
    ppo, run = script
    updates = spy(ppo, "update")
    run(update_epochs=3)
    epochs = np.array([arguments[3].numpy() for arguments, _ in updates]).reshape(6, 4 * 8)
    assert all(sorted(epoch) == list(range(32)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs} | {tuple(range(32))}) == 7


def test_recomputed_advantages_are_those_of_the_current_critic(run, spy):
    updates, gae_calls = spy(ppo, "update"), spy(ppo, "gae")
    run(recompute_advantages=True, update_epochs=3, total_timesteps=32, learning_rate=0.01)
    assert len(gae_calls) == 3
    for epoch in range(3):
        (agent, _, batch, *_), _ = updates[4 * epoch]
        torch.testing.assert_close(batch["values"], agent.get_value(batch["obs"]).detach(), atol=1e-6, rtol=0)
        torch.testing.assert_close(batch["returns"], batch["values"] + batch["advantages"])
    assert (updates[0][0][2]["values"] != updates[8][0][2]["values"]).all()
    assert (updates[0][0][2]["logprobs"] == updates[8][0][2]["logprobs"]).all()
    gae_calls.clear()
    run(recompute_advantages=False, update_epochs=3, total_timesteps=32)
    assert len(gae_calls) == 1


def test_squashed_entropy_draws_its_own_noise_every_epoch(run, spy):
    updates = spy(ppo, "update")
    run(squash_actions=True, update_epochs=2, total_timesteps=32)
    first, second = updates[0][0][2]["noise"], updates[4][0][2]["noise"]
    assert (first != second).all() and first.shape == updates[0][0][2]["actions"].shape


@pytest.mark.parametrize("env_id, on, off", [("Truncating-v0", 0, 6), ("Terminating-v0", 6, 6)])
def test_time_limits_bootstrap_from_the_last_observation(env_id, on, off, script, spy):
    """`on`, `off`: transitions of the rollout that cut the bootstrap with and without bootstrap_truncation."""
    ppo, run = script
    updates, gae_calls = spy(ppo, "update"), spy(ppo, "gae")
    for bootstrap, cut in ((True, on), (False, off)):
        updates.clear(), gae_calls.clear()
        run(env_id=env_id, bootstrap_truncation=bootstrap, norm_obs=False, total_timesteps=32, ortho_init=False)
        (rewards, values, next_values, terminations, dones, *_), _ = gae_calls[0]
        ends = np.flatnonzero(dones[:, 0])
        assert ends.tolist() == [4, 9, 14] and terminations.sum() == cut and dones.sum() == 6
        agent = updates[0][0][0]
        states = [[t % 5 + 1, t // 5] for t in range(16)]  # what really followed step t
        value = getattr(agent, "get_value", lambda obs: agent(obs)[1])
        truth = value(torch.tensor(states).float()).detach().numpy()
        compared = terminations[:, 0] == 0
        np.testing.assert_allclose(next_values[compared, 0], truth[compared], atol=1e-6)


def test_last_observations_are_normalized_too(script, spy):
    ppo, run = script
    updates, gae_calls, normalized = spy(ppo, "update"), spy(ppo, "gae"), spy(ppo, "normalize_obs")
    run(env_id="Truncating-v0", total_timesteps=32, ortho_init=False)
    last = np.stack([result for inputs, result in normalized if inputs[1].ndim == 1])
    (_, _, next_values, terminations, dones, *_), _ = gae_calls[0]
    assert len(last) == dones.sum() == 6 and not terminations.any() and len(np.unique(last, axis=0)) > 2
    agent = updates[0][0][0]
    value = getattr(agent, "get_value", lambda obs: agent(obs)[1])
    np.testing.assert_allclose(next_values[dones == 1], value(torch.from_numpy(last)).detach().numpy(), atol=1e-6)


def test_what_the_environment_gets_and_what_is_stored(run, spy, scripted):
    low, high = scripted.action_space.low, scripted.action_space.high
    functions = {
        "clip_actions": lambda stored: np.minimum(np.maximum(stored, low), high),
        "squash_actions": lambda stored: (low + high) / 2 + (high - low) / 2 * np.tanh(stored),
        "scale_actions": lambda stored: (low + high) / 2 + (high - low) / 2 * stored,
        "neither": lambda stored: stored,
    }
    updates = spy(ppo, "update")
    for name, function in functions.items():
        updates.clear(), scripted.actions.clear()
        switches = {switch: switch == name for switch in ("clip_actions", "squash_actions", "scale_actions")}
        run(init_log_std=1.0, total_timesteps=32, **switches)
        stored = updates[0][0][2]["actions"].numpy()
        np.testing.assert_allclose(scripted.actions, function(stored), atol=1e-5)
        assert (np.abs(stored) > 3).any()  # far outside the bounds


# -- determinism --
@pytest.mark.parametrize("env_id", ["Truncating-v0", "Hopper-v4"])
def test_same_seed_same_run_another_seed_another(env_id, run, read_episodes):
    big = {"env_id": env_id, "num_steps": 128, "total_timesteps": 512}
    one, two, other = (run(seed=seed, **big) for seed in (3, 3, 4))
    assert torch.equal(weights_of(one), weights_of(two)) and not torch.equal(weights_of(one), weights_of(other))
    episodes = [read_episodes(result["run_dir"]) for result in (one, two, other)]
    assert len(episodes[0]) > 5 and episodes[0] == episodes[1]
    assert env_id != "Hopper-v4" or episodes[0] != episodes[2]


@pytest.mark.parametrize("changes", [{}, {"squash_actions": True, "shared_network": True, "ent_coef": 0.01}])
def test_compiled_and_eager_updates_agree(changes, tiny_args):
    """20 steps from the same start, a tenth of the rows invalid."""
    size, args = 256, tiny_args(**changes)
    obs_space, action_space = gym.spaces.Box(-np.inf, np.inf, (11,)), gym.spaces.Box(-1, 1, (3,))
    torch.manual_seed(0)
    start = ppo.Agent(obs_space, action_space, args)
    batch = {"obs": torch.randn(size, 11), "actions": torch.randn(size, 3), "valid": (torch.rand(size) > 0.1).float()}
    batch |= {name: torch.randn(size) for name in ("advantages", "returns", "values")}
    if args.squash_actions:
        batch["noise"] = torch.randn(size, 3)
    with torch.no_grad():
        batch["logprobs"] = start.evaluate_actions(batch["obs"], batch["actions"], batch.get("noise"))[0]
    order = [torch.randperm(size)[:64] for _ in range(20)]
    [compiled] = ppo.compiled([ppo.update], torch.device("cpu"), [])
    assert compiled is not ppo.update
    results = []
    for update in (ppo.update, compiled):
        agent = copy.deepcopy(start)
        num_params = sum(p.numel() for p in agent.parameters())
        adam = {"exp_avg": torch.zeros(num_params), "exp_avg_sq": torch.zeros(num_params), "step": torch.zeros(())}
        lrs = [torch.tensor(3e-4 * (1 - i / 20)) for i in range(20)]
        stats = [update(agent, adam, batch, mb, lr, torch.tensor(0.2), args).clone() for mb, lr in zip(order, lrs)]
        results.append((torch.stack(stats), torch.cat([p.detach().flatten() for p in agent.parameters()])))
    (eager_stats, eager_weights), (compiled_stats, compiled_weights) = results
    torch.testing.assert_close(compiled_stats, eager_stats, rtol=1e-5, atol=1e-5)
    assert (compiled_weights - eager_weights).abs().max() <= 1e-4
    first = torch.cat([p.detach().flatten() for p in start.parameters()])
    assert (eager_weights - first).abs().max() > 1e-3


def test_without_a_compiler_the_update_runs_eagerly(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert ppo.compiled([ppo.update], torch.device("cpu"), []) == [ppo.update]
    assert "no C++ compiler" in capsys.readouterr().out


# -- backends --
def replay(args, actions: list) -> dict:
    """Step EnvPool through the same actions; a row that follows an end resets: no reward, no step, no length."""
    import envpool

    envs = envpool.make_gymnasium(args.env_id, num_envs=args.num_envs, num_threads=args.env_threads, seed=args.seed)
    envs.reset()
    returns, lengths, steps, resetting = [0.0] * args.num_envs, [0] * args.num_envs, 0, [False] * args.num_envs
    episodes, valid, counted_obs = [], [], args.num_envs
    for action in actions:
        _, reward, terminated, truncated, _ = envs.step(action)
        valid.append([not r for r in resetting])
        steps += sum(valid[-1])
        for n in range(args.num_envs):
            if not resetting[n]:
                returns[n], lengths[n] = returns[n] + float(reward[n]), lengths[n] + 1
            resetting[n] = bool(terminated[n] or truncated[n])
            counted_obs += not resetting[n]
            if resetting[n]:
                episodes.append((steps, float(f"{returns[n]:.6g}"), lengths[n]))
                returns[n], lengths[n] = 0.0, 0
    return {"episodes": episodes, "valid": np.array(valid), "steps": steps, "counted_obs": counted_obs}


@pytest.mark.parametrize("env_id", ["Hopper-v4", "InvertedPendulum-v4"])
def test_envpool_reset_rows_are_no_transitions(env_id, run, spy, read_episodes, tiny_args):
    pytest.importorskip("envpool")
    changes = {"env_id": env_id, "env_backend": "envpool", "num_envs": 3, "num_steps": 64, "total_timesteps": 3 * 192}
    env_actions, updates, gae_calls = spy(ppo.Agent, "env_action"), spy(ppo, "update"), spy(ppo, "gae")
    result = run(**changes)
    truth = replay(tiny_args(**changes), [action for _, action in env_actions])
    assert len(truth["episodes"]) > 15 and (truth["valid"][[64, 128]] == 0).sum() < (truth["valid"] == 0).sum()
    valid = np.concatenate([arguments[2]["valid"].numpy().reshape(64, 3) for arguments, _ in updates[::8]])
    np.testing.assert_array_equal(valid, truth["valid"])
    assert result["global_step"] == truth["steps"] == valid.sum() < 3 * 192
    episodes = read_episodes(result["run_dir"])
    assert [(step, length) for step, _, length in episodes] == [(s, length) for s, _, length in truth["episodes"]]
    np.testing.assert_allclose([e[1] for e in episodes], [e[1] for e in truth["episodes"]], rtol=1e-5)
    checkpoint = checkpoint_of(result)
    assert checkpoint["return_rms"]["count"].item() == pytest.approx(truth["steps"] + 1e-4)
    assert checkpoint["obs_rms"]["count"].item() == pytest.approx(truth["counted_obs"] + 1e-4)
    dones = np.concatenate([arguments[4] for arguments, _ in gae_calls])
    np.testing.assert_array_equal(valid[1:], 1 - dones[:-1])
    assert truth["counted_obs"] == 3 + truth["steps"] - dones[-1].sum()


def test_envpool_reset_rows_have_weight_zero(run, spy):
    """The first reported entropy and value loss are means over the valid rows of the first minibatch."""
    pytest.importorskip("envpool")
    updates = spy(ppo, "update")
    run(env_id="InvertedPendulum-v4", env_backend="envpool", num_steps=64, total_timesteps=128, num_minibatches=2)
    (agent, _, batch, mb_inds, *_), stats = updates[0]
    rows = [i for i in mb_inds.tolist() if batch["valid"][i]]
    assert 0 < len(rows) < len(mb_inds)
    errors = (agent.get_value(batch["obs"][rows]) - batch["returns"][rows]).detach() ** 2
    assert stats[1].item() == pytest.approx(0.5 * errors.mean().item(), rel=1e-5)


def test_async_is_sync_in_other_processes(run, read_episodes):
    big = {"env_id": "Hopper-v4", "num_steps": 128, "total_timesteps": 768}
    results = [run(env_backend=backend, **big) for backend in ("sync", "async")]
    assert torch.equal(*map(weights_of, results))
    episodes = [read_episodes(result["run_dir"]) for result in results]
    assert episodes[0] == episodes[1] and len(episodes[0]) > 10


# -- what is logged --
def test_partial_batch_is_dropped(run, spy):
    updates = spy(ppo, "update")
    result = run(total_timesteps=80)
    assert result["iteration"] == 2 and result["global_step"] == 64 and len(updates) == 2 * 8


TAGS = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/learning_rate"} | {
    f"losses/{name}" for name in [*STATS, "explained_variance", "old_approx_kl_max", "approx_kl_max"]
}


def test_tags_are_those_documented_and_losses_are_means_over_all_minibatches(run, spy):
    updates, gae_calls = spy(ppo, "update"), spy(ppo, "gae")
    result = run(total_timesteps=96, update_epochs=3, eval_episodes=1, learning_rate=0.01)
    scalars = scalars_of(result["run_dir"])
    assert set(scalars) == TAGS | {"time/rollout", "time/update", "eval/episodic_return"}
    stats = stats_of(updates).reshape(3, 12, 7)
    for i, name in enumerate(STATS):
        steps, logged = zip(*scalars[f"losses/{name}"])
        assert steps == (32, 64, 96)
        np.testing.assert_allclose(logged, stats[:, :, i].mean(1), rtol=1e-5, atol=1e-7)
    for i, name in ((3, "old_approx_kl"), (4, "approx_kl")):
        logged = [value for _, value in scalars[f"losses/{name}_max"]]
        np.testing.assert_allclose(logged, stats[:, :, i].max(1), rtol=1e-5, atol=1e-7)
    for ((_, values, *_), advantages), (_, logged) in zip(gae_calls, scalars["losses/explained_variance"]):
        assert logged == pytest.approx(1 - advantages.var() / (advantages + values).var(), abs=1e-4)


def test_early_stop_leaves_skipped_minibatches_out_of_the_means(run, spy):
    """The second iteration stops after one epoch; what the first left in the buffer must not count."""
    updates = spy(ppo, "update")
    result = run(target_kl=1e-9, update_epochs=3, learning_rate=0.01)
    scalars = scalars_of(result["run_dir"])
    stats = stats_of(updates).reshape(2, 4, 7)
    for i, name in enumerate(STATS):
        logged = [value for _, value in scalars[f"losses/{name}"]]
        np.testing.assert_allclose(logged, stats[:, :, i].mean(1), rtol=1e-5, atol=1e-7)


def test_every_episode_is_logged_also_those_that_end_together(run, read_episodes):
    result = run(num_envs=4, num_steps=16, total_timesteps=128)
    episodes = read_episodes(result["run_dir"])
    assert episodes == [(4 * 5 * k, 5.0, 5) for k in range(1, 7) for _ in range(4)]
    scalars = scalars_of(result["run_dir"])
    assert scalars["charts/episodic_return"] == [(step, value) for step, value, _ in episodes]
    assert scalars["charts/episodic_length"] == [(step, length) for step, _, length in episodes]
    assert result["return"] == 5.0


@pytest.mark.filterwarnings("ignore:.*out of date")
def test_logged_returns_are_undiscounted_and_unscaled(run, read_episodes):
    """An independent run of the same environments with the recorded actions."""
    recorded = []
    with pytest.MonkeyPatch.context() as patch:
        env_action = ppo.Agent.env_action
        patch.setattr(ppo.Agent, "env_action", lambda agent, a: recorded.append(env_action(agent, a)) or recorded[-1])
        result = run(env_id="Hopper-v4", num_envs=1, num_steps=128, total_timesteps=384, seed=5)
    env, expected, total, length = gym.make("Hopper-v4"), [], 0.0, 0
    env.reset(seed=5)
    for step, action in enumerate(recorded, 1):
        _, reward, terminated, truncated, _ = env.step(action[0])
        total, length = total + reward, length + 1
        if terminated or truncated:
            expected.append((step, float(f"{total:.6g}"), length))
            total, length = 0.0, 0
            env.reset()
    assert read_episodes(result["run_dir"]) == expected and len(expected) > 5


# -- stopping --
@pytest.mark.parametrize("checkpoint_every, iteration", [(1, 1), (0, None)])
def test_losses_that_are_not_finite_stop_the_run(checkpoint_every, iteration, run, tmp_path):
    """The 40th reward is NaN: the third iteration stops; the checkpoint of the second stays."""
    with pytest.raises(SystemExit) as stop:
        run(env_id="Poisoned-v0", total_timesteps=200, num_steps=16, checkpoint_every=checkpoint_every)
    message = str(stop.value.code)
    assert message.startswith("error: iteration 3 ") and "\n" not in message
    checkpoints = list(tmp_path.glob("run*/runs/*/checkpoint.*"))
    if checkpoint_every:
        assert "checkpoint.pt of iteration 2 is good" in message and len(checkpoints) == 1
        checkpoint = torch.load(checkpoints[0], weights_only=True)
        assert checkpoint["iteration"] == 2 and all(w.isfinite().all() for w in checkpoint["agent"].values())
    else:
        assert "no checkpoint" in message and not checkpoints


def test_iterations_between_checkpoints(run, spy):
    saves = spy(ppo, "save_checkpoint")
    run(checkpoint_every=3, total_timesteps=7 * 32)
    assert [state["iteration"] for (_, state), _ in saves] == [3, 6, 7]
    saves.clear()
    run(checkpoint_every=0, total_timesteps=7 * 32)
    assert [state["iteration"] for (_, state), _ in saves] == [7]


def test_run_leaves_the_process_as_it_was(run):
    """Signal handlers are restored and no worker stays."""
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    run(env_backend="async")
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before
    assert not multiprocessing.active_children()
