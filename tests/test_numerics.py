"""The numbers of ppo.py and ppo_continuous_mujoco.py: their functions against float64 loops.

What has the same bytes in all scripts (tests/test_static.py) is tested with those of ppo.py.
"""

import copy
import itertools
import math
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import tiny
from torch import nn
from torch.distributions import (
    AffineTransform,
    Categorical,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
)
from watch import assert_orthogonal

import ppo
import ppo_continuous_mujoco as mujoco

tiny_mujoco = partial(tiny, mujoco)


# -- generalized advantage estimation --
def advantages_by_definition(rewards, values, next_values, terminations, dones, gamma, gae_lambda):
    """Eq. 16 of arXiv:1506.02438 as the sum it is, for one environment, to the episode's end."""
    result = []
    for start in range(len(rewards)):
        total, weight = 0.0, 1.0
        for t in range(start, len(rewards)):
            bootstrap = 0.0 if terminations[t] else gamma * next_values[t]
            total += weight * (rewards[t] + bootstrap - values[t])
            weight *= gamma * gae_lambda
            if dones[t]:
                break
        result.append(total)
    return result


@pytest.mark.parametrize("gamma, gae_lambda", [(0.99, 0.95), (0.9, 1.0), (1.0, 0.5), (0.97, 0.0)])
def test_gae_is_the_sum_of_the_paper(gamma, gae_lambda):
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.normal(size=(3, 60, 4))
    terminations, truncations = rng.random((2, 60, 4)) < 0.1
    dones = terminations | truncations
    expected = [
        advantages_by_definition(*columns, gamma, gae_lambda)
        for columns in zip(rewards.T, values.T, next_values.T, terminations.T, dones.T)
    ]
    ends = (terminations.astype(float), dones.astype(float))
    got = ppo.gae(rewards, values, next_values, *ends, gamma, gae_lambda)
    np.testing.assert_allclose(got, np.transpose(expected), rtol=0, atol=1e-12)


def column(*numbers) -> np.ndarray:
    return np.array(numbers, np.float64)[:, None]


def test_gae_by_hand():
    """Truncated after t=2 in a state of value 8, terminated after t=4; gamma = lambda = 1/2.

    An environment may end because its state is no longer finite: that value counts for nothing.
    """
    values, next_values = column(1, 2, 3, 4, 5, 6), column(2, 3, 8, 5, math.nan, 7)
    terminations, dones = column(0, 0, 0, 0, 1, 0), column(0, 0, 1, 0, 1, 0)
    got = ppo.gae(np.ones((6, 1)), values, next_values, terminations, dones, 0.5, 0.5)
    assert got[:, 0].tolist() == [1.25, 1.0, 2.0, -1.5, -4.0, -1.5]


# -- the loss --
STATS = ["policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac"]


def make_minibatch(size: int = 40):
    """Random (newlogprob, entropy, newvalue), minibatch and clip range, all of them float64."""
    rng = np.random.default_rng(0)
    new = {name: rng.normal(size=size) for name in ("newlogprob", "entropy", "newvalue")}
    mb = {name: rng.normal(size=size) for name in ("advantages", "returns", "values")}
    mb |= {"logprobs": new["newlogprob"] + rng.normal(size=size) * 0.3}
    return new, mb, 0.2


def loss_by_hand(new, mb, clip, args):
    """Loss and diagnostics, one sample after another."""
    size = len(mb["advantages"])
    advantages = list(mb["advantages"])
    if args.norm_adv:
        mean = sum(advantages) / size
        deviation = math.sqrt(sum((a - mean) ** 2 for a in advantages) / size)
        advantages = [(a - mean) / (deviation + 1e-8) for a in advantages]
    sums = np.zeros(6)
    for i in range(size):
        ratio = math.exp(new["newlogprob"][i] - mb["logprobs"][i])
        clipped_ratio = min(max(ratio, 1 - clip), 1 + clip)
        surrogate = min(ratio * advantages[i], clipped_ratio * advantages[i])
        error = (new["newvalue"][i] - mb["returns"][i]) ** 2
        if args.clip_vloss:
            step = min(max(new["newvalue"][i] - mb["values"][i], -clip), clip)
            error = max(error, (mb["values"][i] + step - mb["returns"][i]) ** 2)
        k1 = mb["logprobs"][i] - new["newlogprob"][i]
        outside = ratio < 1 - clip or ratio > 1 + clip
        sums += [-surrogate, error / 2, new["entropy"][i], k1, ratio - 1 + k1, outside]
    policy_loss, value_loss, entropy, *_ = means = sums / size
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    return loss, dict(zip(STATS, means))


def torch_loss(new, mb, clip, args):
    inputs = {name: torch.tensor(array, requires_grad=True) for name, array in new.items()}
    tensors = {name: torch.tensor(array) for name, array in mb.items()}
    loss, stats = ppo.ppo_loss(*inputs.values(), tensors, clip, args)
    loss.backward()
    assert not any(stat.requires_grad for stat in stats.values())
    grads = {name: x.grad.numpy() for name, x in inputs.items() if x.grad is not None}
    return loss.item(), {name: stat.item() for name, stat in stats.items()}, grads


SWITCHES = list(itertools.product([True, False], [True, False], [0.0, 0.3]))


@pytest.mark.parametrize("norm_adv, clip_vloss, ent_coef", SWITCHES)
def test_loss_and_gradient_are_those_of_a_loop(norm_adv, clip_vloss, ent_coef):
    switches = {"norm_adv": norm_adv, "clip_vloss": clip_vloss, "ent_coef": ent_coef}
    args = ppo.Args(vf_coef=0.7, **switches)
    new, mb, clip = make_minibatch()
    loss, stats, grads = torch_loss(new, mb, clip, args)
    expected_loss, expected_stats = loss_by_hand(new, mb, clip, args)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert stats == pytest.approx(expected_stats, rel=1e-7)  # clipfrac is a mean of float32
    for name in set(STATS) - {"clipfrac"}:
        assert stats[name] == pytest.approx(expected_stats[name], rel=1e-12), name
    assert 0 < expected_stats["clipfrac"] < 1  # some ratios are clipped, some are not
    for name, i in itertools.product(new, range(len(mb["advantages"]))):
        sides = []
        for h in (1e-6, -1e-6):
            moved = new | {name: new[name] + h * (np.arange(len(new[name])) == i)}
            sides.append(loss_by_hand(moved, mb, clip, args)[0])
        np.testing.assert_allclose(grads[name][i], (sides[0] - sides[1]) / 2e-6, atol=1e-8)


def test_the_one_sample_of_a_minibatch_has_advantage_zero():
    """An unbiased deviation would make it NaN."""
    new = {"newlogprob": np.zeros(1), "entropy": np.zeros(1), "newvalue": np.full(1, 2.0)}
    mb = {"logprobs": np.zeros(1), "advantages": np.full(1, 3.0), "returns": np.zeros(1)}
    mb |= {"values": np.full(1, 2.0)}
    loss, stats, grads = torch_loss(new, mb, 0.2, ppo.Args(vf_coef=0.5))
    assert stats["policy_loss"] == 0 and loss == pytest.approx(0.5 * 0.5 * 4.0)
    assert all(np.isfinite(grad).all() for grad in grads.values())


# -- KL estimators --


# -- the optimizer --


OTHER = {"max_grad_norm": 0.0, "adam_eps": 1e-2, "anneal_lr": False, "shared_network": True}


@pytest.mark.parametrize("changes", [{"max_grad_norm": 0.1}, OTHER], ids=["clipped", "other"])
def test_updates_are_those_of_adam_over_separate_tensors(changes, script, run_script, watch):
    """The minibatches of a run again: backward, clip_grad_norm_ and torch's plain Adam."""
    seen = watch(script)
    flags = {"learning_rate": 0.01, "total_timesteps": 96, "ortho_init": False, "ent_coef": 0.01}
    result = run_script(**flags | changes)
    args = script.Args(**torch.load(result["run_dir"] / "checkpoint.pt")["args"])
    agent = seen.rollouts[0].agent
    start = {name: weight.clone() for name, weight in agent.state_dict().items()}
    optimizer = torch.optim.Adam(agent.parameters(), eps=args.adam_eps, foreach=False)
    clips = []
    for i, step in enumerate(list(seen.steps)):
        mb = step.mb
        new = agent.evaluate_actions(mb["obs"], mb["actions"])
        loss, _ = script.ppo_loss(*new, mb, args.clip_coef, args)
        optimizer.zero_grad()
        loss.backward()
        max_norm = args.max_grad_norm or math.inf
        clips.append(nn.utils.clip_grad_norm_(agent.parameters(), max_norm) > max_norm)
        left = 1 - (i // 8) / 3 if args.anneal_lr else 1
        optimizer.param_groups[0]["lr"] = 0.01 * left
        optimizer.step()
    assert len(clips) == 3 * 8 and (changes is OTHER or sum(clips) > 12)
    trained = torch.load(result["run_dir"] / "checkpoint.pt")["agent"]
    for weight, value in agent.state_dict().items():
        torch.testing.assert_close(trained[weight], value, rtol=0, atol=1e-5)
        assert (value - start[weight]).abs().max() > 1e-3, weight


# -- normalization --
def fresh_rms(shape=()):
    return mujoco.RunningMeanStd(np.zeros(shape), np.ones(shape))


def test_mujoco_running_mean_std_is_the_moments_of_all_rows_and_the_prior():
    """The prior weighs 1e-4 rows of mean 0 and variance 1; the sizes of batches do not matter."""
    rng = np.random.default_rng(0)
    batches = [rng.normal(5, 3, size=(n, 4)) for n in (1, 7, 1, 50)]
    rms = fresh_rms(4)
    for batch in batches:
        rms.update(batch)
    rows = np.concatenate(batches)
    count = len(rows) + 1e-4
    mean = rows.sum(0) / count
    var = (1e-4 + (rows**2).sum(0)) / count - mean**2
    assert rms.count == pytest.approx(count, rel=1e-15)
    np.testing.assert_allclose(rms.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(rms.var, var, rtol=1e-12)
    assert rms.mean.dtype == rms.var.dtype == np.float64


def test_mujoco_statistics_of_a_checkpoint_are_exact(run_mujoco):
    """In float64, the count too: float32 knows no odd number above 16,777,216."""
    result = run_mujoco(total_timesteps=96)
    checkpoint = torch.load(result["run_dir"] / "checkpoint.pt")
    for name, shape, rows in (("obs_rms", (2,), 98), ("return_rms", (), 96)):
        assert all(tensor.dtype == torch.float64 for tensor in checkpoint[name]), name
        again = mujoco.load_rms(checkpoint, name)
        assert again.count == pytest.approx(rows + 1e-4, rel=1e-12) and again.mean.shape == shape


def test_mujoco_observations_are_normalized_then_clipped():
    """And rewards are scaled then clipped, but not centered."""
    rms = mujoco.RunningMeanStd(np.array([1.0, -2.0]), np.array([4.0, 0.0]))
    obs = np.array([[2.0, -2.0], [41.0, -1.999]])

    def normalized(**changes):
        return mujoco.normalize_obs(rms, obs, tiny_mujoco(**changes))

    assert normalized().dtype == np.float32
    np.testing.assert_allclose(normalized(), [[0.5, 0.0], [10.0, 10.0]], rtol=1e-6)
    unclipped = [[0.5, 0.0], [20.0, 10.0]]  # 0.001 / sqrt(0 + 1e-8) = 10
    np.testing.assert_allclose(normalized(clip_obs=0.0), unclipped, rtol=1e-6)
    np.testing.assert_allclose(normalized(clip_obs=0.1)[1], [0.1, 0.1], rtol=1e-6)
    assert (normalized(norm_obs=False) == obs.astype(np.float32)).all()
    rms, reward = mujoco.RunningMeanStd(np.array(100.0), np.array(4.0)), np.array([3.0, -50.0, 0.0])
    scaled = partial(mujoco.normalize_reward, rms, reward)
    np.testing.assert_allclose(scaled(tiny_mujoco()), [1.5, -10.0, 0.0])
    np.testing.assert_allclose(scaled(tiny_mujoco(clip_reward=0.0)), [1.5, -25.0, 0.0])
    np.testing.assert_allclose(scaled(tiny_mujoco(clip_reward=0.1)), [0.1, -0.1, 0.0])
    assert (scaled(tiny_mujoco(norm_reward=False)) == reward).all()


RETURNS = [1, 1.99, 2.9701, 3.940399, 4.90099501]  # discounted, of the scripted environment


def check_scaling(fed: list, rewards: np.ndarray) -> None:
    """R = gamma R + r enters the variance, then the reward is scaled, then any end sets R to 0."""
    returns = list(itertools.islice(itertools.cycle(RETURNS), 32))
    np.testing.assert_allclose(fed, [[R, R] for R in returns], rtol=1e-12)
    seen, scaled = np.repeat(returns, 2), []
    for n in range(2, 65, 2):  # both returns of a step count before its reward is scaled
        mean = seen[:n].sum() / (n + 1e-4)
        var = (1e-4 + (seen[:n] ** 2).sum()) / (n + 1e-4) - mean**2
        scaled.append(1 / math.sqrt(var + 1e-8))
    np.testing.assert_allclose(rewards[:, 0], np.minimum(scaled, 10), rtol=1e-6)
    np.testing.assert_array_equal(rewards[:, 0], rewards[:, 1])


@pytest.mark.parametrize("env_id", ["Terminating-v0", "Truncating-v0"])
def test_mujoco_reward_scaling_follows_the_order_of_baselines(env_id, run_mujoco, spy, watch):
    updates, seen = spy(mujoco.RunningMeanStd, "update"), watch(mujoco)
    run_mujoco(env_id=env_id)
    fed = [x for (rms, x), _ in updates if rms.mean.shape == ()]
    check_scaling(fed, np.concatenate([rollout.rewards for rollout in seen.rollouts]))


def test_mujoco_reset_observations_count_and_terminal_ones_do_not(run_mujoco, spy):
    updates = spy(mujoco.RunningMeanStd, "update")
    run_mujoco()
    fed = [x[:, 0].tolist() for (rms, x), _ in updates if rms.mean.shape == (2,)]
    assert fed == [[t % 5, t % 5] for t in range(33)]  # the reset, then one a step; 5 is terminal


# -- the agent --
def make_agent(script=mujoco, num_obs=3, low=(-1.0, -1.0), high=(1.0, 1.0), **changes):
    """An agent in float64 for `num_obs` numbers; of ppo.py with five actions."""
    torch.manual_seed(0)
    obs_space = gym.spaces.Box(-np.inf, np.inf, (num_obs,))
    box = gym.spaces.Box(np.float32(low), np.float32(high))
    action_space = gym.spaces.Discrete(5) if script is ppo else box
    return script.Agent(obs_space, action_space, tiny(script, **changes)).double()


def policy_network(agent) -> nn.Sequential:
    return agent.actor_mean if hasattr(agent, "actor_mean") else agent.actor


def test_initial_scales(script):
    agent = make_agent(script)
    name = "actor" if script is ppo else "actor_mean"
    gains = {f"{name}.0": 2**0.5, f"{name}.2": 2**0.5, f"{name}.4": 0.01}
    gains |= {"critic.0": 2**0.5, "critic.2": 2**0.5, "critic.4": 1.0}
    modules = dict(agent.named_modules())
    for layer, gain in gains.items():
        assert_orthogonal(modules[layer].weight, gain)
        assert not modules[layer].bias.any()
    assert not torch.equal(modules[f"{name}.2"].weight, modules["critic.2"].weight)
    parameters = {f"{layer}.{p}" for layer in gains for p in ("weight", "bias")}
    parameters |= set() if script is ppo else {"actor_logstd"}
    assert set(dict(agent.named_parameters())) == parameters
    if script is mujoco:  # an int, as a sweep may give it
        assert (make_agent(init_log_std=-1).actor_logstd == -1.0).all()


def test_without_ortho_init_layers_are_those_of_torch(script):
    """torch's default is uniform within 1 / sqrt(inputs), for weights and biases."""
    agent = make_agent(script, num_obs=50, ortho_init=False)
    layers = [module for module in agent.modules() if isinstance(module, nn.Linear)]
    assert len(layers) == 6
    for layer in layers:
        bound = layer.in_features**-0.5
        assert 0.9 * bound < layer.weight.abs().max() <= bound * (1 + 1e-6)
        assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.25)
        assert 0 < layer.bias.abs().max() <= bound * (1 + 1e-6)


def test_shared_network_shares_the_trunk_and_nothing_else(script):
    shared, separate = make_agent(script, shared_network=True), make_agent(script)
    policies = {agent: policy_network(agent) for agent in (shared, separate)}
    for i in (0, 2):
        assert policies[shared][i] is shared.critic[i]
        assert policies[separate][i] is not separate.critic[i]
    assert policies[shared][4] is not shared.critic[4]
    trunk = sum(p.numel() for i in (0, 2) for p in shared.critic[i].parameters())
    sizes = [sum(p.numel() for p in agent.parameters()) for agent in (separate, shared)]
    assert sizes[0] - sizes[1] == trunk
    value = separate.get_value(torch.ones(5, 3).double()).sum()
    weights = [policies[separate][0].weight, separate.critic[0].weight]
    grads = torch.autograd.grad(value, weights, allow_unused=True)
    assert grads[0] is None and grads[1].abs().sum() > 0


NETWORKS = [(ppo, {}, np.tanh), (mujoco, {"activation": "tanh"}, np.tanh)]
NETWORKS += [(mujoco, {"activation": "relu"}, lambda x: np.maximum(x, 0))]


@pytest.mark.parametrize("script, changes, function", NETWORKS, ids=["ppo", "tanh", "relu"])
def test_networks_by_hand(script, changes, function):
    agent = make_agent(script, num_obs=11, ortho_init=False, **changes)
    obs = np.random.default_rng(0).normal(size=(100, 11))
    outputs = {policy_network(agent): policy_network(agent), agent.critic: agent.get_value}
    for network, torch_output in outputs.items():
        hidden = obs
        for i in (0, 2, 4):
            weight, bias = (p.detach().numpy() for p in network[i].parameters())
            hidden = hidden @ weight.T + bias
            hidden = hidden if i == 4 else function(hidden)
        got = torch_output(torch.from_numpy(obs)).detach().numpy()
        np.testing.assert_allclose(got, hidden if got.ndim == 2 else hidden[:, 0], atol=1e-12)


# -- discrete actions --
def test_ppo_probabilities_are_the_softmax_of_the_logits():
    agent = make_agent(ppo, ortho_init=False)
    obs, actions = torch.randn(50, 3).double(), torch.arange(50) % 5
    logprob, entropy, value = agent.evaluate_actions(obs, actions)
    for i, logits in enumerate(agent.actor(obs).tolist()):
        total = sum(math.exp(logit) for logit in logits)
        probabilities = [math.exp(logit) / total for logit in logits]
        assert logprob[i].item() == pytest.approx(math.log(probabilities[i % 5]), rel=1e-12)
        surprise = -sum(p * math.log(p) for p in probabilities)
        assert entropy[i].item() == pytest.approx(surprise, rel=1e-12)
    torch.testing.assert_close(value, agent.get_value(obs))


def test_ppo_actions_have_the_probabilities_of_the_policy():
    """200,000 draws of Agent.act against the softmax; 4 is the 0.3% quantile of |z|, 5 times."""
    agent, n = make_agent(ppo, ortho_init=False), 200_000
    with torch.no_grad():
        agent.actor[4].bias.copy_(torch.tensor([0.0, 1.0, -1.0, 2.0, -4.0]))
        obs = torch.tensor([[0.5, -1.0, 2.0]]).double()
        probabilities = Categorical(logits=agent.actor(obs)).probs[0]
    actions = agent.act(obs.expand(n, 3))
    frequencies = torch.bincount(actions, minlength=5) / n
    errors = (probabilities * (1 - probabilities) / n).sqrt()
    assert ((frequencies - probabilities).abs() < 4 * errors).all()
    assert probabilities.min() > 1e-4 and probabilities.max() - probabilities.min() > 0.4
    modes = agent.act(obs.expand(9, 3), greedy=True)
    assert modes.tolist() == [probabilities.argmax().item()] * 9


# -- continuous actions --
LOW, HIGH = (-1.0, -0.5, 0.0), (1.0, 2.0, 10.0)


def gaussian_inputs(agent, n: int):
    """Observations, the policy there with its deviations spread, and actions of it."""
    with torch.no_grad():
        agent.actor_logstd.copy_(torch.tensor([0.3, -1.0, 0.0]))
    obs = torch.randn(n, 3, dtype=torch.float64)
    normal = Normal(agent.actor_mean(obs), agent.actor_logstd.exp())
    return obs, normal, normal.sample()


def test_mujoco_log_probability_and_entropy_are_those_of_a_diagonal_gaussian():
    agent = make_agent(low=LOW, high=HIGH, ortho_init=False)
    obs, normal, actions = gaussian_inputs(agent, 50)
    logprob, entropy, value = agent.evaluate_actions(obs, actions)
    joint = Independent(normal, 1)
    torch.testing.assert_close(logprob, joint.log_prob(actions), rtol=1e-12, atol=0)
    torch.testing.assert_close(entropy, joint.entropy(), rtol=1e-12, atol=0)
    torch.testing.assert_close(value, agent.get_value(obs))
    assert logprob.shape == entropy.shape == value.shape == (50,)


def test_mujoco_actions_are_mean_and_deviation_times_noise():
    """Standard normal noise, new in each call, of the CPU's generator; the mode is the mean."""
    agent, n = make_agent(low=LOW, high=HIGH, ortho_init=False), 40_000
    obs, normal, _ = gaussian_inputs(agent, n)
    actions, others = agent.act(obs), agent.act(obs)
    z = (actions - normal.mean) / torch.tensor([0.3, -1.0, 0.0]).double().exp()
    assert z.mean(0).abs().max() < 4 / n**0.5 and (z.var(0) - 1).abs().max() < 4 * (2 / n) ** 0.5
    assert len(z.unique()) > 100_000 and not (actions == others).any()
    torch.testing.assert_close(agent.act(obs, greedy=True), normal.mean)
    assert not actions.requires_grad


def squashed_distribution(normal):
    low, high = torch.tensor(LOW).double(), torch.tensor(HIGH).double()
    middle, half = (high + low) / 2, (high - low) / 2
    transforms = [TanhTransform(), AffineTransform(middle, half)]
    return Independent(TransformedDistribution(normal, transforms), 1)


def test_mujoco_squashed_log_probability_is_that_of_the_transformed_distribution():
    agent = make_agent(low=LOW, high=HIGH, ortho_init=False, squash_actions=True)
    obs, normal, actions = gaussian_inputs(agent, 200)
    logprob, *_ = agent.evaluate_actions(obs, actions)
    in_env = torch.from_numpy(agent.env_action(actions.numpy()))
    expected = squashed_distribution(normal).log_prob(in_env)
    torch.testing.assert_close(logprob, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("u", [-500.0, 30.0])
def test_mujoco_squashed_log_probability_is_finite_far_out(u):
    """log(1 - tanh(u)^2) is 2 log 2 - 2 |u| there, and 1 - tanh(u)^2 is 0 in floating point."""
    agent = make_agent(low=LOW, high=HIGH, squash_actions=True)
    actions = torch.full((1, 3), u, dtype=torch.float64)
    half = (torch.tensor(HIGH) - torch.tensor(LOW)).double() / 2
    expected = half.log().sum() + 3 * (2 * math.log(2) - 2 * abs(u))
    torch.testing.assert_close(agent.squash_log_det(actions)[0], expected, rtol=1e-12, atol=0)
    agent.float()
    far = actions.float()
    logprob, entropy, _ = agent.evaluate_actions(torch.zeros(1, 3), far)
    (logprob + entropy).sum().backward()
    assert torch.isfinite(logprob).all() and torch.isfinite(entropy).all()
    assert all(torch.isfinite(p.grad).all() for p in agent.parameters() if p.grad is not None)


def test_mujoco_squashed_entropy_estimate_is_unbiased():
    """Its mean over the noise is that of -log p over an independent sample of the distribution."""
    n = 100_000
    agent = make_agent(low=LOW, high=HIGH, ortho_init=False, squash_actions=True)
    gaussian_inputs(agent, 1)
    obs = torch.tensor([[0.5, -1.0, 2.0]]).double().expand(n, 3)
    torch.manual_seed(1)
    with torch.no_grad():
        normal = Normal(agent.actor_mean(obs), agent.actor_logstd.exp().expand(n, 3))
        sample = normal.sample()
        logprob, estimate, _ = agent.evaluate_actions(obs, sample)
        surprise = -logprob
        in_env = torch.from_numpy(agent.env_action(sample.numpy()))
    exact = -squashed_distribution(normal).log_prob(in_env)
    torch.testing.assert_close(surprise, exact, rtol=1e-6, atol=1e-6)
    standard_error = math.sqrt((surprise.var() + estimate.var()).item() / n)
    assert abs((estimate.mean() - surprise.mean()).item()) < 4 * standard_error
    assert standard_error < 0.01  # the tolerance means something


def test_mujoco_gradient_of_the_squashed_entropy_is_that_of_its_estimate():
    """Central differences by deviations and by the biases of the means, with the same noise."""
    agent = make_agent(low=LOW, high=HIGH, ortho_init=False, squash_actions=True)
    obs, _, actions = gaussian_inputs(agent, 20)

    def estimate() -> torch.Tensor:
        torch.manual_seed(1)
        return agent.evaluate_actions(obs, actions)[1].mean()

    for param in (agent.actor_logstd, agent.actor_mean[4].bias):
        [grad] = torch.autograd.grad(estimate(), param)
        for i in range(3):
            sides = []
            for h in (1e-6, -1e-6):
                param.data[i] += h
                sides.append(estimate().item())
                param.data[i] -= h
            assert grad[i].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-8)
        assert grad.abs().min() > 1e-3


# -- the fast path: a copy of the policy in NumPy --
def fast_agent(scale: float = 1.0, seed: int = 0, **changes):
    """An agent, and 64 observations of 8 numbers of up to this size."""
    torch.manual_seed(seed)
    spaces = gym.spaces.Box(-np.inf, np.inf, (8,)), gym.spaces.Box(-1, 1, (6,))
    agent = mujoco.Agent(*spaces, mujoco.Args(ortho_init=False, **changes))
    rng = np.random.default_rng(seed)
    return agent, (rng.normal(size=(64, 8)) * np.geomspace(1, scale, 8)).astype(np.float32)


def acting(agent, obs: np.ndarray) -> np.ndarray:
    """`numpy_act` without its draws: the means that it computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", lambda *shape: torch.zeros(*shape))
        patch.setattr(Normal, "sample", lambda policy: policy.mean)
        return mujoco.numpy_act(agent, obs, 3)(obs)


class Doubled(nn.Linear):
    """A module of one's own."""

    def forward(self, x):
        return 2 * super().forward(x)


UNKNOWN_LAYERS = {
    "LayerNorm": lambda: nn.LayerNorm(64),
    "GELU": nn.GELU,
    "Doubled": lambda: Doubled(64, 64),
    "Sequential": lambda: nn.Sequential(nn.Tanh()),
}


@pytest.mark.parametrize("name", UNKNOWN_LAYERS)
def test_mujoco_a_layer_that_numpy_does_not_know_falls_back(name, run_mujoco, capsys, monkeypatch):
    """Slower, but right: what is played is what the agent computes."""
    init = mujoco.Agent.__init__

    def edited(agent, *args):
        init(agent, *args)
        agent.actor_mean.insert(2, UNKNOWN_LAYERS[name]())

    mujoco.say_once.cache_clear()
    monkeypatch.setattr(mujoco.Agent, "__init__", edited)
    agent, obs = fast_agent()
    expected = agent.act(torch.from_numpy(obs), greedy=True).numpy()
    np.testing.assert_array_equal(acting(agent, obs), expected)
    run_mujoco()
    said = capsys.readouterr().err
    assert said.count("agent.act acts, slower") == 1 and name in said


EDITS = {  # of get_policy(agent, obs), by the policy that it was
    "mean": lambda policy: Normal(policy.mean + 0.1, policy.stddev),
    "scale": lambda policy: Normal(1.5 * policy.mean, policy.stddev),
    "deviation": lambda policy: Normal(policy.mean, policy.stddev * (1 + policy.mean.abs())),
}


@pytest.mark.parametrize("name", EDITS)
def test_mujoco_another_policy_falls_back_with_one_line(name, capsys, monkeypatch):
    """Whatever differs from the policy of the loss: with another deviation no ratio were right."""
    get_policy = mujoco.Agent.get_policy
    edited = lambda agent, obs: EDITS[name](get_policy(agent, obs))  # noqa: E731
    mujoco.say_once.cache_clear()
    monkeypatch.setattr(mujoco.Agent, "get_policy", edited)
    agent, obs = fast_agent()
    expected = agent.act(torch.from_numpy(obs), greedy=True).numpy()
    np.testing.assert_array_equal(acting(agent, obs), expected)
    assert "numpy_act does not do what agent.act does" in capsys.readouterr().err


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_mujoco_large_observations_are_no_false_alarm(activation, capsys):
    """Prices and volumes in their own units: the tolerance is relative to the largest action."""
    mujoco.say_once.cache_clear()
    for power, seed in itertools.product((0, 3, 6, 9), range(10)):
        agent, obs = fast_agent(10.0**power, seed, activation=activation, norm_obs=False)
        exact = copy.deepcopy(agent).double().act(torch.from_numpy(obs).double(), greedy=True)
        most = 1e-5 * exact.abs().max().item()
        np.testing.assert_allclose(acting(agent, obs), exact, rtol=0, atol=most)
    assert capsys.readouterr().err == ""


def test_mujoco_numpy_draws_for_each_step_what_torch_would(monkeypatch):
    """The noise of a rollout at once, in the order of the steps, scaled by the deviations."""
    agent, obs = fast_agent()
    agent.actor_logstd.data = torch.linspace(-2, 1, 6)
    torch.manual_seed(5)
    act = mujoco.numpy_act(agent, obs, 3)
    got = np.array([act(obs) for _ in range(3)])
    torch.manual_seed(5)
    noise = torch.randn(3, 64, 6)
    mean = agent.act(torch.from_numpy(obs), greedy=True)
    expected = mean + agent.actor_logstd.detach().exp() * noise
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    assert got.dtype == np.float32
    get_policy = mujoco.Agent.get_policy  # another deviation is followed, one for all observations
    wider = lambda agent, obs: Normal(get_policy(agent, obs).mean, 3.0)  # noqa: E731
    monkeypatch.setattr(mujoco.Agent, "get_policy", wider)
    act = mujoco.numpy_act(agent, obs, 100)
    noise = np.array([act(obs) for _ in range(100)]) - mean.numpy()
    assert abs(noise.std() / 3 - 1) < 0.02 and abs(noise.mean()) < 0.1
