# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["torch>=2.11", "gymnasium[box2d,classic-control]>=1.4", "numpy>=1.26",
#                 "tensorboard>=2.18", "tqdm>=4.66", "tyro>=1.0", "moviepy>=2.1"]
# ///
"""PPO with a memory: ppo.py with the five LSTM details.

Run:    uv run ppo_lstm.py
Watch:  uvx tensorboard --logdir runs
Expect: CartPole without velocities ends at 494 to 500 after 500,000 steps (three seeds), in a
        minute or two on one core; with --no-lstm it stays at 50
Read:   beside ppo.py, down to the line of "=" below `train`. [L01] to [L05] are the LSTM details
        of "The 37 Implementation Details of PPO"; [S01] is ours.
Shapes: T steps of N environments make a batch of B = T * N samples; a minibatch holds all T steps
        of n environments, and its arrays are (T, n), not (M,). An observation has O numbers, which
        become F = 64 features; an action is one of A. The memory is the LSTM's h and c in one
        tensor (2, n, H), with H = 128.
Tune first: --vf-coef. Policy and value share a network, and values reach 100 here; so it is small,
        and the value loss is not clipped. Where returns are about 1, begin with 0.5.
Readers of CleanRL: episode_starts is CleanRL's dones (and RecurrentPPO's episode_starts in
        sb3-contrib); dones[t] says that step t ended an episode.
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
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

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
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run's directory
    seed: int = 1  # seed of weights, actions, minibatches and environments
    torch_deterministic: bool = True  # let cuDNN use deterministic kernels only
    cuda: bool = False  # train on a GPU; for networks this small a CPU should be faster
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "ppo"  # project in Weights & Biases
    wandb_entity: str | None = None  # team in Weights & Biases
    capture_video: bool = False  # record videos of environment 0 and of the evaluation

    # -- algorithm --
    env_id: str = "MaskedCartPole-v1"  # id of the environment, or module:id
    total_timesteps: int = 500_000  # environment steps in all, rounded down to whole batches
    learning_rate: float = 1e-3  # learning rate of Adam
    num_envs: int = 16  # environments stepped together [C01]
    num_steps: int = 128  # steps of each environment in a rollout
    anneal_lr: bool = True  # anneal the learning rate linearly to zero [C04]
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation [C05]
    num_minibatches: int = 4  # minibatches per epoch, each of whole environments [C06]
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # normalize advantages in each minibatch [C07]
    clip_coef: float = 0.2  # clip range of the probability ratio [C08] and of the value [C09]
    clip_vloss: bool = False  # clip the value loss [C09]
    ent_coef: float = 0.01  # coefficient of the entropy bonus [C10]
    vf_coef: float = 0.001  # coefficient of the value loss [C10]
    max_grad_norm: float = 0.5  # largest gradient norm; 0 turns clipping off [C11]
    target_kl: float | None = None  # stop after an epoch with a mean approx_kl above this [X03]
    anneal_clip: bool = False  # anneal clip_coef linearly to zero [X01]
    adam_eps: float = 1e-5  # epsilon of Adam [C03]
    ortho_init: bool = True  # orthogonal initial weights, or torch's default [C02]
    lstm: bool = True  # carry the memory from step to step, or empty it before every step
    bootstrap_truncation: bool = True  # bootstrap from the last state at a time limit [S01]

    # -- run --
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
def make_masked(env_id: str, velocities: list[int], **kwargs) -> gym.Env:
    """The environment with its velocities set to zero: an observation shows positions alone."""
    env = gym.make(env_id, disable_env_checker=True, **kwargs)
    seen = np.ones(env.observation_space.shape, np.float32)
    seen[velocities] = 0
    return gym.wrappers.TransformObservation(env, lambda obs: obs * seen, env.observation_space)


# MaskedCartPole-v1 and three more; other scripts take --env-id ppo_lstm:MaskedCartPole-v1
for env_id, velocities in {
    "CartPole-v1": [1, 3],
    "MountainCar-v0": [1],
    "Acrobot-v1": [4, 5],
    "LunarLander-v3": [2, 3, 5],
}.items():
    kwargs = {"env_id": env_id, "velocities": velocities}
    gym.register(f"Masked{env_id}", make_masked, kwargs=kwargs)


# -- agent --
def layer_init(layer: nn.Module, std: float, args: Args) -> nn.Module:
    """Orthogonal weights of gain `std` and zero biases (baselines/a2c/utils.py)."""
    if args.ortho_init:  # [C02] orthogonal initialization
        nn.init.orthogonal_(layer.weight, std)
        nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value of vector observations: two layers of 64 units, then an LSTM of 128."""

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.spaces.Discrete, args: Args):
        super().__init__()
        first = layer_init(nn.Linear(obs_space.shape[0], 64), 2**0.5, args)
        second = layer_init(nn.Linear(64, 64), 2**0.5, args)
        self.network = nn.Sequential(first, nn.Tanh(), second, nn.Tanh())
        self.lstm = nn.LSTM(64, 128)
        self.remembers = args.lstm
        if args.ortho_init:  # [L01] orthogonal weights of gain 1 and zero biases
            for name, param in self.lstm.named_parameters():
                init = nn.init.zeros_ if "bias" in name else nn.init.orthogonal_
                init(param)
        self.actor = layer_init(nn.Linear(128, int(action_space.n)), 0.01, args)
        self.critic = layer_init(nn.Linear(128, 1), 1.0, args)

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        """Features (m, F) of m observations (m, O), each by itself."""
        return self.network(obs)

    def forward(self, obs: torch.Tensor, episode_starts: torch.Tensor, lstm_state: torch.Tensor):
        """Logits (T, n, A) and values (T, n) of T steps of n environments, and the memory after.

        lstm_state (2, n, H): the memory before the first of them. episode_starts (T, n): 1 for the
        first step of an episode, before which the memory becomes zero. It is on the CPU, where
        Python reads from it which steps lie between two resets: those are one call of the LSTM.

            step                              0  1  2  3  4
            episode_starts of environment 0   0  0  0  0  0
            episode_starts of environment 1   0  0  1  0  0
            calls of the LSTM                 ----  -------
        """
        if not self.remembers:  # every step is a first one
            episode_starts = torch.ones_like(episode_starts)
        features = self.encode(obs.flatten(0, 1)).unflatten(0, obs.shape[:2])  # (T, n, F)
        keeps = (1 - episode_starts).to(obs.device)[:, :, None]  # (T, n, 1)
        cuts = [0, *(episode_starts[1:].any(1).nonzero().flatten() + 1).tolist(), len(obs)]
        hidden = []
        for start, end in zip(cuts, cuts[1:]):
            h, c = (lstm_state * keeps[start]).split(1)  # [L03] reset at the start of an episode
            outputs, (h, c) = self.lstm(features[start:end], (h, c))
            lstm_state = torch.cat((h, c))
            hidden.append(outputs)
        hidden = torch.cat(hidden)  # (T, n, H)
        return self.actor(hidden), self.critic(hidden).squeeze(-1), lstm_state

    @torch.no_grad()
    def act(self, obs, episode_starts, lstm_state: torch.Tensor, greedy: bool = False):
        """Actions (n,) at observations (n, O), sampled or the most probable, and the new memory."""
        logits, _, lstm_state = self(obs[None], episode_starts[None], lstm_state)
        if greedy:
            return logits[0].argmax(-1), lstm_state
        # Gumbel-max samples like Categorical(logits=logits), five times as fast on small batches
        noise = torch.empty(logits.shape).exponential_().log_()  # drawn on the CPU even for a GPU
        return (logits - noise.to(logits.device))[0].argmax(-1), lstm_state

    def get_value(self, obs: torch.Tensor, lstm_state: torch.Tensor) -> torch.Tensor:
        """V (n,) of observations (n, O), given the memory (2, n, H) before each."""
        no_resets = torch.zeros(1, len(obs))  # what a step led to is still of its episode
        return self(obs[None], no_resets, lstm_state)[1][0]

    def evaluate_actions(self, obs, actions, episode_starts, lstm_state: torch.Tensor):
        """Log-probability, entropy and value, each (T, n), of T steps, see `forward`."""
        logits, values, _ = self(obs, episode_starts, lstm_state)
        policy = Categorical(logits=logits, validate_args=False)
        return policy.log_prob(actions), policy.entropy(), values


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
    envs = make_envs(args, run_dir)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    agent = Agent(obs_space, action_space, args).to(device)
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

    # A rollout, in NumPy
    T, N, H = args.num_steps, args.num_envs, agent.lstm.hidden_size
    obs = np.zeros((T, N, *obs_space.shape), np.float32)
    next_obs = np.zeros_like(obs)  # what step t led to, before any reset
    actions = np.zeros((T, N), np.int64)
    rewards = np.zeros((T, N), np.float32)
    terminations = np.zeros((T, N), np.float32)  # 1: the task ended at this step
    dones = np.zeros((T, N), np.float32)  # 1: the episode ended at this step, for any reason
    episode_starts = np.ones((T + 1, N), np.float32)  # 1: this step begins an episode
    next_lstm_states = np.zeros((2, T, N, H), np.float32)  # the memory after each step

    global_step = (start_iteration - 1) * args.batch_size
    episodic_return, episodic_length = np.zeros(N), np.zeros(N)
    current_obs, _ = envs.reset(seed=first_seed)
    lstm_state = torch.zeros(2, N, H, device=device)  # [L02] the memory starts at zero
    log = Log(args, run_dir, checkpoint)
    for iteration in range(start_iteration, args.num_iterations + 1):
        frac = 1 - (iteration - 1) / args.num_iterations
        if args.anneal_lr:  # [C04] learning-rate annealing
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate
        clip_coef = args.clip_coef * (frac if args.anneal_clip else 1)  # [X01] clip-range annealing

        # -- rollout --
        initial_lstm_state = lstm_state  # no copy: nothing overwrites it
        episode_starts[0] = episode_starts[T]  # where the last rollout ended
        for t in range(T):  # [C01] vectorized architecture
            obs[t] = current_obs
            inputs = torch.from_numpy(obs[t]).to(device)
            begins = torch.from_numpy(episode_starts[t])
            action, lstm_state = agent.act(inputs, begins, lstm_state)
            actions[t] = action.cpu().numpy()
            next_lstm_states[:, t] = lstm_state.cpu().numpy()
            current_obs, reward, terminations[t], truncated, infos = envs.step(actions[t])
            dones[t] = np.logical_or(terminations[t], truncated)
            episode_starts[t + 1] = dones[t]
            next_obs[t] = current_obs
            rewards[t] = reward

            global_step += N
            log.step(N)
            episodic_return += reward
            episodic_length += 1
            for n in np.flatnonzero(dones[t]):  # current_obs[n] begins the next episode
                next_obs[t, n] = infos["final_obs"][n]
                log.episode(global_step, episodic_return[n], episodic_length[n])
                episodic_return[n] = episodic_length[n] = 0

        # -- advantages --
        b_obs = torch.from_numpy(obs).to(device)  # (T, N, O): the LSTM needs the order
        b_next_obs = torch.from_numpy(next_obs).to(device).flatten(0, 1)  # (B, O)
        b_next_lstm_states = torch.from_numpy(next_lstm_states).to(device).flatten(1, 2)
        b_actions = torch.from_numpy(actions).to(device)  # (T, N)
        b_episode_starts = torch.from_numpy(episode_starts[:T])  # on the CPU, see Agent.forward
        with torch.no_grad():  # the weights are still the rollout's: one pass for all steps
            b_logprobs, _, b_values = agent.evaluate_actions(
                b_obs, b_actions, b_episode_starts, initial_lstm_state
            )
            b_next_values = agent.get_value(b_next_obs, b_next_lstm_states)
        values = b_values.cpu().numpy()
        next_values = b_next_values.view(T, N).cpu().numpy()
        ends = terminations if args.bootstrap_truncation else dones  # [S01] (as published: dones)
        advantages = gae(rewards, values, next_values, ends, dones, args.gamma, args.gae_lambda)
        b_advantages = torch.from_numpy(advantages).to(device)

        # -- update --
        batch = {
            "obs": b_obs,
            "actions": b_actions,
            "episode_starts": b_episode_starts,
            "logprobs": b_logprobs,
            "values": b_values,
            "advantages": b_advantages,
            "returns": b_advantages + b_values,
        }
        stats = []  # of each minibatch
        for epoch in range(args.update_epochs):
            env_inds = torch.randperm(N)  # [L04] a minibatch holds whole environments, in order
            for mb_envs in env_inds.chunk(args.num_minibatches):  # [C06] every sample once an epoch
                mb = {name: tensor[:, mb_envs] for name, tensor in batch.items()}
                newlogprob, entropy, newvalue = agent.evaluate_actions(
                    mb["obs"],
                    mb["actions"],
                    mb["episode_starts"],
                    initial_lstm_state[:, mb_envs],  # [L05] replay from the start of the rollout
                )
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
    for name in f"{above_0} {at_least_0}".split():
        value = getattr(args, name)
        flag = f"--{name.replace('_', '-')}"
        require(0 <= value < math.inf, f"{flag} ({value}) must not be below 0, nor infinite")
        require(value or name not in above_0.split(), f"{flag} must be above 0")
    for name in ("gamma", "gae_lambda"):
        value = getattr(args, name)
        require(0 <= value <= 1, f"--{name.replace('_', '-')} ({value}) must be between 0 and 1")
    batch = f"--num-envs times --num-steps ({args.num_envs} * {args.num_steps})"
    sizes = f"--num-minibatches ({args.num_minibatches}) must divide --num-envs ({args.num_envs})"
    require(args.num_envs % args.num_minibatches == 0, sizes)
    alone = args.norm_adv and args.batch_size == args.num_minibatches
    require(not alone, f"{batch}: minibatches of one sample need --no-norm-adv")
    require(args.num_iterations, f"--total-timesteps ({args.total_timesteps}) is less than {batch}")
    require(not (args.resume and args.evaluate), "--resume trains, --evaluate plays: give one")
    require(args.eval_episodes or not args.evaluate, "--evaluate needs --eval-episodes above 0")
    is_id = re.fullmatch("[^.:][^:]*(:[^:]+)?", args.env_id)
    require(is_id, f"--env-id ({args.env_id}) is an id or module:id, not a path")
    found = args.evaluate or not args.track or getattr(find_spec("wandb"), "origin", None)
    require(found, "--track needs wandb (uv run --with wandb ...)")  # ./wandb has no origin
    found = not args.capture_video or find_spec("moviepy")
    require(found, "--capture-video needs moviepy (pip install moviepy)")
    found = args.evaluate or not args.cuda or torch.cuda.is_available()
    require(found, "--cuda finds no GPU (try --no-cuda)")


def check_runs(args: Args, checkpoint: dict | None, initial: dict | None) -> None:
    """Refuse to go on with a run, or to begin with its agent, if a flag that matters differs."""
    new = asdict(args)
    network_flags = ["lstm"]
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
    free += "capture_video checkpoint_seconds eval_episodes eval_deterministic".split()
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
        self.action_space = gym.spaces.Discrete(int(env.action_space.n))  # counted from 0
        self.first_action = int(env.action_space.start)

    def reset(self, **kwargs):
        obs, _ = self.env.reset(**kwargs)
        return self.plain(obs, self.observation_space.shape), {}

    def step(self, action):
        action = self.env.action_space.dtype.type(action + self.first_action)
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
    render = {"render_mode": "rgb_array"} if films else {}
    if "" not in sys.path:
        sys.path.append("")  # a module:id may be in the current folder, too
    try:
        env = gym.make(args.env_id, disable_env_checker=True, **render)
    except (gym.error.Error, ModuleNotFoundError) as error:
        hint = " (Atari: ppo_atari_lstm.py)" if isinstance(error, gym.error.UnregisteredEnv) else ""
        raise Refused(f"error: --env-id ({args.env_id}): {error}{hint}") from error
    except TypeError as error:
        require("argument 'render_mode'" not in str(error), f"--capture-video: {error}")
        raise  # the environment's own
    obs_space, action_space = env.observation_space, env.action_space
    is_vector = isinstance(obs_space, gym.spaces.Box) and len(obs_space.shape) == 1
    is_vector = is_vector and obs_space.shape[0] > 0
    other = "(gymnasium.wrappers.FlattenObservation makes one; images: ppo_pixels.py)"
    require(is_vector, f"{args.env_id} observes {obs_space}, not a vector {other}")
    hint = " (try ppo_continuous_mujoco.py)" if isinstance(action_space, gym.spaces.Box) else ""
    is_discrete = isinstance(action_space, gym.spaces.Discrete)
    require(is_discrete, f"{args.env_id} acts in {action_space}, not in Discrete(n){hint}")
    return PlainEnv(env)


def film(env: gym.Env, run_dir: Path, name: str) -> gym.Env:
    """The environment with videos of some episodes, in the directory of the run."""
    video_dir = run_dir / f"{name}_{int(time.time())}"
    print(f"videos: {video_dir}", flush=True)
    return Video(env, str(video_dir), disable_logger=True)


def try_env(args: Args, checkpoint: dict | None) -> None:
    """Refuse an environment, or the weights for it, before anything is written."""
    env = make_env(args, args.capture_video)
    if checkpoint:
        load_weights(Agent(env.observation_space, env.action_space, args), checkpoint)
    env.reset()  # its observation is checked
    if args.capture_video:
        os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")  # or pygame would swallow SIGTERM
        try:
            image = env.render()
        except Exception as error:  # every renderer fails in its own way
            raise Refused(f"error: --capture-video cannot render: {error!r}") from error
        require(np.ndim(image) > 2, "--capture-video cannot render: it returned no image")
    env.close()


def make_envs(args: Args, run_dir: Path) -> gym.vector.VectorEnv:
    """N environments that reset within the step that ends an episode (infos: final_obs)."""

    def first() -> gym.Env:
        env = make_env(args, args.capture_video)
        return film(env, run_dir, "videos") if args.capture_video else env

    makers = [first] + [lambda: make_env(args)] * (args.num_envs - 1)
    same_step = gym.vector.AutoresetMode.SAME_STEP
    return gym.vector.SyncVectorEnv(makers, copy=False, autoreset_mode=same_step)


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
        episode_starts, lstm_state = torch.ones(1), torch.zeros(2, 1, agent.lstm.hidden_size)
        episodic_return, done = 0.0, False
        while not done:
            inputs = torch.from_numpy(obs[None].astype(np.float32))
            greedy = args.eval_deterministic
            action, lstm_state = agent.act(inputs, episode_starts, lstm_state, greedy)
            episode_starts[:] = 0
            obs, reward, terminated, truncated, _ = env.step(action.item())
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
