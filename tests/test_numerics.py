"""The numbers of ppo.py and ppo_continuous_mujoco.py: their functions against float64 by hand.

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
from conftest import run_tiny, tiny
from harness import each_text_of
from torch import nn
from torch.distributions import (
    AffineTransform,
    Categorical,
    ComposeTransform,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
)
from watch import assert_orthogonal, checkpoint_of

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
    """An episode may end because its state is not finite: that value counts for nothing."""
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.normal(size=(3, 60, 4))
    terminations, truncations = rng.random((2, 60, 4)) < 0.1
    next_values[terminations] = math.nan
    dones = terminations | truncations
    expected = [
        advantages_by_definition(*columns, gamma, gae_lambda)
        for columns in zip(rewards.T, values.T, next_values.T, terminations.T, dones.T)
    ]
    ends = (terminations.astype(float), dones.astype(float))
    got = ppo.gae(rewards, values, next_values, *ends, gamma, gae_lambda)
    np.testing.assert_allclose(got, np.transpose(expected), rtol=0, atol=1e-12)


# -- the loss --
def losses_by_hand(new: dict, mb: dict, clip: float, args) -> tuple[np.ndarray, dict]:
    """The loss of each sample (M,), and the diagnostics."""
    advantages = mb["advantages"]
    if args.norm_adv:
        advantages = (advantages - np.mean(advantages)) / (np.std(advantages) + 1e-8)
    k1 = mb["logprobs"] - new["newlogprob"]
    ratio = np.exp(-k1)
    surrogate = np.minimum(ratio * advantages, np.clip(ratio, 1 - clip, 1 + clip) * advantages)
    errors = (new["newvalue"] - mb["returns"]) ** 2
    if args.clip_vloss:
        step = np.clip(new["newvalue"] - mb["values"], -clip, clip)
        errors = np.maximum(errors, (mb["values"] + step - mb["returns"]) ** 2)
    stats = {
        "policy_loss": -surrogate,
        "value_loss": errors / 2,
        "entropy": new["entropy"],
        "old_approx_kl": k1,
        "approx_kl": ratio - 1 + k1,
        "clipfrac": (ratio < 1 - clip) | (ratio > 1 + clip),
    }
    losses = -surrogate - args.ent_coef * new["entropy"] + args.vf_coef * errors / 2
    return losses, {name: np.mean(x) for name, x in stats.items()}


SWITCHES = list(itertools.product([True, False], [True, False], [0.0, 0.3]))


@each_text_of("ppo_loss", detail="C08")
@pytest.mark.parametrize("norm_adv, clip_vloss, ent_coef", SWITCHES)
def test_loss_and_gradient_are_those_by_hand(script, norm_adv, clip_vloss, ent_coef):
    """The gradient by central differences."""
    if norm_adv and "norm_adv" not in script.pieces["ppo_loss"]:
        return  # normalized before
    switches = {"norm_adv": norm_adv, "clip_vloss": clip_vloss, "ent_coef": ent_coef}
    args, rng, size = script.module.Args(vf_coef=0.7, **switches), np.random.default_rng(0), 40
    new = {name: rng.normal(size=size) for name in ("newlogprob", "entropy", "newvalue")}
    mb = {name: rng.normal(size=size) for name in ("advantages", "returns", "values")}
    mb |= {"logprobs": new["newlogprob"] + rng.normal(size=size) * 0.3}
    inputs = {name: torch.tensor(array, requires_grad=True) for name, array in new.items()}
    tensors = {name: torch.tensor(array) for name, array in mb.items()}
    loss, stats = script.module.ppo_loss(*inputs.values(), tensors, 0.2, args)
    losses, expected = losses_by_hand(new, mb, 0.2, args)
    assert loss.item() == pytest.approx(losses.mean(), rel=1e-12)
    assert stats.keys() == expected.keys() and 0 < expected["clipfrac"] < 1
    for name, stat in stats.items():  # clipfrac is a mean of float32
        rel = 1e-7 if name == "clipfrac" else 1e-12
        assert stat.item() == pytest.approx(expected[name], rel=rel), name
        assert not stat.requires_grad, name
    loss.backward()
    for name, x in inputs.items():
        up, down = (
            losses_by_hand(new | {name: new[name] + h}, mb, 0.2, args)[0] for h in (1e-6, -1e-6)
        )
        np.testing.assert_allclose(x.grad, (up - down) / 2e-6 / size, atol=1e-8)


# -- the optimizer --
OTHER = {"max_grad_norm": 0.0, "adam_eps": 1e-2, "anneal_lr": False, "shared_network": True}


@pytest.mark.parametrize("changes", [{"max_grad_norm": 0.1}, OTHER], ids=["clipped", "other"])
def test_updates_are_those_of_adam_over_separate_tensors(changes, script, spy):
    """The minibatches of a run again: backward, clip_grad_norm_ and torch's plain Adam."""
    evaluated, losses = spy(script.Agent, "evaluate_actions"), spy(script, "ppo_loss")
    flags = {"learning_rate": 0.01, "total_timesteps": 96, "ortho_init": False, "ent_coef": 0.01}
    result = run_tiny(script, **flags | changes)
    args = script.Args(**torch.load(result["run_dir"] / "checkpoint.pt")["args"])
    (agent, *_), _ = evaluated[0]  # before the first update
    start = {name: weight.clone() for name, weight in agent.state_dict().items()}
    optimizer = torch.optim.Adam(agent.parameters(), eps=args.adam_eps, foreach=False)
    clips = []
    for i, mb in enumerate([inputs[3] for inputs, _ in losses]):
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
def test_mujoco_running_mean_std_is_the_moments_of_all_rows_and_the_prior():
    """The prior weighs 1e-4 rows of mean 0 and variance 1; the sizes of batches do not matter."""
    rng = np.random.default_rng(0)
    batches = [rng.normal(5, 3, size=(n, 4)) for n in (1, 7, 1, 50)]
    rms = mujoco.RunningMeanStd(np.zeros(4), np.ones(4))
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


def test_mujoco_observations_are_normalized_then_clipped():
    rms = mujoco.RunningMeanStd(np.array([1.0, -2.0]), np.array([4.0, 0.0]))
    obs = np.array([[2.0, -2.0], [41.0, -1.999]])  # 0.001 / sqrt(0 + 1e-8) = 10
    for changes, expected in [
        ({}, [[0.5, 0.0], [10.0, 10.0]]),
        ({"clip_obs": 0.0}, [[0.5, 0.0], [20.0, 10.0]]),
        ({"clip_obs": 0.1}, [[0.1, 0.0], [0.1, 0.1]]),
        ({"norm_obs": False}, obs),
    ]:
        got = mujoco.normalize_obs(rms, obs, tiny_mujoco(**changes))
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        assert got.dtype == np.float32


def test_mujoco_rewards_are_scaled_then_clipped_but_not_centered():
    rms, reward = mujoco.RunningMeanStd(np.array(100.0), np.array(4.0)), np.array([3.0, -50.0, 0.0])
    for changes, expected in [
        ({}, [1.5, -10.0, 0.0]),
        ({"clip_reward": 0.0}, [1.5, -25.0, 0.0]),
        ({"clip_reward": 0.1}, [0.1, -0.1, 0.0]),
        ({"norm_reward": False}, reward),
    ]:
        got = mujoco.normalize_reward(rms, reward, tiny_mujoco(**changes))
        np.testing.assert_allclose(got, expected)


@pytest.mark.parametrize("env_id", ["Terminating-v0", "Truncating-v0"])
def test_mujoco_reward_scaling_follows_the_order_of_baselines(env_id, spy):
    """R = gamma R + r enters the variance, then the reward is scaled, then any end sets R to 0."""
    updates, gae_calls = spy(mujoco.RunningMeanStd, "update"), spy(mujoco, "gae")
    run_tiny(mujoco, env_id=env_id)
    fed = [x for (rms, x), _ in updates if rms.mean.shape == ()]
    returns = np.resize([1, 1.99, 2.9701, 3.940399, 4.90099501], 32)  # of episodes of five steps
    np.testing.assert_allclose(fed, np.column_stack([returns, returns]), rtol=1e-12)
    n, both = np.arange(2, 65, 2), returns.repeat(2)  # those of a step count before it is scaled
    mean = both.cumsum()[1::2] / (n + 1e-4)
    var = (1e-4 + (both**2).cumsum()[1::2]) / (n + 1e-4) - mean**2
    scaled = np.minimum(1 / np.sqrt(var + 1e-8), 10)
    rewards = np.concatenate([inputs[0] for inputs, _ in gae_calls])
    np.testing.assert_allclose(rewards, np.column_stack([scaled, scaled]), rtol=1e-6)


def test_mujoco_reset_observations_count_and_terminal_ones_do_not(spy):
    """A checkpoint has the statistics in float64: float32 knows no odd count above 16,777,216."""
    updates = spy(mujoco.RunningMeanStd, "update")
    checkpoint = checkpoint_of(run_tiny(mujoco)["run_dir"])
    fed = [x[:, 0].tolist() for (rms, x), _ in updates if rms.mean.shape == (2,)]
    assert fed == [[t % 5, t % 5] for t in range(33)]  # the reset, then one a step; 5 is terminal
    statistics = [*checkpoint["obs_rms"], *checkpoint["return_rms"]]
    assert {x.dtype for x in statistics} == {torch.float64}
    assert mujoco.load_rms(checkpoint, "obs_rms").count == pytest.approx(66 + 1e-4, rel=1e-12)


# -- the agent --
LOW, HIGH = np.float32([-1.0, -0.5, 0.0]), np.float32([1.0, 2.0, 10.0])


def make_agent(script=mujoco, **changes):
    """An agent in float64 for three numbers; of ppo.py with five actions."""
    torch.manual_seed(0)
    obs_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gym.spaces.Discrete(5) if script is ppo else gym.spaces.Box(LOW, HIGH)
    return script.Agent(obs_space, action_space, tiny(script, **changes)).double()


def policy_network(agent) -> nn.Sequential:
    return agent.actor_mean if hasattr(agent, "actor_mean") else agent.actor


def test_networks_are_the_published_ones(script):
    """Orthogonal weights of these gains and zero biases; without, torch's of 1 / sqrt(inputs)."""
    agent, plain = make_agent(script), make_agent(script, ortho_init=False)
    for network, last in ((policy_network(agent), 0.01), (agent.critic, 1.0)):
        assert [type(layer) for layer in network] == [nn.Linear, nn.Tanh] * 2 + [nn.Linear]
        assert [layer.in_features for layer in network[::2]] == [3, 64, 64]
        for layer, gain in zip(network[::2], (2**0.5, 2**0.5, last)):
            assert_orthogonal(layer.weight, gain)
            assert not layer.bias.any()
    assert not torch.equal(policy_network(agent)[2].weight, agent.critic[2].weight)
    assert len(list(agent.parameters())) == 12 + (script is mujoco)
    for layer in [*policy_network(plain)[::2], *plain.critic[::2]]:
        assert layer.bias.any() and layer.weight.abs().max() <= layer.in_features**-0.5 + 1e-6
    if script is mujoco:  # an int, as a sweep may give it
        assert (make_agent(init_log_std=-1).actor_logstd == -1.0).all()
        relus = make_agent(activation="relu")
        assert [type(layer) for layer in relus.critic[1::2]] == [nn.ReLU, nn.ReLU]
        assert [type(layer) for layer in relus.actor_mean[1::2]] == [nn.ReLU, nn.ReLU]


def test_shared_network_shares_the_trunk_and_nothing_else(script):
    for shared in (True, False):
        agent = make_agent(script, shared_network=shared)
        both = {*policy_network(agent).parameters()} & {*agent.critic.parameters()}
        assert both == ({*agent.critic[:4].parameters()} if shared else set())


# -- discrete actions --
def test_ppo_probabilities_are_the_softmax_of_the_logits():
    agent = make_agent(ppo, ortho_init=False)
    obs, actions = torch.randn(50, 3).double(), torch.arange(50) % 5
    logprob, entropy, value = agent.evaluate_actions(obs, actions)
    probabilities = agent.actor(obs).exp() / agent.actor(obs).exp().sum(1, keepdim=True)
    torch.testing.assert_close(logprob, probabilities[range(50), actions].log())
    torch.testing.assert_close(entropy, -(probabilities * probabilities.log()).sum(1))
    for got in (value, agent.get_value(obs)):
        torch.testing.assert_close(got, agent.critic(obs)[:, 0])


def test_ppo_actions_have_the_probabilities_of_the_policy():
    """200,000 draws of Agent.act against the softmax; |z| is above 4 once in 3,000 such tests."""
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
def gaussian_inputs(agent, n: int):
    """Observations, the policy there with its deviations spread, and actions of it."""
    with torch.no_grad():
        agent.actor_logstd.copy_(torch.tensor([0.3, -1.0, 0.0]))
    obs = torch.randn(n, 3, dtype=torch.float64)
    normal = Normal(agent.actor_mean(obs), agent.actor_logstd.exp())
    return obs, normal, normal.sample()


def test_mujoco_log_probability_and_entropy_are_those_of_a_diagonal_gaussian():
    agent = make_agent(ortho_init=False)
    obs, normal, actions = gaussian_inputs(agent, 50)
    logprob, entropy, value = agent.evaluate_actions(obs, actions)
    joint = Independent(normal, 1)
    torch.testing.assert_close(logprob, joint.log_prob(actions), rtol=1e-12, atol=0)
    torch.testing.assert_close(entropy, joint.entropy(), rtol=1e-12, atol=0)
    for got in (value, agent.get_value(obs)):
        torch.testing.assert_close(got, agent.critic(obs)[:, 0])


def test_mujoco_actions_are_mean_and_deviation_times_noise():
    """Standard normal noise, new in each call, of the CPU's generator; the mode is the mean."""
    agent, n = make_agent(ortho_init=False), 40_000
    obs, normal, _ = gaussian_inputs(agent, n)
    actions, others = agent.act(obs), agent.act(obs)
    z = (actions - normal.mean) / torch.tensor([0.3, -1.0, 0.0]).double().exp()
    assert z.mean(0).abs().max() < 4 / n**0.5 and (z.var(0) - 1).abs().max() < 4 * (2 / n) ** 0.5
    assert len(z.unique()) > 100_000 and not (actions == others).any()
    torch.testing.assert_close(agent.act(obs, greedy=True), normal.mean)
    assert not actions.requires_grad


def test_mujoco_squashed_log_probability_and_entropy_are_of_the_transformed_distribution():
    """The entropy is estimated with one sample, of whose noise it is a differentiable function: its
    expectation is H(normal) + E[log |d action / d sample|].
    """
    agent = make_agent(ortho_init=False, squash_actions=True)
    obs, normal, actions = gaussian_inputs(agent, 200)
    low, high = torch.tensor(LOW).double(), torch.tensor(HIGH).double()
    affine = AffineTransform((high + low) / 2, (high - low) / 2)
    squash, normals = ComposeTransform([TanhTransform(), affine]), Independent(normal, 1)
    torch.manual_seed(1)
    logprob, entropy, _ = agent.evaluate_actions(obs, actions)
    in_env = torch.from_numpy(agent.env_action(actions.numpy()))
    exact = Independent(TransformedDistribution(normal, squash), 1).log_prob(in_env)
    torch.testing.assert_close(logprob, exact, rtol=1e-8, atol=1e-8)
    torch.manual_seed(1)
    sample = normal.mean + normal.stddev * torch.randn(200, 3, dtype=torch.float64)
    log_slopes = squash.log_abs_det_jacobian(sample, squash(sample))
    expected = normals.entropy() + log_slopes.sum(-1)
    torch.testing.assert_close(entropy, expected)
    params = [agent.actor_logstd, *agent.actor_mean.parameters()]
    grads = (torch.autograd.grad(x.mean(), params) for x in (entropy, expected))
    for got, grad in zip(*grads):
        torch.testing.assert_close(got, grad)
        assert grad.abs().max() > 1e-3


@pytest.mark.parametrize("u", [-500.0, 30.0])
def test_mujoco_squashed_log_probability_is_finite_far_out(u):
    """log(1 - tanh(u)^2) is 2 log 2 - 2 |u| there, and 1 - tanh(u)^2 is 0 in floating point."""
    agent, actions = make_agent(squash_actions=True), torch.full((1, 3), u).double()
    expected = np.log((HIGH - LOW) / 2).sum() + 3 * (2 * math.log(2) - 2 * abs(u))
    assert agent.squash_log_det(actions).item() == pytest.approx(expected, rel=1e-7)
    logprob, entropy, _ = agent.float().evaluate_actions(torch.zeros(1, 3), actions.float())
    (logprob + entropy).sum().backward()
    assert torch.isfinite(logprob).all() and torch.isfinite(entropy).all()
    assert all(torch.isfinite(p.grad).all() for p in agent.parameters() if p.grad is not None)


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


EDITS = {  # of get_policy(agent, obs), by the policy that it was
    "mean": lambda policy: Normal(policy.mean + 0.1, policy.stddev),
    "scale": lambda policy: Normal(1.5 * policy.mean, policy.stddev),
    "deviation": lambda policy: Normal(policy.mean, policy.stddev * (1 + policy.mean.abs())),
}


@pytest.mark.parametrize("name", [*UNKNOWN_LAYERS, *EDITS])
def test_mujoco_what_numpy_does_not_know_falls_back(name, capsys, monkeypatch):
    """With one line, slower, but right: what is played is what the agent computes. Whatever differs
    from the policy of the loss: with another deviation no ratio were right.
    """
    init, get_policy = mujoco.Agent.__init__, mujoco.Agent.get_policy

    def edited_init(agent, *args):
        init(agent, *args)
        agent.actor_mean.insert(2, UNKNOWN_LAYERS[name]())

    if name in UNKNOWN_LAYERS:
        monkeypatch.setattr(mujoco.Agent, "__init__", edited_init)
    else:
        edited = lambda agent, obs: EDITS[name](get_policy(agent, obs))  # noqa: E731
        monkeypatch.setattr(mujoco.Agent, "get_policy", edited)
    mujoco.say_once.cache_clear()
    agent, obs = fast_agent()
    expected = agent.act(torch.from_numpy(obs), greedy=True).numpy()
    np.testing.assert_array_equal(acting(agent, obs), expected)
    run_tiny(mujoco)
    said, why = capsys.readouterr().err, name if name in UNKNOWN_LAYERS else "does not do what"
    assert said.count("agent.act acts, slower") == 1 and why in said


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
