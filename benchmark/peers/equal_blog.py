"""A script of the 37 details' post, unchanged, with the draws and the first weights of equal.py.

python equal_blog.py SCRIPT WEIGHTS EPS OPTIONS; SCRIPT is ppo_multidiscrete.py or
ppo_multidiscrete_mask.py of vwxyzjn/ppo-implementation-details, WEIGHTS holds the first weights, by
our names, and gets the last ones; OPTIONS is JSON. Needs torch, tensorboard and gymnasium, to which
its old gym is translated, and Python 3.11.

Made the same: the deviation of advantages is biased.
"""

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gymnasium
import numpy as np
import torch
from torch.distributions import Categorical

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from draws import Draws, WatchedAdam

script, file, eps, options = sys.argv[1:]
options = json.loads(options)
draws = Draws()
rollout = []  # the noise of its steps that are still to come: of each component


class Envs:
    """Gymnasium's vector environment with what the scripts expect of gym's of 2021."""

    def __init__(self, env_fns: list):
        modes = gymnasium.vector.AutoresetMode
        makers = [lambda: gymnasium.make(options["env_id"])] * len(env_fns)
        self.games = gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=modes.SAME_STEP)
        self.single_observation_space = self.games.single_observation_space
        self.single_action_space = self.games.single_action_space

    def keep_masks(self, infos: dict) -> None:
        self.envs = [SimpleNamespace(action_mask=mask) for mask in infos["action_mask"]]

    def reset(self) -> np.ndarray:
        obs, infos = self.games.reset(seed=options["seed"])
        self.keep_masks(infos)
        return obs

    def step(self, actions: np.ndarray):
        obs, rewards, terminated, truncated, infos = self.games.step(actions.astype(int))
        self.keep_masks(infos)
        return obs, rewards, terminated | truncated, [{}] * len(rewards)

    def close(self) -> None:
        self.games.close()


class Adam(WatchedAdam):
    eps = float(eps)

    def meet(self, agent):
        weights = torch.load(file)
        for name, into in by_our_names(agent).items():
            into.copy_(weights[name])


def by_our_names(agent: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Its weights; the one network that it has is twice among ours."""
    named = {}
    for name, weight in agent.state_dict().items():
        for ours in ("actor_trunk.", "critic_trunk."):
            named[name.replace("network.", ours)] = weight
    return named


def choose(policy: Categorical) -> torch.Tensor:
    """Of a component: the policies of a step are asked in their order."""
    if not rollout:
        nvec = Adam.agent.nvec.tolist()
        for noise in draws.gumbel(options["num_steps"], options["num_envs"], sum(nvec)):
            rollout.extend(noise.split(nvec, dim=-1))
    return (policy.logits + rollout.pop(0)).argmax(-1)


def shuffle(array: np.ndarray) -> None:
    array[:] = draws.permutation(len(array)).numpy()


unbiased_std = torch.Tensor.std
torch.Tensor.std = lambda tensor: unbiased_std(tensor, correction=0)
Categorical.sample, np.random.shuffle, torch.optim.Adam = choose, shuffle, Adam
torch.set_num_threads(1)
gym = ModuleType("gym")
gym.spaces, gym.vector = gymnasium.spaces, SimpleNamespace(SyncVectorEnv=Envs)
sys.modules |= {"gym": gym, "gym_microrts": ModuleType("gym_microrts")}
flags = options | {"gym_id": options["env_id"], "cuda": False}
del flags["env_id"]
flags = [(f"--{name.replace('_', '-')}", str(value)) for name, value in flags.items()]
sys.argv = [script, *sum(flags, ())]
runpy.run_path(script, run_name="__main__")
torch.save({name: x.detach().clone() for name, x in by_our_names(Adam.agent).items()}, file)
