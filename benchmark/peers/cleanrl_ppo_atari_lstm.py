"""CleanRL's ppo_atari_lstm.py, unchanged, on EnvPool with the settings of ours.

PEER_SCRIPT=path/to/ppo_atari_lstm.py python cleanrl_ppo_atari_lstm.py FLAGS...; needs torch,
envpool, gymnasium, tensorboard, tyro.
"""

import inspect
import os
import runpy
import sys
from types import SimpleNamespace

import envpool
import gymnasium as gym
import numpy as np


class EnvPool:
    """What the script asks of SyncVectorEnv; `make_fns` hold its arguments and are not called."""

    def __init__(self, make_fns):
        self.env_id = inspect.getclosurevars(make_fns[0]).nonlocals["env_id"]
        self.num_envs = len(make_fns)
        self.reset(seed=1)

    def reset(self, seed):
        options = {"stack_num": 1, "episodic_life": True, "reward_clip": True}
        options |= {"num_envs": self.num_envs, "seed": seed}
        self.envs = envpool.make_gymnasium(self.env_id, **options)
        self.single_observation_space = self.envs.single_observation_space
        self.single_action_space = gym.spaces.Discrete(int(self.envs.single_action_space.n))
        return self.envs.reset()

    def step(self, actions):
        return self.envs.step(actions.astype(np.int32))

    def close(self):
        self.envs.close()


gym.vector.SyncVectorEnv = EnvPool
# What the script imports of CleanRL and no longer needs:
unused = "ClipRewardEnv EpisodicLifeEnv FireResetEnv MaxAndSkipEnv NoopResetEnv"
sys.modules["cleanrl_utils"] = SimpleNamespace()
sys.modules["cleanrl_utils.atari_wrappers"] = SimpleNamespace(**dict.fromkeys(unused.split()))
runpy.run_path(os.environ["PEER_SCRIPT"], run_name="__main__")
