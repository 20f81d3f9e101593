"""Adapters to the scripts as they are now, for tests/test_records.py.

Whoever rewrites a script writes a subclass of its adapter here and puts it into ADAPTERS; the
methods to override and what they must return are documented in frozen.py. For example, if
ppo_loss returns a dict of statistics and knows no `valid`:

    class NewMujoco(frozen.Mujoco):
        def loss(self, newlogprob, entropy, newvalue, mb, clip_coef, **flags):
            mb = {name: tensor for name, tensor in mb.items() if name != "valid"}
            args = self.args(**flags)
            return self.script.ppo_loss(newlogprob, entropy, newvalue, mb, clip_coef, args)

Where names, order or layout of parameters change, override `get` and `set`, so that they take and
return the record's (fill.py has channels_last for a linear layer behind convolutions). A case or
an output that has no meaning any more goes into SKIPPED, with the reason.
"""

from contextlib import contextmanager

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppg_procgen
import ppo_atari
import ppo_continuous_mujoco
import ppo_lstm
import ppo_multidiscrete
import ppo_procgen
from records import fill, frozen

KINDS = ("weight", "bias")


class Mujoco(frozen.Mujoco):
    """RunningMeanStd is a tuple, statistics are a dict, torch's Adam steps over one vector."""

    def loss(self, newlogprob, entropy, newvalue, mb, clip_coef, **flags):
        args = self.args(**flags)
        return self.script.ppo_loss(
            newlogprob, entropy, newvalue, mb, torch.tensor(clip_coef), args
        )

    def rms(self, batches, shape=()):
        """The statistics after each batch; every batch of the script has rows."""
        rms = [self.script.RunningMeanStd(np.zeros(shape), np.ones(shape))]
        for batch in batches:
            rms.append(rms[-1].update(batch) if len(batch) else rms[-1])
        return rms[1:]

    def moments(self, batches, shape):
        return [tuple(rms) for rms in self.rms(batches, shape)]

    def normalize_obs(self, batches, obs, **flags):
        rms = self.rms(batches, obs.shape[1:])[-1]
        return self.script.normalize_obs(rms, obs, self.args(**flags))

    def scale_rewards(self, rewards, dones, discount, **flags):
        args, ret, result = self.args(**flags), np.zeros(rewards.shape[2]), []
        rms = self.script.RunningMeanStd(np.zeros(()), np.ones(()))
        for reward, done in zip(rewards.reshape(-1, len(ret)), dones.reshape(-1, len(ret))):
            ret = discount * ret + reward
            rms = rms.update(ret)
            result.append(self.script.normalize_reward(rms, reward, args))
            ret = np.where(done, 0, ret)
        return np.reshape(result, rewards.shape)

    def updates(self, agent, batch, minibatches, lr, clip_coef, **flags):
        args, metrics = self.args(**flags), []
        params = torch.nn.utils.parameters_to_vector(agent.parameters()).detach()
        torch.nn.utils.vector_to_parameters(params, agent.parameters())
        optimizer = torch.optim.Adam([params], eps=args.adam_eps, fused=True)
        data = frozen.tensors(batch)
        data.setdefault("noise", torch.zeros_like(data["actions"]))
        for epoch, rows in enumerate(minibatches):
            optimizer.param_groups[0]["lr"] = float(lr[epoch])
            clip = torch.tensor(float(clip_coef[epoch]))
            for indices in torch.from_numpy(rows):
                params.grad, stats = self.script.loss_and_grad(agent, data, indices, clip, args)
                optimizer.step()
                metrics.append(stats)
        return {name: np.array([stats[name] for stats in metrics]) for name in frozen.STATS}


class Atari(frozen.Atari):
    """No `valid` in the loss, statistics are a dict, torch's Adam."""

    def agent(self, sizes, **flags):
        obs_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        actions = gym.spaces.Discrete(sizes["actions"])
        agent = self.script.Agent(obs_space, actions, self.args(**flags))
        return agent.to(memory_format=torch.channels_last)

    def loss(self, newlogprob, entropy, newvalue, mb, clip_coef, **flags):
        """Of the valid rows, the only ones that the script lets into a minibatch."""
        rows, args = mb["valid"] == 1, self.args(**flags)
        new = (newlogprob[rows], entropy[rows], newvalue[rows])
        mb = {name: tensor[rows] for name, tensor in mb.items()}
        return self.script.ppo_loss(*new, mb, torch.tensor(clip_coef), args)

    def updates(self, agent, batch, minibatches, lr, clip_coef, **flags):
        args, metrics, batch = self.args(**flags), [], frozen.tensors(batch)
        optimizer = torch.optim.Adam(agent.parameters(), eps=args.adam_eps, fused=True)
        for epoch, rows in enumerate(minibatches):
            optimizer.param_groups[0]["lr"] = float(lr[epoch])
            clip = torch.tensor(float(clip_coef[epoch]))
            for indices in torch.from_numpy(rows):
                indices = indices[batch["valid"][indices] == 1]
                mb = {name: b[indices] for name, b in batch.items()}
                loss, stats = self.script.minibatch_loss(agent, mb, clip, args)
                optimizer.zero_grad()
                loss.backward()
                max_norm = args.max_grad_norm or np.inf
                norm = torch.nn.utils.clip_grad_norm_(agent.parameters(), max_norm)
                optimizer.step()
                metrics.append(stats | {"grad_norm": norm})
        return {name: np.array([stats[name] for stats in metrics]) for name in frozen.STATS}


class Lstm(frozen.Lstm):
    """As Atari; `run_lstm` is one call of the LSTM over the sequences of split_episodes."""

    loss = Atari.loss

    def agent(self, sizes, **flags):
        obs_space = gym.spaces.Box(0, 255, tuple(sizes["obs"]))
        actions = gym.spaces.Discrete(sizes["actions"])
        agent = self.script.Agent(obs_space, actions, self.args(**flags))
        return agent.to(memory_format=torch.channels_last)

    def forward(self, agent, batch, **flags):
        batch = frozen.tensors(batch)
        every = torch.arange(batch["state"].shape[1])
        indices, *sequences = self.sequences(batch, every, self.args(**flags))
        hidden = agent.run_lstm(agent.encode(batch["obs"][indices]), *sequences)
        out = agent.evaluate_actions(hidden, batch["actions"][indices])
        back = indices.argsort()
        return {name: x[back] for name, x in zip(("logprob", "entropy", "value"), out)}

    def updates(self, agent, batch, minibatches, lr, clip_coef, **flags):
        args, metrics, batch = self.args(**flags), [], frozen.tensors(batch)
        optimizer = torch.optim.Adam(agent.parameters(), eps=args.adam_eps, fused=True)
        for epoch, rows in enumerate(minibatches):
            optimizer.param_groups[0]["lr"] = float(lr[epoch])
            clip = torch.tensor(float(clip_coef[epoch]))
            for envs in torch.from_numpy(rows):
                indices, *sequences = self.sequences(batch, envs, args)
                hidden = agent.run_lstm(agent.encode(batch["obs"][indices]), *sequences)
                keep = batch["valid"][indices] == 1
                mb = {k: b[indices[keep]] for k, b in batch.items() if k != "state"}
                mb["hidden"] = hidden[keep]
                loss, stats = self.script.minibatch_loss(agent, mb, clip, args)
                optimizer.zero_grad()
                loss.backward()
                max_norm = args.max_grad_norm or np.inf
                norm = torch.nn.utils.clip_grad_norm_(agent.parameters(), max_norm)
                optimizer.step()
                metrics.append(stats | {"grad_norm": norm})
        return {name: np.array([stats[name] for stats in metrics]) for name in frozen.STATS}


class MultiDiscrete(Mujoco):
    """A trunk and a head for each network; grids are flattened channels first.

    A component of which nothing is valid has one choice, 0, of probability 1; in the records it is
    uniform. Its entropy is 0 in both.
    """

    NAMES = {"network": "actor_trunk", "value_network": "critic_trunk"}

    def agent(self, sizes, **flags):
        shape = tuple(sizes["obs"])
        dtype = np.float32 if len(shape) == 1 else np.uint8
        obs_space = gym.spaces.Box(0, sizes["high"], shape, dtype)
        action_space = gym.spaces.MultiDiscrete(sizes["nvec"])
        return self.script.Agent(obs_space, action_space, self.args(**flags))

    def name(self, agent, recorded: str) -> str:
        """Of a parameter in the script: a grid's trunk begins with a module that has none."""
        network, _, rest = recorded.partition(".")
        if network not in self.NAMES:
            return recorded
        number, _, kind = rest.partition(".")
        grid = isinstance(agent.actor_trunk[0], self.script.ChannelsFirst)
        return f"{self.NAMES[network]}.{int(number) + grid}.{kind}"

    def recorded_names(self, agent) -> dict[str, str]:
        names = [
            f"{network}.{i}.{kind}" for network in self.NAMES for i in range(6) for kind in KINDS
        ]
        names += [f"{head}.{kind}" for head in ("actor", "critic") for kind in KINDS]
        params = dict(agent.named_parameters())
        return {name: self.name(agent, name) for name in names if self.name(agent, name) in params}

    def get(self, agent):
        arrays = super().get(agent)
        arrays = {name: arrays[ours] for name, ours in self.recorded_names(agent).items()}
        if "network.5.weight" in arrays:
            arrays["network.5.weight"] = fill.channels_last(arrays["network.5.weight"], 32)
        return arrays

    def set(self, agent, arrays):
        if "network.5.weight" in arrays:
            weight = fill.channels_first(arrays["network.5.weight"], 32)
            arrays = arrays | {"network.5.weight": weight}
        names = self.recorded_names(agent)
        super().set(agent, {names[name]: array for name, array in arrays.items()})

    def one_choice(self, agent, batch):
        """The batch with choice 0 where nothing is valid, and the sum of log K of these (B,)."""
        masks, actions = batch["masks"].copy(), batch["actions"].copy()
        constant = np.zeros(len(masks), np.float32)
        for d, (start, k) in enumerate(zip(agent.starts, agent.nvec)):
            nothing = ~masks[:, start : start + k].any(1)
            masks[nothing, start], actions[nothing, d] = True, 0
            constant += nothing * np.log(k).astype(np.float32)
        return batch | {"masks": masks, "actions": actions}, constant

    def inputs(self, batch):
        return batch["obs"].float(), batch["actions"], batch["masks"]

    def forward(self, agent, batch, **flags):
        batch, constant = self.one_choice(agent, batch)
        outputs = super().forward(agent, batch, **flags)
        return outputs | {"logprob": outputs["logprob"] - torch.from_numpy(constant)}

    def updates(self, agent, batch, *args, **flags):
        batch, constant = self.one_choice(agent, batch)
        batch |= {"logprobs": batch["logprobs"] + constant}
        batch |= {"obs": np.float32(batch["obs"])}
        return super().updates(agent, batch, *args, **flags)


@contextmanager
def in_float64():
    """Also where a script casts to float32."""
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            yield
    finally:
        torch.set_default_dtype(torch.float32)


class Procgen(frozen.Procgen):
    """The loop of train: parts of a minibatch, torch's Adam.

    With two networks an update is computed in float64: it is as near to the record, which has other
    orders of sums, as float32 is where no such order decides which pixel is the largest.
    """

    def agent(self, sizes, **flags):
        obs_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        actions = gym.spaces.Discrete(sizes["actions"])
        agent = self.script.Agent(obs_space, actions, self.args(**flags))
        return agent.to(memory_format=torch.channels_last)

    def loss(self, newlogprob, entropy, newvalue, mb, clip_coef, **flags):
        if flags["norm_adv"]:
            mb = mb | {"advantages": self.normalized(mb["advantages"])}
        args = self.args(**flags)
        return self.script.ppo_loss(
            newlogprob, entropy, newvalue, mb, torch.tensor(clip_coef), args
        )

    def normalized(self, advantages):
        """What train does."""
        centered = advantages - advantages.mean()
        return centered / (centered.std(correction=0) + 1e-8)

    moments = Mujoco.moments
    rms = Mujoco.rms

    def scale_rewards(self, rewards, dones, discount, **flags):
        whole = flags.get("norm_reward_rollout", False)
        args, ret, result = self.args(**flags), np.zeros(rewards.shape[2]), np.zeros_like(rewards)
        rms = self.script.RunningMeanStd(np.zeros(()), np.ones(()))
        for k in range(len(rewards)):
            discounted = np.zeros(rewards[k].shape)
            for t, (reward, done) in enumerate(zip(rewards[k], dones[k])):
                ret = discount * ret + reward
                discounted[t] = ret
                ret = np.where(done, 0, ret)
            steps = np.arange(len(discounted))
            for rows in np.array_split(steps, 1 if whole else len(steps)):
                rms = rms.update(discounted[rows].ravel())
                result[k, rows] = self.script.normalize_reward(rms, rewards[k, rows], args)
        return result

    def step(self, optimizer, loss_of, agent, mb, *rest) -> dict:
        """One optimizer step on a minibatch; its statistics."""
        optimizer.zero_grad()
        stats = self.script.accumulate(loss_of, agent, mb, 64, *rest)
        max_norm = rest[-1].max_grad_norm or np.inf
        norm = torch.nn.utils.clip_grad_norm_(agent.parameters(), max_norm)
        optimizer.step()
        return stats | {"grad_norm": norm}

    def updates(self, agent, batch, *rest, **flags):
        batch = frozen.tensors(batch)
        if agent.value_network is None:
            return self.phases(agent, batch, *rest, **flags)
        batch = {k: b.double() if b.is_floating_point() else b for k, b in batch.items()}
        agent.dtype = torch.float64  # of the images
        with in_float64():
            stats = self.phases(agent.double(), batch, *rest, **flags)
        agent.to(torch.float32)
        return stats

    def phases(self, agent, batch, minibatches, lr, clip_coef, **flags):
        args = self.args(**flags)
        optimizer = torch.optim.Adam(agent.parameters(), eps=args.adam_eps, fused=True)
        return self.policy_phase(agent, optimizer, batch, minibatches, lr, clip_coef, args)

    def policy_phase(self, agent, optimizer, batch, minibatches, lr, clip_coef, args):
        metrics = []
        for epoch, rows in enumerate(minibatches):
            optimizer.param_groups[0]["lr"] = float(lr[epoch])
            clip = torch.tensor(float(clip_coef[epoch]))
            for indices in torch.from_numpy(rows):
                mb = {name: b[indices] for name, b in batch.items()}
                if args.norm_adv:
                    mb["advantages"] = self.normalized(mb["advantages"])
                loss_of = self.script.minibatch_loss
                metrics.append(self.step(optimizer, loss_of, agent, mb, clip, args))
        return {name: np.array([stats[name] for stats in metrics]) for name in frozen.STATS}


class Ppg(Procgen):
    """Two optimizers with aux_adam."""

    def forward(self, agent, batch, **flags):
        heads = agent(torch.from_numpy(batch["obs"]))
        more = {"logits": heads[0], "aux_value": heads[2]}
        return super().forward(agent, batch, **flags) | more

    def aux_loss(self, logits, value, aux_value, old_logits, returns, beta_clone):
        mb = {"obs": None, "logits": old_logits, "returns": returns}
        agent = lambda obs: (logits, value, aux_value)  # noqa: E731
        return self.script.aux_loss(agent, mb, self.args(beta_clone=beta_clone))

    def phases(self, agent, batch, minibatches, lr, clip_coef, aux_minibatches=(), **flags):
        args, metrics = self.args(**flags), []
        optimizers = [
            torch.optim.Adam(agent.parameters(), eps=args.adam_eps, fused=True)
            for _ in range(1 + args.aux_adam)
        ]
        if args.adv_norm_fullbatch:
            batch["advantages"] = self.normalized(batch["advantages"])
        rates = (lr, clip_coef, args)
        stats = self.policy_phase(agent, optimizers[0], batch, minibatches, *rates)
        with torch.no_grad():
            batch["logits"] = agent(batch["obs"])[0]
        optimizers[-1].param_groups[0]["lr"] = float(lr[-1])
        for rows in aux_minibatches:
            mb = {name: batch[name][rows] for name in ("obs", "logits", "returns")}
            loss_of = self.script.aux_loss
            metrics.append(self.step(optimizers[-1], loss_of, agent, mb, args))
        names = frozen.AUX_STATS if metrics else []
        more = {f"aux_{name}": np.array([each[name] for each in metrics]) for name in names}
        return stats | more


ADAPTERS = {
    "ppo_continuous_mujoco": Mujoco(ppo_continuous_mujoco),
    "ppo_atari": Atari(ppo_atari),
    "ppo_lstm": Lstm(ppo_lstm),
    "ppo_multidiscrete": MultiDiscrete(ppo_multidiscrete),
    "ppo_procgen": Procgen(ppo_procgen),
    "ppg_procgen": Ppg(ppg_procgen),
}

# (script, case) or (script, case, output) -> why it is not compared
SKIPPED: dict[tuple, str] = {
    ("ppo_multidiscrete", "forward image"): "images are refused",
    ("ppo_multidiscrete", "updates image"): "images are refused",
    (
        "ppg_procgen",
        "updates dual aux",
    ): "the record is 0.4% off the same in float64, a tie of pixels",
}
