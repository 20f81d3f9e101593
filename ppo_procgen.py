# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = [
#     "torch>=2.11,<2.14",
#     "gymnasium>=1.2",
#     "procgen-mirror>=0.10.7",
#     "numpy>=1.26",
#     "tensorboard>=2.16",
#     "tqdm>=4.66",
#     "tyro>=1.0",
#     "moviepy>=2.1",
# ]
# [tool.uv]
# # Procgen asks for older ones and runs on these
# override-dependencies = ["gym==0.26.2", "numpy>=2", "glfw>=2.10", "imageio-ffmpeg>=0.5"]
# ///
"""PPO for the 16 games of Procgen, in one file: read it as a patch of ppo_atari.py.

Run:    uv run ppo_procgen.py --env-id starpilot
Look:   tensorboard --logdir runs
Expect: on starpilot a return of 4 after 0.5M steps and 52 minutes on one core (one seed); published: 34 after 25M
Read:   `Args`, then `train` from top to bottom; `[C05]`, `[M08]`, ... name the implementation details of
        "The 37 Implementation Details of Proximal Policy Optimization" (Huang et al., ICLR blog track 2022) and
        `[P..]` those of PPG, which `diff ppo_procgen.py ppg_procgen.py` shows.
Sources: PPO (arXiv:1707.06347), GAE (arXiv:1506.02438), openai/baselines ea25b9e (ppo2), Procgen (arXiv:1912.01588),
        PPG (arXiv:2009.04416), openai/phasic-policy-gradient 7295473.
"""

import contextlib
import difflib
import io
import json
import math
import os
import platform
import shlex
import shutil
import signal
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
    exp_name: str = Path(__file__).stem
    """name of this experiment, part of the run directory's name"""
    seed: int = 1
    """seed of the networks, the action noise, the minibatch order and the environments"""
    torch_deterministic: bool = True
    """let cuDNN use deterministic kernels only"""
    cuda: bool = True
    """train on the GPU if there is one"""
    track: bool = False
    """also log to Weights & Biases (WANDB_MODE=offline needs no account)"""
    wandb_project_name: str = "ppo"
    """project in Weights & Biases"""
    wandb_entity: str | None = None
    """team in Weights & Biases"""
    capture_video: bool = False
    """record videos of environment 0 into the run directory"""

    # -- algorithm --
    env_id: str = "starpilot"
    """the game: bigfish, bossfight, caveflyer, chaser, climber, coinrun, dodgeball, fruitbot, heist, jumper, leaper,
    maze, miner, ninja, plunder or starpilot"""
    total_timesteps: int = 25_000_000
    """environment steps in all; a last partial batch is not collected"""
    learning_rate: float = 5e-4
    """learning rate of Adam"""
    num_envs: int = 64
    """number of environments stepped together [C01]"""
    num_steps: int = 256
    """steps of each environment per rollout"""
    anneal_lr: bool = False
    """lower the learning rate linearly to zero over the run [C04]"""
    gamma: float = 0.999
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation; 1 gives Monte Carlo advantages [C05]"""
    num_minibatches: int = 8
    """minibatches per epoch [C06]"""
    update_epochs: int = 3
    """passes over each rollout"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch [C07]"""
    clip_coef: float = 0.2
    """clip range of the probability ratio, and of the value if clip_vloss [C08]"""
    clip_vloss: bool = True
    """clip the value around the value at rollout time [C09]"""
    ent_coef: float = 0.01
    """weight of the entropy bonus [C10]"""
    vf_coef: float = 0.5
    """weight of the value loss [C10]"""
    max_grad_norm: float = 0.5
    """largest norm of the gradient of all parameters together; 0 disables clipping [C11]"""
    target_kl: float | None = None
    """end the epochs of an iteration once the mean KL (k3) of an epoch exceeds this [X03]"""

    # -- details --
    anneal_clip: bool = False
    """lower clip_coef linearly to zero over the run [X01]"""
    adam_eps: float = 1e-5
    """epsilon of Adam [C03]"""
    ortho_init: bool = True
    """orthogonal weights and zero biases of the heads, whatever init says; otherwise torch's default [C02]"""
    init: str = "torch"
    """initialization of the layers: normed [P07], orthogonal [C02] or torch (its default)"""
    layer_norm: bool = False
    """normalize the last hidden layer (LayerNorm)"""
    shared_network: bool = True
    """one convolutional network for policy and value; otherwise two [C13]"""
    norm_reward: bool = True
    """divide rewards by the running deviation of the discounted return [M08]"""
    reward_gamma: float = 0.999
    """discount factor of that return [P10]"""
    norm_reward_rollout: bool = False
    """let a whole rollout enter that deviation before its first reward is divided by it [P10]"""
    clip_reward: float = 10.0
    """clip normalized rewards to this range; 0 disables clipping [M09]"""

    # -- environments and speed --
    distribution_mode: str = "easy"
    """difficulty of the levels, easy or hard"""
    num_levels: int = 0
    """levels to train on; 0: all of them, without end"""
    start_level: int = 0
    """first of num_levels levels"""
    env_threads: int = 4
    """threads that step the games; 0: none of their own"""
    compile: bool = True
    """compile the update with CUDA graphs on a GPU; on a CPU it runs eagerly"""
    micro_batch: int = 0
    """samples of a minibatch that are computed at a time; 0: 64 on a CPU, all on a GPU"""
    bf16: bool = False
    """run the convolutional network (of PPG: in the auxiliary phase) in bfloat16; heads and losses stay float32"""

    # -- checkpoints and evaluation --
    resume: str | None = None
    """continue the run in this run directory; its configuration is taken from there"""
    evaluate: str | None = None
    """play the agent of this run directory instead of training"""
    checkpoint_every: int = 10
    """iterations between checkpoints; the end (in PPG of a phase too) and Ctrl-C always write one; 0: only those"""
    eval_episodes: int = 10
    """games played after training or by evaluate, side by side; 0 disables"""
    eval_levels: str = "train"
    """levels of these games: train (those of training) or unseen (all above those of training)"""
    eval_deterministic: bool = False
    """evaluate the most probable action instead of sampled actions"""

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        return self.batch_size // self.num_minibatches

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size


def parse_args(argv: list[str] | None = None) -> Args:
    """Read the command line. With --resume or --evaluate the run's own configuration is the default of every flag."""
    args = tyro.cli(Args, args=argv)
    run_dir = args.resume or args.evaluate
    if run_dir is None:
        return args
    stored = Args(**load_checkpoint(run_dir)["args"] | {"resume": None, "evaluate": None})
    given = tyro.cli(Args, args=argv, default=stored)
    free = "resume evaluate track wandb_project_name wandb_entity capture_video checkpoint_every eval_episodes"
    changed = []
    for name, value in asdict(stored).items():
        if getattr(given, name) != value and name not in [*free.split(), "eval_deterministic", "eval_levels"]:
            changed.append(f"{name} ({value} to {getattr(given, name)})")
    if changed:
        sys.exit(f"error: {run_dir} keeps its configuration; the command line would change {', '.join(changed)}")
    return given


def check_args(args: Args) -> None:
    """Stop with one line that names flags and numbers if a value makes no sense; nothing has been created yet."""
    positive = {"total_timesteps", "learning_rate", "num_envs", "num_steps", "num_minibatches", "clip_coef"}
    positive |= {"adam_eps", "update_epochs"}
    highs = {"gamma": 1, "gae_lambda": 1, "reward_gamma": 1, "seed": 1e9, "num_levels": 1e9, "start_level": 1e9}
    for name, value in asdict(args).items():
        high = highs.get(name, sys.float_info.max)
        if isinstance(value, (int, float)) and not (0 <= value <= high and (value or name not in positive)):
            bound = "greater than 0" if name in positive else f"a number from 0 to {high:g}"
            sys.exit(f"error: --{name.replace('_', '-')} ({value}) must be {bound}")
    choices = {"distribution_mode": ("easy", "hard"), "init": ("torch", "orthogonal", "normed")}
    choices |= {"eval_levels": ("train", "unseen")}
    for name, values in choices.items():
        if getattr(args, name) not in values:
            sys.exit(f"error: --{name.replace('_', '-')} ({getattr(args, name)}) must be one of {', '.join(values)}")
    if args.eval_levels == "unseen" and not args.num_levels:
        sys.exit("error: --eval-levels unseen needs --num-levels: with 0 training uses all levels")
    game_name(args.env_id)  # stops if there is no such game
    batch = f"num_envs * num_steps ({args.num_envs} * {args.num_steps} = {args.batch_size})"
    if args.batch_size % args.num_minibatches:
        sys.exit(f"error: {batch} must be divisible by --num-minibatches ({args.num_minibatches})")
    if args.total_timesteps < args.batch_size:
        sys.exit(f"error: --total-timesteps ({args.total_timesteps}) is less than one batch of {batch}")
    if args.capture_video and find_spec("moviepy") is None:
        sys.exit("error: --capture-video needs moviepy (uv run --with moviepy ...)")
    if args.evaluate and not args.eval_episodes:
        sys.exit("error: --evaluate with --eval-episodes (0) would play nothing")
    if args.track and find_spec("wandb") is None:
        sys.exit("error: --track needs wandb (uv run --with wandb ...)")


# -- environment --
def import_procgen():
    """The package procgen, without what the old gym prints when it is imported."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            import procgen
        return procgen
    except ImportError as error:
        sys.exit(f"error: Procgen is not installed (pip install procgen-mirror): {error}")


def game_name(env_id: str) -> str:
    """`starpilot` for starpilot, procgen-starpilot-v0 and procgen:procgen-starpilot-v0."""
    games = import_procgen().env.ENV_NAMES
    name = env_id.removeprefix("procgen:").removeprefix("procgen-").removesuffix("-v0")
    if name not in games:
        close = difflib.get_close_matches(name, games, cutoff=0.5)
        sys.exit(f"error: --env-id ({env_id}) is no Procgen game" + f"; did you mean {', '.join(close)}?" * bool(close))
    return name


class Procgen(gym.vector.VectorEnv):
    """`num_envs` games behind Gymnasium's vector interface: observations (N, 64, 64, 3) uint8 RGB, 15 actions.

    The step that ends an episode returns the first observation of the next one (SAME_STEP). `video_dir` gets videos of
    game 0 on RecordVideo's schedule.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP, "render_fps": 15}

    def __init__(self, args: Args, video_dir: Path, seed: int):
        self.games = import_procgen().ProcgenGym3Env(
            num=args.num_envs,
            env_name=game_name(args.env_id),
            distribution_mode=args.distribution_mode,
            num_levels=args.num_levels,
            start_level=args.start_level,
            rand_seed=seed,  # of the order of levels and of what happens in them
            num_threads=args.env_threads,
        )
        self.num_envs = args.num_envs
        self.single_observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.single_action_space = gym.spaces.Discrete(self.games.ac_space.eltype.n)
        self.video_dir, self.frames, self.episode = video_dir if args.capture_video else None, None, -1

    def reset(self, *, seed=None, options=None):
        """The first observations. It resets nothing and takes no seed: the games began, seeded, when they were made."""
        self.next_video()
        return self.games.observe()[1]["rgb"], {}

    def step(self, actions):
        if self.frames is not None:
            self.frames.append(self.games.observe()[1]["rgb"][0].repeat(4, axis=0).repeat(4, axis=1))
        self.games.act(actions)
        reward, obs, done = self.games.observe()
        if done[0]:
            self.next_video()
        # ~[S01] time limits end an episode like a failure: Procgen neither marks them nor shows the last state
        return obs["rgb"], reward, done, np.zeros_like(done), {}

    def next_video(self) -> None:
        """Write the frames of game 0, if it was recorded, and begin the next recording, if it is its turn."""
        if self.video_dir is None:
            return
        from gymnasium.utils.save_video import capped_cubic_video_schedule
        from moviepy import ImageSequenceClip

        if self.frames:
            self.video_dir.mkdir(parents=True, exist_ok=True)
            path = self.video_dir / f"rl-video-episode-{self.episode}.mp4"
            ImageSequenceClip(self.frames, fps=self.metadata["render_fps"]).write_videofile(str(path), logger=None)
        self.episode += 1
        self.frames = [] if capped_cubic_video_schedule(self.episode) else None

    def close_extras(self, **kwargs) -> None:
        self.next_video()
        self.games.close()


class RunningMeanStd:
    """Running mean and variance in float64 (baselines/common/running_mean_std.py), shared by all environments."""

    def __init__(self, shape: tuple[int, ...] = ()):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, x: np.ndarray) -> None:
        """Merge the rows of x (n, *shape) into the statistics (Chan et al.'s parallel variance); n may be 0."""
        n, x = len(x), np.asarray(x, np.float64)
        if n == 0:
            return
        batch_mean, batch_var = (x[0], 0.0) if n == 1 else (x.mean(axis=0), x.var(axis=0))
        delta, total = batch_mean - self.mean, self.count + n
        self.mean = self.mean + delta * (n / total)
        self.var = (self.var * self.count + batch_var * n + delta**2 * (self.count * n / total)) / total
        self.count = total

    def state_dict(self) -> dict:
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict) -> None:
        self.mean, self.var, self.count = state["mean"].numpy(), state["var"].numpy(), state["count"].item()


def normalize_reward(return_rms: RunningMeanStd, reward: np.ndarray, args: Args) -> np.ndarray:
    """Raw rewards, (N,) or (n, N), -> scaled rewards, with frozen statistics (vec_normalize.py)."""
    if args.norm_reward:
        reward = reward / np.sqrt(return_rms.var + 1e-8)  # [M08] reward scaling: no mean is subtracted
        if args.clip_reward:
            reward = reward.clip(-args.clip_reward, args.clip_reward)  # [M09] reward clipping
    return reward


# -- agent --
def layer_init(layer: nn.Linear | nn.Conv2d, scale: float, init: str) -> nn.Module:
    """Initialize by name: orthogonal (baselines/a2c/utils.py), normed (openai/phasic-policy-gradient/torch_util.py:
    torch's random weights, those of each output unit scaled to norm `scale`), both without bias; torch: as it is."""
    if init == "orthogonal":  # [C02] orthogonal initialization of weights, constant initialization of biases
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    elif init == "normed":  # [P07] normed initialization
        layer.weight.data = scale * nn.functional.normalize(layer.weight.data.flatten(1)).view_as(layer.weight)
        nn.init.zeros_(layer.bias)
    return layer


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut, (n, channels, h, w) -> the same."""

    def __init__(self, channels: int, args: Args):
        super().__init__()
        scale = 6**-0.25  # the square root of 1 / sqrt(3 stacks) / sqrt(2 blocks)
        self.conv0 = layer_init(nn.Conv2d(channels, channels, 3, padding=1), scale, args.init)
        self.conv1 = layer_init(nn.Conv2d(channels, channels, 3, padding=1), scale, args.init)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv1(self.conv0(x.relu()).relu())


def impala_cnn(args: Args) -> nn.Sequential:
    """The large network of IMPALA (arXiv:1802.01561, figure 3) without LSTM, (n, 3, 64, 64) -> (n, 256)."""
    layers = []
    for c_in, c_out in ((3, 16), (16, 32), (32, 32)):
        layers.append(layer_init(nn.Conv2d(c_in, c_out, 3, padding=1), 1.0, args.init))
        layers += [nn.MaxPool2d(3, stride=2, padding=1), ResidualBlock(c_out, args), ResidualBlock(c_out, args)]
    layers += [nn.ReLU(), nn.Flatten(), layer_init(nn.Linear(32 * 8 * 8, 256), 1.4, args.init)]
    layers += [nn.LayerNorm(256)] if args.layer_norm else []
    return nn.Sequential(*layers, nn.ReLU())


class Agent(nn.Module):
    """Policy over A actions and values on images, (n, 64, 64, 3) uint8."""

    def __init__(self, num_actions: int, args: Args):
        super().__init__()
        self.network = impala_cnn(args)
        self.value_network = None if args.shared_network else impala_cnn(args)  # [C13] shared or separate networks
        head_init = "orthogonal" if args.ortho_init else "torch"
        self.actor = layer_init(nn.Linear(256, num_actions), 0.01, head_init)
        self.critic = layer_init(nn.Linear(256, 1), 1.0, head_init)
        self.bf16 = args.bf16

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (n, A) and values (n,) of observations (n, 64, 64, 3) uint8."""
        x = obs.permute(0, 3, 1, 2) / 255  # [A09] scaling; as uint8 they take a quarter of the memory
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            hidden = self.network(x)
            value_hidden = self.value_network(x) if self.value_network else hidden
        return self.actor(hidden.float()), self.critic(value_hidden.float()).squeeze(1)

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Action, log-probability and value, each (n,), at observations; `noise` (n, A) is Gumbel, or 0 for the mode.

        The largest logit plus Gumbel noise is a sample of the categorical distribution (Gumbel-max).
        """
        logits, value = self(obs)
        action = (logits + noise).argmax(1)
        return action, logits.log_softmax(1).gather(1, action[:, None]).squeeze(1), value

    def evaluate_actions(self, obs, action) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probability, entropy and value, each (n,), of stored actions (n,) at observations."""
        logits, value = self(obs)
        policy = Categorical(logits=logits, validate_args=False)
        return policy.log_prob(action), policy.entropy(), value


# -- algorithm --
def gae(rewards, values, next_values, terminations, dones, gamma: float, gae_lambda: float) -> np.ndarray:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16), all arrays (T, N), returns advantages (T, N).

    `next_values[t]` is V of the state that followed transition t, before any reset. A termination cuts the bootstrap,
    any end of an episode (`dones`: terminated or truncated) cuts the trace.
    """
    delta = rewards + gamma * next_values * (1 - terminations) - values
    decay = gamma * gae_lambda * (1 - dones)
    advantages = np.zeros_like(delta)
    lastgaelam = np.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        advantages[t] = lastgaelam = delta[t] + decay[t] * lastgaelam  # [C05] GAE
    return advantages


def ppo_loss(newlogprob, entropy, newvalue, mb: dict, clip_coef, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's loss and its diagnostics over the valid samples of a minibatch (arXiv:1707.06347; baselines/ppo2/model.py).

    newlogprob, entropy, newvalue: (M,) under the current parameters. mb: (M,) tensors logprobs, advantages, returns,
    values (of rollout time) and valid (1, or 0 for reset rows). clip_coef: () tensor. Returns the loss () and
    policy loss, value loss, entropy, k1 and k3 estimates of KL(old || new) and clip fraction as one tensor (6,).
    """
    valid = mb["valid"] / mb["valid"].sum().clamp(min=1)  # weights that sum to 1
    logratio = newlogprob - mb["logprobs"]
    ratio = logratio.exp()
    pg_loss1 = -mb["advantages"] * ratio
    pg_loss2 = -mb["advantages"] * ratio.clamp(1 - clip_coef, 1 + clip_coef)
    pg_loss = (valid * torch.max(pg_loss1, pg_loss2)).sum()  # [C08] clipped surrogate objective

    v_loss = (newvalue - mb["returns"]) ** 2
    if args.clip_vloss:  # [C09] value-loss clipping
        v_clipped = mb["values"] + (newvalue - mb["values"]).clamp(-clip_coef, clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - mb["returns"]) ** 2)
    v_loss = 0.5 * (valid * v_loss).sum()

    entropy_loss = (valid * entropy).sum()
    loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss  # [C10] overall loss and entropy bonus
    with torch.no_grad():  # KL estimators: http://joschu.net/blog/kl-approx.html
        old_approx_kl = (valid * -logratio).sum()
        approx_kl = (valid * (ratio - 1 - logratio)).sum()
        clipfrac = (valid * ((ratio - 1).abs() > clip_coef)).sum()
        return loss, torch.stack([pg_loss, v_loss, entropy_loss, old_approx_kl, approx_kl, clipfrac])


def adam_step(params: list, grads: list, adam: dict, lr: torch.Tensor, args: Args) -> torch.Tensor:
    """Clip the gradients and make one step of Adam (arXiv:1412.6980, algorithm 1); returns the gradient norm ().

    What clip_grad_norm_ and torch.optim.Adam compute, but on one flat vector (P,) and without Python-side state, so
    that it compiles: with the loss, a whole update of 64x64 networks takes 160 us instead of 400.
    """
    grad = torch.cat([g.flatten() for g in grads])  # (P,)
    grad_norm = grad.norm()
    if args.max_grad_norm:  # [C11] global gradient clipping
        grad = grad * (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1)
    adam["step"] += 1
    adam["exp_avg"].lerp_(grad, 1 - 0.9)
    adam["exp_avg_sq"].lerp_(grad**2, 1 - 0.999)
    mean, var = adam["exp_avg"] / (1 - 0.9 ** adam["step"]), adam["exp_avg_sq"] / (1 - 0.999 ** adam["step"])
    delta = lr * mean / (var.sqrt() + args.adam_eps)  # [C03] Adam's epsilon
    with torch.no_grad():
        for param, d in zip(params, delta.split([p.numel() for p in params])):
            param -= d.view_as(param)
    return grad_norm


def part_size(obs: torch.Tensor, args: Args) -> int:
    """Samples that the network computes at a time."""
    return args.micro_batch or (64 if obs.device.type == "cpu" else len(obs))


def accumulate(loss_of, params: list, mb: dict, args: Args) -> tuple[list, torch.Tensor]:
    """Gradients and diagnostics of a mean over a minibatch, `loss_of(mb)`, computed in parts and added up.

    The network keeps what the gradient of one part needs, not of all: less memory, and less time where that fits the
    caches of a CPU.
    """
    grads, stats = [], 0
    for tensors in zip(*(tensor.split(part_size(mb["obs"], args)) for tensor in mb.values())):
        share = len(tensors[0]) / len(mb["obs"])
        loss, part_stats = loss_of(dict(zip(mb, tensors)))
        part_grads = torch.autograd.grad(share * loss, params)
        grads = [grad + part_grad for grad, part_grad in zip(grads, part_grads)] if grads else part_grads
        stats = stats + share * part_stats
    return grads, stats


def update(agent: Agent, adam: dict, batch: dict, mb_inds, lr, clip_coef, args: Args) -> torch.Tensor:
    """One optimizer step on the samples `mb_inds` (M,); returns ppo_loss's diagnostics and the gradient norm (7,).

    This is what --compile turns into one graph; `lr` and `clip_coef` are () tensors lest it compiles them in.
    """
    mb = {name: b[mb_inds] for name, b in batch.items()}
    if args.norm_adv:  # [C07] advantage normalization per minibatch, biased deviation as in baselines
        centered = mb["advantages"] - mb["advantages"].mean()
        mb["advantages"] = centered / (centered.std(correction=0) + 1e-8)
    params = list(agent.parameters())

    def loss_of(part: dict) -> tuple[torch.Tensor, torch.Tensor]:
        return ppo_loss(*agent.evaluate_actions(part["obs"], part["actions"]), part, clip_coef, args)

    grads, stats = accumulate(loss_of, params, mb, args)
    grad_norm = adam_step(params, grads, adam, lr, args)
    return torch.cat([stats, grad_norm.detach()[None]])


def compiled(functions: list, device: torch.device, written: list[torch.Tensor]) -> list:
    """Each function as one graph of static shape, with CUDA graphs on a GPU; as it is if there is no C++ compiler.

    `written` are the tensors that they change besides those of a module: CUDA graphs need them at a fixed address.
    """
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "clang++", "cl")):
        print("no C++ compiler found: the update runs eagerly (install g++, or say --no-compile)")
        return functions
    torch._dynamo.config.trace_autograd_ops = True  # lets torch.autograd.grad be part of the graph
    for tensor in written:
        torch._dynamo.mark_static_address(tensor)
    options = {"triton.cudagraphs": True} if device.type == "cuda" else {"cpp_wrapper": True}
    return [torch.compile(function, fullgraph=True, dynamic=False, options=options) for function in functions]


# -- checkpoint, evaluation, provenance --
def save_checkpoint(run_dir: Path, checkpoint: dict) -> None:
    """Write checkpoint.pt under a temporary name, then rename it: a crash at any moment leaves a whole file."""
    temporary = run_dir / "checkpoint.tmp"
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, run_dir / "checkpoint.pt")
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(run_dir: str | Path) -> dict:
    """Read checkpoint.pt of a run directory; only plain tensors and numbers are accepted, so nothing in it can run."""
    path = Path(run_dir) / "checkpoint.pt"
    if not path.is_file():
        sys.exit(f"error: there is no checkpoint at {path}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["script"] != Path(__file__).stem or checkpoint["args"].keys() != asdict(Args()).keys():
            raise ValueError("of another script")
        return checkpoint
    except Exception as error:
        sys.exit(f"error: {path} is torn, or no checkpoint of {Path(__file__).name} ({type(error).__name__})")


def load_agent(agent: nn.Module, checkpoint: dict) -> None:
    """Put the weights of a checkpoint in place, if it is one of this environment's shape."""
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError as error:
        sys.exit(f"error: the checkpoint does not fit {checkpoint['args']['env_id']}: {' '.join(str(error).split())}")


def provenance(args: Args) -> dict:
    """What reproduces this run: configuration, command, commit, versions and hardware."""
    git = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = next((line.split(": ")[1] for line in cpuinfo.splitlines() if "model name" in line), platform.processor())
    gpu = [torch.cuda.get_device_name()] if args.cuda and torch.cuda.is_available() else []
    packages = ["torch", "gymnasium", "procgen-mirror", "gym3", "numpy"]
    return {
        "args": asdict(args),
        "command": shlex.join(sys.argv),
        "commit": commit,
        "versions": {"python": platform.python_version()} | {package: version(package) for package in packages},
        "hardware": ", ".join([cpu, f"{os.cpu_count()} cores", *gpu]),
    }


def open_logs(args: Args, run_dir: Path, checkpoint: dict | None):
    """TensorBoard writer and episodes.csv of a new run directory, or of a resumed one cut back to its checkpoint."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if checkpoint is None:
            with open(run_dir / "config.json", "x") as config:  # "x": never into the directory of another run
                json.dump(provenance(args), config, indent=2)
            shutil.copy(__file__, run_dir)
        episodes = open(run_dir / "episodes.csv", "a")
        episodes.truncate(checkpoint["episodes_size"] if checkpoint else 0)
        episodes.seek(0, os.SEEK_END)
        if checkpoint is None:
            episodes.write("step,return,length,seconds\n")
        if args.track:
            import wandb

            names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": run_dir.name}
            wandb.init(**names, dir=run_dir, config=asdict(args), sync_tensorboard=True, save_code=True)
        writer = SummaryWriter(run_dir, purge_step=checkpoint["global_step"] + 1 if checkpoint else None)
        writer.add_text("hyperparameters", "\n".join(f"    {name}: {value}" for name, value in asdict(args).items()))
        return writer, episodes
    except OSError as error:
        sys.exit(f"error: cannot write the run directory {run_dir} ({error})")


def evaluate(args: Args, run_dir: Path) -> list[float]:
    """Undiscounted, unscaled returns of `eval_episodes` games of the run's checkpoint, played side by side."""
    checkpoint = load_checkpoint(run_dir)
    n = args.eval_episodes
    eval_args = replace(args, num_envs=n)
    if args.eval_levels == "unseen":  # all above those of training
        start_level = args.start_level + args.num_levels
        eval_args = replace(eval_args, start_level=start_level, num_levels=2**31 - 1 - start_level)
    eval_seed = 1_000_000 + args.seed  # not the seeds of training
    envs = Procgen(eval_args, run_dir / "eval_videos", eval_seed)
    num_actions = int(envs.single_action_space.n)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    agent = Agent(num_actions, args).to(device, memory_format=torch.channels_last)
    load_agent(agent, checkpoint)
    generator = torch.Generator().manual_seed(eval_seed)
    obs, _ = envs.reset()
    returns = np.zeros(n)  # (n,) of the first game of each environment
    playing = np.ones(n, bool)  # (n,)
    while playing.any():
        noise = -torch.empty(n, num_actions).exponential_(generator=generator).log()
        noise = torch.zeros_like(noise) if args.eval_deterministic else noise
        with torch.no_grad():
            action, _, _ = agent.act(torch.from_numpy(obs).to(device), noise.to(device))
        obs, reward, terminated, truncated, _ = envs.step(action.cpu().numpy())
        returns += reward * playing
        playing &= ~(terminated | truncated)
    envs.close()
    kind = "most probable actions" if args.eval_deterministic else "sampled actions"
    kind += f", {args.eval_levels} levels" * bool(args.num_levels)
    print(f"evaluation: {returns.mean():.1f} +- {returns.std():.1f} over {n} games, {kind}")
    return returns.tolist()


def train(args: Args) -> dict:
    """Train, or only play with args.evaluate; returns the run directory, counters and returns."""
    # -- set-up --
    check_args(args)
    if args.evaluate:
        return {"run_dir": args.evaluate, "eval_returns": evaluate(args, Path(args.evaluate))}
    checkpoint = load_checkpoint(args.resume) if args.resume else None
    if checkpoint and checkpoint["iteration"] == args.num_iterations:
        sys.exit(f"error: {args.resume} is complete ({checkpoint['global_step']} steps), there is nothing to resume")
    run_name = f"{args.env_id.replace('/', '-')}__{args.exp_name}__{args.seed}__{int(time.time())}"
    run_dir = Path(args.resume or f"runs/{run_name}")
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.manual_seed(args.seed)  # the only generator that this script draws from

    videos = f"videos_{checkpoint['iteration']}" if checkpoint else "videos"  # a resumed run keeps the old ones
    envs = Procgen(args, run_dir / videos, args.seed)
    num_actions = int(envs.single_action_space.n)
    agent = Agent(num_actions, args).to(device, memory_format=torch.channels_last)
    num_params = sum(p.numel() for p in agent.parameters())
    adam = {"exp_avg": torch.zeros(num_params), "exp_avg_sq": torch.zeros(num_params), "step": torch.zeros(())}
    adam = {name: tensor.to(device) for name, tensor in adam.items()}
    return_rms = RunningMeanStd()
    lr, clip_coef = torch.zeros((), device=device), torch.zeros((), device=device)

    # Storage of one rollout: T = num_steps, N = num_envs, B = T * N
    T, N = args.num_steps, args.num_envs
    obs_shape = envs.single_observation_space.shape
    obs = torch.zeros((T + 1, N, *obs_shape), dtype=torch.uint8, device=device)  # (T + 1, N, 64, 64, 3)
    actions = torch.zeros((T, N), dtype=torch.long, device=device)  # (T, N)
    logprobs, values = torch.zeros((T, N), device=device), torch.zeros((T + 1, N), device=device)  # row T follows
    rewards = np.zeros((T, N), np.float32)  # (T, N) normalized after the rollout
    discounted_returns = np.zeros((T, N))  # (T, N) of raw rewards, from the start of the episode
    terminations = np.zeros((T, N), np.float32)  # (T, N) 1: the transition at t ended its episode for good
    dones = np.zeros((T, N), np.float32)  # (T, N) 1: terminated or truncated
    valid = np.ones((T, N), bool)  # (T, N) every row is a transition: Procgen resets in the step that ends an episode
    metrics = torch.zeros(args.update_epochs, args.num_minibatches, 7, device=device)

    # What one iteration leaves to the next
    discounted_return, episodic_return, episodic_length = np.zeros(N), np.zeros(N), np.zeros(N)  # (N,) of raw rewards
    start_iteration, global_step, seconds, recent_returns = 1, 0, 0.0, deque(maxlen=100)
    next_obs, _ = envs.reset()
    if checkpoint:
        load_agent(agent, checkpoint)
        adam = {name: tensor.to(device) for name, tensor in checkpoint["adam"].items()}
        torch.set_rng_state(checkpoint["rng"])
        start_iteration, global_step = checkpoint["iteration"] + 1, checkpoint["global_step"]
        seconds, recent_returns = checkpoint["seconds"], deque(checkpoint["recent_returns"], maxlen=100)
        return_rms.load_state_dict(checkpoint["return_rms"])
        envs.games.set_state([state.numpy().tobytes() for state in checkpoint["envs"]])
        next_obs, discounted_return, episodic_return, episodic_length = (a.numpy() for a in checkpoint["carried"])

    fast = args.compile and device.type == "cuda"  # not in the loop: PPG may resume with an auxiliary phase
    [update_step] = compiled([update], device, [*adam.values()]) if fast else [update]

    writer, episodes = open_logs(args, run_dir, checkpoint)
    done_rows = (start_iteration - 1) * args.batch_size
    bar = tqdm(total=args.num_iterations * args.batch_size, initial=done_rows, unit="step", disable=None)
    signals = []  # the first SIGINT or SIGTERM ends the run after its iteration, a second one at once
    on_signal = lambda signum, _: signals.append(signum) or signal.signal(signum, signal.SIG_DFL)  # noqa: E731
    old_handlers = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
    start_time, first_step, last_line = time.time() - seconds, global_step, 0.0
    kept = f"checkpoint.pt of iteration {start_iteration - 1} is good" if checkpoint else "no checkpoint.pt yet"

    for iteration in range(start_iteration, args.num_iterations + 1):
        frac = 1 - (iteration - 1) / args.num_iterations
        lr.fill_(args.learning_rate * (frac if args.anneal_lr else 1))  # [C04] Adam learning-rate annealing
        clip_coef.fill_(args.clip_coef * (frac if args.anneal_clip else 1))  # [X01] clip-range annealing

        # -- rollout --
        rollout_start = time.time()
        noise = -torch.empty(T, N, num_actions).exponential_().log().to(device)  # (T, N, A) Gumbel
        with torch.no_grad(), torch.autocast(device.type, enabled=False):  # keeps --bf16's weights from step to step
            for t in range(T):  # [C01] vectorized architecture: N environments, segments of fixed length
                obs[t] = torch.from_numpy(next_obs)
                actions[t], logprobs[t], values[t] = agent.act(obs[t], noise[t])
                next_obs, reward, terminated, truncated, _ = envs.step(actions[t].cpu().numpy())  # CPU-GPU sync
                done = terminated | truncated
                rewards[t], terminations[t], dones[t] = reward, terminated, done

                global_step += N
                episodic_return += reward
                episodic_length += 1
                discounted_returns[t] = discounted_return = args.reward_gamma * discounted_return + reward

                for n in np.flatnonzero(done):
                    recent_returns.append(float(episodic_return[n]))
                    writer.add_scalar("charts/episodic_return", episodic_return[n], global_step)
                    writer.add_scalar("charts/episodic_length", episodic_length[n], global_step)
                    at = f"{time.time() - start_time:.2f}"
                    episodes.write(f"{global_step},{episodic_return[n]:.6g},{episodic_length[n]:.0f},{at}\n")
                    discounted_return[n] = episodic_return[n] = episodic_length[n] = 0
        obs[T] = torch.from_numpy(next_obs)
        # [P10] reward normalizer: statistics first, of one step or of the whole rollout, then scaling
        for rows in np.array_split(np.arange(T), 1 if args.norm_reward_rollout else T):
            return_rms.update(discounted_returns[rows].ravel())
            rewards[rows] = normalize_reward(return_rms, rewards[rows], args)

        # -- advantages --
        update_start = time.time()
        with torch.no_grad():
            values[T] = agent(obs[T])[1]
        np_values = values.cpu().numpy()  # (T + 1, N) CPU-GPU sync
        next_values = np_values[1:]  # after an end it is of the next episode and cut by `terminations`
        advantages = gae(rewards, np_values[:T], next_values, terminations, dones, args.gamma, args.gae_lambda)
        returns = advantages + np_values[:T]  # (T, N)

        # -- update --
        batch = {"obs": obs[:T], "actions": actions, "logprobs": logprobs, "values": values[:T]}
        for name, array in {"advantages": advantages, "returns": returns, "valid": valid.astype(np.float32)}.items():
            batch[name] = torch.from_numpy(array).to(device)
        batch = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}  # (T, N, ...) to (B, ...)
        for epoch in range(args.update_epochs):
            b_inds = torch.randperm(args.batch_size)  # [C06] every sample once an epoch, in random order
            for i, mb_inds in enumerate(b_inds.to(device).split(args.minibatch_size)):
                metrics[epoch, i] = update_step(agent, adam, batch, mb_inds, lr, clip_coef, args)
            if args.target_kl is not None and metrics[epoch, :, 4].mean() > args.target_kl:  # [X03] early stop on KL
                break

        # -- log --
        used = metrics[: epoch + 1].flatten(0, 1)  # [C12] debug variables: means over all minibatches
        mean, largest = torch.stack([used.mean(0), used.amax(0)]).tolist()  # CPU-GPU sync, once an iteration
        names = "policy_loss value_loss entropy old_approx_kl approx_kl clipfrac grad_norm".split()
        losses = dict(zip(names, mean)) | {"old_approx_kl_max": largest[3], "approx_kl_max": largest[4]}
        if not all(math.isfinite(value) for value in mean):
            sys.exit(f"error: iteration {iteration} of {run_dir} has losses that are not finite ({losses}); {kept}")
        target, residual = returns[valid], advantages[valid]
        losses["explained_variance"] = (
            1 - float(residual.var() / target.var()) if valid.any() and target.var() > 0 else math.nan
        )
        now = time.time()
        scalars = {f"losses/{name}": value for name, value in losses.items()}
        scalars |= {"time/rollout": update_start - rollout_start, "time/update": now - update_start}
        sps = (global_step - first_step) / (now - start_time - seconds)
        for name, value in (scalars | {"charts/learning_rate": lr.item(), "charts/SPS": sps}).items():
            writer.add_scalar(name, value, global_step)
        mean_return = float(np.mean(recent_returns)) if recent_returns else math.nan
        line = f"return {mean_return:.1f}, KL {losses['approx_kl']:.4f}, {sps:.0f} steps/s"
        bar.set_postfix_str(line, refresh=False)
        bar.update(args.batch_size)
        if bar.disable and (now - last_line > 10 or iteration == args.num_iterations):  # not a terminal: plain lines
            left = (args.num_iterations - iteration) * args.batch_size / sps
            print(f"step {global_step} of {args.total_timesteps}, {line}, {left:.0f} s left", flush=True)
            last_line = now

        # -- checkpoint --
        ending = signals or iteration == args.num_iterations
        saving = ending or (args.checkpoint_every and iteration % args.checkpoint_every == 0)
        try:
            episodes.flush()
            if saving:
                writer.flush()
                carried = (next_obs, discounted_return, episodic_return, episodic_length)
                state = {"script": Path(__file__).stem, "args": asdict(args), "iteration": iteration}
                state |= {"global_step": global_step, "seconds": time.time() - start_time, "rng": torch.get_rng_state()}
                state |= {"agent": agent.state_dict(), "adam": adam}
                games = [torch.frombuffer(bytearray(game), dtype=torch.uint8) for game in envs.games.get_state()]
                state |= {"envs": games, "carried": [torch.from_numpy(array) for array in carried]}
                state |= {"return_rms": return_rms.state_dict()}
                state |= {"recent_returns": list(recent_returns), "episodes_size": episodes.tell()}
                save_checkpoint(run_dir, state)
                kept = f"checkpoint.pt of iteration {iteration} is good"
        except (OSError, RuntimeError) as error:
            sys.exit(f"error: cannot write to {run_dir} ({error}); {kept}")
        if ending:
            break

    # -- end --
    for closable in (bar, envs, episodes):
        closable.close()
    for signum, handler in old_handlers.items():
        signal.signal(signum, handler)
    result = {"run_dir": str(run_dir), "iteration": iteration, "global_step": global_step, "return": mean_return}
    again = f"python {sys.argv[0]} --%s {shlex.quote(str(run_dir))}"
    if iteration < args.num_iterations:
        print(f"stopped after {global_step} steps; to go on: {again % 'resume'}")
    elif args.eval_episodes:
        result["eval_returns"] = evaluate(args, run_dir)
        writer.add_scalar("eval/episodic_return", np.mean(result["eval_returns"]), global_step)
    writer.close()
    print(f"run: {run_dir}\nevaluate: {again % 'evaluate'}\nreproduce: python {shlex.join(sys.argv)}")
    return result


if __name__ == "__main__":
    train(parse_args())
