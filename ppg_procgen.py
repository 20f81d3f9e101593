# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["torch>=2.11", "gymnasium>=1.4", "procgen-mirror>=0.10.7", "numpy>=1.26",
#                 "tensorboard>=2.18", "tqdm>=4.66", "tyro>=1.0", "moviepy>=2.1"]
# [tool.uv]
# # Procgen asks for older ones and runs on these
# override-dependencies = ["gym==0.26.2", "numpy>=2", "glfw>=2.10", "imageio-ffmpeg>=0.5"]
# ///
"""Phasic policy gradient (PPG): ppo_procgen.py and an auxiliary phase, for the games of Procgen.

Run:    uv run ppg_procgen.py --env-id starpilot
Watch:  uvx tensorboard --logdir runs
Expect: on starpilot a return of 26.8 after 4.2M steps with --bf16 (one seed); after 25M CleanRL
        reports 35 +- 14 for its script, 42 +- 10 for OpenAI's code with --arch shared
Read:   beside ppo_procgen.py, down to the line of "=" below `train`. [P01] to [P10] are the details
        of PPG (arXiv:2009.04416, openai/phasic-policy-gradient), the others are as in its parent.
        The defaults are CleanRL's; docs/procgen.md has OpenAI's.
Shapes: T steps of N environments make a batch of B = T * N samples; a minibatch has M of them.
        An observation is 64 x 64 pixels of 3 colors, an action is one of A = 15. For the
        auxiliary phase a batch is cut into rollouts of one environment each; a phase has R of them.
"""

import contextlib
import ctypes
import io
import json
import math
import os
import platform
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections import deque
from dataclasses import asdict, astuple, dataclass, replace
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.distributions import Categorical
from torch.utils._pytree import tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    # -- experiment --
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's directory
    seed: int = 1  # seed of weights, actions, minibatches and environments
    torch_deterministic: bool = True  # let cuDNN use deterministic kernels only
    cuda: bool = torch.cuda.is_available()  # train on a GPU
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "ppo"  # project in Weights & Biases
    wandb_entity: str | None = None  # team in Weights & Biases
    capture_video: bool = False  # record videos of environment 0 and of the evaluation

    # -- algorithm --
    env_id: str = "starpilot"  # one of the 16 games of Procgen
    total_timesteps: int = 25_000_000  # environment steps in all, rounded down to whole batches
    learning_rate: float = 5e-4  # learning rate of Adam
    num_envs: int = 64  # environments stepped together [C01]
    num_steps: int = 256  # steps of each environment in a rollout
    anneal_lr: bool = False  # anneal the learning rate linearly to zero [C04]
    gamma: float = 0.999  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation [C05]
    num_minibatches: int = 8  # minibatches per epoch [C06]
    e_policy: int = 1  # passes over each rollout, for policy and value together [P03]
    norm_adv: bool = False  # normalize advantages in each minibatch [C07]
    adv_norm_fullbatch: bool = True  # normalize advantages over the whole batch [P06]
    clip_coef: float = 0.2  # clip range of the probability ratio [C08] and of the value [C09]
    clip_vloss: bool = True  # clip the value loss [C09]
    ent_coef: float = 0.01  # coefficient of the entropy bonus [C10]
    vf_coef: float = 0.5  # coefficient of the value loss [C10]
    max_grad_norm: float = 0.5  # largest gradient norm; 0 turns clipping off [C11]
    target_kl: float | None = None  # stop after an epoch with a mean approx_kl above this [X03]
    n_iteration: int = 32  # iterations of a policy phase, before its auxiliary phase [P03]
    e_auxiliary: int = 6  # passes of an auxiliary phase over the rollouts [P04]
    beta_clone: float = 1.0  # weight of the KL from the policy before the auxiliary phase [P05]
    num_aux_rollouts: int = 4  # rollouts (of one environment each) in an auxiliary minibatch [P04]
    skip_aux_every: int = 0  # leave out every n-th auxiliary phase: 2 every other, 1 all, 0 none
    anneal_clip: bool = False  # anneal clip_coef linearly to zero [X01]
    adam_eps: float = 1e-8  # [P08] epsilon of Adam, torch's default, see [C03]
    aux_adam: bool = False  # an optimizer of its own for the auxiliary phase [P09]
    env_minibatches: bool = False  # minibatches of whole environments in the policy phase [P03]
    init: Literal["torch", "orthogonal", "normed"] = "normed"  # initial weights [C02] [P07]
    arch: Literal["detach", "dual", "shared"] = "detach"  # value: detached, own CNN, shared [P02]
    norm_reward: bool = True  # divide rewards by the deviation of their discounted sum [M08]
    reward_gamma: float | None = None  # discount factor of that sum; None: --gamma
    norm_reward_rollout: bool = False  # update norm_reward once a rollout, not once a step [P10]
    clip_reward: float = 10.0  # clip normalized rewards to this; 0 turns clipping off [M09]
    distribution_mode: Literal["easy", "hard"] = "easy"  # difficulty of the levels
    num_levels: int = 0  # levels to train on; 0: all 2**31 - 1 of them
    start_level: int = 0  # first level to train on

    # -- run --
    env_threads: int = 4  # threads that step the games; 0: the main one
    compile: bool = torch.cuda.is_available()  # compile the network; little use on a CPU
    bf16: bool = False  # the network below the heads in bfloat16: slow on hardware without it
    micro_batch: int = 0  # samples computed at a time; 0: 64 on a CPU, a policy minibatch on a GPU
    checkpoint_seconds: int = 60  # seconds between checkpoints
    init_from: str | None = None  # directory of a run whose agent is the initial one
    resume: str | None = None  # directory of a run to continue
    evaluate: str | None = None  # directory of a run to evaluate
    eval_episodes: int = 10  # episodes of --evaluate and of the evaluation after training; 0: none
    eval_levels: Literal["train", "unseen"] = "train"  # levels of training, or all above those
    eval_deterministic: bool = False  # evaluate with the most probable actions

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size

    @property
    def phase_rollouts(self) -> int:
        return min(self.n_iteration, self.num_iterations) * self.num_envs

    def ends_phase(self, iteration: int) -> bool:
        return iteration % self.n_iteration == 0 or iteration == self.num_iterations


# -- reward normalizer --
@dataclass
class RunningMeanStd:
    """Running mean and variance in float64 (baselines/common/running_mean_std.py)."""

    mean: np.ndarray
    var: np.ndarray
    count: float = 1e-4

    def update(self, x: np.ndarray) -> None:
        """Include the rows of x (n, ...), by the parallel variance of Chan et al."""
        n, total = len(x), self.count + len(x)
        x = np.asarray(x, np.float64)
        mean, var = (x.mean(0), x.var(0)) if n > 1 else (x[0], 0.0)  # NumPy's mean and var are slow
        delta = mean - self.mean
        m2 = self.var * self.count + var * n + delta**2 * (self.count * n / total)
        self.mean = self.mean + delta * (n / total)
        self.var, self.count = m2 / total, total


def normalize_reward(return_rms: RunningMeanStd, reward: np.ndarray, args: Args) -> np.ndarray:
    """Rewards (N,) -> scaled rewards, without subtracting a mean (vec_normalize.py)."""
    if args.norm_reward:  # [M08] reward scaling
        reward = reward / np.sqrt(return_rms.var + 1e-8)
        if args.clip_reward:  # [M09] reward clipping
            reward = reward.clip(-args.clip_reward, args.clip_reward)
    return reward


# -- agent --
def layer_init(layer: nn.Module, std: float, init: str) -> nn.Module:
    """Orthogonal weights of gain `std`, weights of norm `std` for each unit, or torch's default.

    The first two have zero bias (baselines/a2c/utils.py; phasic-policy-gradient/torch_util.py).
    """
    if init == "orthogonal":  # [C02] orthogonal initialization
        nn.init.orthogonal_(layer.weight, std)
        nn.init.zeros_(layer.bias)
    if init == "normed":  # [P07] normed initialization
        units = nn.functional.normalize(layer.weight.data.flatten(1))
        layer.weight.data = std * units.view_as(layer.weight)
        nn.init.zeros_(layer.bias)
    return layer


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut, (n, channels, H, W) to the same."""

    def __init__(self, channels: int, init: str):
        super().__init__()
        std = 6**-0.25  # both scale by 6**-0.5, so six blocks add a variance of 1 (ignoring ReLUs)
        self.conv0 = layer_init(nn.Conv2d(channels, channels, 3, padding=1), std, init)
        self.conv1 = layer_init(nn.Conv2d(channels, channels, 3, padding=1), std, init)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv1(self.conv0(x.relu()).relu())


class Agent(nn.Module):
    """Policy and value of images: the residual network of IMPALA (arXiv:1802.01561)."""

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.spaces.Discrete, args: Args):
        super().__init__()

        def impala_cnn() -> nn.Sequential:
            layers = []
            for c_in, c_out in ((3, 16), (16, 32), (32, 32)):
                layers.append(layer_init(nn.Conv2d(c_in, c_out, 3, padding=1), 1.0, args.init))
                layers.append(nn.MaxPool2d(3, stride=2, padding=1))
                layers += [ResidualBlock(c_out, args.init), ResidualBlock(c_out, args.init)]
            linear = layer_init(nn.Linear(32 * 8 * 8, 256), 1.4, args.init)
            return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), linear, nn.ReLU())

        self.network = impala_cnn()
        self.value_network = impala_cnn() if args.arch == "dual" else None
        self.actor = layer_init(nn.Linear(256, int(action_space.n)), 0.1, args.init)
        self.critic = layer_init(nn.Linear(256, 1), 0.1, args.init)
        self.aux_critic = layer_init(nn.Linear(256, 1), 0.1, args.init)  # [P01] auxiliary value
        self.detach = args.arch == "detach"
        self.dtype = torch.bfloat16 if args.bf16 else torch.float32

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits (n, A), values (n,) and features (n, 256) of observations (n, 64, 64, 3) uint8."""
        x = obs.permute(0, 3, 1, 2).to(self.dtype) / 255  # [A09] scale to [0, 1]
        with torch.autocast(obs.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            hidden = self.network(x)
            value_hidden = self.value_network(x) if self.value_network else hidden
        # In both phases, as in OpenAI's code; in the paper in the policy phase alone
        if self.detach:  # [P02] the value does not train the policy's features
            value_hidden = value_hidden.detach()
        value = self.critic(value_hidden.float()).squeeze(-1)
        return self.actor(hidden.float()), value, hidden.float()

    @torch.no_grad()
    def act(self, obs: torch.Tensor, greedy: bool = False):
        """Actions (sampled or the modes), log-probabilities and values, each (n,), on the CPU."""
        logits, value = (x.cpu() for x in self(obs)[:2])
        # Gumbel-max samples like Categorical(logits=logits), five times as fast on small batches
        noise = torch.empty(logits.shape).exponential_().log_()  # drawn on the CPU even for a GPU
        action = (logits if greedy else logits - noise).argmax(-1, keepdim=True)
        return action[:, 0], logits.log_softmax(-1).gather(-1, action)[:, 0], value

    def evaluate_actions(self, obs: torch.Tensor, actions: torch.Tensor):
        """Log-probability, entropy and value, each (n,), of actions at observations."""
        logits, value, _ = self(obs)
        policy = Categorical(logits=logits, validate_args=False)
        return policy.log_prob(actions), policy.entropy(), value


# -- advantages and loss --
def gae(rewards, values, next_values, terminations, dones, gamma: float, gae_lambda: float):
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16); all arrays are (T, N).

    `next_values[t]` is the value of the state that step t led to, before any reset. It counts as 0
    after a termination; the end of an episode for any reason (`dones`) cuts the sum.
    """
    delta = rewards + gamma * np.where(terminations, 0, next_values) - values
    decay = gamma * gae_lambda * (1 - dones)
    advantages = np.zeros_like(delta)
    lastgaelam = np.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        lastgaelam = delta[t] + decay[t] * lastgaelam  # [C05] GAE
        advantages[t] = lastgaelam
    return advantages


def ppo_loss(newlogprob, entropy, newvalue, mb: dict, clip_coef, args: Args):
    """PPO's scalar loss and diagnostics on a minibatch (arXiv:1707.06347, baselines/ppo2/model.py).

    newlogprob, entropy, newvalue: (M,) under the current weights. mb: (M,) tensors of the rollout.
    """
    advantages = mb["advantages"]
    logratio = newlogprob - mb["logprobs"]
    ratio = logratio.exp()
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)
    pg_loss = torch.max(pg_loss1, pg_loss2).mean()  # [C08] clipped surrogate objective

    v_loss = (newvalue - mb["returns"]) ** 2
    if args.clip_vloss:  # [C09] value-loss clipping
        v_clipped = mb["values"] + (newvalue - mb["values"]).clamp(-clip_coef, clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - mb["returns"]) ** 2)
    v_loss = 0.5 * v_loss.mean()

    entropy = entropy.mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss  # [C10] overall loss
    stats = {  # [C12] debug variables
        "policy_loss": pg_loss,
        "value_loss": v_loss,
        "entropy": entropy,
        "old_approx_kl": -logratio.mean(),  # k1 of http://joschu.net/blog/kl-approx.html
        "approx_kl": (ratio - 1 - logratio).mean(),  # k3
        "clipfrac": ((ratio - 1).abs() > clip_coef).float().mean(),
    }
    return loss, {name: stat.detach() for name, stat in stats.items()}


def aux_loss(agent: Agent, mb: dict, args: Args):
    """PPG's L_joint + L_value, a scalar, and its terms on M samples (arXiv:2009.04416, section 2).

    mb: observations, logits (M, A) of the policy before the auxiliary phase, and returns (M,), the
    targets of the value in the policy phase.
    """
    logits, value, features = agent(mb["obs"])
    # The head is applied here: a compiled `forward` would give it a gradient of 0, not None, in the
    # policy phase, and Adam would move it by its momentum
    aux_value = agent.aux_critic(features).squeeze(-1)
    old_logprobs, logprobs = mb["logits"].log_softmax(-1), logits.log_softmax(-1)
    kl_loss = (old_logprobs.exp() * (old_logprobs - logprobs)).sum(-1).mean()  # KL(old || new)
    aux_v_loss = 0.5 * ((aux_value - mb["returns"]) ** 2).mean()
    v_loss = 0.5 * ((value - mb["returns"]) ** 2).mean()
    loss = aux_v_loss + args.beta_clone * kl_loss + v_loss  # [P05] policy cloning
    stats = {"kl_loss": kl_loss, "aux_value_loss": aux_v_loss, "real_value_loss": v_loss}
    return loss, {name: stat.detach() for name, stat in stats.items()}


def minibatch_loss(agent: Agent, mb: dict, clip_coef, args: Args):
    """The scalar loss and diagnostics of samples of the batch."""
    newlogprob, entropy, newvalue = agent.evaluate_actions(mb["obs"], mb["actions"])
    return ppo_loss(newlogprob, entropy, newvalue, mb, clip_coef, args)


def accumulate(loss_fn, agent: Agent, mb: dict, micro_batch_size: int, *rest) -> dict:
    """Add the gradient of a minibatch, part by part, to the parameters; returns its diagnostics.

    Memory then holds the activations of one part only. Small parts also fit the caches of a CPU
    (oneDNN's convolutions are slow with 1024 images).
    """
    sums = {}
    for start in range(0, len(mb["obs"]), micro_batch_size):
        part = {name: tensor[start : start + micro_batch_size] for name, tensor in mb.items()}
        share = len(part["obs"]) / len(mb["obs"])
        loss, stats = loss_fn(agent, part, *rest)
        (share * loss).backward()
        sums = {name: sums.get(name, 0) + share * stat for name, stat in stats.items()}
        for param in agent.parameters():
            if param.grad is not None:  # CUDA graphs reuse its memory for the next part
                param.grad = param.grad.clone()
    return sums


def train(args: Args) -> dict:
    """Train a new run, or continue that of --resume; returns the run's results."""
    args = plain_numbers(args)  # a sweep may have given NumPy's
    check_args(args)
    keep_freed_memory()
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.benchmark = not args.torch_deterministic  # use the fastest kernels
    device = torch.device("cuda" if args.cuda else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else None
    initial = checkpoint or (args.init_from and load_checkpoint(args.init_from))
    check_runs(args, checkpoint, initial)
    start_iteration = checkpoint["iteration"] + 1 if checkpoint else 1
    try_env(args, initial)

    run_dir = Path(args.resume) if args.resume else new_run_dir(args)
    first_seed = env_seed(args, start_iteration)
    seed_everything(first_seed)
    envs = make_envs(args, run_dir, first_seed)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    agent = Agent(obs_space, action_space, args).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(
        agent.parameters(),
        lr=args.learning_rate,
        eps=args.adam_eps,  # [C03] Adam's epsilon
        fused=True,  # one kernel: faster
    )
    aux_optimizer = optimizer  # [P09] the same Adam for both phases, or a second one
    if args.aux_adam:
        aux_optimizer = torch.optim.Adam(
            agent.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True
        )
    return_rms = RunningMeanStd(np.zeros(()), np.ones(()))  # of the discounted sum of past rewards
    minibatch_size = args.batch_size // args.num_minibatches
    micro_batch_size = args.micro_batch or (minibatch_size if args.cuda else 64)
    reward_gamma = args.gamma if args.reward_gamma is None else args.reward_gamma
    if initial:
        load_weights(agent, initial)
        return_rms = load_rms(initial, "return_rms")
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
        aux_optimizer.load_state_dict(checkpoint["aux_optimizer"])
        torch.set_rng_state(checkpoint["rng"])
    if args.compile:
        agent.forward = compiled(agent.forward, device)

    # A rollout, in NumPy; pinned memory is copied faster to a GPU
    T, N = args.num_steps, args.num_envs
    obs = torch.zeros(T + 1, N, *obs_space.shape, dtype=torch.uint8, pin_memory=args.cuda).numpy()
    actions = np.zeros((T, N), np.int64)
    logprobs = np.zeros((T, N), np.float32)
    values = np.zeros((T + 1, N), np.float32)
    rewards = np.zeros((T, N), np.float32)
    discounted_returns = np.zeros((T, N))  # sums of past rewards, for the reward normalizer
    dones = np.zeros((T, N), np.float32)  # 1: the episode ended at this step, for any reason
    # Returns of a policy phase's rollouts; their observations are a file, see stored_obs
    phase_returns = torch.zeros(args.phase_rollouts, T, device=device)

    global_step = (start_iteration - 1) * args.batch_size
    carried = np.zeros((3, N))
    episodic_return, episodic_length, discounted_return = carried  # views, changed in place
    if checkpoint:  # go on within the episodes
        envs.unwrapped.games.set_state(checkpoint["games"])
        carried[:] = checkpoint["carried"]
        phase_returns[:] = checkpoint["phase_returns"]
    obs[T], _ = envs.reset(seed=first_seed)  # it shows the games as they are
    make_obs_file(args, run_dir, start_iteration)
    log = Log(args, run_dir, checkpoint)
    for iteration in range(start_iteration, args.num_iterations + 1):
        frac = 1 - (iteration - 1) / args.num_iterations
        if args.anneal_lr:  # [C04] learning-rate annealing
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate
        clip_coef = args.clip_coef * (frac if args.anneal_clip else 1)  # [X01] clip-range annealing

        # -- rollout --
        obs[0] = obs[T]  # the last rollout ended there
        for t in range(T):  # [C01] vectorized architecture
            inputs = torch.from_numpy(obs[t]).to(device, non_blocking=True)
            actions[t], logprobs[t], values[t] = agent.act(inputs)
            obs[t + 1], reward, terminated, truncated, _ = envs.step(actions[t])
            dones[t] = np.logical_or(terminated, truncated)
            discounted_return[:] = reward_gamma * discounted_return + reward
            discounted_returns[t], rewards[t] = discounted_return, reward

            global_step += N
            log.step(N)
            episodic_return += reward
            episodic_length += 1
            for n in np.flatnonzero(dones[t]):  # obs[t + 1, n] begins the next episode
                log.episode(global_step, episodic_return[n], episodic_length[n])
                episodic_return[n] = episodic_length[n] = discounted_return[n] = 0

        if args.norm_reward_rollout:  # [P10] statistics of the whole rollout, then scaling
            return_rms.update(discounted_returns.ravel())
            rewards[:] = normalize_reward(return_rms, rewards, args)
        else:
            for t in range(T):
                return_rms.update(discounted_returns[t])
                rewards[t] = normalize_reward(return_rms, rewards[t], args)

        # -- advantages --
        b_obs = torch.from_numpy(obs).to(device).flatten(0, 1)  # (B + N, 64, 64, 3), with obs[T]
        b_actions = torch.from_numpy(actions).to(device).flatten(0, 1)
        b_logprobs = torch.from_numpy(logprobs).to(device).flatten(0, 1)
        with torch.no_grad():
            values[T] = agent(b_obs[-N:])[1].cpu()
        b_values = torch.from_numpy(values[:T]).to(device).flatten(0, 1)
        ends = dones  # ~[S01] Procgen does not say which ends are time limits
        advantages = gae(rewards, values[:T], values[1:], ends, dones, args.gamma, args.gae_lambda)
        b_advantages = torch.from_numpy(advantages).to(device).flatten()

        # -- update --
        batch = {
            "obs": b_obs,
            "actions": b_actions,
            "logprobs": b_logprobs,
            "values": b_values,
            "advantages": b_advantages,
            "returns": b_advantages + b_values,
        }
        if args.adv_norm_fullbatch:  # [P06] advantage normalization over the whole batch
            centered = b_advantages - b_advantages.mean()
            batch["advantages"] = centered / (centered.std(correction=0) + 1e-8)
        stats = []  # of each minibatch
        for epoch in range(args.e_policy):  # [P03] a policy phase: n_iteration such updates
            b_inds = torch.randperm(args.batch_size).to(device)
            if args.env_minibatches:  # step t of environment n is sample t * N + n
                b_inds = (torch.randperm(N)[:, None] + N * torch.arange(T)).flatten().to(device)
            for mb_inds in b_inds.chunk(args.num_minibatches):  # [C06] every sample once an epoch
                mb = {name: tensor[mb_inds] for name, tensor in batch.items()}
                if args.norm_adv:  # [C07] advantage normalization, before the minibatch is cut
                    centered = mb["advantages"] - mb["advantages"].mean()
                    mb["advantages"] = centered / (centered.std(correction=0) + 1e-8)
                optimizer.zero_grad()
                mb_stats = accumulate(minibatch_loss, agent, mb, micro_batch_size, clip_coef, args)
                max_norm = args.max_grad_norm or math.inf  # inf: measure, do not clip
                norm = nn.utils.clip_grad_norm_(agent.parameters(), max_norm)  # [C11] clipping
                optimizer.step()
                stats.append(mb_stats | {"grad_norm": norm})
            if args.target_kl:  # [X03] early stop
                epoch_kl = [x["approx_kl"] for x in stats[-args.num_minibatches :]]
                if torch.stack(epoch_kl).mean() > args.target_kl:
                    break

        # -- auxiliary phase --
        phase, place = divmod(iteration - 1, args.n_iteration)  # number of the phase, place in it
        skipped = args.skip_aux_every and (phase + 1) % args.skip_aux_every == 0
        if not skipped:  # keep these N rollouts for the end of the phase
            rows = slice(place * N, (place + 1) * N)
            stored_obs(args, run_dir)[rows] = obs[:T].swapaxes(0, 1)
            phase_returns[rows] = batch["returns"].view(T, N).T
        log.update_ended()
        if args.ends_phase(iteration) and not skipped:
            R = (place + 1) * N
            phase_logits = torch.zeros(R, T, action_space.n, device=device)
            with torch.no_grad():  # of the policy before the phase, which the KL holds it to
                for r in log.progress(range(R), "policy before the auxiliary phase"):
                    rollout = torch.from_numpy(stored_obs(args, run_dir)[r].copy()).to(device)
                    for start in range(0, T, micro_batch_size):
                        part = slice(start, start + micro_batch_size)
                        phase_logits[r, part] = agent(rollout[part])[0]
            aux_optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
            for epoch in range(1, args.e_auxiliary + 1):  # [P04] over whole rollouts
                minibatches = torch.randperm(R).split(args.num_aux_rollouts)
                title = f"auxiliary pass {epoch} of {args.e_auxiliary}"
                for mb_inds in log.progress(minibatches, title):
                    mb_obs = torch.from_numpy(stored_obs(args, run_dir)[mb_inds.numpy()])
                    mb = {
                        "obs": mb_obs.to(device).flatten(0, 1),
                        "logits": phase_logits[mb_inds].flatten(0, 1),
                        "returns": phase_returns[mb_inds].flatten(0, 1),
                    }
                    aux_optimizer.zero_grad()
                    mb_stats = accumulate(aux_loss, agent, mb, micro_batch_size, args)
                    norm = nn.utils.clip_grad_norm_(agent.parameters(), max_norm)
                    aux_optimizer.step()
                    mb_stats |= {"grad_norm": norm}
                    stats.append({f"aux/{name}": stat for name, stat in mb_stats.items()})

        # -- log and checkpoint --
        explained = 1 - b_advantages.var() / batch["returns"].var()  # advantages = returns - values
        log.iteration(global_step, stats, explained, optimizer.param_groups[0]["lr"])
        # Save before the iteration that ends a phase: a kill in the auxiliary phase then costs only
        # these two. Save after it as well: the next iteration overwrites the rollouts.
        around_phase = args.ends_phase(iteration) or args.ends_phase(iteration + 1)
        if around_phase or log.checkpoint_is_due(iteration):
            if not skipped:
                stored_obs(args, run_dir).flush()  # to the disk
            state = {
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
                "aux_optimizer": aux_optimizer.state_dict(),
                "return_rms": rms_state(return_rms),
                "phase_returns": phase_returns,
                "games": envs.unwrapped.games.get_state(),
                "carried": torch.tensor(carried),
                "rng": torch.get_rng_state(),
                "iteration": iteration,
            }
            save_checkpoint(args, state, log)

    envs.close()
    log.bar.close()
    (run_dir / "observations.bin").unlink(missing_ok=True)
    eval_returns = evaluate(args, run_dir) if args.eval_episodes else []
    return log.close(global_step, eval_returns)


# ============ plumbing: nothing below is needed to understand the algorithm ============


class Refused(SystemExit, Exception):
    """An error that the user can correct: uncaught it is one line; a sweep can catch it."""


def require(condition, message: str) -> None:
    if not condition:
        raise Refused(f"error: {message}")


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line. With --resume or --evaluate the flags of that run are the defaults."""
    args = tyro.cli(Args, args=argv)
    runs = (args.resume, args.evaluate, args.init_from)
    require("" not in runs, "--resume, --evaluate and --init-from need a directory")
    if run_dir := args.resume or args.evaluate:
        args = tyro.cli(Args, args=argv, default=Args(**load_checkpoint(run_dir)["args"]))
    check_args(args)
    return args


def check_args(args: Args) -> None:
    """Refuse bad values before anything is made. Flags that you add are not checked."""
    above_0 = "total_timesteps learning_rate num_envs num_steps num_minibatches e_policy"
    above_0 += " clip_coef adam_eps" + ("" if args.target_kl is None else " target_kl")
    above_0 += " n_iteration e_auxiliary num_aux_rollouts"
    at_least_0 = "seed ent_coef vf_coef max_grad_norm checkpoint_seconds eval_episodes"
    at_least_0 += " clip_reward num_levels start_level env_threads micro_batch"
    at_least_0 += " beta_clone skip_aux_every"
    for name in f"{above_0} {at_least_0}".split():
        value = getattr(args, name)
        flag = f"--{name.replace('_', '-')}"
        require(0 <= value < math.inf, f"{flag} ({value}) must not be below 0, nor infinite")
        require(value or name not in above_0.split(), f"{flag} must be above 0")
    for name in ("gamma", "gae_lambda", "reward_gamma"):
        value = getattr(args, name) or 0  # --reward-gamma may be None
        require(0 <= value <= 1, f"--{name.replace('_', '-')} ({value}) must be between 0 and 1")
    batch = f"--num-envs times --num-steps ({args.num_envs} * {args.num_steps})"
    even = args.batch_size % args.num_minibatches == 0
    require(even, f"{batch} is not divisible by --num-minibatches ({args.num_minibatches})")
    alone = args.norm_adv and args.batch_size == args.num_minibatches
    require(not alone, f"{batch}: minibatches of one sample need --no-norm-adv")
    whole = not args.env_minibatches or args.num_envs % args.num_minibatches == 0
    shares = f"--num-minibatches ({args.num_minibatches}) must divide --num-envs ({args.num_envs})"
    require(whole, f"--env-minibatches: {shares}")
    require(args.num_iterations, f"--total-timesteps ({args.total_timesteps}) is less than {batch}")
    require(not (args.resume and args.evaluate), "--resume trains, --evaluate plays: give one")
    require(args.eval_episodes or not args.evaluate, "--evaluate needs --eval-episodes above 0")
    for name in ("num_levels", "start_level", "env_threads"):
        value = getattr(args, name)
        require(value < 2**30, f"--{name.replace('_', '-')} ({value}) must be below {2**30:,}")
    why = f"--start-level ({args.start_level}), --eval-levels unseen: train with --num-levels"
    require(args.num_levels or args.eval_levels == "train" and not args.start_level, why)
    check_game(args.env_id)
    found = args.evaluate or not args.track or getattr(find_spec("wandb"), "origin", None)
    require(found, "--track needs wandb (uv run --with wandb ...)")  # ./wandb has no origin
    found = not args.capture_video or find_spec("moviepy")
    require(found, "--capture-video needs moviepy (pip install moviepy)")
    found = args.evaluate or not args.cuda or torch.cuda.is_available()
    require(found, "--cuda finds no GPU (try --no-cuda)")
    require(find_spec("procgen"), "Procgen is not installed here (pip install procgen-mirror)")


def check_runs(args: Args, checkpoint: dict | None, initial: dict | None) -> None:
    """Refuse to go on with a run, or to begin with its agent, if a flag that matters differs."""
    new = asdict(args)
    network_flags = ["arch"]
    if initial and not checkpoint:
        for name in network_flags:
            same = initial["args"][name] == new[name]
            require(same, f"--init-from: that run has another --{name.replace('_', '-')}")
    if not checkpoint:
        return
    old = checkpoint["args"]
    is_longer = new["total_timesteps"] > old["total_timesteps"]
    annealed = old["anneal_lr"] or old["anneal_clip"]
    why = "its annealing ends with them; start with --no-anneal-lr and no other annealing"
    require(not (annealed and is_longer), f"this run cannot have more --total-timesteps: {why}")
    rest = Args(**old).num_iterations % old["n_iteration"]
    why = f"its last phase has {rest} iterations, not {old['n_iteration']}"
    why += f"; begin with a multiple of {old['n_iteration'] * args.batch_size} steps"
    require(not (rest and is_longer), f"this run cannot have more --total-timesteps: {why}")
    free = "resume evaluate cuda compile track wandb_project_name wandb_entity".split()
    free += "capture_video checkpoint_seconds eval_episodes eval_deterministic env_threads".split()
    free += ["micro_batch", "eval_levels"]
    free += ["total_timesteps"] if is_longer else []
    changed = [f"{k} ({old[k]} to {new[k]})" for k in old if old[k] != new[k] and k not in free]
    require(not changed, f"this run cannot change {', '.join(changed)}: leave these out")
    is_finished = args.resume and checkpoint["iteration"] >= args.num_iterations
    longer = "" if annealed or rest else ", more --total-timesteps go on with it"
    require(not is_finished, f"this run is finished: --evaluate plays it{longer}")


def new_run_dir(args: Args) -> Path:
    """A new directory runs/{env}__{name}__{seed}__{time}, whatever characters the names have."""
    names = [re.sub(r"[^A-Za-z0-9_.=+-]+", "-", x)[:60] for x in (args.env_id, args.exp_name)]
    path = Path("runs", f"{'__'.join(names)}__{args.seed}__{int(time.time())}")
    path.parent.mkdir(exist_ok=True)
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:  # of a run that began in the same second
            path = path.with_name(f"{path.name}_")


def env_seed(args: Args, iteration: int = 1) -> int:
    """The seed of environment 0, from which all others follow; other --seeds are far from it."""
    return (1_000_003 * args.seed + (iteration - 1) * args.num_envs) % 2**31


def seed_everything(seed: int) -> None:
    """Torch draws weights, actions and minibatches; environments may draw from the others."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def check_game(env_id: str) -> None:
    games = "bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist".split()
    games += "jumper leaper maze miner ninja plunder starpilot".split()
    require(env_id in games, f"--env-id ({env_id}) must be one of {', '.join(games)}")


class Procgen(gym.vector.VectorEnv):
    """N games that reset in the step that ends an episode: it shows the start of the next one."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP, "render_fps": 15}
    render_mode = "rgb_array"

    def __init__(self, args: Args, seed: int):
        with contextlib.redirect_stderr(io.StringIO()):  # the old gym complains when imported
            from procgen import ProcgenGym3Env

        self.games = ProcgenGym3Env(
            num=args.num_envs,
            env_name=args.env_id,
            distribution_mode=args.distribution_mode,
            num_levels=args.num_levels,
            start_level=args.start_level,
            num_threads=args.env_threads,
            rand_seed=seed % 2**31,
        )
        self.num_envs = args.num_envs
        self.single_observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(self.games.ac_space.eltype.n)

    def reset(self, *, seed=None, options=None):
        """What the games show now. They were seeded and started when they were made."""
        return self.games.observe()[1]["rgb"], {}

    def step(self, actions):
        self.games.act(actions)
        reward, obs, done = self.games.observe()
        return obs["rgb"], reward, done, np.zeros_like(done), {}

    def render(self) -> list[np.ndarray]:
        """N times the first game, four times as large: RecordVideo looks at no other."""
        return [self.games.observe()[1]["rgb"][0].repeat(4, 0).repeat(4, 1)] * self.num_envs

    def close_extras(self, **kwargs) -> None:
        self.games.close()


def film(envs: Procgen, args: Args, video_dir: Path) -> gym.vector.VectorEnv:
    """The games with videos: some of training, every one of an evaluation."""
    print(f"videos: {video_dir}", flush=True)
    warnings.filterwarnings("ignore", ".*same-step")  # Procgen does not show the end of a game
    evaluates = video_dir.name.startswith("eval")
    trigger = (lambda game: game < args.eval_episodes) if evaluates else None
    record = gym.wrappers.vector.RecordVideo
    return record(envs, str(video_dir), record_first_only=True, episode_trigger=trigger)


def try_env(args: Args, checkpoint: dict | None) -> None:
    """Refuse a game that cannot be made, or weights for another, before anything is written."""
    env = Procgen(replace(args, num_envs=1), 0)
    if checkpoint:
        agent = Agent(env.single_observation_space, env.single_action_space, args)
        load_weights(agent, checkpoint)
    env.close()


def make_envs(args: Args, run_dir: Path, seed: int, videos: str = "videos") -> gym.vector.VectorEnv:
    """N games, the first one filmed if asked for."""
    envs = Procgen(args, seed)
    if args.capture_video:
        envs = film(envs, args, run_dir / f"{videos}_{int(time.time())}")
    return envs


def make_obs_file(args: Args, run_dir: Path, iteration: int) -> None:
    """Make the file of `stored_obs`, or find the one that a run goes on with."""
    if args.skip_aux_every == 1:  # no auxiliary phase
        return
    path = run_dir / "observations.bin"
    size = math.prod(stored_shape(args))
    if (iteration - 1) % args.n_iteration:  # within a phase
        found = path.is_file() and path.stat().st_size == size
        require(found, f"{path} does not hold the rollouts of this policy phase")
        return
    print(f"observations of a policy phase: {size / 1e9:.2g} GB in {path}", flush=True)
    try:
        with open(path, "ab") as file:
            file.truncate(size)
            if hasattr(os, "posix_fallocate"):  # a disk that is too small fails now
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        if not args.resume:
            shutil.rmtree(run_dir)
        why = f"{path} needs {size / 1e9:.2g} GB (--n-iteration): {error}"
        raise Refused(f"error: {why}") from error


def stored_shape(args: Args) -> tuple[int, ...]:
    return args.phase_rollouts, args.num_steps, 64, 64, 3


def stored_obs(args: Args, run_dir: Path) -> np.memmap:
    """Observations (R, T, 64, 64, 3) of a policy phase, an array that is a file.

    Mapped anew for each use, because what is mapped counts as memory of this process.
    """
    return np.memmap(run_dir / "observations.bin", np.uint8, "r+", shape=stored_shape(args))


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: giving it back costs a sixth of an update in page faults."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD, in bytes, at its largest
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, the same


def compiled(function, device: torch.device):
    """The function as one graph, made in its first call; if that fails, the function itself."""
    torch.compiler.reset()  # torch keeps 8 graphs of a function: forget those of earlier runs
    options = {"triton.cudagraphs": True} if device.type == "cuda" else {"cpp_wrapper": True}
    graph = torch.compile(function, fullgraph=True, dynamic=False, options=options)
    print("compiling takes up to a minute (--no-compile skips this)", flush=True)

    def call(*inputs):
        nonlocal graph
        try:
            outputs = graph(*inputs)
        except Exception as error:  # no compiler, no Python headers, no Triton, an old card
            if graph is function:
                raise
            why = f"{function.__name__} cannot be compiled here and runs eagerly"
            print(f"{why}: {first_line(error)}", flush=True)
            graph = function
            return function(*inputs)
        # Copies, since the next call overwrites what a CUDA graph returns
        return tree_map(torch.clone, outputs) if device.type == "cuda" else outputs

    return call


class Log:
    """A run's outputs: TensorBoard (and W&B), episodes.csv, config.json and the progress bar."""

    newest: "Log | None" = None  # whose directory Ctrl-C names

    def __init__(self, args: Args, run_dir: Path, checkpoint: dict | None):
        Log.newest = self
        self.args, self.run_dir = args, run_dir
        past = checkpoint or {"iteration": 0, "seconds": 0, "recent_returns": []}
        self.episodes = open(run_dir / "episodes.csv", "a", buffering=1)  # a line at a time
        lock(self.episodes, f"another process is training {run_dir}")
        if checkpoint:  # forget what came after it
            newest = load_checkpoint(run_dir)["iteration"] == checkpoint["iteration"]
            require(newest, f"another process has just trained {run_dir}: start again")
            whole = self.episodes.tell() >= checkpoint["episodes_size"]
            require(whole, f"{run_dir / 'episodes.csv'} has lost episodes")
            self.episodes.truncate(checkpoint["episodes_size"])
        else:
            print("step,return,length,seconds", file=self.episodes)
            shutil.copy(__file__, run_dir)
        self.wandb_run = start_wandb(args, run_dir) if args.track else None
        name = f"config_{past['iteration']}.json" if checkpoint else "config.json"
        (run_dir / name).write_text(json.dumps(provenance(args), indent=2))
        step = past["iteration"] * args.batch_size
        self.writer = SummaryWriter(run_dir, purge_step=step + 1 if checkpoint else None)
        rows = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
        self.writer.add_text("hyperparameters", f"|flag|value|\n|-|-|\n{rows}")
        print(f"run: {run_dir} (if it stops, --resume {run_dir} goes on)", flush=True)
        total = args.num_iterations * args.batch_size
        interval = 0.1 if sys.stderr.isatty() else 10  # seconds
        self.bar = tqdm(total=total, initial=step, unit="step", mininterval=interval)
        self.recent_returns = deque(past["recent_returns"], maxlen=100)
        self.start = time.time() - past["seconds"]
        self.last_iteration = self.last_step = time.time()
        self.last_checkpoint = 0.0  # the first iteration writes one: a full disk shows at once

    def seconds(self) -> float:
        """Seconds of training, those before a resumption included."""
        return time.time() - self.start

    def mean_return(self) -> float:
        return float(np.mean(self.recent_returns)) if self.recent_returns else math.nan

    def step(self, n: int) -> None:
        self.last_step = time.time()
        self.bar.update(n)

    def episode(self, step: int, episodic_return: float, length: float) -> None:
        self.recent_returns.append(float(episodic_return))
        self.writer.add_scalar("charts/episodic_return", episodic_return, step)
        self.writer.add_scalar("charts/episodic_length", length, step)
        print(f"{step},{episodic_return:.9g},{length:.0f},{self.seconds():.2f}", file=self.episodes)

    def update_ended(self) -> None:
        self.last_update = time.time()

    def iteration(self, step: int, stats: list[dict], explained_variance, lr: float) -> None:
        """Log the means of the diagnostics of all minibatches, and stop if one is not finite."""
        names = stats[0] | stats[-1]
        by_name = {name: torch.stack([x[name] for x in stats if name in x]) for name in names}
        losses = {f"losses/{name}": values.mean().item() for name, values in by_name.items()}
        require(all(map(math.isfinite, losses.values())), f"the losses are not finite: {losses}")
        now = time.time()
        scalars = losses | {
            "losses/approx_kl_max": by_name["approx_kl"].max().item(),
            "losses/explained_variance": float(explained_variance),
            "charts/learning_rate": lr,
            "charts/SPS": step / self.seconds(),
            "time/rollout": self.last_step - self.last_iteration,
            "time/update": self.last_update - self.last_step,
        }
        if "aux/kl_loss" in names:  # an auxiliary phase followed the update
            scalars["time/auxiliary"] = now - self.last_update
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        self.last_iteration = now
        text = f"return {self.mean_return():.1f}, " if self.recent_returns else ""
        self.bar.set_postfix_str(f"{text}KL {losses['losses/approx_kl']:.1e}", refresh=False)

    def progress(self, rows, title: str) -> tqdm:
        """The rows, with a bar of their own."""
        seconds = self.bar.mininterval  # short ones show none
        return tqdm(rows, title, leave=False, mininterval=seconds, delay=seconds)

    def checkpoint_is_due(self, iteration: int) -> bool:
        is_last = iteration == self.args.num_iterations
        return is_last or time.time() - self.last_checkpoint > self.args.checkpoint_seconds

    def close(self, step: int, eval_returns: list[float]) -> dict:
        """The results of the run."""
        results = {"run_dir": str(self.run_dir), "global_step": step, "return": self.mean_return()}
        if eval_returns:
            results["eval_returns"] = eval_returns
            self.writer.add_scalar("eval/episodic_return", np.mean(eval_returns), step)
        self.writer.close()
        self.episodes.close()
        if self.wandb_run:
            self.wandb_run.finish()
        return results


def lock(file, message: str) -> None:
    """Refuse if another process has locked the file; on Windows there is no lock."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Refused(f"error: {message}") from error
    except OSError as error:  # NFS and Lustre may have no locks
        print(f"{file.name} cannot be locked, so start no other process on this run: {error}")


def start_wandb(args: Args, run_dir: Path):
    """Log to W&B, too. Its files are in ./wandb: in the run's directory it would upload them."""
    import wandb

    try:
        return wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            id=run_dir.resolve().name,
            name=run_dir.resolve().name,
            resume="allow",
            reinit="finish_previous",
            config=asdict(args),
            sync_tensorboard=True,
            save_code=True,
        )
    except wandb.errors.Error as error:
        if not args.resume:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise Refused(f"error: --track: {first_line(error)}") from error


def plain_numbers(args: Args) -> Args:
    """The flags with Python's own numbers."""
    return replace(args, **{k: x.item() for k, x in vars(args).items() if hasattr(x, "item")})


def plain_args(args: Args) -> dict:
    """The flags as a checkpoint can hold them: a path, or what else you add, becomes text."""
    plain = bool | int | float | str | tuple | list | None
    return {k: x if isinstance(x, plain) else str(x) for k, x in asdict(args).items()}


def provenance(args: Args) -> dict:
    """What it takes to repeat the run."""
    git = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty"]
    found = shutil.which("git") and subprocess.run(git, capture_output=True, text=True)
    packages = ["torch", "gymnasium", "numpy"]
    packages += packages_distributions().get("procgen", [])  # procgen-mirror, or your own build
    return {
        "args": plain_args(args),
        "command": shlex.join(sys.argv),
        "commit": found.stdout.strip() if found else "",
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
    }


def save_checkpoint(args: Args, state: dict, log: Log) -> None:
    """Write, then rename: a kill at any moment leaves a whole file, the old one or the new one."""
    log.last_checkpoint = time.time()
    log.writer.flush()
    os.fsync(log.episodes.fileno())
    state |= {
        "args": plain_args(args) | {"resume": None, "evaluate": None},
        "seconds": log.seconds(),
        "recent_returns": list(log.recent_returns),
        "episodes_size": os.fstat(log.episodes.fileno()).st_size,
    }
    with open(log.run_dir / "checkpoint.tmp", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(log.run_dir / "checkpoint.tmp", log.run_dir / "checkpoint.pt")
    log.last_iteration = time.time()  # the next rollout begins now


def load_checkpoint(run_dir: str | Path) -> dict:
    """Read a checkpoint; only tensors and plain values are accepted, so nothing in it can run."""
    path = Path(run_dir) / "checkpoint.pt"
    require(path.is_file(), f"there is no checkpoint at {path}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["args"] = asdict(Args(**checkpoint["args"]))  # newer flags have their defaults
    except Exception as error:
        why = f"{path} is not a checkpoint of this script: {first_line(error)}"
        raise Refused(f"error: {why}") from error
    known = {"agent", "rng", "iteration"} <= checkpoint.keys()
    require(known, f"{path} is of an earlier version: use the script beside it")
    return checkpoint


def load_weights(agent: Agent, checkpoint: dict) -> None:
    """Load the weights of a checkpoint, if it is of an agent of this shape."""
    shapes = {name: tensor.shape for name, tensor in agent.state_dict().items()}
    same = shapes == {name: tensor.shape for name, tensor in checkpoint["agent"].items()}
    require(same, "the run to load has another network or other spaces than this one")
    agent.load_state_dict(checkpoint["agent"])


def rms_state(rms: RunningMeanStd) -> list[torch.Tensor]:
    """Mean, variance and count, for a checkpoint."""
    return [torch.as_tensor(x, dtype=torch.float64) for x in astuple(rms)]


def load_rms(checkpoint: dict, name: str) -> RunningMeanStd:
    """The statistics of a normalizer from a checkpoint."""
    mean, var, count = (x.numpy() for x in checkpoint[name])
    return RunningMeanStd(mean, var, count.item())


def evaluate(args: Args, run_dir: Path) -> list[float]:
    """Returns, not scaled, of whole games: played side by side, or in turns if they are filmed."""
    checkpoint = load_checkpoint(run_dir)
    try_env(args, checkpoint)
    first_seed = env_seed(args) + 900_000  # far from the seeds of training
    N = 1 if args.capture_video else args.eval_episodes
    args = replace(args, num_envs=N)
    if args.eval_levels == "unseen":  # all above those of training
        first_level = args.start_level + args.num_levels
        args = replace(args, start_level=first_level, num_levels=2**31 - 1 - first_level)
    if args.cuda and not torch.cuda.is_available():
        print("evaluation: the run was on a GPU, this machine has none and plays on its CPU")
        args = replace(args, cuda=False)
    device = torch.device("cuda" if args.cuda else "cpu")
    seed_everything(first_seed)
    envs = make_envs(args, run_dir, first_seed, "eval_videos")
    agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
    load_weights(agent, checkpoint)
    returns = []
    obs, _ = envs.reset(seed=first_seed)
    with tqdm(total=args.eval_episodes, unit="game", leave=False) as bar:
        while len(returns) < args.eval_episodes:
            game_returns = np.zeros(N)
            playing = np.ones(N, bool)  # still in this game
            while playing.any():
                inputs = torch.from_numpy(obs).to(device)
                action, _, _ = agent.act(inputs, greedy=args.eval_deterministic)
                obs, reward, terminated, truncated, _ = envs.step(action.numpy())
                game_returns += reward * playing
                over = playing & np.logical_or(terminated, truncated)
                playing &= ~over
                if over.any():
                    bar.update(int(over.sum()))
            returns += game_returns.tolist()
    envs.close()
    mean, std = np.mean(returns), np.std(returns)
    games = f"{len(returns)} games, {args.eval_levels} levels"
    print(f"evaluation: {mean:.1f} +- {std:.1f} over {games}")
    return returns


def main() -> None:
    args = parse_args()
    try:
        if args.evaluate:
            check_runs(args, load_checkpoint(args.evaluate), None)
            evaluate(args, Path(args.evaluate))
        else:
            train(args)
    except KeyboardInterrupt:
        if args.evaluate:
            sys.exit("stopped")
        run_dir = Log.newest.run_dir if Log.newest else args.resume
        if not (run_dir and Path(run_dir, "checkpoint.pt").exists()):
            sys.exit("stopped before the first checkpoint: start again")
        iteration = load_checkpoint(run_dir)["iteration"]
        if iteration == args.num_iterations:
            sys.exit(f"stopped; training is finished, and --evaluate {run_dir} plays the agent")
        step = iteration * args.batch_size
        sys.exit(f"stopped; --resume {run_dir} goes on from step {step}")


if __name__ == "__main__":
    main()
