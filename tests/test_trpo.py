"""trpo_continuous_mujoco.py: the trust region, each part against linear algebra in float64."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import tiny
from torch import nn
from torch.nn.utils import parameters_to_vector
from watch import checkpoint_of, copied, scalars_of

import trpo_continuous_mujoco as trpo

OBS, ACTIONS = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (2,))
args_of = partial(tiny, trpo)


@pytest.fixture
def agent() -> trpo.Agent:
    """In float64, with a policy of 28 numbers, none of them zero."""
    torch.manual_seed(0)
    agent = trpo.Agent(OBS, ACTIONS, args_of())
    agent.actor_mean = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    agent.actor_logstd.data = torch.tensor([-0.5, 0.3])
    return agent.double()


def as_views(agent: trpo.Agent) -> torch.Tensor:
    """The policy's parameters as one vector of which they are views, as in `train`."""
    params = parameters_to_vector(agent.policy_parameters()).detach()
    nn.utils.vector_to_parameters(params, agent.policy_parameters())
    return params


def rollout(agent: trpo.Agent, n: int = 200) -> tuple[torch.distributions.Normal, dict]:
    """The policy at random observations and a batch of its actions; those near 1 are good."""
    obs, noise = torch.randn(n, 3).double(), torch.randn(n, 2).double()
    with torch.no_grad():
        policy = agent.get_policy(obs)
        actions = policy.mean + policy.stddev * noise
        logprobs, _, values = agent.evaluate_actions(obs, actions)
    advantages = -((actions - 1) ** 2).sum(-1)
    batch = {"obs": obs, "actions": actions, "logprobs": logprobs}
    batch |= {"values": values, "advantages": advantages, "returns": advantages + values}
    return policy, batch


def natural_step(agent: trpo.Agent, batch: dict, policy, max_kl: float, args) -> torch.Tensor:
    """Of the KL limit's length in the metric of the undamped Fisher matrix, made explicitly."""
    loss, _ = trpo.trpo_loss(agent, policy, batch, args)
    gradient = parameters_to_vector(torch.autograd.grad(loss, agent.policy_parameters()))
    fisher = fisher_matrix(agent, batch["obs"])
    direction = torch.linalg.solve(fisher, -gradient)
    return direction * (2 * max_kl / (direction @ fisher @ direction)).sqrt()


# -- Fisher-vector product --
def fisher_matrix(agent: trpo.Agent, obs: torch.Tensor) -> torch.Tensor:
    """(P, P): the mean of J^T diag(1 / std^2) J over means, and 2 for each log deviation."""
    params, std = agent.policy_parameters(), agent.actor_logstd.detach().exp()
    rows = [
        parameters_to_vector(torch.autograd.grad(agent.actor_mean(x)[a], params[1:]))
        for x in obs
        for a in range(2)
    ]
    jacobians = torch.stack(rows).view(len(obs), 2, -1)
    of_means = torch.einsum("nap,a,naq->pq", jacobians, std**-2, jacobians) / len(obs)
    return torch.block_diag(2 * torch.eye(2).double(), of_means)


@pytest.mark.parametrize("damping", [0.0, 0.1, 3.0])
def test_fisher_vector_product_is_that_of_the_matrix(damping, agent):
    obs = torch.randn(30, 3).double()
    matrix = fisher_matrix(agent, obs) + damping * torch.eye(28).double()
    for vector in torch.randn(5, 28).double():
        product = trpo.fisher_vector_product(agent, obs, args_of(cg_damping=damping), vector)
        torch.testing.assert_close(product, matrix @ vector, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_fisher_matrix_sees_every_nth_step(num_envs, run_trpo, spy):
    """Of all environments, as many as there may be."""
    searches = spy(trpo, "line_search")
    products = spy(trpo, "fisher_vector_product")
    size = {"num_envs": num_envs, "num_steps": 32, "total_timesteps": 2 * 32 * num_envs}
    run_trpo(fisher_every=3, cg_steps=4, num_minibatches=4, **size)
    assert len(products) == 2 * 5  # once more for the length of the step
    for i, (arguments, _) in enumerate(products):
        obs = searches[i // 5][0][4]["obs"]
        steps = obs.view(32, num_envs, -1)[::3]
        assert torch.equal(arguments[1], steps.flatten(0, 1)) and len(steps) == 11


# -- conjugate gradient --
def positive_definite(n: int) -> torch.Tensor:
    root = torch.randn(n, n).double()
    return root @ root.T / n + 0.1 * torch.eye(n).double()


def test_conjugate_gradient_is_a_direct_solve():
    torch.manual_seed(0)
    matrix, b = positive_definite(20), torch.randn(20).double()
    exact = torch.linalg.solve(matrix, b)
    errors = []
    for steps in (1, 5, 10, 40):
        left = trpo.conjugate_gradient(lambda v: matrix @ v, b, steps) - exact
        errors.append((left @ matrix @ left).item())
    assert errors[0] > errors[1] > errors[2] > errors[3] and errors[2] > 1e-4
    assert errors[3] < 1e-9


def test_conjugate_gradient_takes_a_step_however_small_the_gradient():
    """As baselines does: else a policy whose rewards are tiny would stand still."""
    small = torch.full((4,), 1e-7)
    solution = trpo.conjugate_gradient(lambda v: 2 * v, small, 10)
    torch.testing.assert_close(solution, small / 2, rtol=1e-6, atol=0)


def test_conjugate_gradient_takes_the_steps_asked_for():
    """And none where nothing is left to do: of zero it makes zero, not 0 / 0."""
    torch.manual_seed(0)
    matrix, calls = positive_definite(20), []

    def product(vector: torch.Tensor) -> torch.Tensor:
        calls.append(vector)
        return matrix @ vector

    b = torch.randn(20).double()
    kept = b.clone()
    trpo.conjugate_gradient(product, b, 7)
    assert len(calls) == 7 and torch.equal(b, kept)
    assert torch.equal(trpo.conjugate_gradient(product, 0 * b, 7), 0 * b) and len(calls) == 7


# -- the loss --
def by_hand(agent: trpo.Agent, policy, batch: dict, args) -> tuple[float, float]:
    """Loss and KL(old || new), one sample after another, in NumPy."""
    advantages = batch["advantages"].numpy()
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    old_mean, old_std = policy.mean.numpy(), policy.stddev.numpy()
    new_std = agent.actor_logstd.detach().exp().numpy()
    loss, kl = 0.0, 0.0
    for i, obs in enumerate(batch["obs"]):
        mean, action = agent.actor_mean(obs).detach().numpy(), batch["actions"][i].numpy()
        logs = [
            -(((action - m) / s) ** 2) / 2 - np.log(s)
            for m, s in ((mean, new_std), (old_mean[i], old_std[i]))
        ]
        entropy = (0.5 * np.log(2 * np.pi * np.e) + np.log(new_std)).sum()
        loss -= np.exp((logs[0] - logs[1]).sum()) * advantages[i] + args.ent_coef * entropy
        squares = (old_std[i] ** 2 + (old_mean[i] - mean) ** 2) / (2 * new_std**2)
        kl += (np.log(new_std / old_std[i]) + squares - 0.5).sum()
    return loss / len(batch["obs"]), kl / len(batch["obs"])


@pytest.mark.parametrize("norm_adv, ent_coef", [(True, 0.0), (False, 0.0), (True, 0.3)])
def test_loss_and_kl_are_those_of_a_loop(norm_adv, ent_coef, agent):
    args = args_of(norm_adv=norm_adv, ent_coef=ent_coef)
    policy, batch = rollout(agent)
    params = as_views(agent)
    for size in (0.0, 0.1):
        params += size * torch.randn(28).double()
        loss, stats = trpo.trpo_loss(agent, policy, batch, args)
        expected_loss, expected_kl = by_hand(agent, policy, batch, args)
        assert loss.item() == pytest.approx(expected_loss, rel=1e-9)
        assert stats["approx_kl"].item() == pytest.approx(expected_kl, rel=1e-9, abs=1e-12)
        surrogate = expected_loss + ent_coef * stats["entropy"].item()
        assert stats["policy_loss"].item() == pytest.approx(surrogate, rel=1e-9)
    assert stats["approx_kl"] > 0.01 and stats["old_approx_kl"] != stats["approx_kl"]


@pytest.mark.parametrize("clip_vloss", [True, False])
def test_value_loss_is_that_of_a_loop(clip_vloss, agent):
    batch = {"obs": torch.randn(60, 3), "values": torch.randn(60), "returns": torch.randn(60)}
    batch = {name: tensor.double() for name, tensor in batch.items()}
    inds = torch.randperm(60)[:50]
    args = args_of(clip_vloss=clip_vloss, clip_coef=0.3)
    new = agent.get_value(batch["obs"])
    rows = torch.stack([new, batch["values"], batch["returns"]], 1)[inds]
    total, outside = 0.0, 0
    for v, before, target in rows.tolist():
        outside += abs(v - before) > 0.3
        clipped = before + min(max(v - before, -0.3), 0.3)
        error = (v - target) ** 2
        total += max(error, (clipped - target) ** 2) if clip_vloss else error
    _, stats = trpo.loss_and_grad(agent, batch, inds, args)
    assert stats["value_loss"].item() == pytest.approx(total / 50 / 2, rel=1e-12)
    assert 10 < outside < 50


# -- line search --
@pytest.mark.parametrize("max_kl", [1e-4, 0.01, 0.3])
@pytest.mark.parametrize("length", [1.0, 7.0])
def test_an_accepted_step_obeys_the_limit_and_improves(max_kl, length, agent):
    """It is the longest of the halved steps that does; by a loop in NumPy."""
    args = args_of()
    policy, batch = rollout(agent)
    params = as_views(agent)
    start = params.clone()
    step = length * natural_step(agent, batch, policy, max_kl, args)
    before, _ = by_hand(agent, policy, batch, args)
    stats = trpo.line_search(agent, params, step, policy, batch, max_kl, args)
    fraction = stats["step_fraction"].item()
    torch.testing.assert_close(params, start + fraction * step, rtol=0, atol=0)
    loss, kl = by_hand(agent, policy, batch, args)
    assert 0 < kl <= max_kl and loss < before
    assert stats["approx_kl"].item() == pytest.approx(kl, rel=1e-6)
    assert stats["policy_loss"].item() == pytest.approx(loss)
    larger = 1.0
    while larger > fraction:
        params.copy_(start + larger * step)
        loss, kl = by_hand(agent, policy, batch, args)
        assert kl > max_kl or loss >= before
        larger /= 2
    assert larger == fraction and (length == 1 or fraction < 1)


BAD_STEPS = {
    "uphill": lambda step: -step,
    "not a number": lambda step: step * np.nan,
    "too long to be halved often enough": lambda step: step * 1e6,
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_without_a_good_step_there_is_none(name, agent):
    args = args_of()
    policy, batch = rollout(agent)
    params = as_views(agent)
    start = params.clone()
    step = BAD_STEPS[name](natural_step(agent, batch, policy, 0.01, args))
    old_loss, old_stats = trpo.trpo_loss(agent, policy, batch, args)
    stats = trpo.line_search(agent, params, step, policy, batch, 0.01, args)
    assert torch.equal(params, start) and stats["step_fraction"] == 0
    assert torch.equal(parameters_to_vector(agent.policy_parameters()), start)
    assert stats["policy_loss"] == old_stats["policy_loss"] and stats["approx_kl"] == 0


# -- runs --
@pytest.fixture
def searches(monkeypatch) -> list[dict]:
    """Of each line search of runs from here on: what it got, what it returned and left."""
    found, search = [], trpo.line_search

    def watched(agent, params, step, policy, batch, max_kl, args):
        before = copied(agent)
        stats = search(agent, params, step, policy, batch, max_kl, args)
        names = {"before": before, "after": copied(agent), "params": copied(params)}
        names |= {"step": copied(step), "policy": policy, "batch": copied(batch)}
        found.append(names | {"max_kl": max_kl, "args": args, "stats": copied(stats)})
        return stats

    monkeypatch.setattr(trpo, "line_search", watched)
    return found


REAL = {"env_id": "InvertedPendulum-v4", "num_steps": 128, "total_timesteps": 1024}


def test_steps_of_a_run_stay_within_the_limit_and_improve(searches, run_trpo):
    """And what is logged is what they were."""
    result = run_trpo(max_kl=0.02, **REAL)
    assert len(searches) == 4
    for search in searches:
        policy, batch, args = (search[name] for name in ("policy", "batch", "args"))
        before, kl_before = by_hand(search["before"], policy, batch, args)
        after, kl = by_hand(search["after"], policy, batch, args)
        assert kl_before == pytest.approx(0, abs=1e-6)
        assert 0.002 < kl <= 0.02 * 1.001 and after < before
        assert torch.equal(
            parameters_to_vector(search["after"].policy_parameters()), search["params"]
        )
    scalars = scalars_of(result["run_dir"])
    for name in ("policy_loss", "entropy", "approx_kl", "old_approx_kl", "step_fraction"):
        logged = [value for _, value in scalars[f"losses/{name}"]]
        assert logged == pytest.approx([s["stats"][name].item() for s in searches], rel=1e-4)


def test_the_whole_step_is_as_long_as_the_limit(searches, run_trpo):
    """Half its square in the damped metric; it lowers the loss at first."""
    run_trpo(max_kl=0.03, fisher_every=2, cg_damping=0.01, **REAL)
    for search in searches:
        agent, batch, step = search["before"], search["batch"], search["step"]
        args = search["args"]
        obs = batch["obs"].view(args.num_steps, args.num_envs, -1)[::2].flatten(0, 1)
        product = trpo.fisher_vector_product(agent, obs, args, step)
        assert (step @ product).item() / 2 == pytest.approx(0.03, rel=1e-3)
        loss, _ = trpo.trpo_loss(agent, search["policy"], batch, search["args"])
        gradient = parameters_to_vector(torch.autograd.grad(loss, agent.policy_parameters()))
        assert gradient @ step < 0


@pytest.mark.parametrize("final, limits", [(None, [0.04] * 4), (0.08, [0.04, 0.05, 0.06, 0.07])])
def test_the_limit_moves_linearly(final, limits, searches, run_trpo):
    run_trpo(max_kl=0.04, max_kl_final=final, total_timesteps=128)
    assert [search["max_kl"] for search in searches] == pytest.approx(limits)


def test_a_moving_limit_fixes_the_length_of_a_run(run_trpo):
    """As annealing does."""
    result = run_trpo(anneal_lr=False, max_kl_final=0.05)
    longer = ["--resume", str(result["run_dir"]), "--total-timesteps", "9999"]
    with pytest.raises(trpo.Refused, match="--total-timesteps: .*--no-anneal-lr"):
        trpo.train(trpo.parse_args(longer))
    result = run_trpo(anneal_lr=False)
    longer = ["--resume", str(result["run_dir"]), "--total-timesteps", "128"]
    assert trpo.train(trpo.parse_args(longer))["global_step"] == 128 > result["global_step"]


def test_policy_and_value_are_trained_apart(searches, run_trpo, spy):
    """The line search leaves the value alone, and the value's epochs the policy."""
    updates = spy(trpo, "loss_and_grad")
    result = run_trpo(update_epochs=3, total_timesteps=96)
    assert len(updates) == 3 * 3 * 4 and len(searches) == 3
    for i, search in enumerate(searches):
        for name, weight in search["before"].critic.state_dict().items():
            assert torch.equal(weight, search["after"].critic.state_dict()[name])
        for (agent, *_), _ in updates[12 * i : 12 * (i + 1)]:
            assert torch.equal(parameters_to_vector(agent.policy_parameters()), search["params"])
    weights = checkpoint_of(result["run_dir"])["agent"]
    start = searches[0]["before"].state_dict()
    moved = {name: (weights[name] - start[name]).abs().max() for name in start}
    assert min(moved.values()) > 1e-5, moved


def test_every_sample_once_an_epoch(run_trpo, spy):
    updates = spy(trpo, "loss_and_grad")
    run_trpo(update_epochs=3)
    epochs = np.array([arguments[2].numpy() for arguments, _ in updates]).reshape(6, 4 * 8)
    assert all(sorted(epoch) == list(range(32)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


@pytest.mark.parametrize("bound", [0.0, 1e-3])
def test_the_values_gradient_is_that_of_its_loss(bound, run_trpo, spy):
    updates = spy(trpo, "loss_and_grad")
    run_trpo(max_grad_norm=bound, learning_rate=0.01)
    for (agent, batch, inds, args), (gradient, _) in updates:
        value, old, target = agent.get_value(batch["obs"]), batch["values"], batch["returns"]
        clipped = old + (value - old).clamp(-args.clip_coef, args.clip_coef)
        losses = torch.maximum((value - target) ** 2, (clipped - target) ** 2) / 2
        params = list(agent.critic.parameters())
        expected = parameters_to_vector(torch.autograd.grad(losses[inds].mean(), params))
        expected = expected * ((bound / (expected.norm() + 1e-6)).clamp(max=1) if bound else 1)
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bootstrap, cut", [(True, 0), (False, 6)])
def test_time_limits(bootstrap, cut, run_trpo, spy):
    """Six episodes of five steps, which the limit ends; what followed them has a value."""
    calls = spy(trpo, "gae")
    steps = {"num_envs": 2, "num_steps": 16, "total_timesteps": 32}
    run_trpo(env_id="Truncating-v0", norm_obs=False, bootstrap_truncation=bootstrap, **steps)
    (_, values, following, terminations, dones, *_), _ = calls[0]
    assert dones.sum() == 6 and terminations.sum() == cut
    inside = dones[:-1] == 0
    np.testing.assert_allclose(following[:-1][inside], values[1:][inside], atol=1e-6)
    assert abs(following[dones == 1]).min() > 0


@pytest.mark.e2e
def test_compiled_is_eager(run_trpo):
    runs = [run_trpo(compile=compiled, **REAL) for compiled in (True, False)]
    one, other = (checkpoint_of(run["run_dir"])["agent"] for run in runs)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-3)


# -- bad input --


def test_a_batch_of_one_sample_is_refused():
    """Its normalized advantage is 0: the policy would never move."""
    flags = "--num-envs 1 --num-minibatches 1 --fisher-every 1 --num-steps"
    with pytest.raises(trpo.Refused, match=r"\(1 \* 1\): .* needs --no-norm-adv"):
        trpo.parse_args([*flags.split(), "1"])
    trpo.parse_args([*flags.split(), "1", "--no-norm-adv"])
    trpo.parse_args([*flags.split(), "2"])
