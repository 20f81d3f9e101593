"""ppo_lstm.py: L01 to L05 against a replay, episode ends, vectors, resume, evaluation."""

import copy
import math
import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from watch import assert_equal, checkpoint_of, episodes_of, scalars_of, state_of

import ppo_lstm as ppo


class Counting(gym.Env):
    """Observes (step of the episode, its number k) / 4; ends after 1 + k % 5 steps, if k is odd by
    a time limit.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, render_mode=None):
        self.episode, self.render_mode = -1, render_mode

    def reset(self, seed=None, options=None):
        self.t, self.episode = 0, self.episode + 1
        return np.array([self.t, self.episode]) / 4, {}

    def step(self, action):
        self.t += 1
        over, limit = self.t == 1 + self.episode % 5, self.episode % 2 == 1
        return (
            np.array([self.t, self.episode]) / 4,
            float(action),
            over and not limit,
            over and limit,
            {},
        )


class Exploding(Counting):
    """What it observes when it fails is not finite."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return np.where(terminated, [np.nan, np.inf], obs), reward, terminated, truncated, info


class OldFashioned(Counting):
    """Its flags are NumPy's, and its random numbers those of a RandomState."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self._np_random = np.random.RandomState(1)

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, np.float64(reward), np.bool_(terminated), np.bool_(truncated), info


gym.register("Counting-v0", Counting)
gym.register("Exploding-v0", Exploding)
gym.register("OldFashioned-v0", OldFashioned)
CARTPOLE = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
gym.register("Endless-v0", CARTPOLE)
gym.register("ShortCartPole-v0", CARTPOLE, max_episode_steps=13)  # one rollout of some tests
CNN_SHAPES = [(32, 1, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136)]


def make_agent(obs_shape: tuple, num_actions: int, args: ppo.Args) -> ppo.Agent:
    obs_space = gym.spaces.Box(0, 255, obs_shape)
    return ppo.Agent(obs_space, gym.spaces.Discrete(num_actions), args)


def replay(agent: ppo.Agent, obs: torch.Tensor, starts: np.ndarray, state: torch.Tensor):
    """Logits (T, N, A) and values (T, N), one step after the other, the LSTM by its equations in
    float64.

    obs: (T, N, ...). starts: (T, N), True where an episode's first observation is. state: (2, N, H)
    before row 0.
    """
    agent = copy.deepcopy(agent).double()
    w_x, w_h, b_x, b_h = [p for name, p in agent.named_parameters() if name.startswith("lstm")]
    h, c = state.double()
    logits, values = [], []
    for t in range(len(obs)):
        fresh = torch.from_numpy(starts[t])[:, None]
        h, c = torch.where(fresh, 0, h), torch.where(fresh, 0, c)
        x = obs[t].double() / (255 if obs[t].dim() == 4 else 1)
        i, f, g, o = (agent.network(x) @ w_x.T + b_x + h @ w_h.T + b_h).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        logits.append(agent.actor(h))
        values.append(agent.critic(h).squeeze(1))
    return agent, torch.stack(logits), torch.stack(values)


def starts_after(valid: np.ndarray) -> np.ndarray:
    starts = np.zeros_like(valid)
    starts[1:] = ~valid[:-1]
    return starts


# -- L03, L04, L05: one call over sequences with resets inside equals the replay --
def random_valid(T: int, N: int, seed: int) -> np.ndarray:
    """Reset rows as they happen: anywhere, but never two in a row."""
    rng, valid = np.random.default_rng(seed), np.ones((T, N), bool)
    for t in range(T):
        valid[t] = (rng.random(N) > 0.3) | (~valid[t - 1] if t else False)
    return valid


def reset_rows(T: int, *rows: tuple[int, ...]) -> np.ndarray:
    """(T, N): environment n has reset rows at `rows[n]`."""
    return np.array([[t not in mine for mine in rows] for t in range(T)])


VALID = {
    "no reset": reset_rows(9, (), (), (), ()),
    "first row": reset_rows(9, (0,), (), (0,), ()),
    "last row": reset_rows(9, (8,), (), (), (8,)),
    "last but one": reset_rows(9, (7,), (), (), (7,)),
    "several": reset_rows(9, (1, 4, 6), (), (3, 5), (2, 7)),
    "as many as possible": reset_rows(
        9, (0, 2, 4, 6, 8), (1, 3, 5, 7), (0, 2, 4, 6, 8), (1, 3, 5, 7)
    ),
    "one step": reset_rows(1, (), (0,), (), ()),
} | {f"random {seed}": random_valid(40, 4, seed) for seed in range(4)}


def minibatch(args: ppo.Args, valid: np.ndarray, obs_shape=(3,), seed: int = 0):
    """An agent, a rollout's flat batch and its first state, at random; rows of `valid` (T, N)."""
    torch.manual_seed(seed)
    agent = make_agent(obs_shape, 3, args)
    for param in agent.actor.parameters():
        param.data += 0.3 * torch.randn_like(param)
    T, N = valid.shape
    obs = torch.randn(T, N, *obs_shape)
    obs = torch.randint(0, 256, obs.shape, dtype=torch.uint8) if len(obs_shape) == 3 else obs
    batch = {"obs": obs, "actions": torch.randint(0, 3, (T, N)), "valid": torch.from_numpy(valid)}
    batch |= {name: torch.randn(T, N) for name in ("logprobs", "values", "advantages", "returns")}
    batch["logprobs"] = batch["logprobs"] / 10 - 1.1
    return (
        agent,
        {name: tensor.flatten(0, 1) for name, tensor in batch.items()},
        torch.randn(2, N, 128),
    )


@pytest.mark.parametrize(
    "case, obs_shape", [(case, (3,)) for case in VALID] + [("several", (1, 84, 84))]
)
def test_training_pass_equals_the_replay_step_by_step(case, obs_shape, tiny_lstm):
    """Log-probabilities, values and all gradients of a minibatch of two of four environments; one
    call of the LSTM.
    """
    valid, args, envs = VALID[case], tiny_lstm(), np.array([2, 0])
    agent, batch, state = minibatch(args, valid, obs_shape)
    T, N = valid.shape
    calls, clip_coef = [], torch.tensor(0.1)
    agent.lstm.register_forward_hook(lambda *_: calls.append(1))
    mb_inds, *sequences = ppo.split_episodes(torch.from_numpy(valid), torch.from_numpy(envs), state)
    assert mb_inds.tolist() == [t * N + n for n in envs for t in range(T)]
    hidden = agent.run_lstm(agent.encode(batch["obs"][mb_inds]), *sequences)
    assert len(calls) == 1
    mine = {name: b[mb_inds] for name, b in batch.items()} | {"hidden": hidden}
    out = agent.evaluate_actions(hidden, mine["actions"])
    real = {name: b[mine["valid"]] for name, b in mine.items()}
    if len(real["valid"]) == 0:  # one step that resets
        real = mine
    loss, _ = ppo.minibatch_loss(agent, real, clip_coef, args)
    grads = torch.autograd.grad(loss, list(agent.parameters()))

    obs = batch["obs"].unflatten(0, (T, N))[:, envs]
    twin, logits, values = replay(agent, obs, starts_after(valid)[:, envs], state[:, envs])
    logits, values = logits.transpose(0, 1).flatten(0, 1), values.T.flatten()
    policy = torch.distributions.Categorical(logits=logits)
    expected = (policy.log_prob(mine["actions"]), policy.entropy(), values)
    for got, x in zip(out, expected):
        torch.testing.assert_close(got.double(), x, atol=1e-5, rtol=1e-5)
    rows = mine["valid"] if mine["valid"].any() else ~mine["valid"]
    doubles = {name: b.double() for name, b in real.items() if name != "actions"}
    loss, _ = ppo.ppo_loss(*(x[rows] for x in expected), doubles, clip_coef, args)
    their_grads = torch.autograd.grad(loss, list(twin.parameters()))
    for got, x in zip(grads, their_grads, strict=True):
        torch.testing.assert_close(got.double(), x, atol=1e-5, rtol=1e-5)


def test_sequences_are_split_after_reset_rows():
    """Environment 1: rows 0-2 and 3-4, environment 0: row 0, rows 1-3 and row 4. Rows of the batch
    are t * 3 + n.
    """
    valid, state = torch.from_numpy(reset_rows(5, (0, 3), (2,), ())), torch.randn(2, 3, 4)
    mb_inds, lengths, states = ppo.split_episodes(valid, torch.tensor([1, 0]), state)
    sequences = [rows.tolist() for rows in mb_inds.split(lengths)]
    assert sequences == [[1, 4, 7], [10, 13], [0], [3, 6, 9], [12]]
    assert (states[:, [0, 2]] == state[:, [1, 0]]).all() and (states[:, [1, 3, 4]] == 0).all()


def test_minibatches_are_all_steps_of_whole_environments_in_random_order(run_lstm, spy):
    splits = spy(ppo, "split_episodes")
    run_lstm(num_envs=6, num_minibatches=3, update_epochs=4, total_timesteps=96)
    orders = []
    for epoch in range(4):
        envs = []
        for _, (mb_inds, *_) in splits[3 * epoch : 3 * epoch + 3]:
            mine = sorted(set((mb_inds % 6).tolist()))
            assert len(mine) == 2
            assert sorted(mb_inds.tolist()) == sorted(t * 6 + n for t in range(16) for n in mine)
            envs += mine
        assert sorted(envs) == list(range(6))
        orders.append(envs)
    assert len({str(order) for order in orders}) > 1


def test_every_epoch_starts_from_the_state_before_the_rollout(run_lstm, spy):
    splits, acts = spy(ppo, "split_episodes"), spy(ppo.Agent, "act")
    run_lstm(total_timesteps=128)
    first_states = [inputs[2] for inputs, _ in acts[0::17]]  # 16 steps and the bootstrap value
    assert len(splits) == 8 and len(first_states) == 2
    for i, (inputs, _) in enumerate(splits):
        assert (inputs[2] == first_states[i // 4]).all()
    assert (first_states[0] == 0).all() and (
        first_states[1] != 0
    ).any()  # [L02]: zero, then carried


# -- the rollout --
def test_rollout_equals_the_replay_and_values_at_limits_are_those_of_the_old_episode(run_lstm, spy):
    """Six rollouts at practically fixed weights as one: states are carried, and zero at first
    observations.

    Where episodes start is read off the observations. The value that follows a transition is that
    of the next row, which after an end holds the last observation of the old episode, seen in its
    own state.
    """
    acts, gae_calls = spy(ppo.Agent, "act"), spy(ppo, "gae")
    size = {"num_envs": 3, "num_steps": 7, "num_minibatches": 1, "update_epochs": 1}
    run_lstm(
        env_id="Counting-v0", ortho_init=False, learning_rate=1e-30, total_timesteps=126, **size
    )
    steps = [act for i, act in enumerate(acts) if i % 8 != 7]  # without the bootstrap values
    obs = torch.stack([inputs[1] for inputs, _ in steps])
    actions, logprobs = (torch.stack([result[i] for _, result in steps]) for i in (0, 1))
    rollout_values, next_values, terminations, dones = (
        np.concatenate([inputs[i] for inputs, _ in gae_calls]) for i in (1, 2, 3, 4)
    )
    starts, valid = (obs[..., 0] == 0).numpy(), np.ones(dones.shape, bool)
    valid[1:] = dones[:-1] == 0
    assert obs.dtype == torch.float32 and starts.sum() > 20 and (starts[1:] == ~valid[:-1]).all()
    assert not valid[7::7].all() and not valid[6:-1:7].all()  # at both ends of rollouts
    agent = acts[0][0][0]
    with torch.no_grad():
        _, logits, values = replay(agent, obs, starts, torch.zeros(2, 3, 128))
    chosen = logits.log_softmax(2).gather(2, actions[..., None]).squeeze(2)
    torch.testing.assert_close(logprobs.double(), chosen, atol=1e-5, rtol=0)
    np.testing.assert_allclose(rollout_values, values.numpy(), atol=1e-5)
    np.testing.assert_allclose(next_values[:-1], values[1:].numpy(), atol=1e-5)
    limits = (dones - terminations)[:-1] == 1
    assert limits.sum() > 8 and (obs[1:][limits][:, 0] > 0).all() and not valid[1:][limits].any()
    with torch.no_grad():  # and the state matters: from zero these values are others
        _, _, fresh = replay(agent, obs, np.ones_like(starts), torch.zeros(2, 3, 128))
    assert np.abs(fresh[1:].numpy() - next_values[:-1])[limits].max() > 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lstm": False},
        {"env_id": "Pong", "frame_stack": 4},
        {"env_id": "Pong", "env_backend": "envpool"},
    ],
    ids=["CartPole", "no lstm", "Pong", "Pong of EnvPool"],
)
def test_first_minibatch_has_ratio_one(changes, run_lstm, spy):
    if changes.get("env_backend"):
        pytest.importorskip("envpool")
    losses = spy(ppo, "minibatch_loss")
    size = {"num_steps": 64, "total_timesteps": 256} if "env_id" not in changes else {}
    run_lstm(ortho_init=False, learning_rate=0.01, **size, **changes)
    first, second = (stats for _, (_, stats) in losses[:2])
    assert abs(first["old_approx_kl"]) < 1e-5 and abs(first["approx_kl"]) < 1e-6
    assert first["clipfrac"] == 0 and second["approx_kl"] > 1e-6  # the policy has moved


@pytest.mark.parametrize(
    "changes", [{"num_steps": 64}, {"env_id": "Pong", "max_episode_steps": 12}]
)
def test_every_minibatch_has_ratio_one_while_the_weights_stay(changes, run_lstm, spy):
    """With states carried into rollouts, reset rows inside, and a network that remembers."""
    losses, splits = spy(ppo, "minibatch_loss"), spy(ppo, "split_episodes")
    size = {"total_timesteps": 3 * 4 * changes.get("num_steps", 16)}
    run_lstm(ortho_init=False, learning_rate=1e-30, **size | changes)
    assert len(losses) == 12 and all(not inputs[0].all() for inputs, _ in splits[4:8])
    assert sum(bool(result[2].any()) for _, result in splits[4:]) > 4  # states carried over
    for name, most in (("old_approx_kl", 1e-5), ("approx_kl", 1e-6), ("clipfrac", 0)):
        assert max(abs(stats[name]) for _, (_, stats) in losses) <= most


@pytest.mark.parametrize("bootstrap_truncation", [True, False])
def test_time_limits_end_the_episode_without_bootstrap_truncation(
    bootstrap_truncation, run_lstm, spy
):
    gae_calls = spy(ppo, "gae")
    run_lstm(env_id="Counting-v0", bootstrap_truncation=bootstrap_truncation)
    (_, _, _, terminations, dones, *_), _ = gae_calls[0]
    assert dones.sum() > 8 and (terminations == dones).all() == (not bootstrap_truncation)


def test_reset_rows_are_no_samples(run_lstm, spy):
    """Every minibatch has each real step of its environments, some twice, and no reset."""
    losses, splits = spy(ppo, "minibatch_loss"), spy(ppo, "split_episodes")
    gae_calls = spy(ppo, "gae")
    run_lstm(num_steps=64, total_timesteps=256)
    (_, values, *_), advantages = gae_calls[0]
    valid, sizes = splits[0][0][0].numpy(), set()
    assert 4 < (~valid).sum() < 40 and len(losses) == len(splits) == 4
    for (inputs, _), ((_, mb_envs, _), _) in zip(losses, splits):
        mb, mine = inputs[1], valid[:, mb_envs]
        rows = set(zip(advantages[:, mb_envs][mine], values[:, mb_envs][mine]))
        assert set(zip(mb["advantages"].numpy(), mb["values"].numpy())) == rows
        assert {len(tensor) for tensor in mb.values()} == {128}
        sizes.add(len(rows))
    assert len(sizes) > 1 and max(sizes) < 128


def test_what_a_reset_row_shows_changes_no_other_step(tiny_lstm):
    """Not even through the state: whatever it shows, the new episode starts from zero."""
    valid = VALID["several"]
    agent, batch, state = minibatch(tiny_lstm(), valid)
    every = torch.arange(4)
    mb_inds, *sequences = ppo.split_episodes(torch.from_numpy(valid), every, state)
    obs, real = batch["obs"][mb_inds], batch["valid"][mb_inds]
    other = torch.where(real[:, None], obs, obs + 3.0)
    hidden, changed = (agent.run_lstm(agent.encode(x), *sequences) for x in (obs, other))
    assert torch.equal(hidden[real], changed[real])
    assert (hidden[~real] != changed[~real]).all(1).any()


# -- agent --
@pytest.mark.parametrize("obs_shape, features", [((1, 84, 84), 512), ((4,), 64)])
def test_lstm_weights_are_orthogonal_of_std_one_and_biases_zero(obs_shape, features, tiny_lstm):
    torch.manual_seed(0)
    agent = make_agent(obs_shape, 4, tiny_lstm())
    lstm = agent.lstm
    assert isinstance(lstm, torch.nn.LSTM)
    assert (lstm.input_size, lstm.hidden_size, lstm.num_layers) == (features, 128, 1)
    for weight in (lstm.weight_ih_l0, lstm.weight_hh_l0):
        weight = weight.detach().double()
        gram = weight @ weight.T if len(weight) <= weight.shape[1] else weight.T @ weight
        torch.testing.assert_close(gram, torch.eye(len(gram)).double(), atol=1e-5, rtol=0)
    assert (lstm.bias_ih_l0 == 0).all() and (lstm.bias_hh_l0 == 0).all()
    plain = make_agent(obs_shape, 4, tiny_lstm(ortho_init=False)).lstm
    assert (plain.bias_ih_l0 != 0).any()
    assert agent.actor.weight.shape == (4, 128) and agent.critic.weight.shape == (1, 128)


@pytest.mark.parametrize(
    "obs_shape, shapes", [((1, 84, 84), CNN_SHAPES), ((4,), [(64, 4), (64, 64)])]
)
def test_other_layers_are_the_published_ones(obs_shape, shapes, tiny_lstm):
    """Shapes, gains and zero biases, and the features by hand."""
    torch.manual_seed(0)
    agent = make_agent(obs_shape, 4, tiny_lstm()).double()
    layers = [m for m in agent.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    assert [tuple(layer.weight.shape) for layer in layers] == [*shapes, (4, 128), (1, 128)]
    for layer, gain in zip(layers, [2**0.5] * len(shapes) + [0.01, 1.0], strict=True):
        weight = layer.weight.detach().flatten(1)
        gram = weight @ weight.T if len(weight) <= weight.shape[1] else weight.T @ weight
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)).double(), atol=1e-4, rtol=0)
        assert (layer.bias == 0).all()

    agent = make_agent(obs_shape, 4, tiny_lstm(ortho_init=False))
    layers = [m for m in agent.network if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
    obs = torch.randint(0, 256, (3, *obs_shape), dtype=torch.uint8)
    obs = obs if len(obs_shape) == 3 else obs.float()
    x = obs.float() / (255 if len(obs_shape) == 3 else 1)
    for layer in layers:
        if isinstance(layer, torch.nn.Conv2d):
            x = F.conv2d(x, layer.weight, layer.bias, stride=layer.stride).relu()
        else:
            x = x.permute(0, 2, 3, 1).flatten(1) if x.dim() == 4 else x
            x = F.linear(x, layer.weight, layer.bias)
            x = x.relu() if len(obs_shape) == 3 else x.tanh()
    assert len(obs_shape) == 1 or [layer.stride for layer in layers[:3]] == [(4, 4), (2, 2), (1, 1)]
    torch.testing.assert_close(agent.encode(obs), x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lstm", [True, False])
def test_without_lstm_a_step_knows_nothing_of_the_ones_before(lstm, run_lstm, spy):
    """Every step of the rollout and of the training pass starts from zero: a feed-forward layer of
    the same size.
    """
    acts, splits = spy(ppo.Agent, "act"), spy(ppo, "split_episodes")
    run_dir = run_lstm(lstm=lstm)["run_dir"]
    args = ppo.parse_args(["--evaluate", str(run_dir), "--eval-episodes", "2"])
    ppo.evaluate(args, run_dir)
    before = torch.cat([inputs[2].flatten() for inputs, _ in acts])
    assert len(acts) > 34 and (before == 0).all() == (not lstm)
    for _, (mb_inds, lengths, state) in splits:
        alone = set(lengths) == {1} and state.shape == (2, len(mb_inds), 128) and (state == 0).all()
        assert alone == (not lstm)


def test_bf16_stays_before_the_lstm(tiny_lstm):
    torch.manual_seed(0)
    agent, plain = (make_agent((1, 84, 84), 4, tiny_lstm(bf16=bf16)) for bf16 in (True, False))
    plain.load_state_dict(agent.state_dict())
    types = []
    agent.lstm.register_forward_hook(
        lambda _, inputs, outputs: types.extend([inputs[0].dtype, outputs[0].dtype])
    )
    obs = torch.randint(0, 256, (2, 1, 84, 84), dtype=torch.uint8)
    scaled = []  # what the first layer sees: scaled in bfloat16, to the same as in float32
    agent.network.register_forward_pre_hook(lambda _, inputs: scaled.append(inputs[0]))
    action, logprob, value, state = agent.act(obs, torch.zeros(2, 2, 128), torch.zeros(2, 4))
    assert torch.equal(scaled[0], (obs / 255).bfloat16())
    assert {*types, logprob.dtype, value.dtype, state.dtype} == {torch.float32}
    assert 0 < (agent.encode(obs) - plain.encode(obs)).abs().max() < 0.05


def test_defaults_are_the_published_ones():
    published = {
        "num_envs": 8,
        "num_steps": 128,
        "num_minibatches": 4,
        "update_epochs": 4,
        "learning_rate": 2.5e-4,
    }
    published |= {
        "clip_coef": 0.1,
        "ent_coef": 0.01,
        "frame_stack": 1,
        "gamma": 0.99,
        "gae_lambda": 0.95,
    }
    published |= {
        "env_id": "Breakout-v5",
        "env_backend": "envpool",
        "total_timesteps": 10_000_000,
        "lstm": True,
    }
    assert {name: getattr(ppo.Args(), name) for name in published} == published


# -- vectors --
@pytest.mark.parametrize(
    "env_id, hidden", [("CartPole-v1", {0: 1, 2: 3}), ("MountainCar-v0", {0: 1})]
)
def test_what_is_hidden_is_the_velocity(env_id, hidden, tiny_lstm):
    """Position -> its velocity: the positions of a masked environment move by what the plain one
    says.
    """
    masked, plain = (
        ppo.make_env(tiny_lstm(env_id=env_id, mask_velocity=mask)) for mask in (True, False)
    )
    seen, whole = [masked.reset(seed=1)[0]], [plain.reset(seed=1)[0]]
    for t in range(8):
        for env, kept in ((masked, seen), (plain, whole)):
            kept.append(env.step(t // 2 % 2)[0])
    seen, whole = np.array(seen), np.array(whole)
    assert (seen[:, list(hidden.values())] == 0).all() and (
        whole[1:, list(hidden.values())] != 0
    ).all()
    assert seen.dtype == np.float32 and (seen[:, list(hidden)] == whole[:, list(hidden)]).all()
    for position, velocity in hidden.items():
        step = 0.02 if env_id == "CartPole-v1" else 1.0
        moved = whole[1:, position] - whole[:-1, position]
        old, new = whole[:-1, velocity] * step, whole[1:, velocity] * step
        assert np.allclose(moved, old, atol=1e-6) or np.allclose(moved, new, atol=1e-6)


@pytest.mark.parametrize("env_id, hidden", [("Acrobot-v1", [4, 5]), ("LunarLander-v3", [2, 3, 5])])
def test_other_velocities_are_hidden(env_id, hidden, tiny_lstm):
    if env_id == "LunarLander-v3":
        pytest.importorskip("Box2D")
    env = ppo.make_env(tiny_lstm(env_id=env_id, mask_velocity=True))
    env.reset(seed=1)
    obs = np.array([env.step(1)[0] for _ in range(5)])
    assert (obs[:, hidden] == 0).all() and (np.delete(obs, hidden, 1)[:, :3] != 0).any(0).all()


def test_vectors_come_from_gymnasium_and_games_from_envpool(tmp_path):
    """Whatever --env-backend says, which is of games and stays as it was given."""
    pytest.importorskip("envpool")
    for env_id, sync in (("Pong", False), ("CartPole-v1", True)):
        args = ppo.parse_args(["--env-id", env_id, "--no-cuda", "--num-envs", "4"])
        assert args.env_backend == "envpool"
        envs = ppo.make_envs(args, tmp_path, 1)
        assert isinstance(envs, gym.vector.SyncVectorEnv) == sync


def test_a_small_network_has_one_thread(monkeypatch):
    made = []

    def stop(*_):
        made.append(torch.get_num_threads())
        raise KeyboardInterrupt

    monkeypatch.setattr(ppo, "make_envs", stop)
    torch.set_num_threads(2)
    try:
        for env_id in ("Pong", "CartPole-v1"):
            with pytest.raises(KeyboardInterrupt):
                ppo.train(ppo.parse_args(["--env-id", env_id, "--no-cuda"]))
    finally:
        torch.set_num_threads(1)
    assert made == [2, 1]


def test_actions_begin_where_the_space_begins(run_lstm, monkeypatch):
    monkeypatch.setattr(Counting, "action_space", gym.spaces.Discrete(3, start=5))
    played, step = set(), Counting.step
    monkeypatch.setattr(
        Counting, "step", lambda env, action: played.add(int(action)) or step(env, action)
    )
    run_lstm(env_id="Counting-v0")
    assert played == {5, 6, 7}


def test_episodes_of_vectors_are_counted_whole(run_lstm):
    """CartPole pays 1 a step: returns are lengths, and reset rows are no steps."""
    result = run_lstm(num_steps=64, total_timesteps=512)
    episodes = episodes_of(result["run_dir"])
    assert len(episodes) > 8 and all(total == length for _, total, length in episodes)
    assert 512 - len(episodes) <= result["global_step"] < 512


def test_a_last_observation_that_is_not_finite_stops_nothing(run_lstm):
    """The row of a reset has it; no row before or after may be lost."""
    result = run_lstm(env_id="Exploding-v0", total_timesteps=256)
    weights = checkpoint_of(result["run_dir"])["agent"]
    assert all(torch.isfinite(weight).all() for weight in weights.values())
    for values in scalars_of(result["run_dir"]).values():
        assert all(math.isfinite(value) for _, value in values)


# -- checkpoints and evaluation --
def test_numpys_flags_and_old_random_numbers_are_an_environments_own_affair(run_lstm):
    result = run_lstm(env_id="OldFashioned-v0", eval_episodes=2)
    assert len(result["eval_returns"]) == 2 and checkpoint_of(result["run_dir"])["envs"] is None


@pytest.mark.parametrize(
    "env_id", ["ShortCartPole-v0", pytest.param("Breakout", marks=pytest.mark.e2e)]
)
def test_resumed_run_is_bit_equal_to_one_never_stopped(env_id, run_lstm, monkeypatch, tmp_path):
    """Stopped after each of the first three of five iterations, also when the next step resets.

    tests/test_contract.py has MountainCar and Acrobot, and compares the state of the LSTM too.
    """
    save = ppo.save_checkpoint

    def save_and_copy(run_dir, checkpoint):
        save(run_dir, checkpoint)
        if (
            checkpoint["iteration"] < 4
            and not (tmp_path / f"stopped{checkpoint['iteration']}").exists()
        ):
            shutil.copytree(run_dir, tmp_path / f"stopped{checkpoint['iteration']}")

    monkeypatch.setattr(ppo, "save_checkpoint", save_and_copy)
    limit = {"max_episode_steps": 15, "noop_max": 1}  # games end with the first iteration
    limit = limit if env_id == "Breakout" else {}
    result = run_lstm(
        env_id=env_id, num_steps=13, total_timesteps=260, checkpoint_seconds=0, **limit
    )
    expected, episodes = state_of(result["run_dir"]), episodes_of(result["run_dir"])
    assert (
        expected["iteration"] == 5
        and expected["envs"] is not None
        and (expected["lstm_state"] != 0).any()
    )
    resets = [not checkpoint_of(tmp_path / f"stopped{i}")["carried"][1].all() for i in (1, 2, 3)]
    assert any(resets)
    for iteration in (1, 2, 3):
        stopped = tmp_path / f"stopped{iteration}"
        assert checkpoint_of(stopped)["lstm_state"].shape == (2, 4, 128)
        ppo.train(ppo.parse_args(["--resume", str(stopped)]))
        assert_equal(state_of(stopped), expected, "checkpoint")
        assert episodes_of(stopped) == episodes
    assert env_id != "ShortCartPole-v0" or len(episodes) > 5


@pytest.mark.parametrize("env_id", ["Counting-v0", "Endless-v0", "LunarLander-v3"])
def test_where_the_environment_starts_anew_so_does_the_memory(env_id, run_lstm, spy):
    """Endless-v0 is CartPole without the wrapper that counts its steps."""
    if env_id == "LunarLander-v3":
        pytest.importorskip("Box2D")
    result = run_lstm(env_id=env_id, total_timesteps=192)
    checkpoint = checkpoint_of(result["run_dir"])
    assert checkpoint["envs"] is None and (checkpoint["lstm_state"] != 0).any()
    ppo.save_checkpoint(result["run_dir"], checkpoint | {"iteration": 2})
    splits = spy(ppo, "split_episodes")
    ppo.train(ppo.parse_args(["--resume", str(result["run_dir"])]))
    assert len(splits) == 4 and all((inputs[2] == 0).all() for inputs, _ in splits)


def test_evaluation_carries_the_state_through_each_episode_from_zero(run_lstm):
    """Three episodes side by side against one environment at a time, with a state of its own and
    the same noise.
    """
    run_dir = run_lstm(ortho_init=False, mask_velocity=True)["run_dir"]
    checkpoint = ppo.load_checkpoint(run_dir)
    checkpoint["agent"]["actor.weight"] *= 30  # so that the state matters beside the noise
    ppo.save_checkpoint(run_dir, checkpoint)
    args = ppo.parse_args(["--evaluate", str(run_dir), "--eval-episodes", "3"])
    returns = ppo.evaluate(args, run_dir)
    agent, seed = make_agent((4,), 2, args), 1_000_000 + args.seed
    agent.load_state_dict(checkpoint["agent"])
    torch.manual_seed(args.seed)
    noise = [agent.draw_noise(3) for _ in range(500)]
    expected, forgetful = [], 0
    for i in range(3):
        env, state, t, over = ppo.make_env(args), torch.zeros(2, 1, 128), 0, False
        obs, _ = env.reset(seed=seed + i)
        while not over:
            with torch.no_grad():
                inputs = torch.from_numpy(obs)[None], noise[t][i : i + 1]
                without, *_ = agent.act(inputs[0], torch.zeros(2, 1, 128), inputs[1])
                action, _, _, state = agent.act(inputs[0], state, inputs[1])
            forgetful += int(without != action)
            obs, _, terminated, truncated, _ = env.step(int(action))
            t, over = t + 1, terminated or truncated
        expected.append(t)
    assert returns == expected and len(set(returns)) > 1 and forgetful > 0


@pytest.mark.parametrize(
    "env_backend, episodic_life", [("gymnasium", True), ("gymnasium", False), ("envpool", True)]
)
def test_evaluation_forgets_a_lost_life_if_training_does(
    env_backend, episodic_life, run_lstm, monkeypatch
):
    """The state before a step is zero at the start and after a row that reset, and at no other
    time.
    """
    if env_backend == "envpool":
        pytest.importorskip("envpool")
    game = {"env_id": "Breakout", "env_backend": env_backend, "episodic_life": episodic_life}
    limit = {"max_episode_steps": 27_000 if episodic_life else 100}
    run_dir = run_lstm(**game, **limit, num_steps=2, total_timesteps=8)["run_dir"]
    states, ends, act, make_envs = [], [], ppo.Agent.act, ppo.make_envs

    def watched_act(agent, obs, state, noise):
        states.append(state.clone())
        return act(agent, obs, state, noise)

    def make_watched(*args):
        envs = make_envs(*args)
        step = envs.step

        def watched_step(actions):
            result = step(actions)
            ends.append(result[2] | result[3])
            return result

        envs.step = watched_step
        return envs

    monkeypatch.setattr(ppo.Agent, "act", watched_act)
    monkeypatch.setattr(ppo, "make_envs", make_watched)
    args = ppo.parse_args(["--evaluate", str(run_dir), "--eval-episodes", "2"])
    ppo.evaluate(args, run_dir)
    empty = (torch.stack(states) == 0).all(3).all(1).numpy()  # (steps, 2)
    assert empty[0].all() and np.sum(ends) >= (10 if episodic_life else 2)
    assert not empty[1].any() and (empty[2:] == ends[:-2]).all()


# -- flags --
BAD_FLAGS = [
    ("--num-envs 6", ["--num-envs (6)", "--num-minibatches (4)"]),
    ("--env-id CartPole-v1 --num-envs 2", ["--num-envs (2)", "--num-minibatches (4)"]),
    ("--mask-velocity", ["--mask-velocity", "CartPole", "LunarLander", "Breakout-v5"]),
    ("--frame-stack 4 --env-id CartPole-v1", ["--frame-stack (4)", "CartPole-v1"]),
    ("--frame-skip 3 --env-id CartPole-v1", ["--frame-skip (3)", "CartPole-v1"]),
    ("--max-episode-steps 9 --env-id CartPole-v1", ["--max-episode-steps (9)", "CartPole-v1"]),
    ("--env-id Blackjack-v1 --mask-velocity", ["--mask-velocity", "Blackjack-v1"]),
    ("--env-id Counting-v0 --mask-velocity", ["--mask-velocity", "Counting-v0"]),
    ("--env-id CartPol-v1", ["--env-id", "CartPol-v1", "CartPole-v1"]),
    ("--env-id Qwxyz-v0", ["--env-id", "Qwxyz-v0", "unknown"]),
    ("--env-id LunarLander-v2", ["--env-id", "LunarLander-v2", "LunarLander-v3"]),
    ("--noop-max 0", ["--noop-max (0)", "--env-backend gymnasium"]),
    ("--capture-video", ["--capture-video", "--env-backend gymnasium"]),
]


@pytest.mark.parametrize("flags, words", BAD_FLAGS)
def test_flags_that_make_no_sense_are_named(flags, words, tmp_path):
    with pytest.raises(ppo.UserError) as error:
        ppo.parse_args(flags.split())
    assert [word for word in words if word not in str(error.value)] == []
    assert list(tmp_path.iterdir()) == []


def test_vectors_need_no_envpool(monkeypatch):
    monkeypatch.setattr(ppo, "find_spec", lambda name: None)
    assert ppo.parse_args(["--env-id", "CartPole-v1"]).env_backend == "envpool"
    assert "envpool" not in ppo.provenance(ppo.Args(env_id="CartPole-v1", cuda=False))["versions"]


# -- compiled and eager --
def test_encoder_and_loss_are_compiled(run_lstm, monkeypatch):
    calls = []
    monkeypatch.setattr(ppo, "compiled", lambda function, *rest: calls.append(function) or function)
    run_lstm(compile=True)
    assert calls == [ppo.Agent.encode, ppo.minibatch_loss]


@pytest.mark.e2e
@pytest.mark.parametrize("obs_shape", [(3,), (1, 84, 84)], ids=["vectors", "images"])
def test_compiled_and_eager_updates_agree(obs_shape, tiny_lstm):
    """Ten minibatches with other sequences each time; on the GPU if there is one."""
    args, T, N = tiny_lstm(compile=True), 16, 4
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tolerance = 1e-5 if device.type == "cpu" else 1e-2
    agent, batch, state = minibatch(args, random_valid(T, N, 0), obs_shape)
    agent, state = agent.to(device, memory_format=torch.channels_last), state.to(device)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    clip_coef, example = torch.tensor(0.1, device=device), torch.arange(2 * T, device=device)
    mb = {name: b[example] for name, b in batch.items() if name not in ("obs", "valid")}
    mb["hidden"] = torch.zeros(2 * T, 128, device=device, requires_grad=True)
    encode = ppo.compiled(ppo.Agent.encode, device, (agent, batch["obs"][example]))
    loss_of = ppo.compiled(ppo.minibatch_loss, device, (agent, mb, clip_coef, args))
    assert encode is not ppo.Agent.encode and loss_of is not ppo.minibatch_loss
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, fused=True)
    for step in range(10):
        valid, envs = random_valid(T, N, step), torch.randperm(N)[:2]
        mb_inds, *sequences = ppo.split_episodes(torch.from_numpy(valid), envs, state)
        rows = torch.from_numpy(np.resize(np.flatnonzero(valid[:, envs].T), 2 * T)).to(device)
        results = []
        for parts in ((encode, loss_of), (ppo.Agent.encode, ppo.minibatch_loss)):
            torch.compiler.cudagraph_mark_step_begin()
            hidden = agent.run_lstm(parts[0](agent, batch["obs"][mb_inds]), *sequences)
            mb = {name: batch[name][mb_inds[rows]] for name in mb if name != "hidden"}
            mb["hidden"] = hidden[rows]
            loss, stats = parts[1](agent, mb, clip_coef, args)
            optimizer.zero_grad()
            loss.backward()
            grad = torch.cat([p.grad.flatten() for p in agent.parameters()])
            results.append((loss.detach().clone(), stats["approx_kl"].clone(), grad))
        (loss, kl, grad), (eager_loss, eager_kl, eager_grad) = results
        torch.testing.assert_close(loss, eager_loss, rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(kl, eager_kl, rtol=1e-2, atol=1e-4)
        assert (grad - eager_grad).norm() <= 100 * tolerance * eager_grad.norm()
        optimizer.step()
