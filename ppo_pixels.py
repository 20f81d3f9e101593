# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["torch>=2.11", "gymnasium[box2d,classic-control]>=1.4", "numpy>=1.26",
#                 "opencv-python-headless>=4.11", "tensorboard>=2.18", "tqdm>=4.66", "tyro>=1.0",
#                 "moviepy>=2.1"]
# ///
"""PPO from images: ppo.py with a convolutional network, for Discrete or Box actions.

Run:    uv run ppo_pixels.py --env-id CartPole-v1
Watch:  uvx tensorboard --logdir runs
Expect: a return of 320 (mean of three seeds) after 200,000 steps of two frames each, in up to 40
        minutes on one core
Read:   beside ppo.py, down to the line of "=" below `train`. Tags such as [A07] number the details
        of "The 37 Implementation Details of PPO"; [S01] is ours.
Shapes: T steps of N environments make a batch of B = T * N samples; a minibatch has M of them.
        An observation is K images of H x W pixels and C channels; A is the number of Discrete
        actions, or of the components of a Box action.
"""

import ctypes
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
from collections import deque
from dataclasses import asdict, astuple, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.distributions import Categorical, Independent, Normal
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
    env_id: str = "CartPole-v1"  # id of the environment, or module:id
    total_timesteps: int = 200_000  # steps without skipped frames, rounded down to batches
    learning_rate: float = 1e-3  # learning rate of Adam
    num_envs: int = 8  # environments stepped together [C01]
    num_steps: int = 32  # steps of each environment in a rollout
    anneal_lr: bool = True  # anneal the learning rate linearly to zero [C04]
    gamma: float = 0.98  # discount factor
    gae_lambda: float = 0.8  # lambda of generalized advantage estimation [C05]
    num_minibatches: int = 1  # minibatches per epoch [C06]
    update_epochs: int = 10  # passes over each rollout
    norm_adv: bool = True  # normalize advantages in each minibatch [C07]
    clip_coef: float = 0.2  # clip range of the probability ratio [C08] and of the value [C09]
    clip_vloss: bool = False  # clip the value loss [C09]
    ent_coef: float = 0.0  # coefficient of the entropy bonus [C10]
    vf_coef: float = 0.5  # coefficient of the value loss [C10]
    max_grad_norm: float = 0.5  # largest gradient norm; 0 turns clipping off [C11]
    target_kl: float | None = None  # stop after an epoch with a mean approx_kl above this [X03]
    anneal_clip: bool = False  # anneal clip_coef linearly to zero [X01]
    adam_eps: float = 1e-5  # epsilon of Adam [C03]
    ortho_init: bool = True  # orthogonal initial weights, or torch's default [C02]
    shared_network: bool = True  # one network for policy and value instead of two [A08]
    render_as_observation: bool = True  # observe the rendered picture if observations are no images
    frame_skip: int = 2  # steps of the environment for each action, which is repeated
    image_size: int = 48  # largest height and width; larger pictures shrink; 0: any size [A05]
    grayscale: bool = False  # turn pictures of three channels gray [A05]
    frame_stack: int = 4  # the number of most recent images in an observation [A07]
    norm_reward: bool = True  # divide rewards by the deviation of their discounted sum [M08]
    clip_reward: float = 10.0  # clip normalized rewards to this; 0 turns clipping off [M09]
    init_log_std: float = 0.0  # initial log standard deviation of a policy of Box actions [M02]
    clip_actions: bool = True  # clip Box actions to the bounds of their space [M05]
    bootstrap_truncation: bool = True  # bootstrap from the last state at a time limit [S01]

    # -- run --
    env_backend: Literal["sync", "async"] = "sync"  # in this process, or in a process each
    compile: bool = torch.cuda.is_available()  # compile the network; little use on a CPU
    bf16: bool = False  # the network below the heads in bfloat16: slow on hardware without it
    checkpoint_seconds: int = 60  # seconds between checkpoints
    init_from: str | None = None  # directory of a run whose agent is the initial one
    resume: str | None = None  # directory of a run to continue
    evaluate: str | None = None  # directory of a run to evaluate
    eval_episodes: int = 10  # episodes of --evaluate and of the evaluation after training; 0: none
    eval_deterministic: bool = False  # evaluate with the most probable actions

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size


# -- environment --
def wrap_images(env: gym.Env, args: Args) -> gym.Env:
    """An environment in Gymnasium's wrappers: it observes K images (K, H, W, C), oldest first."""
    env = PlainEnv(env, args.frame_skip)  # images (H, W, C) of bytes or of float32
    if not is_image(env.observation_space):
        env = gym.wrappers.AddRenderObservation(env)
    shape = env.observation_space.shape
    # What Gymnasium can resize:
    is_picture = env.observation_space == gym.spaces.Box(0, 255, shape, np.uint8) and shape[2] <= 4
    size = tuple(min(length, args.image_size or length) for length in shape[:2])
    if is_picture and size != shape[:2]:
        env = gym.wrappers.ResizeObservation(env, size)  # [A05] smaller, then gray: this is faster
    if is_picture and args.grayscale and shape[2] == 3:
        env = gym.wrappers.GrayscaleObservation(env, keep_dim=True)
    if args.clip_actions and isinstance(env.action_space, gym.spaces.Box):
        env = gym.wrappers.ClipAction(env)  # [M05] action clipping; the loss sees them unclipped
    return gym.wrappers.FrameStackObservation(env, args.frame_stack)  # [A07] frame stacking


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
def layer_init(layer: nn.Module, std: float, args: Args) -> nn.Module:
    """Orthogonal weights of gain `std` and zero biases (baselines/a2c/utils.py)."""
    if args.ortho_init:  # [C02] orthogonal initialization
        nn.init.orthogonal_(layer.weight, std)
        nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value of images: the Nature CNN (doi.org/10.1038/nature14236) or a smaller one."""

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.Space, args: Args):
        super().__init__()
        K, H, W, C = obs_space.shape
        sizes = [(8, 4, 0), (4, 2, 0), (3, 1, 0)]  # kernel, stride and padding of each layer
        if min(H, W) < 36:  # no room for the kernels of the Nature CNN
            sizes = [(3, 2, 1), (3, 2, 1), (3, 1, 1)]

        def cnn() -> nn.Sequential:
            layers = []
            for channels, filters, size in zip((K * C, 32, 64), (32, 64, 64), sizes):
                conv = nn.Conv2d(channels, filters, *size)
                layers += [layer_init(conv, 2**0.5, args), nn.ReLU()]
            features = nn.Sequential(*layers)(torch.zeros(1, K * C, H, W)).numel()
            linear = layer_init(nn.Linear(features, 512), 2**0.5, args)
            return nn.Sequential(*layers, nn.Flatten(), linear, nn.ReLU())

        self.network = cnn()  # [A08] one network, shared by policy and value, or two
        self.value_network = None if args.shared_network else cnn()
        self.is_discrete = isinstance(action_space, gym.spaces.Discrete)
        A = int(action_space.n) if self.is_discrete else action_space.shape[0]
        self.actor = layer_init(nn.Linear(512, A), 0.01, args)
        self.critic = layer_init(nn.Linear(512, 1), 1.0, args)
        if not self.is_discrete:
            # [M02] the same for all observations
            self.actor_logstd = nn.Parameter(torch.zeros(A) + args.init_log_std)
        self.scale = image_scale(obs_space)
        self.dtype = torch.bfloat16 if args.bf16 else torch.float32

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits or means (n, A) and values (n,) of observations (n, K, H, W, C)."""
        x = obs.permute(0, 1, 4, 2, 3).flatten(1, 2)  # (n, K * C, H, W)
        x = x.to(self.dtype, memory_format=torch.channels_last) / self.scale  # [A09] 255 for bytes
        with torch.autocast(obs.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            hidden = self.network(x)
            value_hidden = self.value_network(x) if self.value_network is not None else hidden
        return self.actor(hidden.float()), self.critic(value_hidden.float()).squeeze(-1)

    def get_policy(self, output: torch.Tensor) -> Categorical | Independent:
        """The distribution of n actions with these logits or means (n, A)."""
        if self.is_discrete:
            return Categorical(logits=output, validate_args=False)
        std = self.actor_logstd.exp().to(output.device)
        normal = Normal(output, std, validate_args=False)  # [M01] a normal policy
        return Independent(normal, 1, validate_args=False)  # [M03] independent action components

    @torch.no_grad()
    def act(self, obs: torch.Tensor, greedy: bool = False):
        """Actions (sampled or the modes), log-probabilities and values of n observations."""
        output, value = (x.cpu() for x in self(obs))  # to draw on the CPU, also for a GPU
        policy = self.get_policy(output)
        action = policy.mode if greedy else policy.sample()
        return action, policy.log_prob(action), value

    @torch.no_grad()
    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """V of observations (n, K, H, W, C) -> (n,), on the CPU."""
        return self(obs)[1].cpu()

    def evaluate_actions(self, obs: torch.Tensor, actions: torch.Tensor):
        """Log-probability, entropy and value, each (n,), of actions at observations."""
        output, value = self(obs)
        policy = self.get_policy(output)
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
    return_rms = RunningMeanStd(np.zeros(()), np.ones(()))  # of the discounted sum of past rewards
    if initial:
        load_weights(agent, initial)
        return_rms = load_rms(initial, "return_rms")
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng"])
    if args.compile:
        agent.forward = compiled(agent.forward, device)

    # A rollout, in NumPy; pinned memory is copied faster to a GPU
    T, N = args.num_steps, args.num_envs
    dtype = torch.uint8 if obs_space.dtype == np.uint8 else torch.float32
    obs = torch.zeros(T + 1, N, *obs_space.shape, dtype=dtype, pin_memory=args.cuda).numpy()
    actions = np.zeros((T, N, *action_space.shape), np.int64 if agent.is_discrete else np.float32)
    logprobs = np.zeros((T, N), np.float32)
    values = np.zeros((T + 1, N), np.float32)
    final_values = np.zeros((T, N), np.float32)  # of the last state of an episode cut off at t
    rewards = np.zeros((T, N), np.float32)  # normalized, unless --no-norm-reward
    terminations = np.zeros((T, N), np.float32)  # 1: the task ended at this step
    dones = np.zeros((T, N), np.float32)  # 1: the episode ended at this step, for any reason

    global_step = (start_iteration - 1) * args.batch_size
    episodic_return, episodic_length = np.zeros(N), np.zeros(N)
    discounted_return = np.zeros(N)
    obs[T], _ = envs.reset(seed=first_seed)
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
            obs[t + 1], reward, terminations[t], truncated, infos = envs.step(actions[t])
            dones[t] = np.logical_or(terminations[t], truncated)
            discounted_return = args.gamma * discounted_return + reward
            return_rms.update(discounted_return)
            rewards[t] = normalize_reward(return_rms, reward, args)

            global_step += N
            log.step(N)
            episodic_return += reward
            episodic_length += 1
            for n in np.flatnonzero(dones[t]):  # obs[t + 1, n] begins the next episode
                if truncated[n]:
                    final_obs = torch.from_numpy(infos["final_obs"][n]).to(device)
                    final_values[t, n] = agent.get_value(final_obs[None]).item()
                log.episode(global_step, episodic_return[n], episodic_length[n])
                episodic_return[n] = episodic_length[n] = discounted_return[n] = 0

        # -- advantages --
        b_obs = torch.from_numpy(obs).to(device).flatten(0, 1)  # (B + N, K, H, W, C), with obs[T]
        b_actions = torch.from_numpy(actions).to(device).flatten(0, 1)
        b_logprobs = torch.from_numpy(logprobs).to(device).flatten(0, 1)
        values[T] = agent.get_value(b_obs[-N:])
        next_values = np.where(dones, final_values, values[1:])  # a row on, or before the reset
        b_values = torch.from_numpy(values[:T]).to(device).flatten(0, 1)
        ends = terminations if args.bootstrap_truncation else dones  # [S01] (as published: dones)
        advantages = gae(rewards, values[:T], next_values, ends, dones, args.gamma, args.gae_lambda)
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
        stats = []  # of each minibatch
        for epoch in range(args.update_epochs):
            b_inds = torch.randperm(args.batch_size).to(device)
            for mb_inds in b_inds.chunk(args.num_minibatches):  # [C06] every sample once an epoch
                mb = {name: tensor[mb_inds] for name, tensor in batch.items()}
                newlogprob, entropy, newvalue = agent.evaluate_actions(mb["obs"], mb["actions"])
                loss, mb_stats = ppo_loss(newlogprob, entropy, newvalue, mb, clip_coef, args)
                optimizer.zero_grad()
                loss.backward()
                max_norm = args.max_grad_norm or math.inf  # inf: measure, do not clip
                norm = nn.utils.clip_grad_norm_(agent.parameters(), max_norm)  # [C11] clipping
                optimizer.step()
                stats.append(mb_stats | {"grad_norm": norm})
            if args.target_kl:  # [X03] early stop
                epoch_kl = [x["approx_kl"] for x in stats[-args.num_minibatches :]]
                if torch.stack(epoch_kl).mean() > args.target_kl:
                    break

        # -- log and checkpoint --
        explained = 1 - b_advantages.var() / batch["returns"].var()  # advantages = returns - values
        log.iteration(global_step, stats, explained, optimizer.param_groups[0]["lr"])
        if log.checkpoint_is_due(iteration):
            state = {
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
                "return_rms": rms_state(return_rms),
                "rng": torch.get_rng_state(),
                "iteration": iteration,
            }
            save_checkpoint(args, state, log)

    envs.close()
    log.bar.close()
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
    above_0 = "total_timesteps learning_rate num_envs num_steps num_minibatches update_epochs"
    above_0 += " clip_coef adam_eps" + ("" if args.target_kl is None else " target_kl")
    above_0 += " frame_skip frame_stack"
    at_least_0 = "seed ent_coef vf_coef max_grad_norm checkpoint_seconds eval_episodes"
    at_least_0 += " image_size clip_reward"
    for name in f"{above_0} {at_least_0}".split():
        value = getattr(args, name)
        flag = f"--{name.replace('_', '-')}"
        require(0 <= value < math.inf, f"{flag} ({value}) must not be below 0, nor infinite")
        require(value or name not in above_0.split(), f"{flag} must be above 0")
    for name in ("gamma", "gae_lambda"):
        value = getattr(args, name)
        require(0 <= value <= 1, f"--{name.replace('_', '-')} ({value}) must be between 0 and 1")
    require(math.isfinite(args.init_log_std), f"--init-log-std ({args.init_log_std}) is not finite")
    batch = f"--num-envs times --num-steps ({args.num_envs} * {args.num_steps})"
    even = args.batch_size % args.num_minibatches == 0
    require(even, f"{batch} is not divisible by --num-minibatches ({args.num_minibatches})")
    alone = args.norm_adv and args.batch_size == args.num_minibatches
    require(not alone, f"{batch}: minibatches of one sample need --no-norm-adv")
    require(args.num_iterations, f"--total-timesteps ({args.total_timesteps}) is less than {batch}")
    require(not (args.resume and args.evaluate), "--resume trains, --evaluate plays: give one")
    require(args.eval_episodes or not args.evaluate, "--evaluate needs --eval-episodes above 0")
    is_id = re.fullmatch("[^.:][^:]*(:[^:]+)?", args.env_id)
    require(is_id, f"--env-id ({args.env_id}) is an id or module:id, not a path")
    filmed = args.capture_video and args.env_backend == "async" and not args.evaluate
    require(not filmed, "--capture-video needs --env-backend sync, or --evaluate")
    found = args.evaluate or not args.track or getattr(find_spec("wandb"), "origin", None)
    require(found, "--track needs wandb (uv run --with wandb ...)")  # ./wandb has no origin
    found = not args.capture_video or find_spec("moviepy")
    require(found, "--capture-video needs moviepy (pip install moviepy)")
    found = find_spec("cv2") or not (args.image_size or args.grayscale)
    require(found, "--image-size and --grayscale need OpenCV (pip install opencv-python-headless)")
    found = args.evaluate or not args.cuda or torch.cuda.is_available()
    require(found, "--cuda finds no GPU (try --no-cuda)")


def check_runs(args: Args, checkpoint: dict | None, initial: dict | None) -> None:
    """Refuse to go on with a run, or to begin with its agent, if a flag that matters differs."""
    new = asdict(args)
    network_flags = "shared_network render_as_observation image_size grayscale frame_stack".split()
    network_flags += ["frame_skip", "clip_actions"]
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
    free = "resume evaluate cuda compile track wandb_project_name wandb_entity".split()
    free += "capture_video checkpoint_seconds eval_episodes eval_deterministic env_backend".split()
    free += ["total_timesteps"] if is_longer else []
    changed = [f"{k} ({old[k]} to {new[k]})" for k in old if old[k] != new[k] and k not in free]
    require(not changed, f"this run cannot change {', '.join(changed)}: leave these out")
    is_finished = args.resume and checkpoint["iteration"] >= args.num_iterations
    longer = "" if annealed else ", more --total-timesteps go on with it"
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


def is_image(space: gym.Space) -> bool:
    """Whether its arrays are (H, W), (H, W, C) or (C, H, W)."""
    return isinstance(space, gym.spaces.Box) and len(space.shape) in (2, 3) and 0 not in space.shape


def bound_of(space: gym.spaces.Box) -> float:
    """The largest number, of any sign, that an image may have."""
    return max(float(space.high.max()), -float(space.low.min()))


def image_scale(space: gym.spaces.Box) -> float:
    """What to divide an image by: the bound of its space, for bytes 255, or 1 if that is no use."""
    bound = bound_of(space)
    return bound if 0 < bound < 1e6 else 1.0


class PlainEnv(gym.Wrapper):
    """An environment that returns what the loop expects, whatever the one inside returns."""

    render_mode = "rgb_array"  # the one inside may draw and name no mode

    def __init__(self, env: gym.Env, frame_skip: int):
        super().__init__(env)
        space, actions = env.observation_space, env.action_space
        self.frame_skip, self.is_image = frame_skip, is_image(space)
        if self.is_image:
            self.shape = (*space.shape, 1)[:3]
            self.channel_axis = int(np.argmin(self.shape))
            shape = np.moveaxis(np.empty(self.shape, bool), self.channel_axis, -1).shape
            low, high = np.clip((space.low.min(), space.high.max()), -1e30, 1e30)  # for float32
            is_bytes = space.dtype.kind in "bui" and low >= 0 and high <= 255
            self.dtype = np.uint8 if is_bytes else np.float32
            self.observation_space = gym.spaces.Box(low, high, shape, self.dtype)
        fps = env.metadata.get("render_fps") or 30
        self.metadata = env.metadata | {"render_fps": fps / frame_skip}  # a picture a step
        self.first_action = 0
        if isinstance(actions, gym.spaces.Discrete):
            self.action_space = gym.spaces.Discrete(int(actions.n))  # counted from 0
            self.first_action = int(actions.start)

    def reset(self, **kwargs):
        obs, _ = self.env.reset(**kwargs)
        return self.image(obs), {}

    def step(self, action):
        total_reward, dtype = 0.0, self.env.action_space.dtype
        for _ in range(self.frame_skip):  # an action of its own each time
            given = np.add(action, self.first_action).astype(dtype)
            obs, reward, terminated, truncated, _ = self.env.step(given)
            total_reward += self.plain(reward, (), np.float64).item()
            if terminated or truncated:
                break
        return self.image(obs), total_reward, bool(terminated), bool(truncated), {}

    def image(self, obs) -> np.ndarray:
        """The image with its channels last; anything else passes, for wrap_images to replace."""
        if not self.is_image:
            return obs
        return np.moveaxis(self.plain(obs, self.shape, self.dtype), self.channel_axis, -1)

    def plain(self, x, shape: tuple, dtype: type) -> np.ndarray:
        """A copy of what is a number or an array of this shape, up to axes of size 1."""
        given = np.asarray(x)
        x = given.astype(dtype)
        is_same = dtype != np.uint8 or given.dtype == dtype or (x == given).all()
        require(is_same, f"the environment gave {given.dtype} that are no bytes as in its space")
        if x.shape != shape:
            fits = x.squeeze().shape == tuple(size for size in shape if size != 1)
            require(fits, f"the environment gave the shape {x.shape} where {shape} is right")
        return x.reshape(shape)

    def render(self):
        return np.array(self.env.render())  # a copy, since environments may reuse their memory


class Video(gym.wrappers.RecordVideo):
    """Videos of some episodes, of at most 1,500 frames each."""

    def step(self, action):
        result = super().step(action)
        if self.recording and len(self.recorded_frames) >= 1500:
            self.stop_recording()
        return result


def raw_env(args: Args, renders: bool, why: str) -> gym.Env:
    """The environment as Gymnasium makes it; `why` begins the message if it cannot render."""
    render = {"render_mode": "rgb_array"} if renders else {}
    if "" not in sys.path:
        sys.path.append("")  # a module:id may be in the current folder, too
    try:
        return gym.make(args.env_id, disable_env_checker=True, **render)
    except (gym.error.Error, ModuleNotFoundError) as error:
        hint = " (Atari: ppo_atari.py)" if isinstance(error, gym.error.UnregisteredEnv) else ""
        raise Refused(f"error: --env-id ({args.env_id}): {error}{hint}") from error
    except TypeError as error:
        require("argument 'render_mode'" not in str(error), f"{why} cannot render: {error}")
        raise  # the environment's own


def make_env(args: Args, films: bool = False) -> gym.Env:
    """One environment in the wrappers above, which can render if it is to be filmed."""
    is_game = re.search("ALE/|NoFrameskip", args.env_id)
    require(not is_game, f"--env-id ({args.env_id}): the games of Atari are for ppo_atari.py")
    env = raw_env(args, films, "--capture-video")
    obs_space = env.observation_space
    check_spaces(args, obs_space, env.action_space)
    if not is_image(obs_space):
        env.close()
        why = f"{args.env_id} observes {obs_space}, which is no image"
        require(args.render_as_observation, f"{why} (--render-as-observation sees what it renders)")
        env = raw_env(args, True, f"{why}, and")
        hangs = args.env_backend == "async" and hasattr(env.unwrapped, "mujoco_renderer")
        require(not hangs, "--env-backend async: MuJoCo cannot render in copies of a process")
        try_rendering(env, f"{why}, and")
    return wrap_images(env, args)


def check_spaces(args: Args, obs_space: gym.Space, action_space: gym.Space) -> None:
    """Refuse spaces that this script does not know."""
    is_one = not isinstance(obs_space, gym.spaces.Dict | gym.spaces.Tuple)
    hint = "(gymnasium.wrappers.TransformObservation picks one of its parts)"
    require(is_one, f"{args.env_id} observes {obs_space}, not an image {hint}")
    axes = len(obs_space.shape or ())
    stacked = f"an image has two or three axes, not {axes}; --frame-stack does the stacking"
    require(axes < 4, f"{args.env_id} observes {obs_space}: {stacked}")
    if axes == 3 and is_image(obs_space):
        rows, columns, channels = obs_space.shape
        is_clear = min(rows, channels) < sorted(obs_space.shape)[1]
        which = "the channels must be the first or last axis, and fewer than rows or columns"
        require(is_clear, f"{args.env_id} observes {obs_space}: {which}")
    if not isinstance(action_space, gym.spaces.Discrete):
        is_vector = isinstance(action_space, gym.spaces.Box) and len(action_space.shape) == 1
        is_vector = is_vector and np.issubdtype(action_space.dtype, np.floating)
        kinds = "actions must be Discrete, or a Box of floats with one axis"
        require(is_vector, f"{args.env_id} acts in {action_space}: {kinds}")


def try_rendering(env: gym.Env, why: str) -> None:
    """Refuse an environment that cannot render."""
    env.reset()
    try:
        image = np.array(env.render())
    except Exception as error:  # every renderer fails in its own way
        raise Refused(f"error: {why} cannot render: {error!r}") from error
    is_picture = image.ndim == 3 and image.dtype == np.uint8
    wrong = f"render() gave {image.dtype} of the shape {image.shape}, not a picture of bytes"
    require(is_picture, f"{why} cannot render: {wrong}")


def film(env: gym.Env, run_dir: Path, name: str) -> gym.Env:
    """The environment with videos of some episodes, in the directory of the run."""
    video_dir = run_dir / f"{name}_{int(time.time())}"
    print(f"videos: {video_dir}", flush=True)
    return Video(env, str(video_dir), disable_logger=True)


def try_env(args: Args, checkpoint: dict | None) -> None:
    """Refuse an environment, or the weights for it, before anything is written."""
    os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")  # or pygame would swallow SIGTERM
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # needs no screen
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # the same for pygame
    torch.compiler.reset()  # loads Triton, which crashes if OpenGL was loaded before it
    env = make_env(args, args.capture_video)
    obs_space, (image, _) = env.observation_space, env.reset()
    K, H, W, C = obs_space.shape
    scale, bound, largest = image_scale(obs_space), bound_of(obs_space), np.abs(image).max()
    outside = f"an image has {largest:g} where its space ends at {bound:g}"
    require(largest <= 1.01 * bound, f"{args.env_id}: {outside}")
    kind = "images" if env.get_wrapper_attr("is_image") else "rendered pictures"
    seen = f"{K} {kind} of {H}x{W}x{C}, divided by {scale:g}, largest number in the first"
    seen += f" {largest / scale:.2g}; an action lasts {args.frame_skip} steps"
    if not checkpoint:
        print(f"the network sees {seen}", flush=True)
    else:
        load_weights(Agent(obs_space, env.action_space, args), checkpoint)
    if args.capture_video:
        try_rendering(env, "--capture-video")
    env.close()


def make_envs(args: Args, run_dir: Path, first_seed: int) -> gym.vector.VectorEnv:
    """N environments that reset within the step that ends an episode (infos: final_obs)."""

    def maker(n: int):
        def make() -> gym.Env:
            if args.env_backend == "async":  # a worker begins as a copy of this process
                seed_everything(first_seed + n)
            films = args.capture_video and n == 0
            env = make_env(args, films)
            return film(env, run_dir, "videos") if films else env

        return make

    backends = {"sync": gym.vector.SyncVectorEnv, "async": gym.vector.AsyncVectorEnv}
    makers = [maker(n) for n in range(args.num_envs)]
    same_step = gym.vector.AutoresetMode.SAME_STEP
    return backends[args.env_backend](makers, copy=False, autoreset_mode=same_step)


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
            "time/update": now - self.last_step,
        }
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        self.last_iteration = now
        text = f"return {self.mean_return():.1f}, " if self.recent_returns else ""
        self.bar.set_postfix_str(f"{text}KL {losses['losses/approx_kl']:.1e}", refresh=False)

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


def rms_state(rms: RunningMeanStd) -> list[torch.Tensor]:
    """Mean, variance and count, for a checkpoint."""
    return [torch.as_tensor(x, dtype=torch.float64) for x in astuple(rms)]


def load_rms(checkpoint: dict, name: str) -> RunningMeanStd:
    """The statistics of a normalizer from a checkpoint."""
    mean, var, count = (x.numpy() for x in checkpoint[name])
    return RunningMeanStd(mean, var, count.item())


def load_weights(agent: Agent, checkpoint: dict) -> None:
    """Load the weights of a checkpoint, if it is of an agent of this shape."""
    shapes = {name: tensor.shape for name, tensor in agent.state_dict().items()}
    same = shapes == {name: tensor.shape for name, tensor in checkpoint["agent"].items()}
    require(same, "the run to load has another network or other spaces than this one")
    agent.load_state_dict(checkpoint["agent"])


def evaluate(args: Args, run_dir: Path) -> list[float]:
    """Undiscounted returns of `eval_episodes` episodes with the agent of the checkpoint."""
    checkpoint = load_checkpoint(run_dir)
    try_env(args, checkpoint)
    env = make_env(args, args.capture_video)
    if args.capture_video:
        env = film(env, run_dir, "eval_videos")
    agent = Agent(env.observation_space, env.action_space, args)
    load_weights(agent, checkpoint)
    first_seed = env_seed(args) + 900_000  # far from the seeds of training
    seed_everything(first_seed)
    returns = []
    for episode in tqdm(range(args.eval_episodes), unit="episode", leave=False):
        obs, _ = env.reset(seed=first_seed + episode)
        episodic_return, done = 0.0, False
        while not done:
            inputs = torch.from_numpy(obs[None])
            action, _, _ = agent.act(inputs, greedy=args.eval_deterministic)
            obs, reward, terminated, truncated, _ = env.step(action[0].numpy())
            episodic_return += reward
            done = terminated or truncated
        returns.append(episodic_return)
    env.close()
    mean, std = np.mean(returns), np.std(returns)
    print(f"evaluation: {mean:.1f} +- {std:.1f} over {len(returns)} episodes")
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
