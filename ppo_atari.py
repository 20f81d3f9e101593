# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["torch>=2.11", "gymnasium>=1.4", "ale-py>=0.12", "envpool>=1.2.5", "numpy>=1.26",
#                 "opencv-python-headless>=4.11", "tensorboard>=2.18", "tqdm>=4.66", "tyro>=1.0",
#                 "moviepy>=2.1"]
# ///
"""PPO for Atari games: ppo.py with the nine Atari details, on EnvPool or on readable wrappers.

Run:    uv run ppo_atari.py --env-id Breakout-v5
Watch:  uvx tensorboard --logdir runs
Expect: on Breakout a return of 17 after 1M steps (13 to 22, three seeds), 449 after 10M (one seed,
        --bf16, 4 hours on two cores)
Read:   beside ppo.py, down to the line of "=" below `train`. [A01] to [A09] are the Atari details
        of "The 37 Implementation Details of PPO"; [S01] and [S02] are ours.
Shapes: T steps of N environments make a batch of B = T * N samples; a minibatch has M of them.
        An observation is C frames of 84 x 84 pixels, an action is one of A.
Resets: the step after the end of an episode only resets the game, and is never trained on [S02]
        (CleanRL's EnvPool script does). So values[t + 1] belongs to what step t led to: there is no
        next_obs. `act` gives values, too, since a second pass of a CNN after the rollout is slow.
"""

import ctypes
import difflib
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
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import ale_py
import cv2
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
    env_id: str = "Breakout-v5"  # the game, also as Breakout or BreakoutNoFrameskip-v4
    total_timesteps: int = 10_000_000  # environment steps, resets included, rounded down to batches
    learning_rate: float = 2.5e-4  # learning rate of Adam
    num_envs: int = 8  # environments stepped together [C01]
    num_steps: int = 128  # steps of each environment in a rollout
    anneal_lr: bool = True  # anneal the learning rate linearly to zero [C04]
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation [C05]
    num_minibatches: int = 4  # minibatches per epoch [C06]
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # normalize advantages in each minibatch [C07]
    clip_coef: float = 0.1  # clip range of the probability ratio [C08] and of the value [C09]
    clip_vloss: bool = True  # clip the value loss [C09]
    ent_coef: float = 0.01  # coefficient of the entropy bonus [C10]
    vf_coef: float = 0.5  # coefficient of the value loss [C10]
    max_grad_norm: float = 0.5  # largest gradient norm; 0 turns clipping off [C11]
    target_kl: float | None = None  # stop after an epoch with a mean approx_kl above this [X03]
    anneal_clip: bool = False  # anneal clip_coef linearly to zero [X01]
    adam_eps: float = 1e-5  # epsilon of Adam [C03]
    ortho_init: bool = True  # orthogonal initial weights, or torch's default [C02]
    shared_network: bool = True  # one network for policy and value instead of two [A08]
    noop_max: int = 30  # a game begins with 1 to noop_max no-op frames; 0: none [A01]
    frame_skip: int = 4  # frames for which an action is repeated [A02]
    episodic_life: bool = True  # a lost life ends the episode, but does not reset the game [A03]
    fire_reset: bool = True  # press FIRE after a reset in games that have it [A04]
    clip_reward: bool = True  # train on the sign of the reward [A06]
    frame_stack: int = 4  # last frames that an observation holds [A07]
    bootstrap_truncation: bool = True  # bootstrap from the last state at a time limit [S01]
    repeat_action_probability: float = 0.0  # of sticky actions; 0 also for names ending in v5
    full_action_space: bool = False  # all 18 actions instead of those that the game uses
    max_episode_steps: int = 27_000  # then a game is cut off: half an hour at --frame-skip 4

    # -- run --
    env_backend: Literal["envpool", "gymnasium"] = "envpool"  # fast, or readable and with videos
    env_threads: int = os.cpu_count() or 1  # threads of EnvPool, at most one for each game
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
class NoopReset(gym.Wrapper):
    """Begin a game with 1 to `noop_max` no-op frames."""

    def __init__(self, env: gym.Env, noop_max: int):
        super().__init__(env)
        self.noop_max = noop_max

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        for _ in range(self.unwrapped.np_random.integers(1, self.noop_max + 1)):  # [A01] no-ops
            obs, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                obs, info = self.env.reset()
        return obs, info


class MaxAndSkip(gym.Wrapper):
    """Repeat an action; observe the maximum of the last two frames, because sprites flicker."""

    def __init__(self, env: gym.Env, frame_skip: int):
        super().__init__(env)
        self.frame_skip = frame_skip

    def step(self, action):
        obs, total_reward = None, 0.0
        for _ in range(self.frame_skip):
            previous = obs
            obs, reward, terminated, truncated, info = self.env.step(action)
            total_reward += reward
            if terminated or truncated:
                break
        frame = obs if previous is None else np.maximum(previous, obs)  # [A02] frame skipping
        return frame, total_reward, terminated, truncated, info


class EpisodicLife(gym.Wrapper):
    """End the episode when a life is lost, but reset the game only when it is over."""

    def __init__(self, env: gym.Env, episodic_life: bool):
        super().__init__(env)
        self.episodic_life, self.lives, self.game_over = episodic_life, 0, True

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.game_over = terminated or truncated
        info |= {"terminated": terminated, "reward": reward}
        lost = 0 < info["lives"] < self.lives  # at 0 lives some games play on for a few frames
        self.lives = info["lives"]
        terminated = terminated or (self.episodic_life and lost)  # [A03] episodic life
        return obs, reward, terminated, truncated, info

    def reset(self, **kwargs):
        reward, over = 0.0, False
        new_game = self.game_over or kwargs.get("seed") is not None  # a seed asks for one
        if not new_game:  # the game goes on after the lost life, with a no-op
            obs, reward, terminated, truncated, info = self.env.step(0)
            over = terminated or truncated
        if new_game or over:
            obs, info = self.env.reset(**kwargs)
        self.lives, self.game_over = info["lives"], False
        return obs, info | {"terminated": over, "reward": reward}


class FireReset(gym.Wrapper):
    """Press FIRE, then the third action, after each reset: some games wait for one of them."""

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        total_reward, over = info["reward"], info["terminated"]
        for action in (1, 2):  # [A04] fire on reset
            obs, reward, terminated, truncated, info = self.env.step(action)
            total_reward += reward
            over = over or info["terminated"] or truncated
            if terminated or truncated:
                obs, info = self.env.reset()
                total_reward += info["reward"]
                over = over or info["terminated"]
        return obs, info | {"terminated": over, "reward": total_reward}


def warp_frame(frame: np.ndarray) -> np.ndarray:
    """210x160 RGB to 84x84 gray."""
    gray = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
    return cv2.resize(gray, (84, 84), interpolation=cv2.INTER_AREA)  # [A05] gray, then smaller


def wrap_game(env: gym.Env, args: Args, video_dir: Path | None = None) -> gym.Env:
    """A game in baselines' wrappers, in their order; filmed if there is a directory for videos."""
    if args.noop_max:
        env = NoopReset(env, args.noop_max)
    env = MaxAndSkip(env, args.frame_skip)
    if video_dir:
        env = film(env, args, video_dir)
    env = EpisodicLife(env, args.episodic_life)
    if args.fire_reset and env.unwrapped.get_action_meanings()[1] == "FIRE":
        env = FireReset(env)
    gray = gym.spaces.Box(0, 255, (84, 84), np.uint8)
    env = gym.wrappers.TransformObservation(env, warp_frame, gray)
    if args.clip_reward:
        env = gym.wrappers.TransformReward(env, np.sign)  # [A06] reward clipping
    stack = gym.wrappers.FrameStackObservation  # oldest frame first; black at the start
    return stack(env, args.frame_stack, padding_type="zero")  # [A07] frame stacking


def make_envpool(args: Args, seed: int) -> gym.vector.VectorEnv:
    """EnvPool's form of these wrappers, in C++ threads.

    After a lost life it plays up to 30 frames of doing nothing and FIRE, not one step of each, and
    their rewards are lost. docs/games.md says what else differs.
    """
    import envpool

    warnings.filterwarnings("ignore", "EnvPool seeds are fixed")
    names = {name.lower(): name for name in envpool.list_all_envs()}  # in its own capitals
    return envpool.make_gymnasium(
        names[f"{game_name(args.env_id)}-v5".lower()],
        num_envs=args.num_envs,
        num_threads=min(args.env_threads, args.num_envs),
        seed=seed % 2**31,
        noop_max=args.noop_max,  # see [A01]
        frame_skip=args.frame_skip,  # see [A02]
        episodic_life=args.episodic_life,  # see [A03]
        use_fire_reset=args.fire_reset,  # see [A04]
        gray_scale=True,  # see [A05]
        img_height=84,
        img_width=84,
        use_inter_area_resize=True,
        reward_clip=args.clip_reward,  # see [A06]
        stack_num=args.frame_stack,  # see [A07]
        max_episode_steps=args.max_episode_steps,
        full_action_space=args.full_action_space,
        repeat_action_probability=args.repeat_action_probability,
    )


# -- agent --
def layer_init(layer: nn.Module, std: float, args: Args) -> nn.Module:
    """Orthogonal weights of gain `std` and zero biases (baselines/a2c/utils.py)."""
    if args.ortho_init:  # [C02] orthogonal initialization
        nn.init.orthogonal_(layer.weight, std)
        nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value of stacks of frames: the Nature CNN (doi.org/10.1038/nature14236)."""

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.spaces.Discrete, args: Args):
        super().__init__()

        def nature_cnn() -> nn.Sequential:
            conv1 = layer_init(nn.Conv2d(obs_space.shape[0], 32, 8, stride=4), 2**0.5, args)
            conv2 = layer_init(nn.Conv2d(32, 64, 4, stride=2), 2**0.5, args)
            conv3 = layer_init(nn.Conv2d(64, 64, 3, stride=1), 2**0.5, args)
            linear = layer_init(nn.Linear(64 * 7 * 7, 512), 2**0.5, args)
            convs = [conv1, nn.ReLU(), conv2, nn.ReLU(), conv3, nn.ReLU()]
            return nn.Sequential(*convs, nn.Flatten(), linear, nn.ReLU())

        self.network = nature_cnn()  # [A08] one network, shared by policy and value, or two
        self.value_network = None if args.shared_network else nature_cnn()
        self.actor = layer_init(nn.Linear(512, int(action_space.n)), 0.01, args)
        self.critic = layer_init(nn.Linear(512, 1), 1.0, args)
        self.dtype = torch.bfloat16 if args.bf16 else torch.float32

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (n, A) and values (n,) of observations (n, C, 84, 84) uint8."""
        x = obs.to(self.dtype, memory_format=torch.channels_last) / 255  # [A09] scale to [0, 1]
        with torch.autocast(obs.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            hidden = self.network(x)
            value_hidden = self.value_network(x) if self.value_network else hidden
        return self.actor(hidden.float()), self.critic(value_hidden.float()).squeeze(-1)

    @torch.no_grad()
    def act(self, obs: torch.Tensor, greedy: bool = False):
        """Actions (sampled or the modes), log-probabilities and values, each (n,), on the CPU."""
        logits, value = (x.cpu() for x in self(obs))
        # Gumbel-max samples like Categorical(logits=logits), five times as fast on small batches
        noise = torch.empty(logits.shape).exponential_().log_()  # drawn on the CPU even for a GPU
        action = (logits if greedy else logits - noise).argmax(-1, keepdim=True)
        return action[:, 0], logits.log_softmax(-1).gather(-1, action)[:, 0], value

    def evaluate_actions(self, obs: torch.Tensor, actions: torch.Tensor):
        """Log-probability, entropy and value, each (n,), of actions at observations."""
        logits, value = self(obs)
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
    if initial:
        load_weights(agent, initial)
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng"])
    if args.compile:
        agent.forward = compiled(agent.forward, device)

    # A rollout, in NumPy; pinned memory is copied faster to a GPU
    T, N = args.num_steps, args.num_envs
    obs = torch.zeros(T + 1, N, *obs_space.shape, dtype=torch.uint8, pin_memory=args.cuda).numpy()
    actions = np.zeros((T, N), np.int32)  # EnvPool accepts only int32
    logprobs = np.zeros((T, N), np.float32)
    values = np.zeros((T + 1, N), np.float32)
    rewards = np.zeros((T, N), np.float32)
    terminations = np.zeros((T, N), np.float32)  # 1: a life or the game was lost at this step
    dones = np.zeros((T, N), np.float32)  # 1: the episode ended at this step, for any reason
    valid = np.ones((T + 1, N), bool)  # False: the step only resets its environment

    global_step = (start_iteration - 1) * args.batch_size
    episodic_return, episodic_length = np.zeros(N), np.zeros(N)
    obs[T], infos = envs.reset(seed=first_seed)
    episodic_return += infos["reward"]  # FIRE may score (not with EnvPool)
    log = Log(args, run_dir, checkpoint)
    for iteration in range(start_iteration, args.num_iterations + 1):
        frac = 1 - (iteration - 1) / args.num_iterations
        if args.anneal_lr:  # [C04] learning-rate annealing
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate
        clip_coef = args.clip_coef * (frac if args.anneal_clip else 1)  # [X01] clip-range annealing

        # -- rollout --
        obs[0], valid[0] = obs[T], valid[T]  # the last rollout ended there
        for t in range(T):  # [C01] vectorized architecture
            inputs = torch.from_numpy(obs[t]).to(device, non_blocking=True)
            actions[t], logprobs[t], values[t] = agent.act(inputs)
            obs[t + 1], rewards[t], terminations[t], truncated, infos = envs.step(actions[t])
            dones[t] = np.logical_or(terminations[t], truncated)
            valid[t + 1] = dones[t] == 0  # [S02] the step after an end only resets

            global_step += N
            log.step(N)
            episodic_return += infos["reward"]  # not clipped
            episodic_length += valid[t]
            game_over = np.logical_or(infos["terminated"], truncated)  # not only a life
            for n in np.flatnonzero(game_over):
                log.episode(global_step, episodic_return[n], episodic_length[n])
                episodic_return[n] = episodic_length[n] = 0

        # -- advantages --
        b_obs = torch.from_numpy(obs).to(device).flatten(0, 1)  # (B + N, C, 84, 84), with obs[T]
        b_obs = b_obs.contiguous(memory_format=torch.channels_last)  # once, not in each minibatch
        b_actions = torch.from_numpy(actions).to(device).flatten(0, 1)
        b_logprobs = torch.from_numpy(logprobs).to(device).flatten(0, 1)
        with torch.no_grad():
            values[T] = agent(b_obs[-N:])[1].cpu()
        b_values = torch.from_numpy(values[:T]).to(device).flatten(0, 1)
        ends = terminations if args.bootstrap_truncation else dones  # [S01] (as published: dones)
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
        valid_inds = torch.from_numpy(np.flatnonzero(valid[:T]))
        stats = []  # of each minibatch
        for epoch in range(args.update_epochs):
            # Minibatches keep their size: some samples come twice, in place of resets [S02]. At
            # least one row in three is not a reset
            order = torch.randperm(len(valid_inds)).repeat(3)[: args.batch_size]
            b_inds = valid_inds[order].to(device)
            for mb_inds in b_inds.chunk(args.num_minibatches):  # [C06] each sample at least once
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
        explained = 1 - b_advantages[valid_inds].var() / batch["returns"][valid_inds].var()
        log.iteration(global_step, stats, explained, optimizer.param_groups[0]["lr"])
        if log.checkpoint_is_due(iteration):
            state = {
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
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
    above_0 += " frame_skip frame_stack max_episode_steps env_threads"
    at_least_0 = "seed ent_coef vf_coef max_grad_norm checkpoint_seconds eval_episodes noop_max"
    for name in f"{above_0} {at_least_0}".split():
        value = getattr(args, name)
        flag = f"--{name.replace('_', '-')}"
        require(0 <= value < math.inf, f"{flag} ({value}) must not be below 0, nor infinite")
        require(value or name not in above_0.split(), f"{flag} must be above 0")
    for name in ("gamma", "gae_lambda", "repeat_action_probability"):
        value = getattr(args, name)
        require(0 <= value <= 1, f"--{name.replace('_', '-')} ({value}) must be between 0 and 1")
    batch = f"--num-envs times --num-steps ({args.num_envs} * {args.num_steps})"
    even = args.batch_size % args.num_minibatches == 0
    require(even, f"{batch} is not divisible by --num-minibatches ({args.num_minibatches})")
    alone = args.norm_adv and args.batch_size == args.num_minibatches
    require(not alone, f"{batch}: minibatches of one sample need --no-norm-adv")
    require(args.num_iterations, f"--total-timesteps ({args.total_timesteps}) is less than {batch}")
    require(not (args.resume and args.evaluate), "--resume trains, --evaluate plays: give one")
    require(args.eval_episodes or not args.evaluate, "--evaluate needs --eval-episodes above 0")
    require(args.num_steps > 1, "--num-steps (1) must be 2 or more: one row may be a reset")
    frames = args.max_episode_steps * args.frame_skip
    require(frames < 2**31, f"--max-episode-steps times --frame-skip ({frames}) is too long a game")
    for name in ("noop_max", "env_threads", "frame_stack"):
        value = getattr(args, name)
        require(value <= 10**6, f"--{name.replace('_', '-')} ({value}) must be at most 1,000,000")
    if args.env_backend == "envpool" and not (args.evaluate and args.capture_video):
        readable = "--env-backend gymnasium"
        require(find_spec("envpool"), f"EnvPool is not installed here ({readable} does without)")
        require(args.noop_max, f"--noop-max (0) needs {readable}: EnvPool takes at least 1")
        require(not args.capture_video, f"--capture-video needs {readable}")
    game_name(args.env_id)
    found = args.evaluate or not args.track or getattr(find_spec("wandb"), "origin", None)
    require(found, "--track needs wandb (uv run --with wandb ...)")  # ./wandb has no origin
    found = not args.capture_video or find_spec("moviepy")
    require(found, "--capture-video needs moviepy (pip install moviepy)")
    found = args.evaluate or not args.cuda or torch.cuda.is_available()
    require(found, "--cuda finds no GPU (try --no-cuda)")


def check_runs(args: Args, checkpoint: dict | None, initial: dict | None) -> None:
    """Refuse to go on with a run, or to begin with its agent, if a flag that matters differs."""
    new = asdict(args)
    network_flags = ["shared_network", "frame_stack"]
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
    free += "capture_video checkpoint_seconds eval_episodes eval_deterministic env_threads".split()
    free += ["env_backend"] if args.evaluate else []
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


def game_name(env_id: str) -> str:
    """`Breakout` for any of Breakout, Breakout-v5, ALE/Breakout-v5 and BreakoutNoFrameskip-v4."""
    gym.register_envs(ale_py)
    games = sorted({spec.name for spec in gym.registry.values() if spec.namespace == "ALE"})
    name = re.sub(r"(NoFrameskip|Deterministic)?(-v\d+)?$", "", env_id.removeprefix("ALE/"))
    close = ", ".join(difflib.get_close_matches(name, games, cutoff=0.5)) or "the games of ALE"
    require(name in games, f"--env-id ({env_id}) is no Atari game; look at {close}")
    return name


def make_env(args: Args, video_dir: Path | None = None) -> gym.Env:
    """One game of ALE in the wrappers above, filmed if there is a directory for videos."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no greeting
    env = gym.make(
        f"ALE/{game_name(args.env_id)}-v5",
        frameskip=1,
        repeat_action_probability=args.repeat_action_probability,
        full_action_space=args.full_action_space,
        max_num_frames_per_episode=args.max_episode_steps * args.frame_skip,
        render_mode="rgb_array" if video_dir else None,
        disable_env_checker=True,
    )
    return wrap_game(env, args, video_dir)


def film(env: gym.Env, args: Args, video_dir: Path) -> gym.Env:
    """The game with videos of whole games: some of training, every one of an evaluation."""
    print(f"videos: {video_dir}", flush=True)
    env.metadata = env.metadata | {"render_fps": 60 / args.frame_skip}
    trigger = (lambda game: True) if video_dir.name.startswith("eval") else None
    return gym.wrappers.RecordVideo(env, str(video_dir), trigger, disable_logger=True)


def try_env(args: Args, checkpoint: dict | None) -> None:
    """Refuse a game that cannot be made, or weights for another, before anything is written."""
    env = make_env(args)
    if checkpoint:
        load_weights(Agent(env.observation_space, env.action_space, args), checkpoint)
    env.close()


def make_envs(args: Args, run_dir: Path, seed: int, videos: str = "videos") -> gym.vector.VectorEnv:
    """N games; the step after the end of an episode ignores its action and resets (NEXT_STEP).

    infos: "reward" is the reward before [A06] (of a reset: what no-op and FIRE scored, 0 with
    EnvPool), "terminated" says that the whole game is over.
    """
    if args.env_backend == "envpool":
        return make_envpool(args, seed)
    video_dir = run_dir / f"{videos}_{int(time.time())}" if args.capture_video else None
    makers = [lambda: make_env(args, video_dir)]
    makers += [lambda: make_env(args)] * (args.num_envs - 1)
    next_step = gym.vector.AutoresetMode.NEXT_STEP
    return gym.vector.SyncVectorEnv(makers, copy=False, autoreset_mode=next_step)


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
    packages = ["torch", "gymnasium", "numpy", "ale-py"]
    packages += ["envpool"] if find_spec("envpool") else []
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


def evaluate(args: Args, run_dir: Path) -> list[float]:
    """Returns, not clipped, of whole games: played side by side, or in turns if they are filmed."""
    checkpoint = load_checkpoint(run_dir)
    try_env(args, checkpoint)
    N = 1 if args.capture_video else args.eval_episodes
    backend = "gymnasium" if args.capture_video else args.env_backend
    args = replace(args, num_envs=N, env_backend=backend)
    if args.cuda and not torch.cuda.is_available():
        print("evaluation: the run was on a GPU, this machine has none and plays on its CPU")
        args = replace(args, cuda=False)
    device = torch.device("cuda" if args.cuda else "cpu")
    first_seed = env_seed(args) + 900_000  # far from the seeds of training
    seed_everything(first_seed)
    envs = make_envs(args, run_dir, first_seed, "eval_videos")
    agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
    load_weights(agent, checkpoint)
    returns = []
    with tqdm(total=args.eval_episodes, unit="game", leave=False) as bar:
        while len(returns) < args.eval_episodes:
            obs, infos = envs.reset(seed=first_seed + len(returns))
            game_returns = np.array(infos["reward"], np.float64)
            playing = np.ones(N, bool)  # still in this game
            while playing.any():
                inputs = torch.from_numpy(obs).to(device)
                action, _, _ = agent.act(inputs, greedy=args.eval_deterministic)
                obs, _, _, truncated, infos = envs.step(action.numpy().astype(np.int32))
                game_returns += infos["reward"] * playing
                over = playing & np.logical_or(infos["terminated"], truncated)
                playing &= ~over
                if over.any():
                    bar.update(int(over.sum()))
            returns += game_returns.tolist()
    envs.close()
    mean, std = np.mean(returns), np.std(returns)
    print(f"evaluation: {mean:.1f} +- {std:.1f} over {len(returns)} games")
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
