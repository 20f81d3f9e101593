# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["torch>=2.11", "gymnasium>=1.2.1", "ale-py>=0.12", "envpool>=1.2", "numpy>=1.26",
#                 "opencv-python-headless>=4.9", "tensorboard>=2.16", "tqdm>=4.66", "tyro>=1.0",
#                 "moviepy>=2.1"]
# ///
"""PPO for Atari games: ppo.py and the nine Atari details, on EnvPool or on wrappers to read.

Run:     uv run ppo_atari.py --env-id Breakout-v5
Look:    uvx tensorboard --logdir runs
Expect:  with --bf16 a return of 449 after 10M steps and 4 hours on two cores; in float32 22.6 after
         --total-timesteps 1_000_000 and an hour (one seed each)
Read:    to the end of `train`, beside ppo.py; the rest is plumbing. [A01] to [A09] are the Atari
         details of "The 37 Implementation Details of PPO", [S01] and [S02] are ours. What has to do
         with `rank`, `local_args`, `all_gather` or `compiled` can be skipped at first.
Letters: T steps of N environments make a batch of B = T * N samples, a minibatch is M of them;
         an observation is C frames of 84 x 84 pixels, an action is one of A.
"""

import copy
import ctypes
import difflib
import json
import math
import os
import platform
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
import torch.distributed as dist
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
    torch_deterministic: bool = True  # deterministic kernels of cuDNN; off: the fastest ones
    cuda: bool = torch.cuda.is_available()  # train on a GPU
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "ppo"  # project in Weights & Biases
    wandb_entity: str | None = None  # team in Weights & Biases
    capture_video: bool = False  # record some episodes of environment 0 and of the evaluation

    # -- algorithm --
    env_id: str = "Breakout-v5"  # the game, also as Breakout or BreakoutNoFrameskip-v4
    total_timesteps: int = 10_000_000  # steps and reset rows in all, rounded down to batches
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
    shared_network: bool = True  # one network for policy and value instead of two [A08]
    noop_max: int = 30  # a game starts with 1 to noop_max frames of doing nothing; 0: none [A01]
    frame_skip: int = 4  # frames for which an action is repeated [A02]
    episodic_life: bool = True  # a lost life ends the episode, but does not reset the game [A03]
    fire_reset: bool = True  # press FIRE after a reset in games that have it [A04]
    clip_reward: bool = True  # train on the sign of the reward [A06]
    frame_stack: int = 4  # last frames that an observation holds [A07]
    bootstrap_truncation: bool = True  # bootstrap where a time limit ends an episode [S01]

    # -- environments and speed --
    repeat_action_probability: float = 0.0  # of repeating the last action (sticky actions)
    full_action_space: bool = False  # all 18 actions instead of those that the game uses
    max_episode_steps: int = 27_000  # a game is cut off after this: half an hour at --frame-skip 4
    env_backend: Literal["envpool", "gymnasium"] = "envpool"  # fast; gymnasium: readable, can film
    env_threads: int = os.cpu_count() or 1  # threads of EnvPool
    compile: bool = torch.cuda.is_available()  # compile loss and acting; little use on a CPU
    bf16: bool = False  # the network below the heads in bfloat16; the rest stays float32

    # -- run --
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


# -- environment --
class NoopReset(gym.Wrapper):
    """Start a game with 1 to `noop_max` frames of doing nothing."""

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
    """End the episode when a life is lost, but reset the game only when it is over.

    As in EnvPool, info["terminated"] says that the game is over and info["reward"] is the reward
    before it is clipped; after a reset they are of the steps that the reset played.
    """

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
        new_game = self.game_over or kwargs.get("seed") is not None
        if not new_game:  # a step of doing nothing goes on from the lost life
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
        env.metadata = env.metadata | {"render_fps": 60 / args.frame_skip}
        env = gym.wrappers.RecordVideo(env, str(video_dir), disable_logger=True)
    env = EpisodicLife(env, args.episodic_life)
    if args.fire_reset and env.unwrapped.get_action_meanings()[1] == "FIRE":
        env = FireReset(env)
    gray = gym.spaces.Box(0, 255, (84, 84), np.uint8)
    env = gym.wrappers.TransformObservation(env, warp_frame, gray)
    if args.clip_reward:
        env = gym.wrappers.TransformReward(env, np.sign)  # [A06] reward clipping
    n = args.frame_stack  # the last frames, oldest first; before the first one black
    return gym.wrappers.FrameStackObservation(env, n, padding_type="zero")  # [A07] frame stacking


# -- agent --
def layer_init(layer: nn.Module, std: float, args: Args) -> nn.Module:
    """Orthogonal weights of gain `std`, zero bias (baselines/a2c/utils.py); or torch's default."""
    if args.ortho_init:  # [C02] orthogonal initialization of weights, zero biases
        nn.init.orthogonal_(layer.weight, std)
        nn.init.zeros_(layer.bias)
    return layer


class FlattenChannelsLast(nn.Module):
    """(n, C, H, W) to (n, H * W * C), baselines' order: no copy if the channels are last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1).flatten(1)


class Agent(nn.Module):
    """Policy and value function of stacks of frames, (n, C, 84, 84) uint8: the Nature CNN."""

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.spaces.Discrete, args: Args):
        super().__init__()

        def nature_cnn() -> nn.Sequential:
            conv1 = layer_init(nn.Conv2d(obs_space.shape[0], 32, 8, stride=4), 2**0.5, args)
            conv2 = layer_init(nn.Conv2d(32, 64, 4, stride=2), 2**0.5, args)
            conv3 = layer_init(nn.Conv2d(64, 64, 3, stride=1), 2**0.5, args)
            linear = layer_init(nn.Linear(64 * 7 * 7, 512), 2**0.5, args)
            convs = [conv1, nn.ReLU(), conv2, nn.ReLU(), conv3, nn.ReLU()]
            return nn.Sequential(*convs, FlattenChannelsLast(), linear, nn.ReLU())

        self.network = nature_cnn()  # [A08] one network, shared by policy and value, or two
        self.value_network = None if args.shared_network else nature_cnn()
        self.actor = layer_init(nn.Linear(512, int(action_space.n)), 0.01, args)
        self.critic = layer_init(nn.Linear(512, 1), 1.0, args)
        self.dtype = torch.bfloat16 if args.bf16 else torch.float32  # both hold 0 to 255 exactly

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (n, A) and values (n,) of observations (n, C, 84, 84) uint8."""
        x = obs.to(self.dtype, memory_format=torch.channels_last) / 255  # [A09] scaling to 0 to 1
        with torch.autocast(obs.device.type, self.dtype, enabled=self.dtype == torch.bfloat16):
            hidden = self.network(x)
            value_hidden = self.value_network(x) if self.value_network else hidden
        return self.actor(hidden.float()), self.critic(value_hidden.float()).squeeze(-1)

    def draw_noise(self, *shape: int) -> torch.Tensor:
        """Gumbel noise (*shape, A), -log of Exp(1), for `act`; drawn once a rollout for speed."""
        return -torch.empty(*shape, self.actor.out_features).exponential_().log()

    @torch.no_grad()
    def act(self, obs: torch.Tensor, noise: torch.Tensor):
        """Gumbel-max samples (modes if noise is 0), log-probabilities and values, each (n,)."""
        logits, value = self(obs)
        action = (logits + noise).argmax(-1)
        logprob = logits.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)
        return action, logprob, value

    def evaluate_actions(self, obs: torch.Tensor, actions: torch.Tensor):
        """Log-probability, entropy and value, each (n,), of actions (n,) at observations."""
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


def minibatch_loss(agent: Agent, mb: dict, clip_coef, args: Args):
    """The scalar loss and diagnostics of a minibatch; --compile makes it one graph."""
    newlogprob, entropy, newvalue = agent.evaluate_actions(mb["obs"], mb["actions"])
    return ppo_loss(newlogprob, entropy, newvalue, mb, clip_coef, args)


def average_gradients(agent: Agent, stats: dict) -> None:
    """Replace gradient and diagnostics by their means over all processes, with one all-reduce."""
    if dist.is_initialized():
        tensors = [*stats.values(), *(p.grad for p in agent.parameters() if p.grad is not None)]
        flat = torch.cat([tensor.flatten() for tensor in tensors]) / dist.get_world_size()
        dist.all_reduce(flat)
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(mean.view_as(tensor))


def train(args: Args) -> dict:
    """Train to the last step, from the checkpoint of --resume if given; returns the result."""
    check_args(args)
    keep_freed_memory()
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.benchmark = not args.torch_deterministic  # keep the fastest kernels
    torch.compiler.reset()  # forget the graphs of an earlier run, before processes are joined
    rank, local_args = join_processes(args)
    torch.manual_seed(args.seed + 1_000_003 * rank)  # of weights, actions and minibatches
    device = torch.device("cuda" if args.cuda else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else None
    env_name = args.env_id.replace("/", "-").replace(":", "-")  # in the name of a directory
    run_name = f"{env_name}__{args.exp_name}__{args.seed}__{all_gather(int(time.time()))[0]}"
    run_dir = Path(args.resume or f"runs/{run_name}")
    complete = checkpoint and checkpoint["iteration"] >= args.num_iterations
    require(not complete, f"{run_dir} is done: --evaluate plays it")

    resumed_at = checkpoint["iteration"] if checkpoint else 0  # new seeds: EnvPool repeats no game
    env_seed = args.seed + rank * local_args.num_envs + resumed_at * args.num_envs
    envs = make_envs(local_args, run_dir / f"videos_{int(time.time())}", env_seed)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    agent = Agent(obs_space, action_space, args)
    weights = checkpoint or all_gather({"agent": agent.state_dict()})[0]  # those of rank 0
    load_weights(agent, weights)
    agent.to(device, memory_format=torch.channels_last)
    lr, eps = args.learning_rate, args.adam_eps  # [C03] Adam's epsilon
    optimizer = torch.optim.Adam(agent.parameters(), lr=lr, eps=eps, fused=True)
    max_norm = args.max_grad_norm or math.inf
    rollout_agent = copy.deepcopy(agent)  # acts, with weights that --bf16 casts once a rollout
    nn.ModuleList([rollout_agent.network, rollout_agent.value_network]).to(agent.dtype)

    # A rollout
    T, N = args.num_steps, local_args.num_envs
    obs = torch.zeros((T + 1, N, 84, 84, args.frame_stack), dtype=torch.uint8, device=device)
    obs = obs.permute(0, 1, 4, 2, 3)  # (T + 1, N, C, 84, 84), in memory the channels stay last
    actions = torch.zeros((T, N), dtype=torch.int64, device=device)
    logprobs = torch.zeros((T, N), device=device)
    values = torch.zeros((T + 1, N), device=device)
    rewards = np.zeros((T, N), np.float32)
    terminations = np.zeros((T, N), np.float32)  # 1: this step ended the task, or cost a life
    dones = np.zeros((T, N), np.float32)  # 1: this step ended the episode, by a time limit too
    valid = np.ones((T, N), bool)  # False: a reset row, which is no step, see [S02]

    # State carried between iterations and saved in checkpoints
    start_iteration = checkpoint["iteration"] + 1 if checkpoint else 1
    global_step = 0
    seconds = 0.0  # of training before this process
    recent_returns = deque(maxlen=100)
    next_valid = np.ones(N, bool)
    next_obs, infos = envs.reset(seed=env_seed)
    episodic_return = np.array(infos["reward"], np.float64)  # of the whole game, not clipped
    episodic_length = np.zeros(N)
    if checkpoint:
        process = checkpoint["processes"][rank]
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(process["rng"])
        global_step = checkpoint["global_step"]
        seconds = checkpoint["seconds"]
        recent_returns.extend(checkpoint["recent_returns"])
        if restore_envs(envs, process["envs"]):
            carried = (x.numpy() for x in process["carried"])
            next_obs, next_valid, episodic_return, episodic_length = carried

    writer, episodes, bar = [NullLogger()] * 3 if rank else open_logs(args, run_dir, checkpoint)
    start_time = all_gather(time.time())[0] - seconds  # the clock of the first process
    last_checkpoint = 0.0  # the first iteration writes one, so a full disk fails at once
    for iteration in range(start_iteration, args.num_iterations + 1):
        frac = 1 - (iteration - 1) / args.num_iterations
        if args.anneal_lr:  # [C04] learning-rate annealing
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate
        clip_coef = args.clip_coef * (frac if args.anneal_clip else 1)  # [X01] clip-range annealing
        clip_coef = torch.tensor(clip_coef, device=device)  # each new float would compile anew

        # -- rollout --
        rollout_start = time.time()
        finished = []  # (t, return, length, time) of episodes
        noise = agent.draw_noise(T, N).to(device)
        rollout_agent.load_state_dict(agent.state_dict())  # copies the weights, in place
        if iteration == start_iteration:  # compile, or fall back, with arrays of the run's shapes
            example = (rollout_agent, obs[0], noise[0])
            act = compiled(Agent.act, device, example) if args.compile else Agent.act
        for t in range(T):  # [C01] vectorized architecture: N environments, T steps of each
            obs[t] = torch.from_numpy(next_obs)
            valid[t] = next_valid
            actions[t], logprobs[t], values[t] = act(rollout_agent, obs[t], noise[t])
            env_action = actions[t].cpu().numpy().astype(np.int32)  # CPU-GPU sync
            next_obs, reward, terminated, truncated, infos = envs.step(env_action)
            terminations[t] = terminated
            dones[t] = np.logical_or(terminated, truncated)
            rewards[t] = reward
            next_valid = dones[t] == 0  # [S02] the step after an end only resets: no sample

            episodic_return += infos["reward"]
            episodic_length += valid[t]
            for n in np.flatnonzero(np.logical_or(infos["terminated"], truncated)):  # whole games
                finished.append((t, episodic_return[n], episodic_length[n], time.time()))
                episodic_return[n] = episodic_length[n] = 0
        obs[T] = torch.from_numpy(next_obs)

        # -- advantages --
        update_start = time.time()
        with torch.no_grad():
            values[T] = agent(obs[T])[1]
        V = values.cpu().numpy()  # (T + 1, N); V[t + 1] is of what step t led to, before any reset
        ends = terminations if args.bootstrap_truncation else dones  # [S01] or as published: dones
        advantages = gae(rewards, V[:T], V[1:], ends, dones, args.gamma, args.gae_lambda)  # (T, N)

        # -- update --
        b_advantages = torch.from_numpy(advantages).to(device).flatten()
        batch = {"obs": obs[:T], "actions": actions, "logprobs": logprobs, "values": values[:T]}
        batch = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
        batch |= {"advantages": b_advantages, "returns": b_advantages + batch["values"]}
        valid_inds = torch.from_numpy(np.flatnonzero(valid))  # real steps
        if iteration == start_iteration:  # compile, or fall back, with arrays of the run's shapes
            first = torch.arange(local_args.batch_size // args.num_minibatches, device=device)
            example = (agent, {name: b[first] for name, b in batch.items()}, clip_coef, args)
            loss_fn = compiled(minibatch_loss, device, example) if args.compile else minibatch_loss
        metrics = []  # a dict of scalar tensors for each minibatch
        for epoch in range(args.update_epochs):
            # Repeated steps take the place of reset rows, so that minibatches keep their size
            order = torch.randperm(len(valid_inds)).repeat(3)  # at least a third of rows are real
            b_inds = valid_inds[order[: local_args.batch_size]].to(device)  # (B,)
            for mb_inds in b_inds.chunk(args.num_minibatches):  # [C06] all real steps each epoch
                mb = {name: b[mb_inds] for name, b in batch.items()}
                loss, stats = loss_fn(agent, mb, clip_coef, args)
                optimizer.zero_grad()
                loss.backward()
                average_gradients(agent, stats)  # [X02] parallel gradients
                norm = nn.utils.clip_grad_norm_(agent.parameters(), max_norm)  # [C11] clipping
                optimizer.step()
                stats = {name: stat.clone() for name, stat in stats.items()}  # CUDA graphs reuse it
                metrics.append(stats | {"grad_norm": norm})
            if args.target_kl is not None:  # [X03] early stop
                epoch_kl = [stats["approx_kl"] for stats in metrics[-args.num_minibatches :]]
                if torch.stack(epoch_kl).mean() > args.target_kl:
                    break

        # -- log --
        real_steps = sum(all_gather(valid.sum(axis=1)))  # (T,), of all processes in each row
        step_after = global_step + real_steps.cumsum()
        finished = sum(all_gather(finished), [])  # of all processes
        for t, score, length, at in sorted(finished, key=lambda episode: episode[0]):
            recent_returns.append(float(score))
            writer.add_scalar("charts/episodic_return", score, step_after[t])
            writer.add_scalar("charts/episodic_length", length, step_after[t])
            print(f"{step_after[t]},{score:.9g},{length:.0f},{at - start_time:.2f}", file=episodes)
        global_step = int(step_after[-1])
        by_name = {name: torch.stack([stats[name] for stats in metrics]) for name in metrics[0]}
        scalars = {f"losses/{name}": stat.mean().item() for name, stat in by_name.items()}
        finite = all(map(math.isfinite, scalars.values()))
        require(finite, f"losses of iteration {iteration} are not finite: {scalars}")
        scalars["losses/approx_kl_max"] = by_name["approx_kl"].max().item()
        residuals = torch.cat(all_gather(b_advantages[valid_inds].cpu()))  # returns - values
        returns = torch.cat(all_gather(batch["returns"][valid_inds].cpu()))
        scalars["losses/explained_variance"] = (1 - residuals.var() / returns.var()).item()
        scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        now = all_gather(time.time())[0]
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
            carried = (next_obs, next_valid, episodic_return, episodic_length)
            process = {"rng": torch.get_rng_state(), "envs": env_states(envs)}
            process["carried"] = [torch.tensor(array) for array in carried]
            state = {
                "args": asdict(args),
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
                "processes": all_gather(process),
                "iteration": iteration,
                "global_step": global_step,
                "seconds": now - start_time,
                "recent_returns": list(recent_returns),
                "episodes_size": episodes.tell(),
            }
            if rank == 0:
                save_checkpoint(run_dir, state)

    for closable in (bar, envs, episodes):
        closable.close()
    result = {"run_dir": str(run_dir), "global_step": global_step, "return": mean_return}
    if args.eval_episodes and rank == 0:
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
    require(not (args.evaluate and dist.is_torchelastic_launched()), "--evaluate refuses torchrun")
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
    free += "compile env_threads checkpoint_seconds eval_episodes eval_deterministic".split()
    if args.evaluate:
        free.append("env_backend")
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
    may_be_0 += ["checkpoint_seconds", "eval_episodes", "noop_max", "repeat_action_probability"]
    for name, value in asdict(args).items():
        flag = f"--{name.replace('_', '-')} ({value})"
        kind = type(getattr(Args, name))  # of the default; None: a number or a name
        types = {float: (int, float), type(None): (int, float, str, kind)}.get(kind, (kind,))
        require(type(value) in types, f"{flag} cannot be a {type(value).__name__}")
        if type(value) in (int, float):
            highest = {"gamma": 1, "gae_lambda": 1, "repeat_action_probability": 1, "seed": 2**30}
            highest |= {"frame_skip": 100, "max_episode_steps": 2 * 10**7}  # product: an int of C
            highest |= dict.fromkeys(["noop_max", "env_threads", "frame_stack"], 10**6)
            high = highest.get(name, 1e38)
            above = "at least" if name in may_be_0 else "greater than"
            fits = 0 <= value <= high and (value or name in may_be_0)
            require(fits, f"{flag} must be {above} 0 and at most {high:g}")
    batch = f"num_envs * num_steps ({args.num_envs} * {args.num_steps} = {args.batch_size})"
    even = args.batch_size % args.num_minibatches == 0
    require(even, f"{batch} must be divisible by --num-minibatches ({args.num_minibatches})")
    alone = args.norm_adv and args.batch_size == args.num_minibatches
    require(not alone, f"{batch}: minibatches of one sample need --no-norm-adv")
    require(args.num_steps > 1, "--num-steps (1) must be 2 or more: one row may be a reset")
    require(args.num_iterations, f"--total-timesteps ({args.total_timesteps}) is less than {batch}")
    require(args.eval_episodes or not args.evaluate, "--evaluate needs --eval-episodes above 0")
    require(not args.cuda or torch.cuda.is_available(), "--cuda finds no GPU (try --no-cuda)")
    films = args.evaluate and args.capture_video  # on the readable backend
    if args.env_backend == "envpool" and not films:
        readable = "--env-backend gymnasium"
        require(find_spec("envpool"), f"EnvPool is not installed here ({readable} does without)")
        require(args.noop_max, f"--noop-max (0) needs {readable}: EnvPool takes at least 1")
        require(not args.capture_video, f"--capture-video needs {readable}: EnvPool cannot render")
    found = not args.capture_video or find_spec("moviepy")
    require(found, "--capture-video needs moviepy (pip install moviepy)")
    found = args.evaluate or not args.track or find_spec("wandb")
    require(found, "--track needs wandb (uv run --with wandb ...)")
    game_name(args.env_id)


def join_processes(args: Args) -> tuple[int, Args]:
    """Rank of this process, and the arguments with its share."""
    size = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1
    if args.resume:
        saved = len(load_checkpoint(args.resume)["processes"])
        require(saved == size, f"{args.resume} needs {saved} processes, as before, not {size}")
    if not dist.is_torchelastic_launched():
        return 0, args
    rank = int(os.environ["RANK"])
    require(args.num_envs % size == 0, f"{size} processes cannot share --num-envs {args.num_envs}")
    local_args = replace(args, num_envs=args.num_envs // size)
    local_args.total_timesteps //= size  # as many iterations
    here = int(os.environ["LOCAL_WORLD_SIZE"])  # processes on this machine
    local_args.env_threads = math.ceil(args.env_threads / here)
    local_args.capture_video = args.capture_video and rank == 0
    try:
        check_args(replace(local_args, resume=None))  # its share is another configuration
    except UserError as error:
        raise UserError(f"each of {size} processes: {error}") from error
    if args.cuda:
        gpus = torch.cuda.device_count()
        require(here <= gpus, f"{here} processes on a machine with {gpus} GPUs (--no-cuda)")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if args.cuda else "gloo")
    return rank, local_args


def all_gather(value) -> list:
    """The values of all processes, by rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class NullLogger:  # of all processes but the first
    def __getattr__(self, name: str):  # any call does nothing
        return lambda *args, **kwargs: None


def game_name(env_id: str) -> str:
    """`Breakout` for any of Breakout, Breakout-v5, ALE/Breakout-v5 and BreakoutNoFrameskip-v4."""
    gym.register_envs(ale_py)
    games = sorted({spec.name for spec in gym.registry.values() if spec.namespace == "ALE"})
    name = re.sub(r"(NoFrameskip|Deterministic)?(-v\d+)?$", "", env_id.removeprefix("ALE/"))
    close = ", ".join(difflib.get_close_matches(name, games, cutoff=0.5)) or "the games of ALE"
    require(name in games, f"--env-id ({env_id}) is no Atari game; look at {close}")
    return name


def make_env(args: Args, video_dir: Path | None = None) -> gym.Env:
    """One game of ALE."""
    config = {"frameskip": 1, "repeat_action_probability": args.repeat_action_probability}
    config |= {"full_action_space": args.full_action_space, "disable_env_checker": True}
    config |= {"max_num_frames_per_episode": args.max_episode_steps * args.frame_skip}
    config |= {"render_mode": "rgb_array" if video_dir else None}
    return wrap_game(gym.make(f"ALE/{game_name(args.env_id)}-v5", **config), args, video_dir)


def make_envs(args: Args, video_dir: Path, seed: int) -> gym.vector.VectorEnv:
    """N games; the step after the end of an episode ignores its action and resets (NEXT_STEP).

    infos: "reward" is the reward before [A06], "terminated" says that the whole game is over.
    """
    if args.env_backend == "envpool":
        return make_envpool(args, seed)
    first = [lambda: make_env(args, video_dir if args.capture_video else None)]
    makers = first + [lambda: make_env(args)] * (args.num_envs - 1)
    next_step = gym.vector.AutoresetMode.NEXT_STEP
    return gym.vector.SyncVectorEnv(makers, copy=False, autoreset_mode=next_step)


def make_envpool(args: Args, seed: int) -> gym.vector.VectorEnv:
    """EnvPool's form of these wrappers, in C++ threads. How it differs:

    A new game fills the stack with its first frame, a lost life keeps the stack; the maximum is of
    gray frames; FIRE is the last of the 1 to noop_max frames and no third action follows it; a lost
    life too is followed by no-ops, whose rewards are in no return.
    """
    import envpool

    warnings.filterwarnings("ignore", "EnvPool seeds are fixed")
    games = {name.lower(): name for name in envpool.list_all_envs()}  # its capitals can differ
    config = {"num_envs": args.num_envs, "num_threads": args.env_threads, "seed": seed}
    config |= {"noop_max": args.noop_max, "frame_skip": args.frame_skip}  # see [A01], [A02]
    config |= {"episodic_life": args.episodic_life}  # see [A03]
    config |= {"use_fire_reset": args.fire_reset}  # see [A04]
    config |= {"gray_scale": True, "img_height": 84, "img_width": 84}  # see [A05]
    config |= {"use_inter_area_resize": True, "reward_clip": args.clip_reward}  # see [A06]
    config |= {"stack_num": args.frame_stack, "max_episode_steps": args.max_episode_steps}
    config |= {"full_action_space": args.full_action_space}
    config |= {"repeat_action_probability": args.repeat_action_probability}
    return envpool.make_gymnasium(games[f"{game_name(args.env_id)}-v5".lower()], **config)


def env_states(envs: gym.vector.VectorEnv) -> list[dict] | None:
    """The exact state of the readable games; None for EnvPool's.

    None with sticky actions too: the emulator keeps the action that it may repeat to itself.
    """
    if not hasattr(envs, "envs"):
        return None
    known = hasattr(envs, "_autoreset_envs")  # which environments reset in the next step
    require(known, "this version of gymnasium hides what a checkpoint needs: take 1.4")
    states = []
    for env, resets in zip(envs.envs, envs._autoreset_envs):
        game = env.unwrapped
        if game.spec.kwargs["repeat_action_probability"]:
            return None
        frames = torch.tensor(np.array(env.obs_queue))
        state = {"emulator": game.clone_state(include_rng=True).serialize()}
        state |= {"rng": game.np_random.bit_generator.state, "frames": frames}
        state |= {name: env.get_wrapper_attr(name) for name in ("lives", "game_over")}
        states.append(state | {"resets": bool(resets)})
    return states


def restore_envs(envs: gym.vector.VectorEnv, states: list[dict] | None) -> bool:
    """Put the states back; False if there are none."""
    for n, state in enumerate(states or []):
        env = envs.envs[n]
        env.unwrapped.restore_state(ale_py.ALEState(state["emulator"]))
        env.unwrapped.np_random.bit_generator.state = state["rng"]
        env.obs_queue.extend(state["frames"].numpy())
        for name in ("lives", "game_over"):
            env.set_wrapper_attr(name, state[name])
        envs._autoreset_envs[n] = state["resets"]
    return states is not None


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory: given back, it costs a sixth of an update in page faults."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD, in bytes, at its largest
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, the same


def compiled(function, device: torch.device, example: tuple):
    """One graph of the function; the function itself if a call with `example` fails."""
    print("compiling takes up to a minute (--no-compile skips this)", flush=True)
    options = {"triton.cudagraphs": True} if device.type == "cuda" else {"cpp_wrapper": True}
    try:
        graph = torch.compile(function, fullgraph=True, dynamic=False, options=options)
        for _ in range(2):  # a CUDA graph is made in the second call
            result = graph(*example)[0]
            if result.requires_grad:  # keep no gradient: the next graph takes its memory
                torch.autograd.grad(result.sum(), example[0].parameters(), allow_unused=True)
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
    if dist.is_initialized():
        again += f" -m torch.distributed.run --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
    again += f" {shlex.join([__file__, '--resume', str(run_dir)])}"
    print(f"run: {run_dir}, on {device}\nif it is stopped: {again}", flush=True)
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "bf16"
    if args.bf16 and not args.cuda and "bf16" not in cpuinfo:
        print("--bf16 is slower here: this processor has no bfloat16 arithmetic", flush=True)
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
    versions = {name: version(name) for name in ("torch", "gymnasium", "ale-py", "numpy")}
    versions |= {"envpool": version("envpool")} if find_spec("envpool") else {}
    hardware = [cpu, f"{os.cpu_count()} cores"]
    hardware += [torch.cuda.get_device_name()] if args.cuda else []
    return {
        "args": asdict(args),
        "command": shlex.join(sys.argv),
        "commit": commit,
        "versions": {"python": platform.python_version()} | versions,
        "hardware": ", ".join(hardware),
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
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
        known = checkpoint["args"].keys() == asdict(Args()).keys() and "processes" in checkpoint
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
    """Returns, not clipped, of `eval_episodes` whole games, played side by side as in training."""
    backend = "gymnasium" if args.capture_video else args.env_backend
    args = replace(args, num_envs=args.eval_episodes, env_backend=backend)
    seed = 1_000_000 + args.seed  # training begins at --seed
    envs = make_envs(args, run_dir / f"eval_videos_{int(time.time())}", seed)
    device = torch.device("cuda" if args.cuda else "cpu")
    agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
    load_weights(agent, load_checkpoint(run_dir))
    torch.manual_seed(args.seed)
    obs, infos = envs.reset(seed=seed)
    returns = np.array(infos["reward"], np.float64)
    playing = np.ones(len(returns), bool)  # still in its first game
    with tqdm(total=len(returns), unit="game", leave=False) as bar:
        while playing.any():
            noise = agent.draw_noise(len(returns))
            noise = torch.zeros_like(noise) if args.eval_deterministic else noise
            obs = torch.from_numpy(obs).to(device)
            action, _, _ = agent.act(obs, noise.to(device))
            env_action = action.cpu().numpy().astype(np.int32)
            obs, _, _, truncated, infos = envs.step(env_action)
            returns += infos["reward"] * playing
            over = playing & np.logical_or(infos["terminated"], truncated)
            playing &= ~over
            if over.any():
                bar.update(over.sum())
    envs.close()
    print(f"evaluation: {returns.mean():.1f} +- {returns.std():.1f} over {len(returns)} games")
    return returns.tolist()


def main() -> None:
    try:
        args = parse_args()
        if args.evaluate:
            evaluate(args, Path(args.evaluate))
        else:
            train(args)
            if dist.is_initialized():
                dist.destroy_process_group()
    except KeyboardInterrupt:
        sys.exit("stopped")
    except (UserError, OSError) as error:  # OSError: a full disk, a directory without permission
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(10)  # torchrun shows and ends all at the first error: let it be rank 0's
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
