# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["torch>=2.11", "gymnasium[box2d,classic-control,mujoco]>=1.4", "numpy>=1.26",
#                 "tensorboard>=2.18", "tqdm>=4.66", "tyro>=1.0", "moviepy>=2.1"]
# ///
"""PPO for continuous control: ppo.py with nine more details, for Box actions.

Run:    uv run ppo_continuous_mujoco.py --env-id HalfCheetah-v4
Watch:  uvx tensorboard --logdir runs
Expect: 2,300 on HalfCheetah (mean of ten seeds; median 1,800) after 1M steps, 2 to 7 minutes
Read:   beside ppo.py, down to the line of "=" below `train`. Tags such as [M06] number the details
        of "The 37 Implementation Details of PPO"; [S01], [S03], [S04] and [S09] are ours.
Shapes: T steps of N environments make a batch of B = T * N samples; a minibatch has M of them.
        An observation has O numbers, an action has A; the networks have P parameters.
Fast:   Three things here are for speed alone. `numpy_act` repeats `Agent.act` in NumPy, which is
        much faster for one observation. The weights are views of one vector, for Adam. And
        `loss_and_grad` is one compiled graph.
"""

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
from functools import cache, reduce
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import gymnasium as gym
import mujoco
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.distributions import Normal, TanhTransform
from torch.utils._pytree import tree_map
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    # -- experiment --
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's directory
    seed: int = 1  # seed of weights, actions, minibatches and environments
    torch_deterministic: bool = True  # let cuDNN use deterministic kernels only
    cuda: bool = False  # train on a GPU; for networks this small a CPU should be faster
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "ppo"  # project in Weights & Biases
    wandb_entity: str | None = None  # team in Weights & Biases
    capture_video: bool = False  # record videos of environment 0 and of the evaluation

    # -- algorithm --
    env_id: str = "HalfCheetah-v4"  # id of the environment (-v5 works too), or module:id
    total_timesteps: int = 1_000_000  # environment steps in all, rounded down to whole batches
    learning_rate: float = 3e-4  # learning rate of Adam
    num_envs: int = 1  # environments stepped together [C01]
    num_steps: int = 2048  # steps of each environment in a rollout
    anneal_lr: bool = True  # anneal the learning rate linearly to zero [C04]
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation [C05]
    num_minibatches: int = 32  # minibatches per epoch [C06]
    update_epochs: int = 10  # passes over each rollout
    norm_adv: bool = True  # normalize advantages in each minibatch [C07]
    clip_coef: float = 0.2  # clip range of the probability ratio [C08] and of the value [C09]
    clip_vloss: bool = True  # clip the value loss [C09]
    ent_coef: float = 0.0  # coefficient of the entropy bonus [C10]
    vf_coef: float = 0.5  # coefficient of the value loss [C10]
    max_grad_norm: float = 0.5  # largest gradient norm; 0 turns clipping off [C11]
    target_kl: float | None = None  # stop after an epoch with a mean approx_kl above this [X03]
    anneal_clip: bool = False  # anneal clip_coef linearly to zero [X01]
    adam_eps: float = 1e-5  # epsilon of Adam [C03]
    ortho_init: bool = True  # orthogonal initial weights, or torch's default [C02]
    shared_network: bool = False  # one trunk for policy and value instead of two [C13]
    activation: Literal["tanh", "relu"] = "tanh"  # nonlinearity of the hidden layers
    init_log_std: float = 0.0  # initial log standard deviation of the policy [M02]
    clip_actions: bool = True  # clip actions to the bounds of the action space [M05]
    squash_actions: bool = False  # squash actions into the bounds with tanh [S03]
    scale_actions: bool = False  # map actions from [-1, 1] to the bounds [S04]
    norm_obs: bool = True  # normalize observations by their running mean and variance [M06]
    clip_obs: float = 10.0  # clip normalized observations to this; 0 turns clipping off [M07]
    norm_reward: bool = True  # divide rewards by the deviation of their discounted sum [M08]
    clip_reward: float = 10.0  # clip normalized rewards to this; 0 turns clipping off [M09]
    bootstrap_truncation: bool = True  # bootstrap from the last state at a time limit [S01]
    staggered_resets: bool = False  # let the first episodes end at different times [S09]

    # -- run --
    env_backend: Literal["sync", "async"] = "sync"  # in this process, or in one each
    compile: bool = True  # compile the updates; eager where that fails
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


# -- normalizers --
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


def normalize_obs(obs_rms: RunningMeanStd, obs: np.ndarray, args: Args) -> np.ndarray:
    """Observations (n, O) -> inputs of the networks (baselines/common/vec_env/vec_normalize.py)."""
    if args.norm_obs:  # [M06] observation normalization
        obs = (obs - obs_rms.mean) / np.sqrt(obs_rms.var + 1e-8)
        if args.clip_obs:  # [M07] observation clipping
            obs = obs.clip(-args.clip_obs, args.clip_obs)
    return obs.astype(np.float32)


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
    """Policy and value of vector observations: two networks with two layers of 64 units each."""

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.spaces.Box, args: Args):
        super().__init__()
        activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[args.activation]

        def trunk() -> list[nn.Module]:
            first = layer_init(nn.Linear(obs_space.shape[0], 64), 2**0.5, args)
            second = layer_init(nn.Linear(64, 64), 2**0.5, args)
            return [first, activation(), second, activation()]

        actor_trunk = trunk()
        critic_trunk = actor_trunk if args.shared_network else trunk()  # [C13] [M04] one or two
        A = action_space.shape[0]
        policy_head = layer_init(nn.Linear(64, A), 0.01, args)
        value_head = layer_init(nn.Linear(64, 1), 1.0, args)
        self.actor_mean = nn.Sequential(*actor_trunk, policy_head)
        self.actor_logstd = nn.Parameter(torch.zeros(A) + args.init_log_std)  # [M02] for all states
        self.critic = nn.Sequential(*critic_trunk, value_head)
        self.args = args
        self.low, self.high = action_space.low, action_space.high  # (A,)
        half_range = torch.from_numpy(self.high / 2 - self.low / 2).float()
        self.register_buffer("half_range", half_range, persistent=False)

    def get_policy(self, obs: torch.Tensor) -> Normal:
        """The distribution of actions (n, A), before `env_action`, at observations (n, O)."""
        mean = self.actor_mean(obs)
        return Normal(mean, self.actor_logstd.exp(), validate_args=False)  # [M01] a normal policy

    @torch.no_grad()
    def act(self, obs: torch.Tensor, greedy: bool = False) -> torch.Tensor:
        """Actions (n, A) at observations (n, O): sampled, or the most probable ones."""
        policy = self.get_policy(obs)
        return policy.mean if greedy else policy.sample()

    def env_action(self, action: np.ndarray) -> np.ndarray:
        """What env.step gets for sampled actions (n, A); the rollout keeps the sampled ones."""
        if self.args.squash_actions:
            action = np.tanh(action)
        if self.args.squash_actions or self.args.scale_actions:  # [S04] scaled actions
            action = self.low + (action + 1) / 2 * (self.high - self.low)
        if self.args.clip_actions:  # [M05] action clipping
            action = action.clip(self.low, self.high)
        return action

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """V of observations (n, O) -> (n,)."""
        return self.critic(obs).squeeze(-1)

    def evaluate_actions(self, obs: torch.Tensor, actions: torch.Tensor):
        """Log-probability, entropy and value, each (n,), of actions at observations (n, O)."""
        policy = self.get_policy(obs)
        logprob = policy.log_prob(actions).sum(-1)  # [M03] independent action components
        entropy = policy.entropy().sum(-1)
        if self.args.squash_actions:  # [S03] squashed actions
            logprob = logprob - self.squash_log_det(actions)
            sample = policy.mean + policy.stddev * torch.randn_like(policy.mean)
            entropy = entropy + self.squash_log_det(sample)  # estimated: it has no closed form
        return logprob, entropy, self.get_value(obs)

    def squash_log_det(self, action: torch.Tensor) -> torch.Tensor:
        """log |d env_action / d action| of a squashed policy, (n, A) -> (n,)."""
        log_slope = TanhTransform().log_abs_det_jacobian(action, None)
        return (self.half_range.log() + log_slope).sum(-1)


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
    mb = {name: tensor[mb_inds] for name, tensor in batch.items()}
    newlogprob, entropy, newvalue = agent.evaluate_actions(mb["obs"], mb["actions"])
    loss, stats = ppo_loss(newlogprob, entropy, newvalue, mb, clip_coef, args)
    grads = torch.autograd.grad(loss, list(agent.parameters()), materialize_grads=True)
    grad = nn.utils.parameters_to_vector(grads)
    norm = grad.norm()
    if args.max_grad_norm:  # [C11] global gradient clipping
        grad = grad * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
    return grad, stats | {"grad_norm": norm}


def train(args: Args) -> dict:
    """Train a new run, or continue that of --resume; returns the run's results."""
    args = plain_numbers(args)  # a sweep may have given NumPy's
    check_args(args)
    torch.set_num_threads(1)  # networks this small are slower with more
    torch.backends.cudnn.deterministic = args.torch_deterministic
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
    agent = Agent(obs_space, action_space, args).to(device)
    params = nn.utils.parameters_to_vector(agent.parameters()).detach()  # (P,): one vector for Adam
    nn.utils.vector_to_parameters(params, agent.parameters())  # the weights become views of it
    optimizer = torch.optim.Adam(
        [params],
        lr=args.learning_rate,
        eps=args.adam_eps,  # [C03] Adam's epsilon
        fused=True,  # one kernel: faster
    )
    update = loss_and_grad
    if args.compile:
        torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad is in the graph
        update = compiled(loss_and_grad, device)
    obs_rms = RunningMeanStd(np.zeros(obs_space.shape), np.ones(obs_space.shape))
    return_rms = RunningMeanStd(np.zeros(()), np.ones(()))  # of the discounted sum of past rewards
    if initial:
        load_weights(agent, initial)
        obs_rms, return_rms = load_rms(initial, "obs_rms"), load_rms(initial, "return_rms")
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng"])

    # A rollout, in NumPy
    T, N = args.num_steps, args.num_envs
    obs = np.zeros((T, N, *obs_space.shape), np.float32)  # normalized, unless --no-norm-obs
    next_obs = np.zeros_like(obs)  # what step t led to, before any reset
    actions = np.zeros((T, N, *action_space.shape), np.float32)  # as sampled, see env_action
    rewards = np.zeros((T, N), np.float32)  # normalized, unless --no-norm-reward
    terminations = np.zeros((T, N), np.float32)  # 1: the task ended at this step
    dones = np.zeros((T, N), np.float32)  # 1: the episode ended at this step, for any reason

    global_step = (start_iteration - 1) * args.batch_size
    episodic_return, episodic_length = np.zeros(N), np.zeros(N)
    discounted_return = np.zeros(N)
    raw_obs, _ = envs.reset(seed=first_seed)
    if not checkpoint:  # a resumed run has its statistics
        obs_rms.update(raw_obs)
    current_obs = normalize_obs(obs_rms, raw_obs, args)
    if args.staggered_resets:  # [S09] staggered resets
        limit = envs.get_attr("_max_episode_steps")[0]
        envs.set_attr("_elapsed_steps", [n * limit // N for n in range(N)])  # of the first episodes
    log = Log(args, run_dir, checkpoint)
    for iteration in range(start_iteration, args.num_iterations + 1):
        frac = 1 - (iteration - 1) / args.num_iterations
        if args.anneal_lr:  # [C04] learning-rate annealing
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate
        clip_coef = args.clip_coef * (frac if args.anneal_clip else 1)  # [X01] clip-range annealing
        clip_coef = torch.tensor(clip_coef, device=device)  # a new float would compile anew

        # -- rollout --
        act = numpy_act(agent, current_obs, T)  # agent.act, only faster
        for t in range(T):  # [C01] vectorized architecture
            obs[t] = current_obs
            actions[t] = act(obs[t])
            env_actions = agent.env_action(actions[t])
            raw_obs, reward, terminations[t], truncated, infos = envs.step(env_actions)
            dones[t] = np.logical_or(terminations[t], truncated)
            obs_rms.update(raw_obs)  # statistics first, then scaling, as in baselines
            current_obs = normalize_obs(obs_rms, raw_obs, args)
            next_obs[t] = current_obs
            discounted_return = args.gamma * discounted_return + reward
            return_rms.update(discounted_return)
            rewards[t] = normalize_reward(return_rms, reward, args)

            global_step += N
            log.step(N)
            episodic_return += reward
            episodic_length += 1
            for n in np.flatnonzero(dones[t]):  # current_obs[n] begins the next episode
                next_obs[t, n] = normalize_obs(obs_rms, infos["final_obs"][n], args)
                log.episode(global_step, episodic_return[n], episodic_length[n])
                episodic_return[n] = episodic_length[n] = discounted_return[n] = 0

        # -- advantages --
        b_obs = torch.from_numpy(obs).to(device).flatten(0, 1)  # (B, O)
        b_next_obs = torch.from_numpy(next_obs).to(device).flatten(0, 1)  # (B, O)
        b_actions = torch.from_numpy(actions).to(device).flatten(0, 1)
        with torch.no_grad():  # the weights are still the rollout's: one pass for all steps
            b_logprobs, _, b_values = agent.evaluate_actions(b_obs, b_actions)
            b_next_values = agent.get_value(b_next_obs)
        values = b_values.view(T, N).cpu().numpy()
        next_values = b_next_values.view(T, N).cpu().numpy()
        ends = terminations if args.bootstrap_truncation else dones  # [S01] (as published: dones)
        advantages = gae(rewards, values, next_values, ends, dones, args.gamma, args.gae_lambda)
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
                params.grad, mb_stats = update(agent, batch, mb_inds, clip_coef, args)
                optimizer.step()
                stats.append(mb_stats)
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
                "obs_rms": rms_state(obs_rms),
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
    at_least_0 = "seed ent_coef vf_coef max_grad_norm checkpoint_seconds eval_episodes"
    at_least_0 += " clip_obs clip_reward"
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
    found = args.evaluate or not args.cuda or torch.cuda.is_available()
    require(found, "--cuda finds no GPU (try --no-cuda)")


def check_runs(args: Args, checkpoint: dict | None, initial: dict | None) -> None:
    """Refuse to go on with a run, or to begin with its agent, if a flag that matters differs."""
    new = asdict(args)
    network_flags = "shared_network activation norm_obs clip_obs".split()
    network_flags += "clip_actions squash_actions scale_actions".split()
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


class PlainEnv(gym.Wrapper):
    """An environment that returns what the loop expects, whatever the one inside returns."""

    render_mode = "rgb_array"  # the one inside may draw and name no mode

    def __init__(self, env: gym.Env):
        super().__init__(env)
        shape = env.observation_space.shape
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, shape, np.float64)

    def reset(self, **kwargs):
        obs, _ = self.env.reset(**kwargs)
        return self.plain(obs, self.observation_space.shape), {}

    def step(self, action):
        action = action.astype(self.action_space.dtype)  # a copy: an environment may write into it
        obs, reward, terminated, truncated, _ = self.env.step(action)
        obs = self.plain(obs, self.observation_space.shape)
        return obs, self.plain(reward, ()).item(), bool(terminated), bool(truncated), {}

    def plain(self, x, shape: tuple) -> np.ndarray:
        """A copy in float64 of what is a number or an array of this shape, up to axes of size 1."""
        x = np.array(x, np.float64)
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


def make_env(args: Args, films: bool = False) -> gym.Env:
    """One environment, which can render if it is to be filmed."""
    mujoco.set_mju_user_warning(say_once)  # each text once, and none to MUJOCO_LOG.TXT
    render = {"render_mode": "rgb_array"} if films else {}
    if "" not in sys.path:
        sys.path.append("")  # a module:id may be in the current folder, too
    try:
        env = gym.make(args.env_id, disable_env_checker=True, **render)
    except (gym.error.Error, ModuleNotFoundError) as error:
        raise Refused(f"error: --env-id ({args.env_id}): {error}") from error
    except TypeError as error:
        require("argument 'render_mode'" not in str(error), f"--capture-video: {error}")
        raise  # the environment's own
    obs_space, action_space = env.observation_space, env.action_space
    is_vector = isinstance(obs_space, gym.spaces.Box) and len(obs_space.shape) == 1
    is_vector = is_vector and obs_space.shape[0] > 0
    other = "(gymnasium.wrappers.FlattenObservation makes one; images: ppo_pixels.py)"
    require(is_vector, f"{args.env_id} observes {obs_space}, not a vector {other}")
    hint = " (try ppo.py)" if isinstance(action_space, gym.spaces.Discrete) else ""
    is_vector = isinstance(action_space, gym.spaces.Box) and len(action_space.shape) == 1
    is_vector = is_vector and np.issubdtype(action_space.dtype, np.floating)
    require(is_vector, f"{args.env_id} acts in {action_space}, not in a vector of reals{hint}")
    with np.errstate(over="ignore"):
        bounded = np.isfinite(action_space.high - action_space.low).all()
    needed = args.squash_actions or args.scale_actions
    require(bounded or not needed, f"{args.env_id} has no bounds to squash or scale actions to")
    moves = (action_space.low < action_space.high).all() or not args.squash_actions
    require(moves, f"{args.env_id} has bounds without room between them to squash actions into")
    limited = env.spec.max_episode_steps or not args.staggered_resets
    require(limited, f"{args.env_id} has no time limit: --staggered-resets needs one")
    return PlainEnv(env)


def film(env: gym.Env, run_dir: Path, name: str) -> gym.Env:
    """The environment with videos of some episodes, in the directory of the run."""
    video_dir = run_dir / f"{name}_{int(time.time())}"
    print(f"videos: {video_dir}", flush=True)
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    if renderer and renderer.camera_id == -1:  # it has chosen no camera: follow the robot
        camera = (env.unwrapped.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
        renderer.camera_id = mujoco.mj_name2id(*camera)  # -1, the free one, if there is none
    return Video(env, str(video_dir), disable_logger=True)


def try_env(args: Args, checkpoint: dict | None) -> None:
    """Refuse an environment, or the weights for it, before anything is written."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # needs no screen
    env = make_env(args, args.capture_video)
    if checkpoint:
        load_weights(Agent(env.observation_space, env.action_space, args), checkpoint)
    env.reset()  # its observation is checked
    if args.capture_video:
        os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")  # or pygame would swallow SIGTERM
        torch.compiler.reset()  # loads Triton, which crashes if OpenGL was loaded before it
        try:
            image = env.render()
        except Exception as error:  # every renderer fails in its own way
            hint = "MuJoCo without a screen needs libegl1, or MUJOCO_GL=osmesa and libosmesa6"
            raise Refused(f"error: --capture-video cannot render: {error!r} ({hint})") from error
        require(np.ndim(image) > 2, "--capture-video cannot render: it returned no image")
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


@cache
def say_once(message: str) -> None:
    print(message.strip(), file=sys.stderr, flush=True)


def numpy_act(agent: Agent, obs: np.ndarray, num_steps: int):
    """agent.act with its current weights, as a function of NumPy arrays (N, O) -> (N, A).

    It draws the noise of `num_steps` steps at once. Where NumPy does not know a layer, or does not
    get the policy that agent.act has at `obs`, it is agent.act: slower, but right.
    """
    device = agent.actor_logstd.device

    def torch_act(obs: np.ndarray, greedy: bool = False) -> np.ndarray:
        return agent.act(torch.from_numpy(obs).to(device), greedy).cpu().numpy()

    known = {nn.Tanh: np.tanh, nn.ReLU: lambda x: np.maximum(x, 0)}
    layers = []
    for module in agent.actor_mean.children():
        if type(module) is nn.Linear and module.bias is not None:
            weight, bias = (p.detach().cpu().numpy() for p in module.parameters())
            layers.append(lambda x, weight=weight.T, bias=bias: x @ weight + bias)
        elif type(module) in known:
            layers.append(known[type(module)])
        else:
            say_once(f"numpy_act does not know {type(module).__name__}: agent.act acts, slower")
            return torch_act

    def means(obs: np.ndarray) -> np.ndarray:
        return reduce(lambda x, layer: layer(x), layers, obs)

    expected = torch_act(obs, greedy=True)
    probe = torch.from_numpy(np.concatenate([obs, obs + 1])).to(device)
    with torch.no_grad():
        policy = agent.get_policy(probe)
    std = policy.stddev.cpu().numpy()
    is_same = type(policy) is Normal and (std == std[0]).all()
    apart = np.abs(means(obs) - expected).max()
    if not is_same or apart > 1e-3 * np.abs(expected).max() + 1e-6:
        say_once("numpy_act does not do what agent.act does: agent.act acts, slower")
        return torch_act
    std = std[0]  # (A,), the same everywhere
    deviations = iter(std * torch.randn(num_steps, *expected.shape).numpy())  # (N, A) each
    return lambda obs: means(obs) + next(deviations)


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
    packages = ["torch", "gymnasium", "mujoco", "numpy"]
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
    """Undiscounted returns of `eval_episodes` episodes with the agent of the checkpoint."""
    checkpoint = load_checkpoint(run_dir)
    try_env(args, checkpoint)
    env = make_env(args, args.capture_video)
    if args.capture_video:
        env = film(env, run_dir, "eval_videos")
    agent = Agent(env.observation_space, env.action_space, args)
    load_weights(agent, checkpoint)
    obs_rms = load_rms(checkpoint, "obs_rms")
    first_seed = env_seed(args) + 900_000  # far from the seeds of training
    seed_everything(first_seed)
    returns = []
    for episode in tqdm(range(args.eval_episodes), unit="episode", leave=False):
        obs, _ = env.reset(seed=first_seed + episode)
        episodic_return, done = 0.0, False
        while not done:
            inputs = torch.from_numpy(normalize_obs(obs_rms, obs[None], args))
            action = agent.act(inputs, greedy=args.eval_deterministic)
            env_action = agent.env_action(action[0].numpy())
            obs, reward, terminated, truncated, _ = env.step(env_action)
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
