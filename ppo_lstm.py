# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = [
#     "torch>=2.11,<2.14",
#     "gymnasium[box2d,classic-control]>=1.2",
#     "ale-py>=0.11",
#     "opencv-python-headless>=4.9",
#     "envpool>=1.2",
#     "numpy>=1.26",
#     "tensorboard>=2.16",
#     "tqdm>=4.66",
#     "tyro>=1.0",
#     "moviepy>=2.1",
# ]
# ///
"""Recurrent PPO for Atari games and for vector observations, in one file: read it as a patch of ppo_atari.py.

Run:    uv run ppo_lstm.py --env-id Breakout-v5
Look:   tensorboard --logdir runs
Read:   `Args`, then `train` from top to bottom; `[C05]`, `[A03]`, ... name the implementation details of
        "The 37 Implementation Details of Proximal Policy Optimization" (Huang et al., ICLR blog track 2022).
Sources: PPO (arXiv:1707.06347), GAE (arXiv:1506.02438), openai/baselines ea25b9e (ppo2, atari_wrappers.py).
"""

import difflib
import json
import math
import os
import platform
import re
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

import ale_py
import cv2
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
    """record videos of environment 0 into the run directory (backend gymnasium)"""

    # -- algorithm --
    env_id: str = "Breakout-v5"
    """the game: Breakout, Breakout-v5, ALE/Breakout-v5 and BreakoutNoFrameskip-v4 are one; or an id with vectors"""
    total_timesteps: int = 10_000_000
    """environment steps in all, with those that only reset; a last partial batch is not collected"""
    learning_rate: float = 2.5e-4
    """learning rate of Adam"""
    num_envs: int = 8
    """number of environments stepped together [C01]"""
    num_steps: int = 128
    """steps of each environment per rollout"""
    anneal_lr: bool = True
    """lower the learning rate linearly to zero over the run [C04]"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation; 1 gives Monte Carlo advantages [C05]"""
    num_minibatches: int = 4
    """minibatches per epoch [C06]"""
    update_epochs: int = 4
    """passes over each rollout"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch [C07]"""
    clip_coef: float = 0.1
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
    """orthogonal weights and zero biases; otherwise torch's default initialization [C02]"""
    lstm: bool = True
    """remember; otherwise the LSTM forgets after every step, which makes it a feed-forward layer"""
    mask_velocity: bool = False
    """set the velocities in the observations of CartPole, MountainCar, Acrobot and LunarLander to 0"""
    noop_max: int = 30
    """a game starts with 1 to noop_max frames of doing nothing; 0 disables this [A01]"""
    frame_skip: int = 4
    """frames that each action is repeated [A02]"""
    episodic_life: bool = True
    """to the agent a lost life ends the episode; only the end of the game resets it [A03]"""
    fire_reset: bool = True
    """press FIRE after a reset in games whose second action it is [A04]"""
    clip_reward: bool = True
    """train on the sign of the reward [A06]"""
    frame_stack: int = 1
    """last frames that one observation holds [A07]"""
    bootstrap_truncation: bool = True
    """bootstrap from the value of the last state at a time limit; off: as if terminated, as in baselines [S01]"""
    repeat_action_probability: float = 0.0
    """probability that the game ignores an action and repeats the last one (sticky actions)"""
    full_action_space: bool = False
    """all 18 actions instead of those that the game knows"""
    max_episode_steps: int = 27_000
    """steps after which a game is cut off (27,000 are half an hour of play)"""

    # -- environments and speed --
    env_backend: str = "envpool"
    """envpool (C++ threads) or gymnasium (wrappers to read, exact resume, videos, every platform)"""
    env_threads: int = 0
    """threads of EnvPool; 0 lets EnvPool choose"""
    compile: bool = True
    """compile the update (with CUDA graphs on a GPU); without a C++ compiler it runs eagerly"""
    bf16: bool = False
    """run the convolutional network in bfloat16; heads, log-probabilities and losses stay float32"""

    # -- checkpoints and evaluation --
    resume: str | None = None
    """continue the run in this run directory; its configuration is taken from there"""
    evaluate: str | None = None
    """play the agent of this run directory instead of training"""
    checkpoint_every: int = 100
    """iterations between checkpoints; the end of the run and Ctrl-C always write one; 0: only those"""
    eval_episodes: int = 10
    """games played after training or by evaluate, side by side; 0 disables"""
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
        if getattr(given, name) != value and name not in [*free.split(), "eval_deterministic"]:
            changed.append(f"{name} ({value} to {getattr(given, name)})")
    if changed:
        sys.exit(f"error: {run_dir} keeps its configuration; the command line would change {', '.join(changed)}")
    return given


def check_args(args: Args) -> None:
    """Stop with one line that names flags and numbers if a value makes no sense; nothing has been created yet."""
    positive = {"total_timesteps", "learning_rate", "num_envs", "num_steps", "num_minibatches", "update_epochs"}
    positive |= {"clip_coef", "adam_eps", "frame_skip", "frame_stack", "max_episode_steps"}
    for name, value in asdict(args).items():
        high = 1 if name in ("gamma", "gae_lambda", "repeat_action_probability") else sys.float_info.max
        if isinstance(value, (int, float)) and not (0 <= value <= high and (value or name not in positive)):
            bound = "greater than 0" if name in positive else f"a number from 0 to {high:g}"
            sys.exit(f"error: --{name.replace('_', '-')} ({value}) must be {bound}")
    if args.env_backend not in ("envpool", "gymnasium"):
        sys.exit(f"error: --env-backend ({args.env_backend}) must be one of envpool, gymnasium")
    args.env_backend = args.env_backend if game_name(args.env_id) else "gymnasium"  # stops if there is no such one
    if args.env_backend == "envpool" and (args.noop_max < 1 or args.frame_skip < 2):
        given = f"--noop-max ({args.noop_max}) and --frame-skip ({args.frame_skip})"
        sys.exit(f"error: {given} need --env-backend gymnasium: EnvPool takes at least 1 and 2")
    if args.mask_velocity and re.sub(r"-v\d+$", "", args.env_id) not in VectorObservation.velocities:
        sys.exit(f"error: --mask-velocity knows {', '.join(VectorObservation.velocities)}, not {args.env_id}")
    batch = f"num_envs * num_steps ({args.num_envs} * {args.num_steps} = {args.batch_size})"
    if args.num_envs % args.num_minibatches:
        sys.exit(f"error: --num-envs ({args.num_envs}) must be divisible by --num-minibatches ({args.num_minibatches})")
    if args.total_timesteps < args.batch_size:
        sys.exit(f"error: --total-timesteps ({args.total_timesteps}) is less than one batch of {batch}")
    if args.capture_video and args.env_backend != "gymnasium" and not args.evaluate:
        sys.exit(f"error: --capture-video needs --env-backend gymnasium, not {args.env_backend}")
    if args.capture_video and find_spec("moviepy") is None:
        sys.exit("error: --capture-video needs moviepy (uv run --with moviepy ...)")
    if args.evaluate and not args.eval_episodes:
        sys.exit("error: --evaluate with --eval-episodes (0) would play nothing")
    if args.track and find_spec("wandb") is None:
        sys.exit("error: --track needs wandb (uv run --with wandb ...)")


# -- environment --
def game_name(env_id: str) -> str:
    """`Breakout` for any of Breakout, Breakout-v5, ALE/Breakout-v5 and BreakoutNoFrameskip-v4; "" if no game."""
    gym.register_envs(ale_py)
    games = sorted({spec.name for spec in gym.registry.values() if spec.namespace == "ALE"})
    name = re.sub(r"(NoFrameskip|Deterministic)?(-v\d+)?$", "", env_id.removeprefix("ALE/"))
    if name not in games and (env_id in gym.registry or ":" in env_id):  # module:id, as gym.make takes it
        return ""
    if name not in games:
        close = difflib.get_close_matches(name, [*games, *gym.registry], cutoff=0.5)
        sys.exit(f"error: --env-id ({env_id}) is no environment" + f"; did you mean {', '.join(close)}?" * bool(close))
    return name


class VectorObservation(gym.Wrapper):
    """An environment that is no game, which the flags of games leave alone: hides velocities, gives a game's infos."""

    velocities = {"CartPole": [1, 3], "MountainCar": [1], "Acrobot": [4, 5], "LunarLander": [2, 3, 5]}

    def __init__(self, env: gym.Env, args: Args):
        super().__init__(env)
        box, discrete = env.observation_space, env.action_space
        if not isinstance(box, gym.spaces.Box) or len(box.shape) != 1 or not isinstance(discrete, gym.spaces.Discrete):
            sys.exit(f"error: --env-id ({args.env_id}) has {box}, {discrete}; this script needs a vector and Discrete")
        hidden = self.velocities.get(re.sub(r"-v\d+$", "", args.env_id), []) * args.mask_velocity
        self.seen = ~np.isin(np.arange(len(box.low)), hidden)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action + self.action_space.start)
        info |= {"reward": float(reward), "terminated": bool(terminated), "lives": 0}
        return obs * self.seen, reward, terminated, truncated, info

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return obs * self.seen, info | {"reward": 0.0, "terminated": False, "lives": 0}


class NoopReset(gym.Wrapper):
    """Start a game with 1 to `noop_max` frames of doing nothing."""  # [A01] no-op starts

    def __init__(self, env: gym.Env, noop_max: int):
        super().__init__(env)
        self.noop_max = noop_max

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        for _ in range(self.unwrapped.np_random.integers(1, self.noop_max + 1)):
            obs, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                obs, info = self.env.reset()
        return obs, info


class MaxAndSkip(gym.Wrapper):
    """Repeat an action; observe the pixelwise maximum of the last two frames, because sprites flicker."""

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
        frame = obs if previous is None else np.maximum(previous, obs)  # [A02] frame skipping, maximum of two frames
        return frame, total_reward, terminated, truncated, info


class EpisodicLife(gym.Wrapper):
    """End the episode when a life is lost, but reset the game only when it is over.

    As in EnvPool, info["terminated"] says whether the game is over. What happens between a lost life and the next
    observation, without the agent, is in the info of the reset: "reward", and "terminated" if it was the end.
    """

    def __init__(self, env: gym.Env, episodic_life: bool):
        super().__init__(env)
        self.episodic_life, self.lives, self.game_over = episodic_life, 0, True

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.game_over, info["terminated"] = terminated or truncated, terminated
        if self.episodic_life and 0 < info["lives"] < self.lives:  # [A03] a lost life ends the episode
            terminated = True  # not at 0 lives: some games play on for a few frames, then they end by themselves
        self.lives = info["lives"]
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
            total_reward, over = total_reward + reward, over or info["terminated"] or truncated
            if terminated or truncated:
                obs, info = self.env.reset()
                total_reward, over = total_reward + info["reward"], over or info["terminated"]
        return obs, info | {"terminated": over, "reward": total_reward}


class WarpFrame(gym.ObservationWrapper):
    """210x160 RGB to 84x84 gray."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(0, 255, (84, 84), np.uint8)

    def observation(self, frame):
        gray = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
        return cv2.resize(gray, (84, 84), interpolation=cv2.INTER_AREA)  # [A05] gray, then resized by pixel area


class ClipReward(gym.Wrapper):
    """Give the sign of the reward; info["reward"] has the reward itself."""

    def __init__(self, env: gym.Env, clip_reward: bool):
        super().__init__(env)
        self.clip_reward = clip_reward

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        info["reward"] = reward
        return obs, np.sign(reward) if self.clip_reward else reward, terminated, truncated, info  # [A06] sign


class FrameStack(gym.Wrapper):
    """The last frames, oldest first, as channels; black before the first one, as in baselines/common/vec_env."""

    def __init__(self, env: gym.Env, frame_stack: int):
        super().__init__(env)
        self.frames = np.zeros((frame_stack, 84, 84), np.uint8)
        self.observation_space = gym.spaces.Box(0, 255, self.frames.shape, np.uint8)

    def push(self, frame: np.ndarray) -> np.ndarray:
        self.frames = np.concatenate([self.frames[1:], frame[None]])  # [A07] frame stacking
        return self.frames

    def step(self, action):
        frame, *result = self.env.step(action)
        return self.push(frame), *result

    def reset(self, **kwargs):
        frame, info = self.env.reset(**kwargs)
        self.frames = np.zeros_like(self.frames)
        return self.push(frame), info


def make_env(args: Args, video_dir: Path | None = None) -> gym.Env:
    """One environment: games with the wrappers of atari_wrappers.py in their order; RGB videos with `video_dir`."""
    if not game_name(args.env_id):
        try:
            env = gym.make(args.env_id, render_mode="rgb_array" if video_dir else None, disable_env_checker=True)
        except (gym.error.Error, ImportError) as error:
            sys.exit(f"error: --env-id ({args.env_id}): {error}")
        env = gym.wrappers.RecordVideo(env, str(video_dir), disable_logger=True) if video_dir else env
        return VectorObservation(env, args)
    config = {"frameskip": 1, "repeat_action_probability": args.repeat_action_probability}
    config |= {"full_action_space": args.full_action_space, "render_mode": "rgb_array" if video_dir else None}
    config |= {"max_num_frames_per_episode": args.max_episode_steps * args.frame_skip, "disable_env_checker": True}
    env = gym.make(f"ALE/{game_name(args.env_id)}-v5", **config)
    env = NoopReset(env, args.noop_max) if args.noop_max else env
    env = MaxAndSkip(env, args.frame_skip)
    if video_dir:
        env.metadata = env.metadata | {"render_fps": 60 // args.frame_skip}
        env = gym.wrappers.RecordVideo(env, str(video_dir), disable_logger=True)
    env = EpisodicLife(env, args.episodic_life)
    if args.fire_reset and env.unwrapped.get_action_meanings()[1] == "FIRE":
        env = FireReset(env)
    return FrameStack(ClipReward(WarpFrame(env), args.clip_reward), args.frame_stack)


def make_envs(args: Args, video_dir: Path, seed: int) -> gym.vector.VectorEnv:
    """`num_envs` environments behind Gymnasium's vector interface; games observe (N, frame_stack, 84, 84) uint8.

    Both backends reset in the step after the one that ends an episode (NEXT_STEP): that step ignores its action and
    gives no reward to learn from, see [S02]. In each step's infos "reward" is the reward before [A06] and "terminated"
    says that the whole game is over.
    """
    if args.env_backend == "gymnasium":
        videos = [video_dir if args.capture_video and i == 0 else None for i in range(args.num_envs)]
        make_fns = [lambda video_dir=video_dir: make_env(args, video_dir) for video_dir in videos]
        return gym.vector.SyncVectorEnv(make_fns, copy=False, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)
    try:
        import envpool
    except ImportError:
        sys.exit("error: EnvPool is not installed (pip install envpool); --env-backend gymnasium works without it")
    names = {name.lower(): name for name in envpool.list_all_envs()}  # it writes TicTacToe3d
    try:
        return envpool.make_gymnasium(
            names[f"{game_name(args.env_id)}-v5".lower()],
            num_envs=args.num_envs,
            num_threads=args.env_threads,
            seed=seed,
            noop_max=args.noop_max,  # see [A01]
            frame_skip=args.frame_skip,  # see [A02]; it takes the maximum of the last two frames
            episodic_life=args.episodic_life,  # see [A03]
            use_fire_reset=args.fire_reset,  # see [A04]
            gray_scale=True,  # see [A05]
            img_height=84,
            img_width=84,
            use_inter_area_resize=True,
            reward_clip=args.clip_reward,  # see [A06]
            stack_num=args.frame_stack,  # see [A07]
            repeat_action_probability=args.repeat_action_probability,
            full_action_space=args.full_action_space,
            max_episode_steps=args.max_episode_steps,
        )
    except Exception as error:
        sys.exit(f"error: --env-id ({args.env_id}): EnvPool cannot make it ({error})")


def env_states(envs: gym.vector.VectorEnv, states: list[dict] | None = None) -> list[dict] | None:
    """The exact state of the games of backend gymnasium, after writing `states` into them if given.

    Returns None where the state cannot be had, such as EnvPool's, or with sticky actions, because the emulator keeps
    the action that it may repeat to itself.
    """
    result = []
    for i, env in enumerate(getattr(envs, "envs", [])):
        game, rng = env.unwrapped, env.unwrapped.np_random.bit_generator
        if type(game).__module__.startswith("gymnasium.envs.classic") and env.has_wrapper_attr("_elapsed_steps"):
            if states:
                game.state, rng.state = states[i]["state"].numpy(), states[i]["rng"]
                env.set_wrapper_attr("_elapsed_steps", states[i]["elapsed_steps"])
            state = {"state": torch.tensor(np.array(game.state)), "rng": rng.state}
            result.append(state | {"elapsed_steps": env.get_wrapper_attr("_elapsed_steps")})
            continue
        if isinstance(env, VectorObservation) or game.spec.kwargs["repeat_action_probability"]:
            return None
        if states:
            emulator = ale_py.ALEState.__new__(ale_py.ALEState)
            emulator.__setstate__(states[i]["emulator"].numpy().tobytes())
            game.restore_state(emulator)
            rng.state = states[i]["rng"]
            for name in ("lives", "game_over"):
                env.set_wrapper_attr(name, states[i][name])
            env.frames = states[i]["frames"].numpy()
        emulator = np.frombuffer(game.clone_state(include_rng=True).__getstate__(), np.uint8).copy()
        state = {"emulator": torch.from_numpy(emulator), "rng": rng.state, "frames": torch.from_numpy(env.frames)}
        result.append(state | {name: env.get_wrapper_attr(name) for name in ("lives", "game_over")})
    return result or None


# -- agent --
def layer_init(layer: nn.Linear | nn.Conv2d, std: float, args: Args) -> nn.Module:
    """Orthogonal weights of gain `std` and zero bias (baselines/a2c/utils.py ortho_init), or torch's default."""
    if args.ortho_init:  # [C02] orthogonal initialization of weights, constant initialization of biases
        nn.init.orthogonal_(layer.weight, std)
        nn.init.zeros_(layer.bias)
    return layer


class FlattenChannelsLast(nn.Module):
    """(n, C, H, W) to (n, H * W * C), the order of openai/baselines: no copy if the channels are last in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1).flatten(1)


class Agent(nn.Module):
    """Policy over A actions and values on (n, C, 84, 84) uint8 or (n, O) and a state (2, n, H), which `act` renews."""

    def __init__(self, obs_shape: tuple[int, ...], num_actions: int, args: Args):
        super().__init__()

        def nature_cnn() -> nn.Sequential:
            layers = [nn.Conv2d(args.frame_stack, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2)]
            layers += [nn.Conv2d(64, 64, 3, stride=1), nn.Linear(64 * 7 * 7, 512)]
            conv1, conv2, conv3, linear = [layer_init(layer, 2**0.5, args) for layer in layers]
            relu = nn.ReLU()
            return nn.Sequential(conv1, relu, conv2, relu, conv3, relu, FlattenChannelsLast(), linear, relu)

        def mlp() -> nn.Sequential:
            linear1, linear2 = [layer_init(nn.Linear(size, 64), 2**0.5, args) for size in (obs_shape[0], 64)]
            return nn.Sequential(linear1, nn.Tanh(), linear2, nn.Tanh())

        self.network = nature_cnn() if len(obs_shape) == 3 else mlp()  # [A08] Nature CNN, shared by policy and value
        self.lstm = nn.LSTM(512 if len(obs_shape) == 3 else 64, 128)
        for name, param in self.lstm.named_parameters() if args.ortho_init else []:
            nn.init.orthogonal_(param, 1.0) if "weight" in name else nn.init.zeros_(param)  # [L01] LSTM initialization
        self.actor = layer_init(nn.Linear(128, num_actions), 0.01, args)
        self.critic = layer_init(nn.Linear(128, 1), 1.0, args)
        self.bf16 = args.bf16

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        """Features (n, F) of observations, without memory."""
        x = obs.float() if obs.dim() == 2 else obs.to(memory_format=torch.channels_last) / 255  # [A09] scaling
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.bf16):
            return self.network(x).float()

    def act(self, obs: torch.Tensor, state: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Action, log-probability and value, each (n,), at observations; `noise` (n, A) is Gumbel, or 0 for the mode.

        The largest logit plus Gumbel noise is a sample of the categorical distribution (Gumbel-max).
        """
        hidden, state = self.lstm(self.encode(obs)[None], tuple(state[:, None]))  # (1, n, H), h and c of (1, n, H)
        logits, value = self.actor(hidden[0]), self.critic(hidden[0]).squeeze(1)
        action = (logits + noise).argmax(1)
        return action, logits.log_softmax(1).gather(1, action[:, None]).squeeze(1), value, torch.cat(state)

    def evaluate_actions(self, hidden, action) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probability, entropy and value, each (n,), of stored actions (n,) at hidden (n, H)."""
        logits, value = self.actor(hidden), self.critic(hidden).squeeze(1)
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


def split_episodes(valid: torch.Tensor, env_inds: torch.Tensor, state: torch.Tensor) -> tuple:
    """All rows of environments `env_inds` (n,) as S sequences with no reset inside, padded for one call of the LSTM.

    valid: (T, N), False on reset rows, which still belong to the episode that ended; after one a sequence starts, as at
    row 0. state: (2, N, H) before row 0. Returns where the M = n * T rows are in the flat batch (M,) and in the padded
    one of L * S rows (M,), the length L of the longest sequence, and the state (2, S, H) before each.
    """
    T, N = valid.shape
    starts = torch.ones(len(env_inds), T, dtype=torch.bool)  # (n, T)
    starts[:, 1:] = ~valid[:-1, env_inds].T
    env, first = starts.nonzero().T  # (S,), (S,) environment and step of each start
    sequence = starts.flatten().cumsum(0) - 1  # (M,)
    place = torch.arange(T).repeat(len(env_inds)) - first[sequence]  # (M,) steps since the start of the sequence
    mb_inds = (torch.arange(T) * N + env_inds[:, None]).flatten()  # (M,)
    state = state[:, env_inds[env]] * (first == 0).to(state.device)[:, None]  # [L05] rebuilt from before the rollout
    return mb_inds.to(state.device), (place * len(first) + sequence).to(state.device), int(place.max()) + 1, state


def update(parts, agent: Agent, adam: dict, batch: dict, mb_inds, padded_inds, L, state, lr, clip_coef, args: Args):
    """One optimizer step on the samples `mb_inds` (M,); returns ppo_loss's diagnostics and the gradient norm (7,).

    From `mb_inds` to `state` they are split_episodes'. --compile makes graphs of `parts`, not of the LSTM (S, L vary).
    """
    if args.compile:
        torch.compiler.cudagraph_mark_step_begin()  # lest one graph overwrites what another has returned
    encode, evaluate_actions, ppo_loss, adam_step = parts
    mb = {name: b[mb_inds] for name, b in batch.items()}
    features = encode(agent, mb["obs"])  # (M, F)
    padded = features.new_zeros(L * state.shape[1], features.shape[1]).index_copy(0, padded_inds, features)
    hidden, _ = agent.lstm(padded.unflatten(0, (L, -1)), tuple(state[:, None]))  # (L, S, H)
    newlogprob, entropy, newvalue = evaluate_actions(agent, hidden.flatten(0, 1)[padded_inds], mb["actions"])
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
    packages = ["torch", "gymnasium", "ale-py", "numpy"] + ["envpool"] * (args.env_backend == "envpool")
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
    """Undiscounted, unclipped returns of `eval_episodes` whole games of the run's checkpoint, played side by side."""
    checkpoint = load_checkpoint(run_dir)
    n = args.eval_episodes
    backend = "gymnasium" if args.capture_video else args.env_backend
    eval_args = replace(args, num_envs=n, episodic_life=False, clip_reward=False, env_backend=backend)
    eval_seed = 1_000_000 + args.seed  # not the seeds of training
    envs = make_envs(eval_args, run_dir / "eval_videos", eval_seed)
    num_actions = int(envs.single_action_space.n)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    agent = Agent(envs.single_observation_space.shape, num_actions, args).to(device, memory_format=torch.channels_last)
    load_agent(agent, checkpoint)
    generator = torch.Generator().manual_seed(eval_seed)
    obs, infos = envs.reset(seed=None if backend == "envpool" else eval_seed)  # EnvPool's is fixed when made
    returns = np.array(infos["reward"], np.float64)  # (n,) of the first game of each environment
    lstm_state, lives = torch.zeros(2, n, agent.actor.in_features, device=device), infos["lives"]  # (2, n, H), (n,)
    playing = np.ones(n, bool)  # (n,)
    while playing.any():
        noise = -torch.empty(n, num_actions).exponential_(generator=generator).log()
        noise = torch.zeros_like(noise) if args.eval_deterministic else noise
        with torch.no_grad():
            action, _, _, lstm_state = agent.act(torch.from_numpy(obs).to(device), lstm_state, noise.to(device))
        obs, reward, terminated, truncated, infos = envs.step(action.cpu().numpy().astype(np.int32))
        lost = (0 < infos["lives"]) & (infos["lives"] < lives) & args.episodic_life  # which empties the memory too
        lives = infos["lives"]
        lstm_state = lstm_state * torch.from_numpy(~lost & args.lstm).to(device)[:, None]
        returns += reward * playing
        playing &= ~(terminated | truncated)
    envs.close()
    kind = "most probable actions" if args.eval_deterministic else "sampled actions"
    print(f"evaluation: {returns.mean():.1f} +- {returns.std():.1f} over {n} games, {kind}")
    return returns.tolist()


def train(args: Args) -> dict:
    """Train, or only play with args.evaluate; returns the run directory, counters and returns."""
    # -- set-up --
    check_args(args)
    torch.set_num_threads(torch.get_num_threads() if game_name(args.env_id) else 1)  # a small network is slower on more
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

    env_seed = args.seed + (checkpoint["iteration"] if checkpoint else 0)
    videos = f"videos_{checkpoint['iteration']}" if checkpoint else "videos"  # a resumed run keeps the old ones
    envs = make_envs(args, run_dir / videos, env_seed)
    num_actions = int(envs.single_action_space.n)
    agent = Agent(envs.single_observation_space.shape, num_actions, args).to(device, memory_format=torch.channels_last)
    num_params = sum(p.numel() for p in agent.parameters())
    adam = {"exp_avg": torch.zeros(num_params), "exp_avg_sq": torch.zeros(num_params), "step": torch.zeros(())}
    adam = {name: tensor.to(device) for name, tensor in adam.items()}
    lr, clip_coef = torch.zeros((), device=device), torch.zeros((), device=device)

    # Storage of one rollout: T = num_steps, N = num_envs, C = frame_stack, B = T * N
    T, N = args.num_steps, args.num_envs
    space = envs.single_observation_space
    obs = torch.from_numpy(np.zeros((T + 1, N, *space.shape), space.dtype)).to(device)  # (T + 1, N, C, 84, 84) or O
    actions = torch.zeros((T, N), dtype=torch.long, device=device)  # (T, N)
    logprobs, values = torch.zeros((T, N), device=device), torch.zeros((T + 1, N), device=device)  # row T follows
    rewards = np.zeros((T, N), np.float32)  # (T, N) signs if clip_reward
    terminations = np.zeros((T, N), np.float32)  # (T, N) 1: the transition at t ended its episode for good
    dones = np.zeros((T, N), np.float32)  # (T, N) 1: terminated or truncated
    valid = np.ones((T, N), bool)  # (T, N) False: a reset row, no transition
    metrics = torch.zeros(args.update_epochs, args.num_minibatches, 7, device=device)

    # What one iteration leaves to the next
    next_valid = np.ones(N, bool)  # (N,)
    lstm_state = torch.zeros(2, N, agent.actor.in_features, device=device)  # (2, N, H) [L02] zero at first
    start_iteration, global_step, seconds, recent_returns = 1, 0, 0.0, deque(maxlen=100)
    next_obs, infos = envs.reset(seed=None if args.env_backend == "envpool" else env_seed)  # as in evaluate
    episodic_return, episodic_length = np.array(infos["reward"], np.float64), np.zeros(N)  # (N,) of whole games
    if checkpoint:
        load_agent(agent, checkpoint)
        adam = {name: tensor.to(device) for name, tensor in checkpoint["adam"].items()}
        torch.set_rng_state(checkpoint["rng"])
        start_iteration, global_step = checkpoint["iteration"] + 1, checkpoint["global_step"]
        seconds, recent_returns = checkpoint["seconds"], deque(checkpoint["recent_returns"], maxlen=100)
    if checkpoint and checkpoint["envs"]:
        env_states(envs, checkpoint["envs"])
        next_obs, next_valid, episodic_return, episodic_length = (a.numpy() for a in checkpoint["carried"])
        lstm_state = checkpoint["lstm_state"].to(device)
        envs._autoreset_envs = ~next_valid  # the games that the next step resets
    elif checkpoint:
        print(f"the state of {args.env_id} ({args.env_backend}) cannot be saved: new games start")

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
        initial_state = lstm_state  # (2, N, H)
        noise = -torch.empty(T, N, num_actions).exponential_().log().to(device)  # (T, N, A) Gumbel
        with torch.no_grad(), torch.autocast(device.type, enabled=False):  # keeps --bf16's weights from step to step
            for t in range(T):  # [C01] vectorized architecture: N environments, segments of fixed length
                obs[t], valid[t] = torch.from_numpy(next_obs), next_valid
                actions[t], logprobs[t], values[t], lstm_state = agent.act(obs[t], lstm_state, noise[t])
                # [L03] reset at episode ends: after the reset row, so that its observation never enters the new episode
                lstm_state = lstm_state * torch.from_numpy(next_valid & args.lstm).to(device)[:, None]
                env_action = actions[t].cpu().numpy().astype(np.int32)  # CPU-GPU sync
                next_obs, reward, terminated, truncated, infos = envs.step(env_action)
                done = terminated | truncated
                rewards[t], terminations[t], dones[t] = reward, terminated, done

                global_step += int(np.count_nonzero(next_valid))  # real transitions only
                episodic_return += infos["reward"]  # before clipping, over all lives
                episodic_length += next_valid
                next_valid = ~done  # [S02] the row after an end only resets; the observation before it starts nothing

                for n in np.flatnonzero(infos["terminated"] | truncated):
                    recent_returns.append(float(episodic_return[n]))
                    writer.add_scalar("charts/episodic_return", episodic_return[n], global_step)
                    writer.add_scalar("charts/episodic_length", episodic_length[n], global_step)
                    at = f"{time.time() - start_time:.2f}"
                    episodes.write(f"{global_step},{episodic_return[n]:.6g},{episodic_length[n]:.0f},{at}\n")
                    episodic_return[n] = episodic_length[n] = 0
        obs[T] = torch.from_numpy(next_obs)
        if not args.bootstrap_truncation:
            terminations[:] = dones  # baselines: a time limit ends the episode like a failure

        # -- advantages --
        update_start = time.time()
        with torch.no_grad():
            values[T] = agent.act(obs[T], lstm_state, noise[0])[2]  # of which the action is not used
        np_values = values.cpu().numpy()  # (T + 1, N) CPU-GPU sync
        # [S01] a time limit is no end: the row after it holds the state that it cut off, with its value
        next_values = np_values[1:]
        advantages = gae(rewards, np_values[:T], next_values, terminations, dones, args.gamma, args.gae_lambda)
        returns = advantages + np_values[:T]  # (T, N)

        # -- update --
        if iteration == start_iteration:  # not before the first rollout: loading the compiler takes seconds
            parts = [Agent.encode, Agent.evaluate_actions, ppo_loss, adam_step]
            parts = compiled(parts, device, [*adam.values(), *agent.parameters()]) if args.compile else parts
        batch = {"obs": obs[:T], "actions": actions, "logprobs": logprobs, "values": values[:T]}
        for name, array in {"advantages": advantages, "returns": returns, "valid": valid.astype(np.float32)}.items():
            batch[name] = torch.from_numpy(array).to(device)
        batch = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}  # (T, N, ...) to (B, ...)
        for epoch in range(args.update_epochs):
            env_inds = torch.randperm(N)  # [C06] every sample once an epoch, [L04] in sequences of whole environments
            for i, mb_envs in enumerate(env_inds.split(args.minibatch_size // T)):
                sequences = split_episodes(torch.from_numpy(valid & args.lstm), mb_envs, initial_state)
                metrics[epoch, i] = update(parts, agent, adam, batch, *sequences, lr, clip_coef, args)
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
                carried = (next_obs, next_valid, episodic_return, episodic_length)
                state = {"script": Path(__file__).stem, "args": asdict(args), "iteration": iteration}
                state |= {"global_step": global_step, "seconds": time.time() - start_time, "rng": torch.get_rng_state()}
                state |= {"agent": agent.state_dict(), "adam": adam}
                state |= {"lstm_state": lstm_state}
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
