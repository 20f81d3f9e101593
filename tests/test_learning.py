"""Learning on real tasks, and every family of environments for two iterations."""

import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo_continuous_mujoco as ppo

FAST = {"num_envs": 8, "num_steps": 256, "num_minibatches": 16, "update_epochs": 4}


def last_return(episodes: list) -> float:
    """Mean return of the last 100 training episodes, as published."""
    return float(np.mean([episode[1] for episode in episodes[-100:]]))


@pytest.mark.parametrize("seed", [1, 2])
def test_learns_inverted_pendulum(seed, run, read_episodes):
    """Measured: 423 to 473 over seeds 1 to 4; the first 100 episodes have a mean below 15."""
    result = run(env_id="InvertedPendulum-v4", seed=seed, total_timesteps=60_000, learning_rate=2e-3, **FAST)
    episodes = read_episodes(result["run_dir"])
    assert last_return(episodes[:100]) < 30 and last_return(episodes) > 300


CARTPOLE = {"num_envs": 16, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "learning_rate": 1e-3}
CARTPOLE |= {"gamma": 0.98, "clip_coef": 0.2, "clip_vloss": False, "ent_coef": 0.0, "vf_coef": 0.001}


@pytest.mark.parametrize("lstm", [True, False])
def test_hidden_velocities_need_a_memory(lstm, run_lstm, read_episodes):
    """Measured: 197, 171 and 191 with seeds 1 to 3; 50 and 51 without memory."""
    result = run_lstm(lstm=lstm, mask_velocity=True, total_timesteps=100_000, **CARTPOLE)
    reached = last_return(read_episodes(result["run_dir"]))
    assert reached > 110 if lstm else 25 < reached < 75


@pytest.mark.slow
def test_learns_hopper(run, read_episodes):
    """Measured: 741, 1034, 1046, 647 with seeds 1 to 4; a random policy gets 15."""
    result = run(env_id="Hopper-v4", total_timesteps=200_000, learning_rate=1e-3, **FAST)
    assert last_return(read_episodes(result["run_dir"])) > 400


def test_learns_cartpole(run_multidiscrete, read_episodes):
    """Measured: 218, 230, 270 with seeds 1 to 3; the first 100 episodes have a mean of 25."""
    flags = {"num_envs": 8, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "shared_network": False}
    result = run_multidiscrete(total_timesteps=40_960, learning_rate=1e-3, clip_coef=0.2, **flags)
    episodes = read_episodes(result["run_dir"])
    assert last_return(episodes[:100]) < 50 and last_return(episodes) > 150


def test_learns_to_mine(run_multidiscrete, read_episodes):
    """Measured over 96 games: 12.1 and 12.3 with seeds 1 and 2; random valid actions get 4, and 0 without masks."""
    flags = {"env_id": "MicrortsMining-v1", "num_envs": 8, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4}
    result = run_multidiscrete(total_timesteps=20_480, **flags)
    assert last_return(read_episodes(result["run_dir"])) > 9


@pytest.mark.slow
def test_learns_road_runner(run_atari, read_episodes):
    """Measured: 1045 and 1130 over the last 20 games with seeds 1 and 2; 5 and 0 over the first 20."""
    fast = {"num_envs": 16, "num_steps": 128, "num_minibatches": 8, "update_epochs": 3}
    fast |= {"clip_coef": 0.2, "learning_rate": 1e-3, "env_backend": "envpool"}
    episodes = read_episodes(run_atari(env_id="RoadRunner-v5", total_timesteps=61_440, **fast)["run_dir"])
    assert last_return(episodes[:20]) < 50 and last_return(episodes[-20:]) > 300


ENVIRONMENTS = ["Pendulum-v1", "BipedalWalker-v3", "LunarLanderContinuous-v3"]
ENVIRONMENTS += [f"{name}-v5" for name in "Ant HalfCheetah Hopper Humanoid InvertedDoublePendulum".split()]
ENVIRONMENTS += [f"{name}-v4" for name in "Ant Hopper Humanoid InvertedDoublePendulum Reacher Swimmer Walker2d".split()]


@pytest.mark.filterwarnings("ignore:.*out of date")
@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_two_iterations_of_every_family(env_id, run):
    """Two iterations, a checkpoint with the state of the environments where it can be had, and an evaluation."""
    if env_id.startswith(("Bipedal", "Lunar")):
        pytest.importorskip("Box2D")
    result = run(env_id=env_id, num_steps=128, total_timesteps=512, checkpoint_every=1)
    checkpoint = torch.load(result["run_dir"] / "checkpoint.pt", weights_only=True)
    assert checkpoint["iteration"] == 2 and result["global_step"] == 512
    assert (checkpoint["envs"] is None) == env_id.startswith(("Pendulum", "Bipedal", "Lunar"))
    space = gym.spec(env_id).make().observation_space
    assert checkpoint["agent"]["actor_mean.0.weight"].shape == (64, *space.shape)
    returns = ppo.train(ppo.parse_args(["--evaluate", str(result["run_dir"]), "--eval-episodes", "1"]))["eval_returns"]
    assert len(returns) == 1 and np.isfinite(returns).all()


def test_environments_that_are_not_mujoco_run_in_a_process_of_their_own():
    """Nothing else has imported Gymnasium's MuJoCo module there."""
    flags = "--env-id Pendulum-v1 --no-compile --num-steps 256 --num-minibatches 4 --total-timesteps 512"
    command = [sys.executable, ppo.__file__, *flags.split(), "--eval-episodes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "evaluation: -" in done.stdout, done.stdout + done.stderr
