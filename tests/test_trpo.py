"""trpo_continuous_mujoco.py: the trust region, each part against linear algebra in float64."""

from dataclasses import replace
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import run_tiny, tiny
from torch import nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence
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


def rollout(agent: trpo.Agent) -> tuple[Normal, dict]:
    """The policy at random observations and a batch of its actions; those near 1 are good."""
    obs = torch.randn(200, 3).double()
    with torch.no_grad():
        policy = agent.get_policy(obs)
        actions = policy.sample()
        logprobs, _, values = agent.evaluate_actions(obs, actions)
    advantages = -((actions - 1) ** 2).sum(-1)
    batch = {"obs": obs, "actions": actions, "logprobs": logprobs}
    batch |= {"values": values, "advantages": advantages, "returns": advantages + values}
    return policy, batch


def gradient_of(agent: trpo.Agent, policy: Normal, batch: dict, args) -> torch.Tensor:
    loss, _ = trpo.trpo_loss(agent, policy, batch, args)
    return parameters_to_vector(torch.autograd.grad(loss, agent.policy_parameters()))


def natural_step(agent: trpo.Agent, policy: Normal, batch: dict, max_kl: float) -> torch.Tensor:
    """Of the KL limit's length in the metric of the undamped Fisher matrix, made explicitly."""
    fisher = fisher_matrix(agent, batch["obs"])
    direction = torch.linalg.solve(fisher, -gradient_of(agent, policy, batch, args_of()))
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


# -- conjugate gradient --
def test_conjugate_gradient_is_a_direct_solve():
    """Each step, of one product, comes nearer; b is left as it was."""
    torch.manual_seed(0)
    root, b = torch.randn(20, 20).double(), torch.randn(20).double()
    matrix, kept, calls = root @ root.T / 20 + 0.1 * torch.eye(20), b.clone(), []
    product = lambda vector: calls.append(1) or matrix @ vector  # noqa: E731
    errors = []
    for steps in (1, 5, 10, 40):
        left = trpo.conjugate_gradient(product, b, steps) - torch.linalg.solve(matrix, b)
        errors.append((left @ matrix @ left).item())
        assert len(calls) == steps or steps == 40
        calls.clear()
    assert errors[0] > errors[1] > errors[2] > errors[3] and errors[2] > 1e-4
    assert errors[3] < 1e-9 and torch.equal(b, kept)
    assert torch.equal(trpo.conjugate_gradient(product, 0 * b, 7), 0 * b) and not calls


def test_conjugate_gradient_takes_a_step_however_small_the_gradient():
    """As baselines does: else a policy whose rewards are tiny would stand still."""
    small = torch.full((4,), 1e-7)
    solution = trpo.conjugate_gradient(lambda v: 2 * v, small, 10)
    torch.testing.assert_close(solution, small / 2, rtol=1e-6, atol=0)


# -- the losses --
def by_hand(agent: trpo.Agent, policy: Normal, batch: dict, args) -> tuple[float, float]:
    """Loss and KL(old || new), of normal distributions with covariance matrices."""
    new = Normal(agent.actor_mean(batch["obs"]).detach(), agent.actor_logstd.detach().exp())
    old, new = (MultivariateNormal(p.mean, torch.diag_embed(p.variance)) for p in (policy, new))
    advantages = batch["advantages"].numpy()
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratios = (new.log_prob(batch["actions"]) - old.log_prob(batch["actions"])).exp().numpy()
    loss = -np.mean(ratios * advantages) - args.ent_coef * new.entropy().mean().item()
    return loss, kl_divergence(old, new).mean().item()


@pytest.mark.parametrize("norm_adv, ent_coef", [(True, 0.0), (False, 0.0), (True, 0.3)])
def test_loss_and_kl_are_those_by_hand(norm_adv, ent_coef, agent):
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


@pytest.mark.parametrize("bound", [0.0, 1e-3])
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_value_loss_and_its_gradient_by_hand(clip_vloss, bound, agent):
    args = args_of(clip_vloss=clip_vloss, clip_coef=0.3, max_grad_norm=bound)
    obs, old, target = torch.randn(60, 3).double(), *torch.randn(2, 60).double()
    batch, inds = {"obs": obs, "values": old, "returns": target}, torch.randperm(60)[:50]
    gradient, stats = trpo.loss_and_grad(agent, batch, inds, args)
    step = agent.get_value(obs) - old
    losses = (old + step - target) ** 2
    if clip_vloss:
        losses = torch.maximum(losses, (old + step.clip(-0.3, 0.3) - target) ** 2)
    loss = losses[inds].mean() / 2
    expected = parameters_to_vector(torch.autograd.grad(loss, list(agent.critic.parameters())))
    if bound:
        expected = expected * bound / expected.norm()
    torch.testing.assert_close(stats["value_loss"], loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-12)
    assert 10 < (step.abs() > 0.3)[inds].sum() < 50


# -- line search --
@pytest.mark.parametrize("max_kl", [1e-4, 0.01, 0.3])
@pytest.mark.parametrize("length", [1.0, 7.0])
def test_an_accepted_step_obeys_the_limit_and_improves(max_kl, length, agent):
    """It is the longest of the halved steps that does."""
    args = args_of()
    policy, batch = rollout(agent)
    params = as_views(agent)
    start = params.clone()
    step = length * natural_step(agent, policy, batch, max_kl)
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


@pytest.mark.parametrize("factor", [-1, np.nan, 1e6], ids=["uphill", "not a number", "too long"])
def test_without_a_good_step_there_is_none(factor, agent):
    policy, batch = rollout(agent)
    params = as_views(agent)
    start, step = params.clone(), factor * natural_step(agent, policy, batch, 0.01)
    _, old_stats = trpo.trpo_loss(agent, policy, batch, args_of())
    stats = trpo.line_search(agent, params, step, policy, batch, 0.01, args_of())
    assert torch.equal(params, start) and stats["step_fraction"] == 0
    assert torch.equal(parameters_to_vector(agent.policy_parameters()), start)
    assert stats["policy_loss"] == old_stats["policy_loss"] and stats["approx_kl"] == 0


def test_chance_accepts_no_step():
    """The entropy of squashed actions is an estimate, so its noise is the same in every loss."""
    torch.manual_seed(0)
    args = args_of(squash_actions=True, ent_coef=1.0)
    agent = trpo.Agent(OBS, ACTIONS, args).double()
    policy, batch = rollout(agent)
    params = as_views(agent)
    stats = trpo.line_search(agent, params, 0 * params, policy, batch, 0.01, args)
    assert stats["step_fraction"] == 0


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


def test_steps_of_a_run_are_as_long_as_the_limit_and_improve(searches, spy):
    """The limit moves linearly. The damped Fisher matrix, of every third step of all environments,
    measures half the square of the step. What is logged is what the steps were.
    """
    products = spy(trpo, "fisher_vector_product")
    limits = {"max_kl": 0.02, "max_kl_final": 0.06}
    result = run_tiny(trpo, **REAL, **limits, fisher_every=3, cg_steps=4, cg_damping=0.01)
    assert [search["max_kl"] for search in searches] == pytest.approx([0.02, 0.03, 0.04, 0.05])
    assert len(products) == 4 * 5  # once more for the length of the step
    for i, search in enumerate(searches):
        policy, batch, args = (search[name] for name in ("policy", "batch", "args"))
        before, kl_before = by_hand(search["before"], policy, batch, args)
        after, kl = by_hand(search["after"], policy, batch, args)
        assert kl_before == pytest.approx(0, abs=1e-6)
        assert 0.002 < kl <= search["max_kl"] * 1.001 and after < before
        assert gradient_of(search["before"], policy, batch, args) @ search["step"] < 0
        obs = batch["obs"].view(128, 2, -1)[::3].flatten(0, 1)
        assert all(torch.equal(inputs[1], obs) for inputs, _ in products[5 * i : 5 * i + 5])
        product = trpo.fisher_vector_product(search["before"], obs, args, search["step"])
        assert (search["step"] @ product).item() / 2 == pytest.approx(search["max_kl"], rel=1e-3)
    scalars = scalars_of(result["run_dir"])
    for name in ("policy_loss", "entropy", "approx_kl", "old_approx_kl", "step_fraction"):
        logged = [value for _, value in scalars[f"losses/{name}"]]
        assert logged == pytest.approx([s["stats"][name].item() for s in searches], rel=1e-4)


def test_policy_and_value_are_trained_apart(searches, spy):
    """The line search leaves the value alone; its epochs, of every sample once, the policy."""
    updates = spy(trpo, "loss_and_grad")
    result = run_tiny(trpo, update_epochs=3, total_timesteps=96, max_kl=0.04)
    assert len(updates) == 3 * 3 * 4 and [search["max_kl"] for search in searches] == [0.04] * 3
    for i, search in enumerate(searches):
        for name, weight in search["before"].critic.state_dict().items():
            assert torch.equal(weight, search["after"].critic.state_dict()[name])
        for (agent, *_), _ in updates[12 * i : 12 * (i + 1)]:
            assert torch.equal(parameters_to_vector(agent.policy_parameters()), search["params"])
    weights = checkpoint_of(result["run_dir"])["agent"]
    start = searches[0]["before"].state_dict()
    moved = {name: (weights[name] - start[name]).abs().max() for name in start}
    assert min(moved.values()) > 1e-5, moved
    epochs = np.array([inputs[2].numpy() for inputs, _ in updates]).reshape(9, 4 * 8)
    assert (np.sort(epochs) == np.arange(32)).all() and len(np.unique(epochs, axis=0)) == 9


# -- what is refused --
def test_a_moving_limit_fixes_the_length_of_a_run():
    """As annealing does."""
    for final in (0.05, None):
        args = args_of(anneal_lr=False, max_kl_final=final)
        checkpoint = {"args": vars(args), "iteration": 1}
        longer = replace(args, resume="run", total_timesteps=9999)
        if final:
            with pytest.raises(trpo.Refused, match="--total-timesteps: .*--no-anneal-lr"):
                trpo.check_runs(longer, checkpoint, checkpoint)
        else:
            trpo.check_runs(longer, checkpoint, checkpoint)


def test_a_batch_of_one_sample_is_refused():
    """Its normalized advantage is 0: the policy would never move."""
    one = {"num_envs": 1, "num_steps": 1, "num_minibatches": 1, "fisher_every": 1}
    with pytest.raises(trpo.Refused, match=r"\(1 \* 1\): .* needs --no-norm-adv"):
        trpo.check_args(args_of(**one))
    trpo.check_args(args_of(**one, norm_adv=False))
    trpo.check_args(args_of(**one | {"num_steps": 2}))
