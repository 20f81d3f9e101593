# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["torch>=2.11", "gymnasium[box2d,classic-control,mujoco]>=1.2.1", "numpy>=1.26",
#                 "tensorboard>=2.16", "tqdm>=4.66", "tyro>=1.0", "moviepy>=2.1"]
# ///
"""TRPO for continuous control: ppo_continuous_mujoco.py with a trust region instead of the clip.

Run:     uv run trpo_continuous_mujoco.py --env-id Hopper-v4 --no-bootstrap-truncation \
             --no-clip-actions --max-grad-norm 0 --fisher-every 10 --max-kl 0.04 \
             --learning-rate 2e-4 --no-anneal-lr --no-clip-vloss
Look:    uvx tensorboard --logdir runs
Expect:  a return of 1,800 to 2,500 after 1M steps and 6 to 10 minutes (3 seeds)
Read:    to the end of `train`, beside ppo_continuous_mujoco.py, from which it differs in the
         update: [S05] to [S07] after baselines/trpo_mpi (which accepts 1.5 times the KL limit),
         and [S08]. "~" marks a detail left out. The rest is plumbing.
Letters: T steps of N environments make a batch of B = T * N samples, a minibatch is M of them;
         an observation has O numbers, an action has A; the policy has P parameters.
"""

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
from dataclasses import asdict, dataclass
from functools import partial, reduce
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import mujoco
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.distributions import Normal, TanhTransform, kl_divergence
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
    env_id: str = "HalfCheetah-v4"  # id of the environment, or module:id
    total_timesteps: int = 1_000_000  # environment steps in all, rounded down to whole batches
    learning_rate: float = 3e-4  # learning rate of Adam, which fits the value
    num_envs: int = 1  # environments stepped together [C01]
    num_steps: int = 2048  # steps of each environment in a rollout
    anneal_lr: bool = True  # lower the learning rate linearly to zero [C04]
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation [C05]
    num_minibatches: int = 32  # minibatches of an epoch [C06]
    update_epochs: int = 10  # passes over a rollout to fit the value
    norm_adv: bool = True  # normalize the advantages of a rollout [C07]
    clip_coef: float = 0.2  # clip range of the value, if clip_vloss [C09]
    clip_vloss: bool = True  # clip the value loss [C09]
    ent_coef: float = 0.0  # weight of the entropy bonus [C10]
    max_grad_norm: float = 0.5  # largest norm of the value's gradient; 0 disables clipping [C11]
    max_kl: float = 0.01  # largest mean KL divergence of a policy step [S07]
    max_kl_final: float | None = None  # move max_kl linearly to this until the end [S08]

    # -- details --
    cg_steps: int = 10  # steps of conjugate gradient [S05]
    cg_damping: float = 0.1  # added to the diagonal of the Fisher matrix [S06]
    fisher_every: int = 5  # the Fisher matrix is estimated from every n-th step [S06]
    line_search_steps: int = 10  # policy steps tried, each half as long as the one before [S07]
    adam_eps: float = 1e-5  # epsilon of Adam [C03]
    ortho_init: bool = True  # orthogonal weights, or torch's default [C02]
    activation: Literal["tanh", "relu"] = "tanh"  # nonlinearity of the hidden layers
    init_log_std: float = 0.0  # initial log standard deviation of the policy [M02]
    clip_actions: bool = True  # clip actions to the bounds of the action space [M05]
    squash_actions: bool = False  # squash actions into the bounds with tanh [S03]
    scale_actions: bool = False  # map actions from [-1, 1] to the bounds [S04]
    norm_obs: bool = True  # normalize observations by their running mean and variance [M06]
    clip_obs: float = 10.0  # clip normalized observations to this; 0 disables clipping [M07]
    norm_reward: bool = True  # divide rewards by the deviation of their discounted sum [M08]
    clip_reward: float = 10.0  # clip normalized rewards to this; 0 disables clipping [M09]
    bootstrap_truncation: bool = True  # bootstrap where a time limit ends an episode [S01]
    staggered_resets: bool = False  # let the first episodes end at different times [S09]

    # -- run --
    env_backend: Literal["sync", "async"] = "sync"  # environments in this process or one each
    compile: bool = True  # compile the minibatch updates; eager where that fails
    checkpoint_seconds: int = 60  # between checkpoints; the last iteration always writes one
    resume: str | None = None  # continue the run in this directory, with its configuration
    evaluate: str | None = None  # play the agent in this directory instead of training
    eval_episodes: int = 10  # episodes played after training or by --evaluate; 0: none
    eval_deterministic: bool = False  # play the mean actions, not sampled ones

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


class Agent(nn.Module):
    """Gaussian policy and value function of a vector: two networks, two layers of 64 units each."""

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.spaces.Box, args: Args):
        super().__init__()
        activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[args.activation]

        def trunk() -> list[nn.Module]:
            first = layer_init(nn.Linear(obs_space.shape[0], 64), 2**0.5, args)
            second = layer_init(nn.Linear(64, 64), 2**0.5, args)
            return [first, activation(), second, activation()]

        actor_trunk = trunk()
        critic_trunk = trunk()  # [M04] separate, or fitting the value would move the policy
        A = action_space.shape[0]
        self.actor_mean = nn.Sequential(*actor_trunk, layer_init(nn.Linear(64, A), 0.01, args))
        log_std = torch.full((A,), float(args.init_log_std))
        self.actor_logstd = nn.Parameter(log_std)  # [M02] state-independent
        self.critic = nn.Sequential(*critic_trunk, layer_init(nn.Linear(64, 1), 1.0, args))
        self.args = args
        self.low, self.high = action_space.low, action_space.high  # (A,)
        half = torch.as_tensor((self.high - self.low) / 2)
        self.register_buffer("half_range", half.float(), persistent=False)

    def policy_parameters(self) -> list[nn.Parameter]:
        """The P parameters that the trust region bounds; Adam fits those of the value."""
        return [self.actor_logstd, *self.actor_mean.parameters()]

    def draw_noise(self, *shape: int) -> torch.Tensor:
        """Normal noise (*shape, A), with which `act` samples; drawn once a rollout to save time."""
        return torch.randn(*shape, len(self.actor_logstd))

    def get_policy(self, obs: torch.Tensor) -> Normal:
        """The distribution of actions (n, A), before `env_action`, at observations (n, O)."""
        mean = self.actor_mean(obs)
        std = self.actor_logstd.exp().expand_as(mean)
        return Normal(mean, std, validate_args=False)  # [M01] normal distributions

    @torch.no_grad()
    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Actions (n, A) at observations (n, O): samples, or the means if noise is 0."""
        policy = self.get_policy(obs)
        return policy.mean + policy.stddev * noise

    def env_action(self, action: np.ndarray) -> np.ndarray:
        """What the environment gets for sampled actions (n, A); the sampled ones are stored."""
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

    def evaluate_actions(self, obs: torch.Tensor, actions: torch.Tensor, noise: torch.Tensor):
        """Log-probability, entropy and value, each (n,), of actions (n, A) at observations (n, O).

        A squashed policy's entropy has no closed form: noise (n, A) gives a one-sample estimate.
        """
        policy = self.get_policy(obs)
        logprob = policy.log_prob(actions).sum(-1)  # [M03] independent action components
        entropy = policy.entropy().sum(-1)
        if self.args.squash_actions:  # [S03] squashed actions
            logprob = logprob - self.squash_log_det(actions)
            entropy = entropy + self.squash_log_det(policy.mean + policy.stddev * noise)
        return logprob, entropy, self.get_value(obs)

    def squash_log_det(self, action: torch.Tensor) -> torch.Tensor:
        """log |d env_action / d action| of a squashed policy, (n, A) -> (n,)."""
        log_slope = TanhTransform().log_abs_det_jacobian(action, None)
        return (self.half_range.log() + log_slope).sum(-1)


# -- advantages and loss --
def gae(rewards, values, next_values, terminations, dones, gamma: float, gae_lambda: float):
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16); all arrays are (T, N).

    `next_values[t]` is the value of the state that followed step t, before any reset. It is left
    out after a termination; the end of an episode for any reason (`dones`) stops the sum.
    """
    delta = rewards + gamma * np.where(terminations, 0, next_values) - values
    decay = gamma * gae_lambda * (1 - dones)
    advantages = np.zeros_like(delta)
    lastgaelam = np.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        lastgaelam = delta[t] + decay[t] * lastgaelam  # [C05] GAE
        advantages[t] = lastgaelam
    return advantages


def trpo_loss(agent: Agent, old_policy: Normal, batch: dict, args: Args):
    """TRPO's scalar loss and diagnostics on a whole batch (baselines/trpo_mpi/trpo_mpi.py).

    old_policy: the distribution (B, A) of the rollout. batch: (B, ...) tensors of the rollout.
    """
    newlogprob, entropy, _ = agent.evaluate_actions(batch["obs"], batch["actions"], batch["noise"])
    advantages = batch["advantages"]
    if args.norm_adv:  # [C07] advantage normalization, of the batch
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)

    logratio = newlogprob - batch["logprobs"]
    pg_loss = -(advantages * logratio.exp()).mean()  # ~[C08] no clipping: a trust region
    kl = kl_divergence(old_policy, agent.get_policy(batch["obs"])).sum(-1).mean()
    entropy = entropy.mean()
    loss = pg_loss - args.ent_coef * entropy  # [C10] overall loss, without the value's
    stats = {  # [C12] debug variables
        "policy_loss": pg_loss,
        "entropy": entropy,
        "old_approx_kl": -logratio.mean(),  # k1 of http://joschu.net/blog/kl-approx.html
        "approx_kl": kl,  # the exact one, under PPO's name
    }
    return loss, {name: stat.detach() for name, stat in stats.items()}


def flatten(tensors) -> torch.Tensor:
    """All numbers of the tensors as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def fisher_vector_product(agent: Agent, obs: torch.Tensor, args: Args, vector: torch.Tensor):
    """(F + damping * I) @ vector; F is the policy's Fisher matrix at obs (n, O), never formed."""
    policy = agent.get_policy(obs)
    fixed = Normal(policy.mean.detach(), policy.stddev.detach(), validate_args=False)
    kl = kl_divergence(fixed, policy).sum(-1).mean()  # its Hessian is F (1502.05477, app. C)
    params = agent.policy_parameters()
    grad = flatten(torch.autograd.grad(kl, params, create_graph=True))
    product = flatten(torch.autograd.grad(grad @ vector, params))
    return product + args.cg_damping * vector  # [S06] damped Fisher-vector product


def conjugate_gradient(product, b: torch.Tensor, steps: int) -> torch.Tensor:
    """Approximate solution x (P,) of product(x) = b (baselines/common/cg.py)."""
    x = torch.zeros_like(b)
    residual, direction = b.clone(), b.clone()
    squares = residual @ residual
    for _ in range(steps if squares > 0 else 0):
        image = product(direction)
        alpha = squares / (direction @ image)
        x += alpha * direction
        residual -= alpha * image
        old_squares, squares = squares, residual @ residual
        if squares < 1e-10:  # as in baselines, after a step
            break
        direction = residual + squares / old_squares * direction
    return x


@torch.no_grad()
def line_search(agent: Agent, params, full_step, old_policy: Normal, batch, max_kl, args: Args):
    """Move params (P,) by full_step, half of it, ... until one is accepted; its diagnostics."""
    start = params.clone()
    old_loss, old_stats = trpo_loss(agent, old_policy, batch, args)
    for i in range(args.line_search_steps):
        params.copy_(start + 0.5**i * full_step)
        loss, stats = trpo_loss(agent, old_policy, batch, args)
        if loss < old_loss and stats["approx_kl"] <= max_kl:  # [S07] line search; false with NaN
            return stats | {"step_fraction": torch.tensor(0.5**i)}
    params.copy_(start)
    return old_stats | {"step_fraction": torch.tensor(0.0)}


def value_loss(newvalue: torch.Tensor, mb: dict, args: Args) -> torch.Tensor:
    """The scalar loss of newvalue (M,) on a minibatch of the rollout, fitted to its returns."""
    v_loss = (newvalue - mb["returns"]) ** 2
    if args.clip_vloss:  # [C09] value-loss clipping
        v_clipped = mb["values"] + (newvalue - mb["values"]).clamp(-args.clip_coef, args.clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - mb["returns"]) ** 2)
    return 0.5 * v_loss.mean()


def loss_and_grad(agent: Agent, batch: dict, mb_inds, args: Args):
    """Clipped gradient of the value's loss on samples mb_inds (M,); --compile compiles this."""
    mb = {name: b[mb_inds] for name, b in batch.items()}
    v_loss = value_loss(agent.get_value(mb["obs"]), mb, args)
    grad = flatten(torch.autograd.grad(v_loss, list(agent.critic.parameters())))
    norm = grad.norm()
    if args.max_grad_norm:  # [C11] global gradient clipping
        grad = grad * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1)
    return grad, {"value_loss": v_loss.detach(), "grad_norm": norm}


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
    params = flatten(agent.policy_parameters()).detach()  # (P,)
    nn.utils.vector_to_parameters(params, agent.policy_parameters())  # weights: views of params
    value_params = flatten(agent.critic.parameters()).detach()
    nn.utils.vector_to_parameters(value_params, agent.critic.parameters())
    lr, eps = args.learning_rate, args.adam_eps  # [C03] Adam's epsilon
    optimizer = torch.optim.Adam([value_params], lr=lr, eps=eps, fused=True)
    obs_rms = RunningMeanStd(np.zeros(obs_space.shape), np.ones(obs_space.shape))
    return_rms = RunningMeanStd(np.zeros(()), np.ones(()))  # of the discounted sum of past rewards

    # A rollout
    T, N = args.num_steps, args.num_envs
    obs = np.zeros((T, N, *obs_space.shape), np.float32)  # normalized if --norm-obs
    actions = np.zeros((T, N, *action_space.shape), np.float32)  # as sampled, see env_action
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
    raw_obs, _ = envs.reset(seed=env_seed)
    obs_rms = obs_rms.update(raw_obs)
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
        next_obs, discounted_return, episodic_return, episodic_length = carried
    elif args.staggered_resets:  # [S09] staggered resets
        limit = envs.get_attr("_max_episode_steps")[0]
        envs.set_attr("_elapsed_steps", [n * limit // N for n in range(N)])  # of the first episodes

    writer, episodes, bar = open_logs(args, run_dir, checkpoint)
    start_time = time.time() - seconds
    last_checkpoint = 0.0  # the first iteration writes one, so a full disk fails at once
    for iteration in range(start_iteration, args.num_iterations + 1):
        frac = 1 - (iteration - 1) / args.num_iterations
        if args.anneal_lr:  # [C04] learning-rate annealing
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate
        final_kl = args.max_kl_final or args.max_kl
        max_kl = frac * args.max_kl + (1 - frac) * final_kl  # [S08] KL-limit annealing

        # -- rollout --
        rollout_start = time.time()
        policy = numpy_policy(agent.actor_mean)  # with noise added: agent.act, without torch
        noise = agent.draw_noise(T, N).to(device)
        deviations = (agent.actor_logstd.detach().exp() * noise).cpu().numpy()  # (T, N, A)
        for t in range(T):  # [C01] vectorized architecture: N environments, T steps of each
            obs[t] = next_obs
            actions[t] = policy(next_obs) + deviations[t]
            env_action = agent.env_action(actions[t].copy())  # an environment may change it
            raw_obs, reward, terminated, truncated, infos = envs.step(env_action)
            terminations[t] = terminated
            dones[t] = np.logical_or(terminated, truncated)
            obs_rms = obs_rms.update(raw_obs)  # statistics first, then scaling, as in baselines
            next_obs = normalize_obs(obs_rms, raw_obs, args)
            discounted_return = args.gamma * discounted_return + reward
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
        expected = agent.act(torch.from_numpy(obs[-1]).to(device), noise[-1]).cpu().numpy()
        same = np.allclose(actions[-1], expected, rtol=1e-3, atol=1e-4, equal_nan=True)
        require(same, "numpy_policy does not do what agent.act does: call agent.act instead")

        # -- advantages --
        update_start = time.time()
        b_obs = torch.from_numpy(obs).to(device).flatten(0, 1)  # (B, O)
        b_following_obs = torch.from_numpy(following_obs).to(device).flatten(0, 1)  # (B, O)
        b_actions = torch.from_numpy(actions).to(device).flatten(0, 1)
        b_noise = noise.flatten(0, 1)  # (B, A), for the entropy of squashed actions only
        with torch.no_grad():  # still the rollout's weights: one pass instead of T
            b_policy = agent.get_policy(b_obs)  # (B, A)
            b_logprobs, _, b_values = agent.evaluate_actions(b_obs, b_actions, b_noise)  # (B,)
            b_next_values = agent.get_value(b_following_obs)  # (B,)
        values = b_values.view(T, N).cpu().numpy()
        next_values = b_next_values.view(T, N).cpu().numpy()
        ends = terminations if args.bootstrap_truncation else dones  # [S01] or as published: dones
        advantages = gae(rewards, values, next_values, ends, dones, args.gamma, args.gae_lambda)

        # -- update --
        b_advantages = torch.from_numpy(advantages).to(device).flatten()
        batch = {"obs": b_obs, "actions": b_actions, "logprobs": b_logprobs, "values": b_values}
        batch |= {"advantages": b_advantages, "returns": b_advantages + b_values, "noise": b_noise}
        loss, _ = trpo_loss(agent, b_policy, batch, args)
        gradient = flatten(torch.autograd.grad(loss, agent.policy_parameters()))  # (P,)
        f_obs = b_obs.view(T, N, -1)[:: args.fisher_every].flatten(0, 1)
        fisher = partial(fisher_vector_product, agent, f_obs, args)
        direction = conjugate_gradient(fisher, -gradient, args.cg_steps)  # [S05] natural gradient
        scale = (2 * max_kl / (direction @ fisher(direction))).sqrt()  # KL max_kl, to 2nd order
        full_step = scale * direction
        policy_stats = line_search(agent, params, full_step, b_policy, batch, max_kl, args)
        if iteration == start_iteration:  # compile, or fall back, with arrays of the run's shapes
            first = torch.arange(args.batch_size // args.num_minibatches, device=device)
            example = (agent, batch, first, args)
            update = compiled(loss_and_grad, device, example) if args.compile else loss_and_grad
        metrics = []  # a dict of scalar tensors for each minibatch
        for epoch in range(args.update_epochs):
            b_inds = torch.randperm(args.batch_size).to(device)
            for mb_inds in b_inds.chunk(args.num_minibatches):  # [C06] every sample once an epoch
                value_params.grad, stats = update(agent, batch, mb_inds, args)
                optimizer.step()
                metrics.append(policy_stats | {k: x.clone() for k, x in stats.items()})

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
            carried = (next_obs, discounted_return, episodic_return, episodic_length)
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
        annealed = old["anneal_lr"] or old["max_kl_final"]
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
    may_be_0 = "seed gamma gae_lambda ent_coef cg_damping max_grad_norm".split()  # add your own
    may_be_0 += ["checkpoint_seconds", "eval_episodes", "init_log_std", "clip_obs", "clip_reward"]
    for name, value in asdict(args).items():
        flag = f"--{name.replace('_', '-')} ({value})"
        kind = type(getattr(Args, name))  # of the default; None: a number or a name
        types = {float: (int, float), type(None): (int, float, str, kind)}.get(kind, (kind,))
        require(type(value) in types, f"{flag} cannot be a {type(value).__name__}")
        if type(value) in (int, float):
            high = {"gamma": 1, "gae_lambda": 1, "seed": 2**30}.get(name, 1e38)
            low = -high if name == "init_log_std" else 0
            above = "at least" if name in may_be_0 else "greater than"
            fits = low <= value <= high and (value or name in may_be_0)
            require(fits, f"{flag} must be {above} {low:g} and at most {high:g}")
    batch = f"num_envs * num_steps ({args.num_envs} * {args.num_steps} = {args.batch_size})"
    even = args.batch_size % args.num_minibatches == 0
    require(even, f"{batch} must be divisible by --num-minibatches ({args.num_minibatches})")
    alone = args.norm_adv and args.batch_size == 1
    require(not alone, f"{batch}: a batch of one sample needs --no-norm-adv")
    require(args.num_iterations, f"--total-timesteps ({args.total_timesteps}) is less than {batch}")
    every = f"--fisher-every ({args.fisher_every}) is more than --num-steps ({args.num_steps})"
    require(args.fisher_every <= args.num_steps, every)
    require(args.eval_episodes or not args.evaluate, "--evaluate needs --eval-episodes above 0")
    found = not args.capture_video or find_spec("moviepy")
    require(found, "--capture-video needs moviepy (pip install moviepy)")
    if not args.evaluate:
        require(not args.cuda or torch.cuda.is_available(), "--cuda finds no GPU (try --no-cuda)")
        found = not args.track or find_spec("wandb")
        require(found, "--track needs wandb (uv run --with wandb ...)")
        films = args.capture_video and args.env_backend == "async"
        require(not films, "--capture-video needs --env-backend sync, or --evaluate")


def make_env(args: Args, video_dir: Path | None = None) -> gym.Env:
    """One environment, which records videos if it has a directory."""
    try:
        render = {"render_mode": "rgb_array"} if video_dir else {}
        env = gym.make(args.env_id, **render)
    except (gym.error.Error, ImportError) as error:
        raise UserError(f"--env-id ({args.env_id}): {error}") from error
    obs_space, action_space = env.observation_space, env.action_space
    for space in (obs_space, action_space):
        vector = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
        require(vector, f"{args.env_id} has the space {space}; this script needs vectors (Box)")
    real = np.issubdtype(action_space.dtype, np.floating)
    require(real, f"{args.env_id} acts in {action_space}; this script needs real numbers")
    bounded = action_space.is_bounded() or not (args.squash_actions or args.scale_actions)
    require(bounded, f"{args.env_id} has no bounds to squash or scale actions to")
    limited = env.spec.max_episode_steps or not args.staggered_resets
    require(limited, f"{args.env_id} has no time limit: --staggered-resets needs one")
    if video_dir:
        env = record_videos(env, video_dir)
    # A copy of each observation: a reset may reuse the memory of final_obs
    return gym.wrappers.TransformObservation(env, np.array, obs_space)


def record_videos(env: gym.Env, video_dir: Path) -> gym.Env:
    """The environment with videos of some of its episodes, if it renders here."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # needs no screen
    env.reset()
    if renderer := getattr(env.unwrapped, "mujoco_renderer", None):  # follow the robot
        camera = (env.unwrapped.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
        renderer.camera_id = mujoco.mj_name2id(*camera)  # -1, the free one, if there is none
    try:
        env.render()
        return gym.wrappers.RecordVideo(env, str(video_dir), disable_logger=True)
    except Exception as error:  # every renderer fails in its own way
        hint = "MuJoCo without a screen needs libegl1, or MUJOCO_GL=osmesa and libosmesa6"
        raise UserError(f"--capture-video cannot render: {error!r} ({hint})") from error


def make_envs(args: Args, run_dir: Path) -> gym.vector.VectorEnv:
    """N environments that reset within the step that ends an episode (infos: final_obs)."""
    video_dir = run_dir / f"videos_{int(time.time())}" if args.capture_video else None
    makers = [lambda: make_env(args, video_dir)] + [lambda: make_env(args)] * (args.num_envs - 1)
    backends = {"sync": gym.vector.SyncVectorEnv, "async": gym.vector.AsyncVectorEnv}
    same_step = gym.vector.AutoresetMode.SAME_STEP
    return backends[args.env_backend](makers, copy=False, autoreset_mode=same_step)


def env_states(envs: gym.vector.VectorEnv) -> list[dict] | None:
    """The exact state of Gymnasium's MuJoCo environments in this process; None for others.

    Besides MuJoCo's integration state, Ant and Humanoid read body positions of the last step.
    """
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    states = []
    for env in getattr(envs, "envs", []):
        game = env.unwrapped
        spec = gym.registry[game.spec.id]  # its own wrappers could have a state too
        exact = str(spec.entry_point).startswith("gymnasium.envs.mujoco")
        if not exact or spec.additional_wrappers or not env.has_wrapper_attr("_elapsed_steps"):
            return None
        model, data = game.model, game.data
        integration = np.empty(mujoco.mj_stateSize(model, kind))
        mujoco.mj_getState(model, data, integration, kind)
        state = {"integration": torch.from_numpy(integration)}
        state |= {"xpos": torch.tensor(data.xpos), "xipos": torch.tensor(data.xipos)}
        state["rng"] = game.np_random.bit_generator.state
        state["elapsed_steps"] = env.get_wrapper_attr("_elapsed_steps")
        states.append(state)
    return states or None


def restore_envs(envs: gym.vector.VectorEnv, states: list[dict] | None) -> bool:
    """Put the states back; False if there are none."""
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    for env, state in zip(getattr(envs, "envs", []), states or []):
        model, data = env.unwrapped.model, env.unwrapped.data
        mujoco.mj_setState(model, data, state["integration"].numpy(), kind)
        data.xpos[:] = state["xpos"].numpy()
        data.xipos[:] = state["xipos"].numpy()
        env.unwrapped.np_random.bit_generator.state = state["rng"]
        env.set_wrapper_attr("_elapsed_steps", state["elapsed_steps"])
    return states is not None


def numpy_policy(network: nn.Sequential):
    """The network as a function of NumPy arrays: for one vector, a fifth of torch's time."""
    known = {nn.Tanh: np.tanh, nn.ReLU: lambda x: np.maximum(x, 0)}
    layers = []
    for module in network:
        if type(module) is nn.Linear and module.bias is not None:
            weight, bias = (p.detach().cpu().numpy() for p in module.parameters())
            layers.append(lambda x, weight=weight.T, bias=bias: x @ weight + bias)
        else:
            require(type(module) in known, f"numpy_policy lacks {module}: add it, or use agent.act")
            layers.append(known[type(module)])
    return lambda x: reduce(lambda x, layer: layer(x), layers, x)


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
    versions = {name: version(name) for name in ("torch", "gymnasium", "mujoco", "numpy")}
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
    video_dir = run_dir / f"eval_videos_{int(time.time())}" if args.capture_video else None
    env = make_env(args, video_dir)
    agent = Agent(env.observation_space, env.action_space, args)
    checkpoint = load_checkpoint(run_dir)
    load_weights(agent, checkpoint)
    obs_rms = RunningMeanStd(*(x.numpy() for x in checkpoint["obs_rms"]))
    torch.manual_seed(args.seed)
    returns = np.zeros(args.eval_episodes)
    for episode in tqdm(range(args.eval_episodes), unit="episode", leave=False):
        obs, _ = env.reset(seed=1_000_000 + episode)  # training begins at --seed
        done = False
        while not done:
            noise = agent.draw_noise(1)
            noise = torch.zeros_like(noise) if args.eval_deterministic else noise
            action = agent.act(torch.from_numpy(normalize_obs(obs_rms, obs[None], args)), noise)
            env_action = agent.env_action(action[0].numpy())
            obs, reward, terminated, truncated, _ = env.step(env_action)
            returns[episode] += reward
            done = terminated or truncated
    env.close()
    print(f"evaluation: {returns.mean():.1f} +- {returns.std():.1f} over {len(returns)} episodes")
    return returns.tolist()


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
