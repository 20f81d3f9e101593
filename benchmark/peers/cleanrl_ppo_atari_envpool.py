"""CleanRL's ppo_atari_envpool.py, unchanged, on today's EnvPool with gym 0.23's interface.

PEER_SCRIPT=path/to/ppo_atari_envpool.py python cleanrl_ppo_atari_envpool.py FLAGS...; needs
torch, envpool, gym==0.23.1, tensorboard, tyro.
"""

import os
import runpy

import envpool
import gym
import numpy as np

new_make = envpool.make


class OldInterface:
    """Four results of a step, observations alone from a reset, attributes that can be set."""

    def __init__(self, envs):
        self.envs, self.observation_space = envs, envs.observation_space
        self.action_space = gym.spaces.Discrete(int(envs.action_space.n))
        self.metadata = self.reward_range = self.spec = None  # asked for by gym.Wrapper

    def reset(self):
        return self.envs.reset()[0]

    def step(self, actions):
        obs, reward, terminated, truncated, info = self.envs.step(actions.astype(np.int32))
        return obs, reward, terminated | truncated, info

    def close(self):
        self.envs.close()


envpool.make = lambda *args, **kwargs: OldInterface(new_make(*args, **kwargs))
runpy.run_path(os.environ["PEER_SCRIPT"], run_name="__main__")
