# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["torch>=2.11", "gymnasium>=1.2.1", "procgen-mirror>=0.10.7", "numpy>=1.26",
#                 "tensorboard>=2.16", "tqdm>=4.66", "tyro>=1.0", "moviepy>=2.1"]
# [tool.uv]
# # Procgen asks for older ones and runs on these
# override-dependencies = ["gym==0.26.2", "numpy>=2", "glfw>=2.10", "imageio-ffmpeg>=0.5"]
# ///
"""PPO for the 16 games of Procgen: ppo_atari.py with IMPALA's network and scaled rewards.

Run:     uv run ppo_procgen.py --env-id starpilot
Look:    uvx tensorboard --logdir runs
Expect:  on starpilot 4 after 0.5M steps and 50 to 100 minutes on two cores (two runs; 4 too
         in openai/train-procgen); published after 25M: 31 (CleanRL) to 34 (openai/train-procgen)
Read:    to the end of `train`, beside ppo_atari.py; the rest is plumbing. Ids in brackets name
         details of "The 37 Implementation Details of PPO"; [S01] is ours. "~" marks one left out.
Letters: T steps of N environments make a batch of B = T * N samples, a minibatch is M of them;
         an observation is 64 x 64 pixels of 3 colours, an action is one of A = 15.
"""

import contextlib
import copy
import ctypes
import io
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
    env_id: str = "starpilot"  # one of the 16 games of Procgen
    total_timesteps: int = 25_000_000  # environment steps in all, rounded down to whole batches
    learning_rate: float = 5e-4  # learning rate of Adam
    num_envs: int = 64  # environments stepped together [C01]
    num_steps: int = 256  # steps of each environment in a rollout
    anneal_lr: bool = False  # lower the learning rate linearly to zero [C04]
    gamma: float = 0.999  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation [C05]
    num_minibatches: int = 8  # minibatches of an epoch [C06]
    update_epochs: int = 3  # passes over a rollout
    norm_adv: bool = True  # normalize the advantages of a minibatch [C07]
    clip_coef: float = 0.2  # clip range of the probability ratio [C08] and of the value [C09]
    clip_vloss: bool = True  # clip the value loss [C09]
    ent_coef: float = 0.01  # weight of the entropy bonus [C10]
    vf_coef: float = 0.5  # weight of the value loss [C10]
    max_grad_norm: float = 0.5  # largest norm of the gradient; 0 disables clipping [C11]
    target_kl: float | None = None  # skip the epochs after one whose mean KL exceeds this [X03]

    # -- details --
    anneal_clip: bool = False  # lower clip_coef linearly to zero [X01]
    adam_eps: float = 1e-5  # epsilon of Adam [C03]
    ortho_init: bool = True  # orthogonal weights of the heads, or torch's default [C02]
    shared_network: bool = True  # one network for policy and value instead of two [C13]
    norm_reward: bool = True  # divide rewards by the deviation of their discounted sum [M08]
    reward_gamma: float | None = None  # discount factor of norm_reward's sum; None: gamma
    clip_reward: float = 10.0  # clip scaled rewards to this range; 0 disables clipping [M09]

    # -- environments and speed --
    distribution_mode: Literal["easy", "hard"] = "easy"  # difficulty of the levels
    num_levels: int = 0  # levels to train on; 0: all 2**31 - 1 of them
    start_level: int = 0  # first level to train on
    env_threads: int = 4  # threads that step the games; 0: none of their own
    compile: bool = torch.cuda.is_available()  # compile loss and acting; little use on a CPU
    micro_batch: int = 0  # samples computed at a time; 0: 64 on a CPU, whole minibatches on a GPU
    bf16: bool = False  # the network below the heads in bfloat16; the rest stays float32

    # -- run --
    checkpoint_seconds: int = 60  # between checkpoints; the last iteration always writes one
    resume: str | None = None  # continue the run in this directory, with its configuration
    evaluate: str | None = None  # play the agent in this directory instead of training
    eval_episodes: int = 10  # episodes played after training or by --evaluate; 0: none
    eval_levels: Literal["train", "unseen"] = "train"  # play training levels, or all above those
    eval_deterministic: bool = False  # play the most probable actions, not sampled ones

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size


# -- reward normalizer --
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


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut, (n, channels, H, W) to the same."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv0 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv1(self.conv0(x.relu()).relu())


class Agent(nn.Module):
    """Policy and value function of images (n, 64, 64, 3) uint8: IMPALA's CNN (arXiv:1802.01561)."""

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.spaces.Discrete, args: Args):
        super().__init__()

        def impala_cnn() -> nn.Sequential:
            layers = []
            for c_in, c_out in ((3, 16), (16, 32), (32, 32)):
                layers.append(nn.Conv2d(c_in, c_out, 3, padding=1))
                layers.append(nn.MaxPool2d(3, stride=2, padding=1))
                layers += [ResidualBlock(c_out), ResidualBlock(c_out)]
            layers += [nn.ReLU(), nn.Flatten()]
            layers.append(nn.Linear(32 * 8 * 8, 256))
            return nn.Sequential(*layers, nn.ReLU())

        self.network = impala_cnn()  # [C13] one network, shared by policy and value, or two
        self.value_network = None if args.shared_network else impala_cnn()
        self.actor = layer_init(nn.Linear(256, int(action_space.n)), 0.01, args)
        self.critic = layer_init(nn.Linear(256, 1), 1.0, args)
        self.dtype = torch.bfloat16 if args.bf16 else torch.float32  # both hold 0 to 255 exactly

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (n, A) and values (n,) of observations (n, 64, 64, 3) uint8."""
        x = obs.permute(0, 3, 1, 2).to(self.dtype) / 255  # [A09] scaling to 0 to 1
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


def accumulate(loss_fn, agent: Agent, mb: dict, micro_batch_size: int, *rest) -> dict:
    """Sum the gradient of a minibatch into the parameters, part by part; returns its diagnostics.

    So memory holds the activations of one part only. Small parts also fit the caches of a CPU
    (oneDNN's convolutions are slow with 1024 images).
    """
    sums = {}
    for start in range(0, len(mb["obs"]), micro_batch_size):
        part = {name: b[start : start + micro_batch_size] for name, b in mb.items()}
        share = len(part["obs"]) / len(mb["obs"])
        loss, stats = loss_fn(agent, part, *rest)
        (share * loss).backward()
        sums = {name: sums.get(name, 0) + share * stat for name, stat in stats.items()}
        for param in agent.parameters():
            if param.grad is not None:  # CUDA graphs reuse its memory for the next part
                param.grad = param.grad.clone()
    return sums


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
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{all_gather(int(time.time()))[0]}"
    run_dir = Path(args.resume or f"runs/{run_name}")
    complete = checkpoint and checkpoint["iteration"] >= args.num_iterations
    require(not complete, f"{run_dir} is done: --evaluate plays it")

    env_seed = args.seed + rank * local_args.num_envs
    envs = make_envs(local_args, run_dir / f"videos_{int(time.time())}", env_seed)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    agent = Agent(obs_space, action_space, args)
    weights = checkpoint or all_gather({"agent": agent.state_dict()})[0]  # those of rank 0
    load_weights(agent, weights)
    agent.to(device, memory_format=torch.channels_last)
    lr, eps = args.learning_rate, args.adam_eps  # [C03] Adam's epsilon
    optimizer = torch.optim.Adam(agent.parameters(), lr=lr, eps=eps, fused=True)
    max_norm = args.max_grad_norm or math.inf
    return_rms = RunningMeanStd(np.zeros(()), np.ones(()))  # of the discounted sum of past rewards
    reward_gamma = args.gamma if args.reward_gamma is None else args.reward_gamma
    minibatch_size = local_args.batch_size // args.num_minibatches
    micro_batch_size = args.micro_batch or (minibatch_size if args.cuda else 64)
    rollout_agent = copy.deepcopy(agent)  # acts, with weights that --bf16 casts once a rollout
    nn.ModuleList([rollout_agent.network, rollout_agent.value_network]).to(agent.dtype)

    # A rollout
    T, N = args.num_steps, local_args.num_envs
    obs = torch.zeros((T + 1, N, *obs_space.shape), dtype=torch.uint8, device=device)
    actions = torch.zeros((T, N), dtype=torch.int64, device=device)
    logprobs = torch.zeros((T, N), device=device)
    values = torch.zeros((T + 1, N), device=device)
    rewards = np.zeros((T, N), np.float32)
    discounted_returns = np.zeros((T, N))
    dones = np.zeros((T, N), np.float32)  # 1: this step ended the episode

    # State carried between iterations and saved in checkpoints
    start_iteration = checkpoint["iteration"] + 1 if checkpoint else 1
    global_step = 0
    seconds = 0.0  # of training before this process
    recent_returns = deque(maxlen=100)
    next_obs, _ = envs.reset(seed=env_seed)
    discounted_return, episodic_return, episodic_length = np.zeros(N), np.zeros(N), np.zeros(N)
    if checkpoint:
        process = checkpoint["processes"][rank]
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(process["rng"])
        global_step = checkpoint["global_step"]
        seconds = checkpoint["seconds"]
        recent_returns.extend(checkpoint["recent_returns"])
        return_rms = RunningMeanStd(*(x.numpy() for x in checkpoint["return_rms"]))
        restore_envs(envs, process["envs"])
        carried = (x.numpy() for x in process["carried"])
        next_obs, discounted_return, episodic_return, episodic_length = carried

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
        finished = []  # (step, return, length, time) of episodes
        noise = agent.draw_noise(T, N).to(device)
        rollout_agent.load_state_dict(agent.state_dict())  # copies the weights, in place
        if iteration == start_iteration:  # compile, or fall back, with arrays of the run's shapes
            example = (rollout_agent, obs[0], noise[0])
            act = compiled(Agent.act, device, example) if args.compile else Agent.act
        for t in range(T):  # [C01] vectorized architecture: N environments, T steps of each
            obs[t] = torch.from_numpy(next_obs)
            actions[t], logprobs[t], values[t] = act(rollout_agent, obs[t], noise[t])
            env_action = actions[t].cpu().numpy()  # CPU-GPU sync
            next_obs, reward, terminated, truncated, _ = envs.step(env_action)
            dones[t] = np.logical_or(terminated, truncated)
            rewards[t] = reward

            global_step += args.num_envs
            episodic_return += reward
            episodic_length += 1
            discounted_return = reward_gamma * discounted_return + reward
            discounted_returns[t] = discounted_return
            for n in np.flatnonzero(dones[t]):
                finished.append((global_step, episodic_return[n], episodic_length[n], time.time()))
                discounted_return[n] = episodic_return[n] = episodic_length[n] = 0
        obs[T] = torch.from_numpy(next_obs)
        all_sums = np.concatenate(all_gather(discounted_returns), axis=1)  # (T, num_envs)
        for t in range(T):
            return_rms = return_rms.update(all_sums[t])
            rewards[t] = normalize_reward(return_rms, rewards[t], args)

        # -- advantages --
        update_start = time.time()
        with torch.no_grad():
            values[T] = agent(obs[T])[1]
        V = values.cpu().numpy()  # (T + 1, N); V[t + 1] after an end: the next game's, unused
        # ~[S01] no bootstrap at time limits: Procgen does not tell them from other ends
        advantages = gae(rewards, V[:T], V[1:], dones, dones, args.gamma, args.gae_lambda)  # (T, N)

        # -- update --
        b_advantages = torch.from_numpy(advantages).to(device).flatten()
        batch = {"obs": obs[:T], "actions": actions, "logprobs": logprobs, "values": values[:T]}
        batch = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
        batch |= {"advantages": b_advantages, "returns": b_advantages + batch["values"]}
        if iteration == start_iteration:  # compile, or fall back, with arrays of the run's shapes
            first = slice(min(micro_batch_size, minibatch_size))
            example = (agent, {name: b[first] for name, b in batch.items()}, clip_coef, args)
            loss_fn = compiled(minibatch_loss, device, example) if args.compile else minibatch_loss
        metrics = []  # a dict of scalar tensors for each minibatch
        for epoch in range(args.update_epochs):
            b_inds = torch.randperm(local_args.batch_size).to(device)
            for mb_inds in b_inds.chunk(args.num_minibatches):  # [C06] every sample once an epoch
                mb = {name: b[mb_inds] for name, b in batch.items()}
                if args.norm_adv:  # [C07] advantage normalization, before micro-batches are cut
                    centered = mb["advantages"] - mb["advantages"].mean()
                    mb["advantages"] = centered / (centered.std(correction=0) + 1e-8)
                optimizer.zero_grad()
                stats = accumulate(loss_fn, agent, mb, micro_batch_size, clip_coef, args)
                average_gradients(agent, stats)  # [X02] parallel gradients
                norm = nn.utils.clip_grad_norm_(agent.parameters(), max_norm)  # [C11] clipping
                optimizer.step()
                metrics.append(stats | {"grad_norm": norm})
            if args.target_kl is not None:  # [X03] early stop
                epoch_kl = [stats["approx_kl"] for stats in metrics[-args.num_minibatches :]]
                if torch.stack(epoch_kl).mean() > args.target_kl:
                    break

        # -- log --
        finished = sum(all_gather(finished), [])  # of all processes
        for step, score, length, at in sorted(finished, key=lambda episode: episode[0]):
            recent_returns.append(float(score))
            writer.add_scalar("charts/episodic_return", score, step)
            writer.add_scalar("charts/episodic_length", length, step)
            print(f"{step},{score:.9g},{length:.0f},{at - start_time:.2f}", file=episodes)
        by_name = {name: torch.stack([stats[name] for stats in metrics]) for name in metrics[0]}
        scalars = {f"losses/{name}": stat.mean().item() for name, stat in by_name.items()}
        finite = all(map(math.isfinite, scalars.values()))
        require(finite, f"losses of iteration {iteration} are not finite: {scalars}")
        scalars["losses/approx_kl_max"] = by_name["approx_kl"].max().item()
        residuals = torch.cat(all_gather(b_advantages.cpu()))  # returns - values
        returns = torch.cat(all_gather(batch["returns"].cpu()))
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
            carried = (next_obs, discounted_return, episodic_return, episodic_length)
            process = {"rng": torch.get_rng_state(), "envs": env_states(envs)}
            process["carried"] = [torch.tensor(array) for array in carried]
            state = {
                "args": asdict(args),
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
                "return_rms": [torch.as_tensor(x, dtype=torch.float64) for x in return_rms],
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
    free += "compile env_threads micro_batch checkpoint_seconds".split()
    free += "eval_episodes eval_levels eval_deterministic".split()
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
    may_be_0 += "eval_episodes reward_gamma clip_reward num_levels start_level".split()
    may_be_0 += ["checkpoint_seconds", "env_threads", "micro_batch"]
    for name, value in asdict(args).items():
        flag = f"--{name.replace('_', '-')} ({value})"
        kind = type(getattr(Args, name))  # of the default; None: a number or a name
        types = {float: (int, float), type(None): (int, float, str, kind)}.get(kind, (kind,))
        require(type(value) in types, f"{flag} cannot be a {type(value).__name__}")
        if type(value) in (int, float):
            highest = dict.fromkeys("seed num_levels start_level env_threads".split(), 2**30 - 1)
            high = (highest | {"gamma": 1, "gae_lambda": 1, "reward_gamma": 1}).get(name, 1e38)
            above = "at least" if name in may_be_0 else "greater than"
            fits = 0 <= value <= high and (value or name in may_be_0)
            require(fits, f"{flag} must be {above} 0 and at most {high:g}")
    batch = f"num_envs * num_steps ({args.num_envs} * {args.num_steps} = {args.batch_size})"
    even = args.batch_size % args.num_minibatches == 0
    require(even, f"{batch} must be divisible by --num-minibatches ({args.num_minibatches})")
    alone = args.norm_adv and args.batch_size == args.num_minibatches
    require(not alone, f"{batch}: minibatches of one sample need --no-norm-adv")
    require(args.num_iterations, f"--total-timesteps ({args.total_timesteps}) is less than {batch}")
    require(args.eval_episodes or not args.evaluate, "--evaluate needs --eval-episodes above 0")
    require(not args.cuda or torch.cuda.is_available(), "--cuda finds no GPU (try --no-cuda)")
    limited = args.num_levels or (args.eval_levels == "train" and not args.start_level)
    require(limited, f"--eval-levels unseen, --start-level ({args.start_level}) need --num-levels")
    found = not args.capture_video or find_spec("moviepy")
    require(found, "--capture-video needs moviepy (pip install moviepy)")
    found = args.evaluate or not args.track or find_spec("wandb")
    require(found, "--track needs wandb (uv run --with wandb ...)")
    require(find_spec("procgen"), "Procgen is not installed here (pip install procgen-mirror)")
    games = "bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper"
    games = f"{games} leaper maze miner ninja plunder starpilot".split()
    require(args.env_id in games, f"--env-id ({args.env_id}) must be one of {', '.join(games)}")


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


class Procgen(gym.vector.VectorEnv):
    """N games that reset in the step that ends an episode: it shows the start of the next one."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP, "render_fps": 15}
    render_mode = "rgb_array"

    def __init__(self, args: Args, seed: int):
        with contextlib.redirect_stderr(io.StringIO()):  # the old gym complains when imported
            from procgen import ProcgenGym3Env

        levels = {"num_levels": args.num_levels, "start_level": args.start_level}
        levels |= {"distribution_mode": args.distribution_mode, "env_name": args.env_id}
        size = {"num": args.num_envs, "num_threads": args.env_threads}
        self.games = ProcgenGym3Env(**levels, **size, rand_seed=seed)
        self.num_envs = args.num_envs
        self.single_observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(self.games.ac_space.eltype.n)

    def reset(self, *, seed=None, options=None):
        """The first observations: the games began, with their seed, when they were made."""
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


def make_envs(args: Args, video_dir: Path, seed: int) -> gym.vector.VectorEnv:
    """N games, the first one filmed if asked for."""
    envs = Procgen(args, seed)
    if args.capture_video:
        envs = gym.wrappers.vector.RecordVideo(envs, str(video_dir), record_first_only=True)
    return envs


def env_states(envs: gym.vector.VectorEnv) -> list[bytes]:
    """The exact states of the games."""
    return envs.unwrapped.games.get_state()


def restore_envs(envs: gym.vector.VectorEnv, states: list[bytes]) -> None:
    envs.unwrapped.games.set_state(states)


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
    versions = {name: version(name) for name in ("torch", "gymnasium", "procgen-mirror", "numpy")}
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
    """Returns, not scaled, of `eval_episodes` games that are played side by side."""
    args = replace(args, num_envs=args.eval_episodes)
    if args.eval_levels == "unseen":  # all above those of training
        first = args.start_level + args.num_levels
        args = replace(args, start_level=first, num_levels=2**31 - 1 - first)
    seed = 1_000_000 + args.seed  # training begins at --seed
    envs = make_envs(args, run_dir / f"eval_videos_{int(time.time())}", seed)
    device = torch.device("cuda" if args.cuda else "cpu")
    agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
    load_weights(agent, load_checkpoint(run_dir))
    torch.manual_seed(args.seed)
    obs, _ = envs.reset(seed=seed)
    returns = np.zeros(args.num_envs)
    playing = np.ones(len(returns), bool)  # still in its first game
    with tqdm(total=len(returns), unit="game", leave=False) as bar:
        while playing.any():
            noise = agent.draw_noise(len(returns))
            noise = torch.zeros_like(noise) if args.eval_deterministic else noise
            action, _, _ = agent.act(torch.from_numpy(obs).to(device), noise.to(device))
            obs, reward, terminated, truncated, _ = envs.step(action.cpu().numpy())
            returns += reward * playing
            over = playing & np.logical_or(terminated, truncated)
            playing &= ~over
            if over.any():
                bar.update(over.sum())
    envs.close()
    games = f"{len(returns)} games, {args.eval_levels} levels"
    print(f"evaluation: {returns.mean():.1f} +- {returns.std():.1f} over {games}")
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
