"""The numbers of ppo_continuous_mujoco.py: its functions against float64 loops from the papers and frozen figures."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

import ppo_continuous_mujoco as ppo


# -- generalized advantage estimation --
def advantages_by_definition(rewards, values, next_values, terminations, dones, gamma, gae_lambda):
    """Eq. 16 of arXiv:1506.02438 as the sum it is, for one environment; the sum stops where an episode ends."""
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
    got = ppo.gae(rewards, values, next_values, terminations.astype(float), dones.astype(float), gamma, gae_lambda)
    np.testing.assert_allclose(got, np.transpose(expected), rtol=0, atol=1e-12)


def column(*numbers) -> np.ndarray:
    return np.array(numbers, np.float64)[:, None]


def test_gae_same_step_by_hand():
    """Truncated after t=2 in a state of value 8, terminated after t=4; gamma = lambda = 1/2."""
    values, next_values = column(1, 2, 3, 4, 5, 6), column(2, 3, 8, 5, 1000, 7)
    terminations, dones = column(0, 0, 0, 0, 1, 0), column(0, 0, 1, 0, 1, 0)
    got = ppo.gae(np.ones((6, 1)), values, next_values, terminations, dones, 0.5, 0.5)
    assert got[:, 0].tolist() == [1.25, 1.0, 2.0, -1.5, -4.0, -1.5]


def test_gae_next_step_by_hand():
    """Terminated after t=1, row 2 resets; truncated after t=4 in the state of row 5, which resets."""
    values, next_values = column(1, 2, 3, 4, 5, 6), column(2, 3, 4, 5, 6, 7)
    terminations, dones = column(0, 1, 0, 0, 0, 0), column(0, 1, 0, 0, 1, 0)
    rewards, valid = column(1, 1, 0, 1, 1, 0), [0, 1, 3, 4]
    got = ppo.gae(rewards, values, next_values, terminations, dones, 0.5, 0.5)
    assert got[valid, 0].tolist() == [0.75, -1.0, -0.75, -1.0]
    for array in (rewards, values, next_values):
        array[[2, 5]] = 1e6  # whatever the reset rows hold
    again = ppo.gae(rewards, values, next_values, terminations, dones, 0.5, 0.5)
    assert again[valid, 0].tolist() == [0.75, -1.0, -0.75, -1.0]


# -- the loss --
def make_minibatch(size: int = 40, seed: int = 0):
    """Random (newlogprob, entropy, newvalue), minibatch with a third of invalid rows, clip range; all float64."""
    rng = np.random.default_rng(seed)
    new = {"newlogprob": rng.normal(size=size), "entropy": rng.normal(size=size), "newvalue": rng.normal(size=size)}
    mb = {name: rng.normal(size=size) for name in ("advantages", "returns", "values")}
    mb |= {"logprobs": new["newlogprob"] + rng.normal(size=size) * 0.3, "valid": (np.arange(size) % 3 > 0) * 1.0}
    return new, mb, 0.2


def loss_by_hand(new, mb, clip, args):
    """Loss and diagnostics, one valid sample after another."""
    rows = [i for i in range(len(mb["valid"])) if mb["valid"][i]]
    advantages = {i: mb["advantages"][i] for i in rows}
    if args.norm_adv:
        mean = sum(advantages.values()) / len(rows)
        deviation = math.sqrt(sum((a - mean) ** 2 for a in advantages.values()) / len(rows))
        advantages = {i: (a - mean) / (deviation + 1e-8) for i, a in advantages.items()}
    sums = np.zeros(6)
    for i in rows:
        ratio = math.exp(new["newlogprob"][i] - mb["logprobs"][i])
        surrogate = min(ratio * advantages[i], min(max(ratio, 1 - clip), 1 + clip) * advantages[i])
        error = (new["newvalue"][i] - mb["returns"][i]) ** 2
        if args.clip_vloss:
            step = min(max(new["newvalue"][i] - mb["values"][i], -clip), clip)
            error = max(error, (mb["values"][i] + step - mb["returns"][i]) ** 2)
        k1 = mb["logprobs"][i] - new["newlogprob"][i]
        outside = ratio < 1 - clip or ratio > 1 + clip
        sums += [-surrogate, error / 2, new["entropy"][i], k1, ratio - 1 + k1, outside]
    policy_loss, value_loss, entropy, *_ = means = sums / len(rows)
    return policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss, means


def torch_loss(new, mb, clip, args):
    inputs = {name: torch.tensor(array, requires_grad=True) for name, array in new.items()}
    tensors = {name: torch.tensor(array) for name, array in mb.items()}
    loss, stats = ppo.ppo_loss(*inputs.values(), tensors, torch.tensor(clip, dtype=torch.float64), args)
    loss.backward()
    return loss.item(), stats.detach().numpy(), {name: tensor.grad.numpy() for name, tensor in inputs.items()}


SWITCHES = list(itertools.product([True, False], [True, False], [0.0, 0.3]))


@pytest.mark.parametrize("norm_adv, clip_vloss, ent_coef", SWITCHES)
def test_loss_and_gradient_are_those_of_a_loop(norm_adv, clip_vloss, ent_coef, tiny_args):
    args = tiny_args(norm_adv=norm_adv, clip_vloss=clip_vloss, ent_coef=ent_coef, vf_coef=0.7)
    new, mb, clip = make_minibatch()
    loss, stats, grads = torch_loss(new, mb, clip, args)
    expected_loss, expected_stats = loss_by_hand(new, mb, clip, args)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
    np.testing.assert_allclose(stats, expected_stats, rtol=1e-12)
    assert 0 < expected_stats[5] < 1  # some ratios are clipped, some are not
    for name, i in itertools.product(new, range(len(mb["valid"]))):
        sides = []
        for h in (1e-6, -1e-6):
            moved = new | {name: new[name] + h * (np.arange(len(new[name])) == i)}
            sides.append(loss_by_hand(moved, mb, clip, args)[0])
        np.testing.assert_allclose(grads[name][i], (sides[0] - sides[1]) / 2e-6, atol=1e-8)


@pytest.mark.parametrize("norm_adv, clip_vloss, ent_coef", SWITCHES)
def test_invalid_rows_change_nothing(norm_adv, clip_vloss, ent_coef, tiny_args):
    args = tiny_args(norm_adv=norm_adv, clip_vloss=clip_vloss, ent_coef=ent_coef)
    new, mb, clip = make_minibatch()
    loss, stats, grads = torch_loss(new, mb, clip, args)
    invalid = mb["valid"] == 0
    other_new, other_mb, _ = make_minibatch(seed=1)
    new = {name: np.where(invalid, 5 * other_new[name], array) for name, array in new.items()}
    mb = {name: np.where(invalid & (name != "valid"), 5 * other_mb[name], array) for name, array in mb.items()}
    again_loss, again_stats, again_grads = torch_loss(new, mb, clip, args)
    assert again_loss == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(again_stats, stats, rtol=1e-12)
    for name in new:
        np.testing.assert_allclose(again_grads[name], grads[name], rtol=1e-10, atol=1e-15)
        assert not again_grads[name][invalid].any()


@pytest.mark.parametrize("num_valid, expected", [(0, 0.0), (1, 0.5 * 0.5 * 4.0)])
def test_minibatch_of_one_or_no_valid_row_is_finite(num_valid, expected, tiny_args):
    """One advantage normalizes to 0 (torch's unbiased deviation would be NaN); no valid row gives no gradient."""
    new = {"newlogprob": np.zeros(3), "entropy": np.zeros(3), "newvalue": np.full(3, 2.0)}
    mb = {"logprobs": np.zeros(3), "advantages": np.array([3.0, 1.0, 2.0]), "returns": np.zeros(3)}
    mb |= {"values": np.full(3, 2.0), "valid": (np.arange(3) < num_valid) * 1.0}
    loss, _, grads = torch_loss(new, mb, 0.2, tiny_args(vf_coef=0.5))
    assert loss == pytest.approx(expected)
    assert all(np.isfinite(grad).all() for grad in grads.values())


# -- KL estimators --
def test_kl_estimates_are_the_closed_form(tiny_args):
    """k1 and k3 of 200 000 actions of the old policy against KL(old || new) of diagonal Gaussians."""
    torch.manual_seed(0)
    n, double = 200_000, torch.float64
    old = Independent(Normal(torch.zeros(3, dtype=double), torch.tensor([1.0, 0.5, 2.0], dtype=double)), 1)
    new = Independent(Normal(torch.tensor([0.3, -0.1, 0.2], dtype=double), torch.tensor([0.8, 0.6, 2.5]).double()), 1)
    actions = old.sample((n,))
    logratio = new.log_prob(actions) - old.log_prob(actions)
    mb = {name: torch.zeros(n, dtype=double) for name in ("advantages", "returns", "values")}
    mb |= {"logprobs": old.log_prob(actions), "valid": torch.ones(n, dtype=double)}
    nothing = torch.zeros(n, dtype=double)
    _, stats = ppo.ppo_loss(new.log_prob(actions), nothing, nothing, mb, torch.tensor(0.2), tiny_args())
    closed_form = torch.distributions.kl_divergence(old.base_dist, new.base_dist).sum().item()
    error_k1, error_k3 = ((sample.std() / n**0.5).item() for sample in (-logratio, logratio.exp() - 1 - logratio))
    assert abs(stats[3].item() - closed_form) < 4 * error_k1
    assert abs(stats[4].item() - closed_form) < 4 * error_k3
    assert error_k3 < error_k1 < closed_form / 20  # the tolerances mean something


def test_k3_of_a_single_sample_is_never_negative(tiny_args):
    zero, one = torch.zeros(1), torch.ones(1)
    mb = {"advantages": zero, "returns": zero, "values": zero, "logprobs": zero, "valid": one}
    logratios = torch.linspace(-3, 3, 301)
    stats = [ppo.ppo_loss(x[None], zero, zero, mb, torch.tensor(0.2), tiny_args())[1] for x in logratios]
    k1, k3 = torch.stack(stats)[:, 3], torch.stack(stats)[:, 4]
    assert k3.min() >= 0 and k1.min() < -2.9
    torch.testing.assert_close(k3, logratios.exp() - 1 - logratios)


# -- the optimizer --
@pytest.mark.parametrize("max_grad_norm, scale, adam_eps", [(0.5, 3, 1e-5), (0.5, 0.01, 1e-5), (0.0, 3, 1e-2)])
def test_adam_step_is_torch_adam_after_clip_grad_norm(max_grad_norm, scale, adam_eps, tiny_args):
    """Clipping always, never and switched off; 50 steps with a learning rate that falls."""
    torch.manual_seed(0)
    ours = [torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.randn(4).double().requires_grad_()]
    theirs = [param.detach().clone().requires_grad_() for param in ours]
    optimizer = torch.optim.Adam(theirs, lr=1.0, eps=adam_eps)
    moments = {"exp_avg": torch.zeros(16).double(), "exp_avg_sq": torch.zeros(16).double()}
    state = moments | {"step": torch.zeros((), dtype=torch.float64)}
    args = tiny_args(max_grad_norm=max_grad_norm, adam_eps=adam_eps)
    for step in range(50):
        grads = [scale * torch.randn_like(param) for param in ours]
        lr = 1e-2 * (1 - step / 50)
        norm = ppo.adam_step(ours, grads, state, torch.tensor(lr, dtype=torch.float64), args)
        for param, grad in zip(theirs, grads):
            param.grad = grad.clone()
        their_norm = torch.nn.utils.clip_grad_norm_(theirs, max_grad_norm or math.inf)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        torch.testing.assert_close(norm, their_norm)  # the norm before clipping
        assert (norm > 0.5) == (scale == 3)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    assert state["step"] == 50


# -- normalization --
def test_running_mean_std_is_the_moments_of_all_rows_and_the_prior():
    """The prior weighs 1e-4 rows of mean 0 and variance 1; merging batches of any size equals counting all at once."""
    rng = np.random.default_rng(0)
    batches = [rng.normal(5, 3, size=(n, 4)) for n in (1, 7, 0, 1, 50)]
    rms = ppo.RunningMeanStd((4,))
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


def test_running_mean_std_gives_the_figures_of_baselines():
    """What openai/baselines ea25b9e computes for the same three batches."""
    rms = ppo.RunningMeanStd((2,))
    frozen = [
        ([1.499950001666611, 3.333222225925802], [1.1667361062965402, 16.888729622593242], 3.0001),
        ([3.6249093772655683, 2.4999375015624605], [14.421867960713298, 14.749812500781333], 4.0001),
        ([2.583290278495358, 2.3332944450925814], [12.534641203200271, 9.888831480925964], 6.0001),
    ]
    batches = [[[1.0, -2.0], [3.0, 4.0], [0.5, 8.0]], [[10.0, 0.0]], [[-1.0, 2.0], [2.0, 2.0]]]
    for batch, (mean, var, count) in zip(batches, frozen):
        rms.update(np.array(batch))
        np.testing.assert_allclose([*rms.mean, *rms.var, rms.count], [*mean, *var, count], rtol=1e-12)


def test_running_mean_std_survives_a_checkpoint():
    rms, restored = ppo.RunningMeanStd((3,)), ppo.RunningMeanStd((3,))
    rms.update(np.random.default_rng(0).normal(size=(10, 3)))
    restored.load_state_dict(rms.state_dict())
    for one in (rms, restored):
        one.update(np.full((2, 3), 1 / 3))
    assert [*restored.mean, *restored.var, restored.count] == [*rms.mean, *rms.var, rms.count]


def test_observations_are_normalized_then_clipped(tiny_args):
    rms = ppo.RunningMeanStd((2,))
    rms.mean, rms.var = np.array([1.0, -2.0]), np.array([4.0, 0.0])
    obs = np.array([[2.0, -2.0], [41.0, -1.999]])
    got = ppo.normalize_obs(rms, obs, tiny_args())
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [[0.5, 0.0], [10.0, 10.0]], rtol=1e-6)
    unclipped = [[0.5, 0.0], [20.0, 10.0]]  # 0.001 / sqrt(0 + 1e-8) = 10
    np.testing.assert_allclose(ppo.normalize_obs(rms, obs, tiny_args(clip_obs=0.0)), unclipped, rtol=1e-6)
    np.testing.assert_allclose(ppo.normalize_obs(rms, obs, tiny_args(clip_obs=0.1))[1], [0.1, 0.1], rtol=1e-6)
    assert (ppo.normalize_obs(rms, obs, tiny_args(norm_obs=False)) == obs.astype(np.float32)).all()


def test_rewards_are_scaled_then_clipped_but_not_centered(tiny_args):
    rms = ppo.RunningMeanStd()
    rms.mean, rms.var = np.float64(100.0), np.float64(4.0)
    reward = np.array([3.0, -50.0, 0.0])
    np.testing.assert_allclose(ppo.normalize_reward(rms, reward, tiny_args()), [1.5, -10.0, 0.0])
    np.testing.assert_allclose(ppo.normalize_reward(rms, reward, tiny_args(clip_reward=0.0)), [1.5, -25.0, 0.0])
    np.testing.assert_allclose(ppo.normalize_reward(rms, reward, tiny_args(clip_reward=0.1)), [0.1, -0.1, 0.0])
    assert (ppo.normalize_reward(rms, reward, tiny_args(norm_reward=False)) == reward).all()


@pytest.mark.parametrize("env_id", ["Terminating-v0", "Truncating-v0"])
def test_reward_scaling_follows_the_order_of_baselines(env_id, script, spy):
    """R = gamma R + r enters the variance, then the reward is scaled, then any end sets R to 0, also a time limit."""
    ppo, run = script
    updates, gae_calls = spy(ppo.RunningMeanStd, "update"), spy(ppo, "gae")
    run(env_id=env_id, num_steps=16, total_timesteps=64)
    fed = [x for (rms, x), _ in updates if rms.mean.shape == ()]
    returns = list(itertools.islice(itertools.cycle([1, 1.99, 2.9701, 3.940399, 4.90099501]), 32))
    np.testing.assert_allclose(fed, [[R, R] for R in returns], rtol=1e-12)
    seen, scaled = np.repeat(returns, 2), []
    for n in range(2, 65, 2):  # both returns of a step count before its reward is scaled
        mean = seen[:n].sum() / (n + 1e-4)
        scaled.append(1 / math.sqrt((1e-4 + (seen[:n] ** 2).sum()) / (n + 1e-4) - mean**2 + 1e-8))
    got = np.concatenate([rewards for (rewards, *_), _ in gae_calls])
    np.testing.assert_allclose(got[:, 0], np.minimum(scaled, 10), rtol=1e-6)
    np.testing.assert_array_equal(got[:, 0], got[:, 1])


def test_gamma_of_the_reward_scaling_is_that_of_the_agent(script, spy):
    ppo, run = script
    updates = spy(ppo.RunningMeanStd, "update")
    run(gamma=0.5, num_steps=8, total_timesteps=16)
    fed = [x[0] for (rms, x), _ in updates if rms.mean.shape == ()]
    assert fed == [1, 1.5, 1.75, 1.875, 1.9375, 1, 1.5, 1.75]


def test_reset_observations_count_and_terminal_ones_do_not(script, spy):
    ppo, run = script
    updates = spy(ppo.RunningMeanStd, "update")
    run(num_steps=16, total_timesteps=64)
    fed = [x[:, 0].tolist() for (rms, x), _ in updates if rms.mean.shape == (2,)]
    assert fed == [[t % 5, t % 5] for t in range(33)]  # the reset, then one observation per step; 5 is terminal


# -- the agent --
def test_initial_scales(make_agent):
    """Orthogonal: W W^T (or W^T W, for a tall W) is the square of the gain times the identity."""
    agent = make_agent(num_obs=3, init_log_std=-0.7)
    gains = {"actor_mean.0": 2**0.5, "actor_mean.2": 2**0.5, "actor_mean.4": 0.01}
    gains |= {"critic.0": 2**0.5, "critic.2": 2**0.5, "critic.4": 1.0}
    modules = dict(agent.named_modules())
    for name, gain in gains.items():
        weight = modules[name].weight
        gram = weight.T @ weight if weight.shape[0] > weight.shape[1] else weight @ weight.T
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)).double(), atol=1e-5 * gain**2, rtol=0)
        assert not modules[name].bias.any()
    assert not torch.equal(modules["actor_mean.2"].weight, modules["critic.2"].weight)
    torch.testing.assert_close(agent.actor_logstd, torch.full((2,), -0.7).double(), atol=1e-7, rtol=0)
    assert set(dict(agent.named_parameters())) == {f"{n}.{p}" for n in gains for p in ("weight", "bias")} | {
        "actor_logstd"
    }


def test_without_ortho_init_layers_are_those_of_torch(make_agent):
    """torch's default is uniform within 1 / sqrt(inputs), for weights and biases."""
    agent = make_agent(num_obs=50, ortho_init=False)
    layers = [module for module in agent.modules() if isinstance(module, torch.nn.Linear)]
    assert len(layers) == 6
    for layer in layers:
        bound = layer.in_features**-0.5
        assert 0.9 * bound < layer.weight.abs().max() <= bound * (1 + 1e-6)
        assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.25)
        assert 0 < layer.bias.abs().max() <= bound * (1 + 1e-6)


def test_shared_network_shares_the_trunk_and_nothing_else(make_agent):
    shared, separate = make_agent(shared_network=True), make_agent()
    for i in (0, 2):
        assert shared.actor_mean[i] is shared.critic[i] and separate.actor_mean[i] is not separate.critic[i]
    assert shared.actor_mean[4] is not shared.critic[4]
    trunk = sum(p.numel() for i in (0, 2) for p in shared.actor_mean[i].parameters())
    sizes = [sum(p.numel() for p in agent.parameters()) for agent in (separate, shared)]
    assert sizes[0] - sizes[1] == trunk
    value = separate.get_value(torch.ones(5, 3).double()).sum()
    grads = torch.autograd.grad(value, [separate.actor_mean[0].weight, separate.critic[0].weight], allow_unused=True)
    assert grads[0] is None and grads[1].abs().sum() > 0


@pytest.mark.parametrize("activation, function", [("tanh", np.tanh), ("relu", lambda x: np.maximum(x, 0))])
def test_network_by_hand_and_numpy_policy(activation, function, make_agent):
    agent = make_agent(num_obs=11, low=[-1] * 3, high=[1] * 3, activation=activation, ortho_init=False)
    obs = np.random.default_rng(0).normal(size=(100, 11))
    for network, torch_output in ((agent.actor_mean, agent.actor_mean), (agent.critic, agent.get_value)):
        hidden = obs
        for i in (0, 2, 4):
            weight, bias = (p.detach().numpy() for p in network[i].parameters())
            hidden = hidden @ weight.T + bias if i == 4 else function(hidden @ weight.T + bias)
        got = torch_output(torch.from_numpy(obs)).detach().numpy()
        np.testing.assert_allclose(got, hidden if got.ndim == 2 else hidden[:, 0], atol=1e-12)
    agent.float()
    mean = agent.actor_mean(torch.from_numpy(obs).float()).detach().numpy()
    np.testing.assert_allclose(agent.numpy_policy()(obs.astype(np.float32)), mean, rtol=0, atol=1e-6)
    assert np.abs(mean).max() > 0.05


LOW, HIGH = (-1.0, -0.5, 0.0), (1.0, 2.0, 10.0)


def gaussian_inputs(agent, n: int):
    """Observations, the policy there with its deviations spread, and actions of it."""
    with torch.no_grad():
        agent.actor_logstd.copy_(torch.tensor([0.3, -1.0, 0.0]))
    obs = torch.randn(n, 3, dtype=torch.float64)
    normal = Normal(agent.actor_mean(obs), agent.actor_logstd.exp())
    return obs, normal, normal.sample()


def test_log_probability_and_entropy_are_those_of_a_diagonal_gaussian(make_agent):
    agent = make_agent(low=LOW, high=HIGH, ortho_init=False)
    obs, normal, actions = gaussian_inputs(agent, 50)
    logprob, entropy, value = agent.evaluate_actions(obs, actions)
    torch.testing.assert_close(logprob, Independent(normal, 1).log_prob(actions), rtol=1e-12, atol=0)
    torch.testing.assert_close(entropy, Independent(normal, 1).entropy(), rtol=1e-12, atol=0)
    torch.testing.assert_close(value, agent.get_value(obs))
    assert logprob.shape == entropy.shape == value.shape == (50,)


def squashed_distribution(normal):
    middle, half = ((torch.tensor(HIGH) + sign * torch.tensor(LOW)).double() / 2 for sign in (1, -1))
    return Independent(TransformedDistribution(normal, [TanhTransform(), AffineTransform(middle, half)]), 1)


def test_squashed_log_probability_is_that_of_the_transformed_distribution(make_agent):
    agent = make_agent(low=LOW, high=HIGH, ortho_init=False, squash_actions=True)
    obs, normal, actions = gaussian_inputs(agent, 200)
    logprob, *_ = agent.evaluate_actions(obs, actions, torch.zeros_like(actions))
    in_env = torch.from_numpy(agent.env_action(actions.numpy()))
    torch.testing.assert_close(logprob, squashed_distribution(normal).log_prob(in_env), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("u", [-500.0, -30.0, 30.0, 500.0])
def test_squashed_log_probability_is_finite_far_out(u, make_agent):
    """log(1 - tanh(u)^2) is 2 log 2 - 2 |u| there, and 1 - tanh(u)^2 is 0 in floating point."""
    agent = make_agent(low=LOW, high=HIGH, squash_actions=True)
    actions = torch.full((1, 3), u, dtype=torch.float64)
    half = (torch.tensor(HIGH) - torch.tensor(LOW)).double() / 2
    expected = half.log().sum() + 3 * (2 * math.log(2) - 2 * abs(u))
    torch.testing.assert_close(agent.squash_log_det(actions)[0], expected, rtol=1e-12, atol=0)
    agent.float()
    logprob, entropy, _ = agent.evaluate_actions(torch.zeros(1, 3), actions.float(), actions.float())
    logprob.sum().backward()
    assert torch.isfinite(logprob).all() and torch.isfinite(entropy).all()
    assert all(torch.isfinite(p.grad).all() for p in agent.parameters() if p.grad is not None)


def test_squashed_entropy_estimate_is_unbiased(make_agent):
    """Its mean over the noise is the mean of -log p over an independent sample of the transformed distribution."""
    n = 100_000
    agent = make_agent(low=LOW, high=HIGH, ortho_init=False, squash_actions=True)
    gaussian_inputs(agent, 1)
    obs = torch.tensor([[0.5, -1.0, 2.0]]).double().expand(n, 3)
    torch.manual_seed(1)
    with torch.no_grad():
        normal = Normal(agent.actor_mean(obs), agent.actor_logstd.exp().expand(n, 3))
        sample = normal.sample()
        surprise = -agent.evaluate_actions(obs, sample, torch.zeros_like(sample))[0]
        estimate = agent.evaluate_actions(obs, sample, torch.randn_like(sample))[1]
        in_env = torch.from_numpy(agent.env_action(sample.numpy()))
    exact = -squashed_distribution(normal).log_prob(in_env)
    torch.testing.assert_close(surprise, exact, rtol=1e-6, atol=1e-6)
    standard_error = math.sqrt((surprise.var() + estimate.var()).item() / n)
    assert abs((estimate.mean() - surprise.mean()).item()) < 4 * standard_error
    assert standard_error < 0.01  # the tolerance means something


def test_env_actions(make_agent):
    """Clipped into the action space, squashed into it, or left alone."""
    low, high = np.float32(LOW), np.float32(HIGH)
    actions = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32) * 10
    clipped = make_agent(low=LOW, high=HIGH).env_action(actions)
    inside = (actions > low) & (actions < high)
    assert (clipped[inside] == actions[inside]).all() and inside.any() and not inside.all()
    assert (clipped[actions >= high] == np.broadcast_to(high, clipped.shape)[actions >= high]).all()
    assert (clipped[actions <= low] == np.broadcast_to(low, clipped.shape)[actions <= low]).all()
    assert (make_agent(low=LOW, high=HIGH, clip_actions=False).env_action(actions) == actions).all()
    squashed = make_agent(low=LOW, high=HIGH, squash_actions=True).env_action(actions)
    expected = (high + low) / 2 + (high - low) / 2 * np.tanh(actions.astype(np.float64))
    np.testing.assert_allclose(squashed, expected, atol=2e-6)
    assert (squashed >= low).all() and (squashed <= high).all()
