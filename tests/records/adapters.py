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

import numpy as np
import torch

import ppg_procgen
import ppo_atari
import ppo_continuous_mujoco
import ppo_lstm
import ppo_multidiscrete
import ppo_procgen
from records import frozen


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


ADAPTERS = {
    "ppo_continuous_mujoco": Mujoco(ppo_continuous_mujoco),
    "ppo_atari": frozen.Atari(ppo_atari),
    "ppo_lstm": frozen.Lstm(ppo_lstm),
    "ppo_multidiscrete": frozen.MultiDiscrete(ppo_multidiscrete),
    "ppo_procgen": frozen.Procgen(ppo_procgen),
    "ppg_procgen": frozen.Ppg(ppg_procgen),
}

# (script, case) or (script, case, output) -> why it is not compared
SKIPPED: dict[tuple, str] = {}
