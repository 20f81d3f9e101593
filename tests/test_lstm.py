"""ppo_lstm.py and ppo_atari_lstm.py: L01 to L05 against a replay, episode ends, evaluation."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import run_tiny, tiny
from harness import play_frames, watch_envs
from registry import ATARI_LSTM
from watch import assert_orthogonal, scalars_of

import ppo_atari_lstm as atari
import ppo_lstm as ppo

both = pytest.mark.parametrize("script", [ppo, atari], ids=lambda script: script.__name__)


def make_agent(script, **changes):
    torch.manual_seed(0)
    args = tiny(script, **changes)
    image = gym.spaces.Box(0, 255, (args.frame_stack, 84, 84), np.uint8) if script is atari else 0
    space = image or gym.spaces.Box(-1, 1, (3,))
    return script.Agent(space, gym.spaces.Discrete(3), args)


def some_obs(script, *shape: int) -> torch.Tensor:
    if script is atari:
        return torch.randint(0, 256, (*shape, 1, 84, 84), dtype=torch.uint8)
    return torch.randn(*shape, 3)


def replay(agent, obs: torch.Tensor, episode_starts: torch.Tensor, state: torch.Tensor):
    """A copy of the agent, its logits (T, n, A) and values (T, n): one step after the other, the
    LSTM by its equations, in float64.
    """
    agent = copy.deepcopy(agent).double()
    w_x, w_h, b_x, b_h = [p for name, p in agent.named_parameters() if name.startswith("lstm")]
    h, c = state.double()
    logits, values = [], []
    for t in range(len(obs)):
        fresh = episode_starts[t, :, None] == 1
        h, c = torch.where(fresh, 0, h), torch.where(fresh, 0, c)
        x = obs[t].double() / (255 if obs[t].dim() == 4 else 1)
        i, f, g, o = (agent.network(x) @ w_x.T + b_x + h @ w_h.T + b_h).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        logits.append(agent.actor(h))
        values.append(agent.critic(h).squeeze(1))
    return agent, torch.stack(logits), torch.stack(values)


# -- L03, L05: calls between resets equal the replay --
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.4, 1.0])
@both
def test_a_training_pass_equals_the_replay_step_by_step(script, share):
    """Log-probabilities, values and all gradients, where this share of the steps begins anew."""
    agent, calls, (T, n) = make_agent(script), [], (6, 3)
    agent.actor.weight.data += 0.3 * torch.randn_like(agent.actor.weight)
    episode_starts = (torch.rand(T, n) < share).float()
    obs, actions = some_obs(script, T, n), torch.randint(0, 3, (T, n))
    state = torch.randn(2, n, 128)
    agent.lstm.register_forward_hook(lambda *_: calls.append(1))
    results = agent.evaluate_actions(obs, actions, episode_starts, state)
    assert len(calls) == 1 + episode_starts[1:].any(1).sum()  # see the picture in the docstring
    twin, logits, values = replay(agent, obs, episode_starts, state)
    policy = torch.distributions.Categorical(logits=logits)
    expected = (policy.log_prob(actions), policy.entropy(), values)
    weights = torch.randn(3, T, n)
    for got, x in zip(results, expected):
        torch.testing.assert_close(got.double(), x, atol=1e-5, rtol=1e-5)
    sides = ((agent, results), (twin, expected))
    loss = [sum((w * x).sum() for w, x in zip(weights, outputs)) for _, outputs in sides]
    grads = [torch.autograd.grad(x, list(a.parameters())) for x, (a, _) in zip(loss, sides)]
    for got, x in zip(*grads, strict=True):
        torch.testing.assert_close(got.double(), x, atol=1e-4, rtol=1e-4)


# -- L02, L04, L05: what minibatches are --
@both
def test_minibatches_are_whole_environments_in_random_order(script, spy, monkeypatch):
    """And every epoch starts from the memory before the rollout: zeros at first, then carried."""
    if script is atari:
        play_frames(script, monkeypatch)
    passes = spy(script.Agent, "evaluate_actions")
    size = {"num_envs": 6, "num_minibatches": 3, "update_epochs": 4, "total_timesteps": 192}
    run_tiny(script, num_steps=16, **size)
    updates = [inputs for inputs, _ in passes if inputs[1].shape[1] == 2]  # not the whole rollout
    assert len(updates) == 2 * 3 * 4
    starts = []
    for rollout in (updates[:12], updates[12:]):
        environments = []  # what was done in each, and its memory before
        for _, obs, actions, episode_starts, state in rollout:
            assert obs.shape[:2] == actions.shape == episode_starts.shape == (16, 2)
            for tensors in zip(actions.unbind(1), state.unbind(1), strict=True):
                environments.append(tuple(x.numpy().tobytes() for x in tensors))
        orders = [environments[6 * epoch : 6 * epoch + 6] for epoch in range(4)]
        assert all(sorted(order) == sorted(orders[0]) for order in orders)
        assert any(order != orders[0] for order in orders)
        starts.append(torch.cat([state for *_, state in rollout], 1))
    assert (starts[0] == 0).all() and (starts[1] != 0).any()


@pytest.mark.parametrize("name", ["Truncating", "Terminating"])
def test_a_rollout_equals_the_replay_and_limits_are_valued_by_the_old_memory(name, spy):
    """Six rollouts at practically fixed weights as one: memories are carried, and zero at first
    observations. What follows the last step of an episode is valued by what was remembered there.
    """
    passes, gae_calls = spy(ppo.Agent, "evaluate_actions"), spy(ppo, "gae")
    values_of_next = spy(ppo.Agent, "get_value")
    size = {"num_envs": 3, "num_steps": 7, "num_minibatches": 1, "update_epochs": 1}
    changes = {"ortho_init": False, "learning_rate": 1e-30, "total_timesteps": 126} | size
    run_tiny(ppo, env_id=f"{name}-v0", **changes)
    rollouts = passes[0::2]  # each before its only minibatch
    obs = torch.cat([inputs[1] for inputs, _ in rollouts])  # (42, 3, 2)
    values = torch.cat([results[2] for _, results in rollouts])
    next_obs = torch.cat([inputs[1].unflatten(0, (7, 3)) for inputs, _ in values_of_next])
    next_values, terminations, dones = (
        np.concatenate([inputs[i] for inputs, _ in gae_calls]) for i in (2, 3, 4)
    )
    episode_starts = (obs[..., 0] == 0).float()
    assert torch.equal(episode_starts, torch.cat([inputs[3] for inputs, _ in rollouts]))
    assert (episode_starts[1:].numpy() == dones[:-1]).all() and episode_starts.sum() > 20
    agent, zeros = rollouts[0][0][0], torch.zeros(2, 3, 128)
    with torch.no_grad():
        _, _, expected = replay(agent, obs, episode_starts, zeros)
        np.testing.assert_allclose(values, expected, atol=1e-5)
        limits = list(zip(*np.nonzero(dones - terminations)))
        assert len(limits) == (24 if name == "Truncating" else 0)
        for t, n in limits:
            start = episode_starts[: t + 1, n].nonzero().max()
            episode = torch.cat((obs[start : t + 1, n], next_obs[t, n][None]))[:, None]
            _, _, alone = replay(agent, episode, torch.zeros(len(episode), 1), zeros[:, :1])
            assert next_values[t, n] == pytest.approx(alone[-1].item(), abs=1e-5)
            _, _, fresh = replay(agent, episode[-1:], torch.zeros(1, 1), zeros[:, :1])
            assert abs(next_values[t, n] - fresh.item()) > 1e-3  # the memory matters


@pytest.mark.parametrize("lstm", [True, False])
@both
def test_without_lstm_a_step_knows_nothing_of_those_before(script, lstm, spy, monkeypatch):
    """In the rollout, in training and in an evaluation."""
    if script is atari:
        play_frames(script, monkeypatch)
    known = []
    layer = torch.nn.LSTM.forward
    before = lambda lstm, x, state: known.append(state[0].detach()) or layer(lstm, x, state)  # noqa: E731
    monkeypatch.setattr(torch.nn.LSTM, "forward", before)
    run_dir = run_tiny(script, lstm=lstm)["run_dir"]
    trained = len(known)
    args = script.parse_args(["--evaluate", str(run_dir), "--eval-episodes", "2"])
    script.evaluate(args, run_dir)
    assert len(known) > trained + 5
    assert any(state.any() for state in known[:trained]) == lstm
    assert any(state.any() for state in known[trained:]) == lstm


# -- reset rows of games --
def test_reset_rows_are_no_samples_and_the_step_after_episode_starts(spy, monkeypatch):
    """An epoch has each real step once, and no reset. Explained variance is of them, too."""
    play_frames(atari, monkeypatch)
    losses, passes = spy(atari, "ppo_loss"), spy(atari.Agent, "evaluate_actions")
    gae_calls = spy(atari, "gae")
    result = run_tiny(atari, num_steps=20, total_timesteps=80, update_epochs=1)
    [((_, values, _, _, dones, *_), advantages)] = gae_calls
    is_reset, episode_starts = np.zeros(dones.shape, bool), np.ones(dones.shape, bool)
    is_reset[1:] = dones[:-1] == 1
    episode_starts[1:] = is_reset[:-1]
    assert 0 < is_reset.sum() < 20
    batches = [inputs[3] for inputs, _ in losses]
    samples = [x for mb in batches for x in zip(mb["advantages"].tolist(), mb["values"].tolist())]
    a, v = advantages[~is_reset], values[~is_reset]
    assert sorted(samples) == sorted(zip(a.tolist(), v.tolist()))
    [(_, explained)] = scalars_of(result["run_dir"])["losses/explained_variance"]
    assert explained == pytest.approx(1 - a.var(ddof=1) / (a + v).var(ddof=1), rel=1e-4)
    for inputs, _ in passes:  # all games are in phase
        assert (inputs[3].numpy() == episode_starts[:, :2]).all()


# -- agent --
NETWORKS = {  # features, shapes and strides of the layers before the LSTM, their names
    ppo: (64, [(64, 3), (64, 64)], [], "Linear Tanh Linear Tanh"),
    atari: (
        512,
        [(32, 1, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136)],
        [4, 2, 1],
        "Conv2d ReLU Conv2d ReLU Conv2d ReLU Flatten Linear ReLU",
    ),
}


def test_the_memory_crosses_the_end_of_a_rollout(spy, monkeypatch):
    """The value of a rollout's last state is that of the next one's first, and learning begins with
    the memory of acting.
    """
    play_frames(atari, monkeypatch)
    calls, size = spy(atari, "gae"), {"num_steps": 20, "total_timesteps": 160}
    run_dir = run_tiny(atari, **size, learning_rate=1e-30, ortho_init=False)["run_dir"]
    (one, _), (two, _) = calls
    (_, _, next_values, _, dones, *_), (_, values, *_) = one, two
    assert not dones[-1].any()  # with a memory
    np.testing.assert_allclose(next_values[-1], values[0], rtol=1e-4, atol=1e-6)
    assert all(kl < 1e-6 for _, kl in scalars_of(run_dir)["losses/approx_kl_max"])


@both
def test_networks_are_the_published_ones(script):
    """L01: orthogonal of gain 1 and zero biases in the LSTM. The gains of the other layers."""
    agent = make_agent(script)
    lstm = agent.lstm
    features, shapes, strides, names = NETWORKS[script]
    assert [type(layer).__name__ for layer in agent.network] == names.split()
    assert [x.stride for x in agent.network if hasattr(x, "stride")] == [(x, x) for x in strides]
    assert (lstm.input_size, lstm.hidden_size, lstm.num_layers) == (features, 128, 1)
    layers = [x for x in [*agent.network, agent.actor, agent.critic] if hasattr(x, "weight")]
    assert [tuple(layer.weight.shape) for layer in layers] == [*shapes, (3, 128), (1, 128)]
    gains = [2**0.5] * len(shapes) + [0.01, 1.0, 1.0, 1.0]
    weights = [layer.weight for layer in layers] + [lstm.weight_ih_l0, lstm.weight_hh_l0]
    for weight, gain in zip(weights, gains, strict=True):
        assert_orthogonal(weight, gain)
    for bias in [layer.bias for layer in layers] + [lstm.bias_ih_l0, lstm.bias_hh_l0]:
        assert (bias == 0).all()
    assert (make_agent(script, ortho_init=False).lstm.bias_ih_l0 != 0).any()


# -- hidden velocities --
MASKED = {
    spec.kwargs["env_id"]: spec.kwargs["velocities"]
    for spec in gym.registry.values()
    if "velocities" in spec.kwargs
}


@pytest.mark.parametrize("env_id, hidden", MASKED.items())
def test_masked_environments_hide_velocities_alone(env_id, hidden):
    """Rewards, limits and all other numbers are those of the whole environment."""
    envs = [gym.make(env_id), gym.make(f"Masked{env_id}")]
    shown = np.delete(np.arange(envs[0].observation_space.shape[0]), hidden)
    (whole, _), (masked, _) = (env.reset(seed=1) for env in envs)
    moved = np.zeros(len(whole), bool)
    for t in range(600):  # Acrobot's limit is 500 steps
        assert (masked[hidden] == 0).all() and (masked[shown] == whole[shown]).all()
        assert masked.dtype == np.float32 and envs[1].observation_space.contains(masked)
        moved |= whole != 0
        (whole, *rest, _), (masked, *same, _) = (env.step(t // 3 % 2) for env in envs)
        assert rest == same
        if any(rest[1:]):
            break
    assert any(rest[1:]) and moved[hidden].all()


# -- evaluation --
def test_an_evaluation_carries_the_memory_through_each_episode():
    """Three episodes against a replay from the first observation on."""
    run_dir = run_tiny(ppo, ortho_init=False)["run_dir"]
    flags = ["--evaluate", str(run_dir), "--eval-episodes", "3", "--eval-deterministic"]
    args = ppo.parse_args(flags)
    checkpoint = ppo.load_checkpoint(run_dir)
    torch.manual_seed(0)
    checkpoint["agent"]["actor.weight"].normal_()  # so that the memory matters
    checkpoint["agent"]["lstm.weight_hh_l0"].normal_()
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    returns = ppo.evaluate(args, run_dir)
    env = ppo.make_env(args)
    agent = ppo.Agent(env.observation_space, env.action_space, args)
    agent.load_state_dict(checkpoint["agent"])
    zeros, expected, forgetful = torch.zeros(2, 1, 128), [], 0
    for i in range(3):
        seen, over = [env.reset(seed=ppo.env_seed(args) + 900_000 + i)[0]], False
        while not over:
            obs = torch.tensor(np.array(seen)).float()[:, None]
            with torch.no_grad():
                _, logits, _ = replay(agent, obs, torch.zeros(len(obs), 1), zeros)
                _, fresh, _ = replay(agent, obs[-1:], torch.zeros(1, 1), zeros)
            action = logits[-1, 0].argmax().item()
            forgetful += action != fresh[0, 0].argmax().item()
            obs, _, terminated, truncated, _ = env.step(action)
            seen.append(obs)
            over = terminated or truncated
        expected.append(len(seen) - 1)
    assert returns == expected and forgetful > 0


@pytest.mark.parametrize("env_backend, episodic_life", [("gymnasium", False), ("envpool", True)])
def test_an_evaluation_forgets_a_lost_life_if_training_does(
    env_backend, episodic_life, fast, monkeypatch, spy
):
    """An episode begins in the first row and in each that follows a reset, and in no other."""
    if env_backend == "envpool":
        pytest.importorskip("envpool")
    game = {"env_id": "Breakout", "env_backend": env_backend, "episodic_life": episodic_life}
    limit = {"max_episode_steps": 27_000 if episodic_life else 100}
    run_dir = run_tiny(atari, **game, **limit, num_steps=2, total_timesteps=8)["run_dir"]
    acts, ends = spy(atari.Agent, "act"), []
    step = lambda result, actions: ends.append(result[2] | result[3]) or result  # noqa: E731
    watch_envs(ATARI_LSTM, monkeypatch, step=step)
    args = atari.parse_args(["--evaluate", str(run_dir), "--eval-episodes", "2"])
    atari.evaluate(args, run_dir)
    episode_starts = np.array([inputs[2].numpy() == 1 for inputs, _ in acts])  # (steps, 2)
    assert episode_starts[0].all() and not episode_starts[1].any()
    assert np.sum(ends) >= (10 if episodic_life else 2)
    assert (episode_starts[2:] == np.array(ends)[:-2]).all()
