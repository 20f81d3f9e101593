# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = [
#     "torch>=2.11,<2.14",
#     "gymnasium[box2d,classic-control,mujoco]>=1.2",
#     "numpy>=1.26",
#     "tensorboard>=2.16",
#     "tqdm>=4.66",
#     "tyro>=1.0",
#     "moviepy>=2.1",
# ]
# ///
"""PPO for continuous control: every Gymnasium env with vector observations and a Box action space, in one file.

Run:    uv run ppo_continuous_mujoco.py --env-id HalfCheetah-v4
Look:   tensorboard --logdir runs
Expect: a return of 1,750 after 1M steps and two minutes on one core (median of 5 seeds; one reached 4,100)
Read:   `Args`, then `train` from top to bottom; `[C05]`, `[M06]`, ... name the implementation details of
        "The 37 Implementation Details of Proximal Policy Optimization" (Huang et al., ICLR blog track 2022).
Sources: PPO (arXiv:1707.06347), GAE (arXiv:1506.02438), openai/baselines ea25b9e (ppo2, vec_normalize.py).
"""

import json
import math
import multiprocessing
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import deque
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.distributions import Normal
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
    cuda: bool = False
    """train on the GPU; a 64x64 network is faster on the CPU"""
    track: bool = False
    """also log to Weights & Biases (WANDB_MODE=offline needs no account)"""
    wandb_project_name: str = "ppo"
    """project in Weights & Biases"""
    wandb_entity: str | None = None
    """team in Weights & Biases"""
    capture_video: bool = False
    """record videos of environment 0 into the run directory (backend sync)"""

    # -- algorithm --
    env_id: str = "HalfCheetah-v4"
    """id of the environment"""
    total_timesteps: int = 1_000_000
    """environment steps in all; a last partial batch is not collected"""
    learning_rate: float = 3e-4
    """learning rate of Adam"""
    num_envs: int = 1
    """number of environments stepped together [C01]"""
    num_steps: int = 2048
    """steps of each environment per rollout"""
    anneal_lr: bool = True
    """lower the learning rate linearly to zero over the run [C04]"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation; 1 gives Monte Carlo advantages [C05]"""
    num_minibatches: int = 32
    """minibatches per epoch [C06]"""
    update_epochs: int = 10
    """passes over each rollout"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch [C07]"""
    clip_coef: float = 0.2
    """clip range of the probability ratio, and of the value if clip_vloss [C08]"""
    clip_vloss: bool = True
    """clip the value around the value at rollout time [C09]"""
    ent_coef: float = 0.0
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
    """orthogonal weights and zero biases; otherwise torch's default initialization [C02]"""
    shared_network: bool = False
    """one trunk for policy and value instead of two networks [C13] [M04]"""
    activation: str = "tanh"
    """activation of the hidden layers, tanh or relu"""
    init_log_std: float = 0.0
    """initial log standard deviation of the policy [M02]"""
    clip_actions: bool = True
    """clip actions to the action space before the environment sees them [M05]"""
    squash_actions: bool = False
    """squash actions into the action space with tanh instead of clipping them [S03]"""
    scale_actions: bool = False
    """let actions of -1 and 1 be the bounds of the action space, whatever its units [S04]"""
    norm_obs: bool = True
    """normalize observations by their running mean and variance [M06]"""
    clip_obs: float = 10.0
    """clip normalized observations to this range; 0 disables clipping [M07]"""
    norm_reward: bool = True
    """divide rewards by the running deviation of the discounted return [M08]"""
    clip_reward: float = 10.0
    """clip normalized rewards to this range; 0 disables clipping [M09]"""
    bootstrap_truncation: bool = True
    """bootstrap from the value of the last state at a time limit; off: as if terminated, as in baselines [S01]"""
    recompute_advantages: bool = False
    """recompute values and advantages before every epoch, not only before the first"""

    # -- environments and speed --
    env_backend: str = "sync"
    """sync (Gymnasium, this process), async (Gymnasium, worker processes) or envpool (C++ threads)"""
    env_threads: int = 0
    """threads of EnvPool; 0 lets EnvPool choose"""
    compile: bool = True
    """compile the update (with CUDA graphs on a GPU); without a C++ compiler it runs eagerly"""

    # -- checkpoints and evaluation --
    resume: str | None = None
    """continue the run in this run directory; its configuration is taken from there"""
    evaluate: str | None = None
    """play the agent of this run directory instead of training"""
    checkpoint_every: int = 50
    """iterations between checkpoints; the end of the run and Ctrl-C always write one; 0: only those"""
    eval_episodes: int = 10
    """episodes played after training or by evaluate; 0 disables"""
    eval_deterministic: bool = False
    """evaluate the mean action instead of sampled actions"""

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
        if getattr(given, name) != value and name not in [*free.split(), "eval_deterministic"]:
            changed.append(f"{name} ({value} to {getattr(given, name)})")
    if changed:
        sys.exit(f"error: {run_dir} keeps its configuration; the command line would change {', '.join(changed)}")
    return given


def check_args(args: Args) -> None:
    """Stop with one line that names flags and numbers if a value makes no sense; nothing has been created yet."""
    positive = {"total_timesteps", "learning_rate", "num_envs", "num_steps", "num_minibatches", "update_epochs"}
    positive |= {"clip_coef", "adam_eps"}
    for name, value in asdict(args).items():
        low = -1000 if name == "init_log_std" else 0
        high = 1 if name in ("gamma", "gae_lambda") else sys.float_info.max
        if isinstance(value, (int, float)) and not (low <= value <= high and (value or name not in positive)):
            bound = "greater than 0" if name in positive else f"a number from {low} to {high:g}"
            sys.exit(f"error: --{name.replace('_', '-')} ({value}) must be {bound}")
    for name, choices in {"activation": ("tanh", "relu"), "env_backend": ("sync", "async", "envpool")}.items():
        if getattr(args, name) not in choices:
            sys.exit(f"error: --{name.replace('_', '-')} ({getattr(args, name)}) must be one of {', '.join(choices)}")
    batch = f"num_envs * num_steps ({args.num_envs} * {args.num_steps} = {args.batch_size})"
    if args.batch_size % args.num_minibatches:
        sys.exit(f"error: {batch} must be divisible by --num-minibatches ({args.num_minibatches})")
    if args.total_timesteps < args.batch_size:
        sys.exit(f"error: --total-timesteps ({args.total_timesteps}) is less than one batch of {batch}")
    if args.capture_video and args.env_backend != "sync" and not args.evaluate:
        sys.exit(f"error: --capture-video needs --env-backend sync, not {args.env_backend}")
    if args.capture_video and find_spec("moviepy") is None:
        sys.exit("error: --capture-video needs moviepy (uv run --with moviepy ...)")
    if args.evaluate and not args.eval_episodes:
        sys.exit("error: --evaluate with --eval-episodes (0) would play nothing")
    if args.track and find_spec("wandb") is None:
        sys.exit("error: --track needs wandb (uv run --with wandb ...)")
    if args.cuda and not args.evaluate and not torch.cuda.is_available():
        sys.exit(f"error: --cuda, but torch {torch.__version__} finds no GPU")


# -- environment --
def check_spaces(args: Args, obs_space: gym.Space, action_space: gym.Space) -> None:
    """Stop with one line if the environment does not map vectors to Box actions."""
    for what, space in {"observation": obs_space, "action": action_space}.items():
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            sys.exit(f"error: --env-id ({args.env_id}) has {what} space {space}; this script needs a vector Box")
    for flag in ("squash_actions", "scale_actions"):
        if getattr(args, flag) and not action_space.is_bounded():
            name = flag.replace("_", "-")
            sys.exit(f"error: --{name} needs a bounded action space, {args.env_id} has {action_space}")


def make_env(args: Args, video_dir: Path | None = None) -> gym.Env:
    """One Gymnasium environment; with `video_dir` it records episodes there on RecordVideo's schedule."""
    if multiprocessing.parent_process():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which stops its workers
    if video_dir and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(cache(print))  # each of MuJoCo's warnings once, not once per environment
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # v4 is asked for on purpose
            env = gym.make(args.env_id, render_mode="rgb_array" if video_dir else None, disable_env_checker=True)
    except (gym.error.Error, ImportError) as error:
        sys.exit(f"error: --env-id ({args.env_id}): {error}")
    if isinstance(env.observation_space, gym.spaces.Dict):
        env = gym.wrappers.FlattenObservation(env)
    check_spaces(args, env.observation_space, env.action_space)
    if video_dir:
        try:
            env.reset()
            if renderer := getattr(env.unwrapped, "mujoco_renderer", None):  # Gymnasium 1.4 films where the robot was
                model = env.unwrapped.model
                names = [model.camera(i).name for i in range(model.ncam)]
                renderer.camera_id = names.index("track") if "track" in names else -1
            env.render()
            env = gym.wrappers.RecordVideo(env, str(video_dir), disable_logger=True)
        except Exception as error:  # every renderer fails in its own way
            sys.exit(
                f"error: --capture-video cannot render {args.env_id} ({error}); MuJoCo without a screen needs "
                "libegl1 (MUJOCO_GL=egl) or libosmesa6 (MUJOCO_GL=osmesa)"
            )
    return env


def make_envs(args: Args, video_dir: Path, seed: int) -> gym.vector.VectorEnv:
    """`num_envs` environments behind Gymnasium's vector interface.

    sync and async reset in the step that ends an episode (SAME_STEP; the last observation is in infos["final_obs"]),
    EnvPool in the step after it (NEXT_STEP; that step ignores its action and brings reward 0, see [S02]).
    """
    if args.env_backend != "envpool":
        videos = [video_dir if args.capture_video and i == 0 else None for i in range(args.num_envs)]
        make_fns = [lambda video_dir=video_dir: make_env(args, video_dir) for video_dir in videos]
        vector_env = gym.vector.SyncVectorEnv if args.env_backend == "sync" else gym.vector.AsyncVectorEnv
        return vector_env(make_fns, copy=False, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    try:
        import envpool

        config = {"num_envs": args.num_envs, "num_threads": args.env_threads, "seed": seed}
        envs = envpool.make_gymnasium(args.env_id, **config)
    except ImportError:
        sys.exit("error: --env-backend envpool needs EnvPool (uv run --with envpool ...); sync and async do not")
    except Exception as error:
        sys.exit(f"error: --env-id ({args.env_id}): EnvPool cannot make it ({error})")
    check_spaces(args, envs.single_observation_space, envs.single_action_space)
    return envs


def env_states(envs: gym.vector.VectorEnv, states: list[dict] | None = None) -> list[dict] | None:
    """The exact state of Gymnasium's MuJoCo environments in this process, after writing `states` into them if given.

    Besides MuJoCo's integration state, Ant and Humanoid read body positions that their last step left.
    Returns None where the state cannot be had (other backends, other simulators).
    """
    result, kind = [], mujoco.mjtState.mjSTATE_INTEGRATION
    for i, env in enumerate(getattr(envs, "envs", [])):
        if not isinstance(getattr(env.unwrapped, "data", None), mujoco.MjData):
            return None
        model, data, rng = env.unwrapped.model, env.unwrapped.data, env.unwrapped.np_random.bit_generator
        if states:
            mujoco.mj_setState(model, data, states[i]["integration"].numpy(), kind)
            data.xpos[:], data.xipos[:] = states[i]["xpos"].numpy(), states[i]["xipos"].numpy()
            rng.state = states[i]["rng"]
            env.set_wrapper_attr("_elapsed_steps", states[i]["elapsed_steps"])
        integration = np.empty(mujoco.mj_stateSize(model, kind))
        mujoco.mj_getState(model, data, integration, kind)
        arrays = {"integration": integration, "xpos": data.xpos, "xipos": data.xipos}
        state = {name: torch.tensor(array) for name, array in arrays.items()}
        result.append(state | {"rng": rng.state, "elapsed_steps": env.get_wrapper_attr("_elapsed_steps")})
    return result or None


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


def normalize_obs(obs_rms: RunningMeanStd, obs: np.ndarray, args: Args) -> np.ndarray:
    """Raw observations (n, O) -> network inputs (n, O) float32, with frozen statistics (vec_normalize.py)."""
    if args.norm_obs:
        obs = (obs - obs_rms.mean) / np.sqrt(obs_rms.var + 1e-8)  # [M06] observation normalization
        if args.clip_obs:
            obs = obs.clip(-args.clip_obs, args.clip_obs)  # [M07] observation clipping
    return obs.astype(np.float32)


def normalize_reward(return_rms: RunningMeanStd, reward: np.ndarray, args: Args) -> np.ndarray:
    """Raw rewards, (N,) or (n, N), -> scaled rewards, with frozen statistics (vec_normalize.py)."""
    if args.norm_reward:
        reward = reward / np.sqrt(return_rms.var + 1e-8)  # [M08] reward scaling: no mean is subtracted
        if args.clip_reward:
            reward = reward.clip(-args.clip_reward, args.clip_reward)  # [M09] reward clipping
    return reward


# -- agent --
def layer_init(layer: nn.Linear, std: float, args: Args) -> nn.Linear:
    """Orthogonal weights of gain `std` and zero bias (baselines/a2c/utils.py ortho_init), or torch's default."""
    if args.ortho_init:  # [C02] orthogonal initialization of weights, constant initialization of biases
        nn.init.orthogonal_(layer.weight, std)
        nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Diagonal Gaussian policy and value function on vectors of O observations and A action components."""

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.spaces.Box, args: Args):
        super().__init__()
        activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[args.activation]

        def trunk() -> list[nn.Module]:
            first, second = nn.Linear(obs_space.shape[0], 64), nn.Linear(64, 64)
            return [layer_init(first, 2**0.5, args), activation(), layer_init(second, 2**0.5, args), activation()]

        policy_trunk = trunk()
        value_trunk = policy_trunk if args.shared_network else trunk()  # [C13] [M04] separate networks unless asked
        num_actions = action_space.shape[0]
        self.actor_mean = nn.Sequential(*policy_trunk, layer_init(nn.Linear(64, num_actions), 0.01, args))
        self.critic = nn.Sequential(*value_trunk, layer_init(nn.Linear(64, 1), 1.0, args))
        self.actor_logstd = nn.Parameter(torch.full((num_actions,), args.init_log_std))  # [M02] state-independent
        self.low, self.high = action_space.low, action_space.high  # (A,) NumPy
        self.squash, self.clip, self.scale_actions = args.squash_actions, args.clip_actions, args.scale_actions
        self.register_buffer("scale", torch.as_tensor((self.high - self.low) / 2).float(), persistent=False)

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """V of observations (..., O) -> (...)."""
        return self.critic(obs).squeeze(-1)

    def evaluate_actions(self, obs, action, noise=None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probability, entropy and value, each (n,), of stored actions (n, A) at observations (n, O).

        A squashed policy stores the action before tanh; its entropy has no closed form and is estimated with the
        sample that `noise` (n, A), drawn from a standard normal distribution, gives.
        """
        mean = self.actor_mean(obs)  # (n, A)
        std = self.actor_logstd.exp().expand_as(mean)
        normal = Normal(mean, std, validate_args=False)  # [M01] continuous actions via normal distributions
        logprob = normal.log_prob(action).sum(1)  # [M03] independent action components
        entropy = normal.entropy().sum(1)
        if self.squash:  # [S03] squashed actions
            logprob = logprob - self.squash_log_det(action)
            entropy = entropy + self.squash_log_det(mean + std * noise)
        return logprob, entropy, self.get_value(obs)

    def squash_log_det(self, action: torch.Tensor) -> torch.Tensor:
        """log |d(env action) / d(action)| of the squashed policy, (n, A) -> (n,).

        log(1 - tanh(u)^2) is written as 2 (log 2 - u - softplus(-2 u)), which does not overflow.
        """
        return (self.scale.log() + 2 * (math.log(2) - action - nn.functional.softplus(-2 * action))).sum(1)

    def numpy_policy(self):
        """The mean network as a NumPy function (n, O) -> (n, A), a copy of the weights if they are on a GPU.

        One observation takes NumPy 5 us, torch 18 us and a GPU longer, and a rollout is thousands of them in turn.
        """
        layers = [m for m in self.actor_mean if isinstance(m, nn.Linear)]
        weights = [(m.weight.detach().cpu().numpy().T, m.bias.detach().cpu().numpy()) for m in layers]
        activation = np.tanh if isinstance(self.actor_mean[1], nn.Tanh) else lambda x: np.maximum(x, 0)

        def policy(obs: np.ndarray) -> np.ndarray:
            for weight, bias in weights[:-1]:
                obs = activation(obs @ weight + bias)
            return obs @ weights[-1][0] + weights[-1][1]

        return policy

    def env_action(self, action: np.ndarray) -> np.ndarray:
        """The action (n, A) that the environment gets for a sampled one; the sampled one is stored."""
        action = np.tanh(action) if self.squash else action
        if self.squash or self.scale_actions:  # [S04] scaled actions
            action = self.low + (action + 1) / 2 * (self.high - self.low)
        return action.clip(self.low, self.high) if self.clip else action  # [M05] action clipping


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
    advantages = mb["advantages"]
    if args.norm_adv:  # [C07] advantage normalization per minibatch, biased deviation as in baselines
        centered = advantages - (valid * advantages).sum()
        advantages = centered / ((valid * centered**2).sum().sqrt() + 1e-8)

    logratio = newlogprob - mb["logprobs"]
    ratio = logratio.exp()
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)
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


def update(agent: Agent, adam: dict, batch: dict, mb_inds, lr, clip_coef, args: Args) -> torch.Tensor:
    """One optimizer step on the samples `mb_inds` (M,); returns ppo_loss's diagnostics and the gradient norm (7,).

    This is what --compile turns into one graph; `lr` and `clip_coef` are () tensors lest it compiles them in.
    """
    mb = {name: b[mb_inds] for name, b in batch.items()}
    newlogprob, entropy, newvalue = agent.evaluate_actions(mb["obs"], mb["actions"], mb.get("noise"))
    loss, stats = ppo_loss(newlogprob, entropy, newvalue, mb, clip_coef, args)
    params = list(agent.parameters())
    grad_norm = adam_step(params, torch.autograd.grad(loss, params), adam, lr, args)
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


def load_agent(agent: nn.Module, obs_rms: RunningMeanStd, checkpoint: dict) -> None:
    """Put weights and observation statistics of a checkpoint in place, if it is one of this environment's shape."""
    try:
        agent.load_state_dict(checkpoint["agent"])
        obs_rms.load_state_dict(checkpoint["obs_rms"])
    except RuntimeError as error:
        sys.exit(f"error: the checkpoint does not fit {checkpoint['args']['env_id']}: {' '.join(str(error).split())}")


def provenance(args: Args) -> dict:
    """What reproduces this run: configuration, command, commit, versions and hardware."""
    git = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = next((line.split(": ")[1] for line in cpuinfo.splitlines() if "model name" in line), platform.processor())
    gpu = [torch.cuda.get_device_name()] if args.cuda and torch.cuda.is_available() else []
    packages = ["torch", "gymnasium", "mujoco", "numpy"] + ["envpool"] * (args.env_backend == "envpool")
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
    """Undiscounted, unclipped returns of `eval_episodes` episodes of the run's checkpoint, with frozen statistics."""
    checkpoint = load_checkpoint(run_dir)
    env = make_env(args, run_dir / "eval_videos" if args.capture_video else None)
    agent, obs_rms = Agent(env.observation_space, env.action_space, args), RunningMeanStd()
    load_agent(agent, obs_rms, checkpoint)
    policy = agent.numpy_policy()
    std = 0.0 if args.eval_deterministic else agent.actor_logstd.detach().exp().numpy()
    rng = np.random.default_rng(args.seed)
    returns = []
    for episode in range(args.eval_episodes):
        obs, _ = env.reset(seed=1_000_000 + args.seed + episode)  # not the seeds of training
        done, episodic_return = False, 0.0
        while not done:
            action = policy(normalize_obs(obs_rms, obs[None], args)) + std * rng.standard_normal(env.action_space.shape)
            obs, reward, terminated, truncated, _ = env.step(agent.env_action(action)[0].astype(np.float32))
            done, episodic_return = terminated or truncated, episodic_return + float(reward)
        returns.append(episodic_return)
    env.close()
    kind = "mean actions" if args.eval_deterministic else "sampled actions"
    print(f"evaluation: {np.mean(returns):.1f} +- {np.std(returns):.1f} over {len(returns)} episodes, {kind}")
    return returns


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
    device = torch.device("cuda" if args.cuda else "cpu")
    torch.set_num_threads(1)  # 64x64 networks are slower on more
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.manual_seed(args.seed)  # the only generator that this script draws from

    env_seed = args.seed + (checkpoint["iteration"] if checkpoint else 0)
    videos = f"videos_{checkpoint['iteration']}" if checkpoint else "videos"  # a resumed run keeps the old ones
    envs = make_envs(args, run_dir / videos, env_seed)
    next_step_reset = envs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.NEXT_STEP
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    agent = Agent(obs_space, action_space, args).to(device)
    num_params = sum(p.numel() for p in agent.parameters())
    adam = {"exp_avg": torch.zeros(num_params), "exp_avg_sq": torch.zeros(num_params), "step": torch.zeros(())}
    adam = {name: tensor.to(device) for name, tensor in adam.items()}
    lr, clip_coef = torch.zeros((), device=device), torch.zeros((), device=device)
    obs_rms, return_rms = RunningMeanStd(obs_space.shape), RunningMeanStd()

    # Storage of one rollout: T = num_steps, N = num_envs, O observations, A action components, B = T * N
    T, N = args.num_steps, args.num_envs
    obs = np.zeros((T + 1, N, *obs_space.shape), np.float32)  # (T + 1, N, O) normalized; row T follows the rollout
    actions = np.zeros((T, N, *action_space.shape), np.float32)  # (T, N, A) as sampled, before clipping or squashing
    rewards = np.zeros((T, N), np.float32)  # (T, N) normalized
    terminations = np.zeros((T, N), np.float32)  # (T, N) 1: the transition at t ended its episode for good
    dones = np.zeros((T, N), np.float32)  # (T, N) 1: terminated or truncated
    valid = np.ones((T, N), bool)  # (T, N) False: a reset row, no transition
    metrics = torch.zeros(args.update_epochs, args.num_minibatches, 7, device=device)

    # What one iteration leaves to the next
    next_valid = np.ones(N, bool)  # (N,)
    discounted_return, episodic_return, episodic_length = np.zeros(N), np.zeros(N), np.zeros(N)  # (N,) of raw rewards
    start_iteration, global_step, seconds, recent_returns = 1, 0, 0.0, deque(maxlen=100)
    raw_obs, _ = envs.reset(seed=None if args.env_backend == "envpool" else env_seed)  # EnvPool's is fixed when made
    if checkpoint:
        load_agent(agent, obs_rms, checkpoint)
        adam = {name: tensor.to(device) for name, tensor in checkpoint["adam"].items()}
        return_rms.load_state_dict(checkpoint["return_rms"])
        torch.set_rng_state(checkpoint["rng"])
        start_iteration, global_step = checkpoint["iteration"] + 1, checkpoint["global_step"]
        seconds, recent_returns = checkpoint["seconds"], deque(checkpoint["recent_returns"], maxlen=100)
    if checkpoint and checkpoint["envs"]:
        env_states(envs, checkpoint["envs"])
        next_obs, discounted_return, episodic_return, episodic_length = (a.numpy() for a in checkpoint["carried"])
    else:
        if checkpoint:
            print(f"the state of {args.env_id} ({args.env_backend}) cannot be saved: new episodes start")
        obs_rms.update(raw_obs)
        next_obs = normalize_obs(obs_rms, raw_obs, args)

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
        policy = agent.numpy_policy()
        noise = torch.randn(actions.shape).numpy() * agent.actor_logstd.detach().exp().cpu().numpy()  # (T, N, A)
        final_obs = []  # (t, n, last observation) of truncated episodes whose environment is reset already
        for t in range(T):  # [C01] vectorized architecture: N environments, segments of fixed length
            obs[t], valid[t] = next_obs, next_valid
            actions[t] = policy(next_obs) + noise[t]  # its value and log-probability are computed after the rollout
            raw_obs, reward, terminated, truncated, infos = envs.step(agent.env_action(actions[t]))
            done = terminated | truncated
            terminations[t], dones[t] = terminated, done

            global_step += int(np.count_nonzero(next_valid))  # real transitions only
            episodic_return += reward
            episodic_length += next_valid
            # Normalizers in baselines' order: statistics first, with this step in them, then scaling.
            discounted_return = args.gamma * discounted_return + reward
            return_rms.update(discounted_return[next_valid])
            rewards[t] = normalize_reward(return_rms, reward, args)
            if next_step_reset:  # [S02] the row after an end only resets; the observation before it starts nothing
                next_valid = ~done
            obs_rms.update(raw_obs[next_valid])
            next_obs = normalize_obs(obs_rms, raw_obs, args)

            for n in np.flatnonzero(done):
                recent_returns.append(float(episodic_return[n]))
                writer.add_scalar("charts/episodic_return", episodic_return[n], global_step)
                writer.add_scalar("charts/episodic_length", episodic_length[n], global_step)
                at = f"{time.time() - start_time:.2f}"
                episodes.write(f"{global_step},{episodic_return[n]:.6g},{episodic_length[n]:.0f},{at}\n")
                if truncated[n] and not next_step_reset:
                    final_obs.append((t, n, normalize_obs(obs_rms, infos["final_obs"][n], args)))
                discounted_return[n] = episodic_return[n] = episodic_length[n] = 0
        obs[T] = next_obs
        if not args.bootstrap_truncation:
            terminations[:] = dones  # baselines: a time limit ends the episode like a failure

        # -- update --
        update_start = time.time()
        if iteration == start_iteration:  # not before the first rollout: loading the compiler takes seconds
            [update_step] = compiled([update], device, [*adam.values()]) if args.compile else [update]
        t_obs = torch.from_numpy(obs).to(device)  # (T + 1, N, O)
        batch = {"obs": t_obs[:T].flatten(0, 1), "actions": torch.from_numpy(actions).to(device).flatten(0, 1)}
        batch["valid"] = torch.from_numpy(valid).to(device).flatten().float()  # (B,)
        for epoch in range(args.update_epochs):
            # -- advantages --
            if epoch == 0 or args.recompute_advantages:
                with torch.no_grad():
                    values = agent.get_value(t_obs).cpu().numpy()  # (T + 1, N)
                    next_values = values[1:].copy()  # (T, N); after an end it is cut by `terminations`, or see [S01]
                    if final_obs:  # [S01] a time limit is no end: bootstrap from the state that it cut off
                        ts, ns, last_obs = zip(*final_obs)
                        last_values = agent.get_value(torch.from_numpy(np.stack(last_obs)).to(device))
                        next_values[ts, ns] = last_values.cpu().numpy()
                advantages = gae(rewards, values[:T], next_values, terminations, dones, args.gamma, args.gae_lambda)
                returns = advantages + values[:T]  # (T, N)
                for name, array in {"advantages": advantages, "values": values[:T], "returns": returns}.items():
                    batch[name] = torch.from_numpy(array).to(device).flatten()
            if args.squash_actions:  # a fresh sample for the entropy, drawn here: the compiled update draws nothing
                batch["noise"] = torch.randn(batch["actions"].shape).to(device)
            if epoch == 0:
                with torch.no_grad():
                    # The weights are still those of the rollout, so the ratio of the first minibatch is 1.
                    batch["logprobs"] = agent.evaluate_actions(batch["obs"], batch["actions"], batch.get("noise"))[0]

            # -- minibatches --
            b_inds = torch.randperm(args.batch_size).to(device)  # [C06] every sample once an epoch, in random order
            for i, mb_inds in enumerate(b_inds.split(args.minibatch_size)):
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
        try:
            episodes.flush()
            if ending or (args.checkpoint_every and iteration % args.checkpoint_every == 0):
                writer.flush()
                carried = (next_obs, discounted_return, episodic_return, episodic_length)
                state = {"script": Path(__file__).stem, "args": asdict(args), "iteration": iteration}
                state |= {"global_step": global_step, "seconds": time.time() - start_time, "rng": torch.get_rng_state()}
                state |= {"agent": agent.state_dict(), "adam": adam}
                state |= {"obs_rms": obs_rms.state_dict(), "return_rms": return_rms.state_dict()}
                state |= {"envs": env_states(envs), "carried": [torch.from_numpy(array) for array in carried]}
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
