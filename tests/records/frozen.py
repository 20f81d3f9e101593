"""Adapters to the six scripts as they were at commit f6f8a49; record.py uses them. Do not edit.

An adapter translates between the algorithm, in which the records are written, and a script's
functions. adapters.py has those of the current scripts: a script that changes gets a subclass of
the class here that overrides the methods which no longer fit.

Notation: T steps, N environments, B = T * N samples (sample t * N + n is step t of environment
n), M samples of a minibatch, A actions or action components. Arrays are NumPy's but for `loss`
and `aux_loss`, which get and return torch tensors, because their gradients are compared.
"""

import zlib

import gymnasium as gym
import numpy as np
import torch

STATS = "policy_loss value_loss entropy old_approx_kl approx_kl clipfrac grad_norm".split()
AUX_STATS = "kl_loss aux_value_loss real_value_loss grad_norm".split()


def tensors(arrays: dict) -> dict:
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


class Adapter:
    """What the scripts have in common."""

    def __init__(self, script):
        self.script = script

    def args(self, **flags):
        return self.script.Args(**{"compile": False, "cuda": False} | flags)

    # -- functions --
    def gae(self, rewards, values, next_values, terminations, dones, gamma, gae_lambda):
        """Advantages (T, N) of (T, N) float32 arrays.

        next_values[t] is V of what followed step t in its own episode; dones: terminated or
        truncated. For the Atari, LSTM and Procgen scripts next_values[:-1] is values[1:].
        """
        arrays = (rewards, values, next_values, terminations, dones)
        return self.script.gae(*arrays, gamma, gae_lambda)

    def loss(self, newlogprob, entropy, newvalue, mb: dict, clip_coef: float, **flags):
        """PPO's loss () and its statistics by name, of (M,) tensors.

        mb: logprobs, advantages, returns, values and valid (1 or 0) of (M,). flags: norm_adv (of
        the minibatch's valid rows, biased deviation), clip_vloss, ent_coef, vf_coef.
        """
        args = self.args(**flags)
        clip = torch.tensor(clip_coef)
        loss, stats = self.script.ppo_loss(newlogprob, entropy, newvalue, mb, clip, args)
        return loss, dict(zip(STATS, stats))

    def moments(self, batches: list, shape: tuple) -> list:
        """(mean, var, count) after each of the batches (n, *shape), n may be 0, has been merged.

        The prior is a mean of 0 and a variance of 1 that weigh 1e-4 rows.
        """
        rms, result = self.script.RunningMeanStd(shape), []
        for batch in batches:
            rms.update(batch)
            result.append((np.array(rms.mean), np.array(rms.var), rms.count))
        return result

    def normalize_obs(self, batches: list, obs, **flags):
        """obs (n, O) normalized by the moments of all batches (not changed by obs), float32.

        flags: norm_obs, clip_obs (0: no clipping).
        """
        rms = self.script.RunningMeanStd(obs.shape[1:])
        for batch in batches:
            rms.update(batch)
        return self.script.normalize_obs(rms, obs, self.args(**flags))

    def scale_rewards(self, rewards, dones, discount: float, **flags):
        """Scaled rewards of raw ones, both (rollouts, T, N): the normalizer of one training run.

        At every step: G = discount * G + reward for each environment; the moments of G take in
        this row of G; reward / sqrt(var + 1e-8), clipped to clip_reward (0: not), is the result;
        then G = 0 where an episode is done. flags: norm_reward, clip_reward and, in the Procgen
        scripts, norm_reward_rollout: all T rows of G enter before the first reward is scaled.
        """
        rms, args = self.script.RunningMeanStd(), self.args(**flags)
        ret, result = np.zeros(rewards.shape[2]), np.zeros_like(rewards)
        for k in range(len(rewards)):
            discounted = []
            for reward, done in zip(rewards[k], dones[k]):
                ret = discount * ret + reward
                discounted.append(ret)
                ret = np.where(done, 0, ret)
            steps = np.arange(len(discounted))
            whole = flags.get("norm_reward_rollout", False)
            for rows in np.array_split(steps, 1 if whole else len(steps)):
                rms.update(np.array(discounted)[rows].ravel())
                result[k, rows] = self.script.normalize_reward(rms, rewards[k, rows], args)
        return result

    # -- agent --
    # agent(sizes, **flags), of every subclass: a new agent on the CPU. sizes: what the environment
    # would say, see each script.

    def get(self, agent) -> dict[str, np.ndarray]:
        """Copies of the parameters by the record's name, in the record's layout."""
        return {name: p.detach().numpy().copy() for name, p in agent.named_parameters()}

    def set(self, agent, arrays: dict) -> None:
        """Write arrays as `get` returns them into the agent."""
        params = dict(agent.named_parameters())
        assert params.keys() == arrays.keys()
        with torch.no_grad():
            for name, array in arrays.items():
                params[name].copy_(torch.from_numpy(array))

    def forward(self, agent, batch: dict, **flags) -> dict[str, np.ndarray]:
        """logprob, entropy and value, each (n,), of batch["obs"] and batch["actions"]."""
        out = agent.evaluate_actions(*self.inputs(tensors(batch)))
        return dict(zip(("logprob", "entropy", "value"), out))

    def inputs(self, batch: dict) -> tuple:
        return batch["obs"], batch["actions"]

    # -- updates --
    def new_adam(self, agent) -> dict:
        size = sum(p.numel() for p in agent.parameters())
        zeros = {name: torch.zeros(size) for name in ("exp_avg", "exp_avg_sq")}
        return zeros | {"step": torch.zeros(())}

    def updates(self, agent, batch: dict, minibatches, lr, clip_coef, **flags):
        """One optimizer step on each row of minibatches (epochs, K, M), indices into the batch.

        lr and clip_coef: (epochs,), what both are in that epoch. A batch has (B,) logprobs,
        advantages, returns, values and valid (1 or 0), besides obs, actions and what the script
        has more. flags: those of `loss`, and max_grad_norm (0: no clipping) and adam_eps (Adam
        has betas 0.9, 0.999). Changes the agent in place and returns statistics by name, each
        (epochs * K,), or None if the script does not give them.
        """
        args, adam, stats = self.args(**flags), self.new_adam(agent), []
        data = tensors(batch)
        for epoch, rates in enumerate(zip(lr, clip_coef)):
            for rows in minibatches[epoch]:
                scalars = [torch.tensor(float(rate)) for rate in rates]
                indices = torch.from_numpy(rows)
                stats.append(self.script.update(agent, adam, data, indices, *scalars, args))
        return dict(zip(STATS, torch.stack(stats).T.numpy()))


class Mujoco(Adapter):
    """sizes: obs (O), low and high (A) of the action space. A batch may have noise (B, A).

    flags: shared_network, activation, squash_actions; noise are the standard normal numbers that
    the entropy of a squashed policy is estimated with. Stored actions are those before tanh.
    """

    def agent(self, sizes, **flags):
        obs_space = gym.spaces.Box(-np.inf, np.inf, (sizes["obs"],))
        action_space = gym.spaces.Box(np.float32(sizes["low"]), np.float32(sizes["high"]))
        return self.script.Agent(obs_space, action_space, self.args(**flags))

    def inputs(self, batch):
        return batch["obs"], batch["actions"], batch.get("noise")

    def env_action(self, agent, actions):
        """What the environment gets for stored actions (n, A).

        flags of the agent: clip_actions, squash_actions, scale_actions.
        """
        return agent.env_action(actions)


class MultiDiscrete(Adapter):
    """sizes: obs (shape), high (of observations), nvec. A batch has masks (B, L), actions (B, D).

    L = sum(nvec). masks: what was valid for the components, given the first one's value.
    flags: shared_network.
    """

    def agent(self, sizes, **flags):
        shape = tuple(sizes["obs"])
        dtype = np.float32 if len(shape) == 1 else np.uint8
        obs_space = gym.spaces.Box(0, sizes["high"], shape, dtype)
        agent = self.script.Agent(
            obs_space, gym.spaces.MultiDiscrete(sizes["nvec"]), self.args(**flags)
        )
        return agent.to(memory_format=torch.channels_last)

    def inputs(self, batch):
        return batch["obs"], batch["actions"], batch["masks"]


class Games:
    """The wrappers of ppo_atari.py and ppo_lstm.py."""

    def play(self, actions, seed: int, **flags) -> dict[str, np.ndarray]:
        """One environment of the readable backend, without autoreset: reset(seed), then actions.

        A step that ends an episode is followed by reset() without a seed. Arrays (n,): reward
        and raw_reward (before its sign is taken) of each step, terminated, truncated, game_over
        (terminated for good, not a life), reset_reward (what the game paid while it was reset;
        0 without a reset), the first observation, and seen and reset_seen: zlib.crc32 of the bytes
        of each image and of that after an end (0 without a reset), vectors themselves. flags:
        those of the script.
        """
        env = self.script.make_env(self.args(env_backend="gymnasium", **flags))
        obs, info = env.reset(seed=seed)
        see = (lambda x: zlib.crc32(np.ascontiguousarray(x))) if obs.ndim == 3 else np.array
        result = {"first": np.array(obs)}
        rows, seen, reset_seen = [], [], []
        for action in actions:
            obs, reward, terminated, truncated, info = env.step(action)
            rows.append([reward, info["reward"], terminated, truncated, info["terminated"], 0])
            seen.append(see(obs))
            reset_seen.append(np.zeros_like(seen[-1]))
            if terminated or truncated:
                obs, info = env.reset()
                rows[-1][5], reset_seen[-1] = info["reward"], see(obs)
        env.close()
        names = "reward raw_reward terminated truncated game_over reset_reward".split()
        result |= dict(zip(names, np.array(rows, np.float32).T))
        return result | {"seen": np.array(seen), "reset_seen": np.array(reset_seen)}


class Atari(Games, Adapter):
    """sizes: actions. Observations (n, 4, 84, 84) uint8. flags: shared_network."""

    def agent(self, sizes, **flags):
        agent = self.script.Agent(sizes["actions"], self.args(**flags))
        return agent.to(memory_format=torch.channels_last)


class Lstm(Games, Adapter):
    """sizes: obs (shape), actions. Observations (n, 1, 84, 84) uint8 or (n, O) float32.

    A batch has state (2, N, 128): hidden and cell state before row 0. A row that is not valid
    still belongs to the old episode, the row after it sees a state of zeros. Flag lstm=False: the
    state is zeros at every row. Minibatches (epochs, K, n) are environments, all their rows.
    """

    def agent(self, sizes, **flags):
        agent = self.script.Agent(tuple(sizes["obs"]), sizes["actions"], self.args(**flags))
        return agent.to(memory_format=torch.channels_last)

    def sequences(self, batch, envs, args):
        state = batch["state"]
        valid = (batch["valid"] == 1).view(-1, state.shape[1])
        return self.script.split_episodes(valid & args.lstm, envs, state)

    def forward(self, agent, batch, **flags):
        """logprob, entropy and value, each (B,) in the order of the batch; all N environments."""
        batch = tensors(batch)
        every = torch.arange(batch["state"].shape[1])
        indices, padded, length, state = self.sequences(batch, every, self.args(**flags))
        features = agent.encode(batch["obs"][indices])
        sequences = features.new_zeros(length * state.shape[1], features.shape[1])
        sequences = sequences.index_copy(0, padded, features).unflatten(0, (length, -1))
        hidden = agent.lstm(sequences, tuple(state[:, None]))[0].flatten(0, 1)[padded]
        out = agent.evaluate_actions(hidden, batch["actions"][indices])
        back = indices.argsort()
        return {name: x[back] for name, x in zip(("logprob", "entropy", "value"), out)}

    def states(self, agent, batch, **flags):
        """The state (2, N, 128) after the last row, from steps one by one as in a rollout."""
        args, batch = self.args(**flags), tensors(batch)
        state, N = batch["state"], batch["state"].shape[1]
        for t in range(len(batch["valid"]) // N):
            rows = slice(t * N, (t + 1) * N)
            noise = torch.zeros(N, agent.actor.out_features)
            state = agent.act(batch["obs"][rows], state, noise)[3]
            state = state * ((batch["valid"][rows] == 1) & args.lstm)[:, None]
        return state

    def updates(self, agent, batch, minibatches, lr, clip_coef, **flags):
        args, adam, stats = self.args(**flags), self.new_adam(agent), []
        script, batch = self.script, tensors(batch)
        parts = [script.Agent.encode, script.Agent.evaluate_actions]
        parts += [script.ppo_loss, script.adam_step]
        rows = {name: array for name, array in batch.items() if name != "state"}
        for epoch, rates in enumerate(zip(lr, clip_coef)):
            for envs in minibatches[epoch]:
                sequences = self.sequences(batch, torch.from_numpy(envs), args)
                scalars = [torch.tensor(float(rate)) for rate in rates]
                stats.append(script.update(parts, agent, adam, rows, *sequences, *scalars, args))
        return dict(zip(STATS, torch.stack(stats).T.numpy()))


class Procgen(Adapter):
    """sizes: actions. Observations (n, 64, 64, 3) uint8. flags: shared_network."""

    def agent(self, sizes, **flags):
        agent = self.script.Agent(sizes["actions"], self.args(**flags))
        return agent.to(memory_format=torch.channels_last)

    def loss(self, newlogprob, entropy, newvalue, mb, clip_coef, **flags):
        if flags["norm_adv"]:  # the script does it in `update`
            centered = mb["advantages"] - mb["advantages"].mean()
            mb = mb | {"advantages": centered / (centered.std(correction=0) + 1e-8)}
        return super().loss(newlogprob, entropy, newvalue, mb, clip_coef, **flags)


class Ppg(Procgen):
    """sizes: actions. flags: arch, adv_norm_fullbatch, aux_adam, beta_clone."""

    def aux_loss(self, logits, value, aux_value, old_logits, returns, beta_clone: float):
        """PPG's auxiliary loss () and its terms by name, of (M, A) and (M,) tensors."""
        mb, args = {"logits": old_logits, "returns": returns}, self.args(beta_clone=beta_clone)
        loss, terms = self.script.aux_loss(logits, value, aux_value, mb, args)
        return loss, dict(zip(AUX_STATS, terms))

    def forward(self, agent, batch, **flags):
        """Besides those of the others: aux_value (n,) and logits (n, A)."""
        heads = agent.all_heads(torch.from_numpy(batch["obs"]))
        more = {"logits": heads[0], "aux_value": heads[2]}
        return super().forward(agent, batch, **flags) | more

    def updates(self, agent, batch, minibatches, lr, clip_coef, aux_minibatches=(), **flags):
        """A policy phase, then an auxiliary one if aux_minibatches (K, M) has rows.

        With adv_norm_fullbatch the advantages of the whole batch are normalized first (biased
        deviation). The auxiliary phase begins with the logits of the whole batch, the old policy,
        and makes one step on each row with the learning rate of the last epoch. Adam goes on with
        the moments and counts of the policy phase, in which the auxiliary head had no part
        (aux_adam: all of them start anew). Returns the policy phase's statistics, then the
        auxiliary ones as aux_NAME.
        """
        args, script, stats = self.args(**flags), self.script, []
        size = sum(p.numel() for p in agent.parameters())
        head = sum(p.numel() for p in agent.aux_critic.parameters())
        names = ("exp_avg", "exp_avg_sq", "step")
        adam = {name: torch.zeros(1 + args.aux_adam, size) for name in names}
        policy_adam = {name: tensor[0, :-head] for name, tensor in adam.items()}
        aux_adam = {name: tensor[-1] for name, tensor in adam.items()}
        batch = tensors(batch)
        if args.adv_norm_fullbatch:
            centered = batch["advantages"] - batch["advantages"].mean()
            batch["advantages"] = centered / (centered.std(correction=0) + 1e-8)
        for epoch, rates in enumerate(zip(lr, clip_coef)):
            for rows in minibatches[epoch]:
                scalars = [torch.tensor(float(rate)) for rate in rates]
                indices = torch.from_numpy(rows)
                stats.append(script.update(agent, policy_adam, batch, indices, *scalars, args))
        result = dict(zip(STATS, torch.stack(stats).T.numpy()))
        if len(aux_minibatches) == 0:
            return result
        with torch.no_grad():
            logits, stats = agent(batch["obs"])[0], []
        for rows in aux_minibatches:
            mb = {"obs": batch["obs"][rows], "logits": logits[rows]}
            mb |= {"returns": batch["returns"][rows]}
            rate = torch.tensor(float(lr[-1]))
            stats.append(script.aux_update(agent, aux_adam, mb, rate, args))
        terms = dict(zip(AUX_STATS, torch.stack(stats).T.numpy()))
        return result | {f"aux_{name}": array for name, array in terms.items()}


CLASSES = {
    "ppo_continuous_mujoco": Mujoco,
    "ppo_atari": Atari,
    "ppo_lstm": Lstm,
    "ppo_multidiscrete": MultiDiscrete,
    "ppo_procgen": Procgen,
    "ppg_procgen": Ppg,
}
