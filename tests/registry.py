"""The scripts of the new form (algorithm above, plumbing below) and what the tests know of each.

A script that moves to the new form becomes one row of SCRIPTS; tests/test_static.py and
tests/test_contract.py then hold it to the contract.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RULER = "# ================ plumbing: nothing below is part of the algorithm ================"


@dataclass(frozen=True)
class Script:
    name: str
    tiny: dict  # fields of Args of a run of a fraction of a second
    exact: dict[str, dict]  # name -> fields of a run of which the environments' state is saved
    inexact: dict[str, dict]  # the same where it cannot be saved; the last one runs anywhere
    poisoned: dict  # fields of a run of which the rewards become NaN at step 40
    own: dict  # fields that an environment of the user's own needs, tests/test_contract.py
    wrong_env: dict[str, list[str]]  # flags with an environment that does not fit -> words
    by_hand: object  # (weights in float64, checkpoint, obs) -> the greedy action
    details: dict[str, str]  # id -> pattern of the code beside its marker
    lines: int  # budgets: of the file
    loop_before: int  # the line before which the loop starts
    plumbing: int  # lines from the ruler to the end
    parent: str | None = None
    changed: int = 0  # lines of `diff parent script`
    # What exists in the parent too and has another text, and why. `train: update` is the block of
    # train under the ruler `# -- update --`, `train: set-up` what stands before the loop.
    different: dict[str, str] = field(default_factory=dict)
    omitted: set[str] = field(default_factory=set)  # `# ~[S01] why` says why there is none
    zero: set[str] = field(default_factory=set)  # numeric fields that may be 0
    negative: set[str] = field(default_factory=set)  # and less
    bad_flags: dict[str, list[str]] = field(default_factory=dict)  # of this script only -> words
    free: set[str] = field(default_factory=set)  # fields that --resume and --evaluate may change
    annealing: set[str] = field(default_factory=set)  # switches that fix --total-timesteps
    tags: set[str] = field(default_factory=set)  # of TensorBoard

    @property
    def path(self) -> Path:
        return ROOT / f"{self.name}.py"

    @property
    def source(self) -> str:
        return self.path.read_text()

    @cached_property
    def module(self) -> ModuleType:
        return import_module(self.name)


LOSSES = "policy_loss value_loss entropy old_approx_kl approx_kl approx_kl_max clipfrac grad_norm"
TAGS = {f"losses/{name}" for name in [*LOSSES.split(), "explained_variance"]}
TAGS |= {"charts/episodic_return", "charts/episodic_length", "charts/learning_rate", "charts/SPS"}
TAGS |= {"time/rollout", "time/update", "eval/episodic_return"}

ZERO = {"seed", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm"}
ZERO |= {"checkpoint_seconds", "eval_episodes"}
FREE = {"cuda", "track", "wandb_project_name", "wandb_entity", "capture_video"}
FREE |= {"checkpoint_seconds", "eval_episodes", "eval_deterministic"}

CORE = {
    "C01": r"for t in range\(T\)",
    "C02": r"nn\.init\.orthogonal_",
    "C03": r"args\.adam_eps",
    "C04": r'\["lr"\] = frac \* args\.learning_rate',
    "C05": r"lastgaelam = delta\[t\] \+ decay\[t\] \* lastgaelam",
    "C06": r"chunk\(args\.num_minibatches\)",
    "C07": r"advantages - advantages\.mean\(\)",
    "C08": r"torch\.max\(pg_loss1, pg_loss2\)",
    "C09": r"v_clipped = ",
    "C10": r"args\.ent_coef \* entropy \+ args\.vf_coef \* v_loss",
    "C11": r"clip_grad_norm_|args\.max_grad_norm / ",
    "C12": r'"policy_loss": ',
    "C13": r"actor_trunk if args\.shared_network else trunk\(\)",
    "S01": r"args\.bootstrap_truncation",
    "X01": r"args\.anneal_clip",
    "X03": r"epoch_kl = ",
}
CONTINUOUS = {
    "M01": r"Normal\(mean, std",
    "M02": r"nn\.Parameter\(log_std\)",
    "M03": r"log_prob\(actions\)\.sum\(-1\)",
    "M04": r"actor_trunk if args\.shared_network else trunk\(\)",
    "M05": r"action\.clip\(self\.low, self\.high\)",
    "M06": r"obs - obs_rms\.mean\) / np\.sqrt\(obs_rms\.var",
    "M07": r"clip\(-args\.clip_obs",
    "M08": r"reward / np\.sqrt\(return_rms\.var",
    "M09": r"clip\(-args\.clip_reward",
    "S03": r"logprob - self\.squash_log_det",
    "S04": r"action = self\.low \+",
}


def mlp(weights: dict, name: str, x: np.ndarray) -> np.ndarray:
    """The output of a trunk of two tanh layers and a head, modules 0, 2 and 4 of `name`."""
    for i in (0, 2, 4):
        x = weights[f"{name}.{i}.weight"] @ x + weights[f"{name}.{i}.bias"]
        x = x if i == 4 else np.tanh(x)
    return x


def discrete_action(weights: dict, checkpoint: dict, obs: np.ndarray) -> int:
    return int(mlp(weights, "actor", obs).argmax())


def continuous_action(weights: dict, checkpoint: dict, obs: np.ndarray) -> np.ndarray:
    """With the moments of the checkpoint, at bounds of -3 and 3 (InvertedPendulum)."""
    mean, var = (x.numpy() for x in checkpoint["obs_rms"][:2])
    x = np.clip((obs - mean) / np.sqrt(var + 1e-8), -10, 10)
    return np.clip(mlp(weights, "actor_mean", x), -3, 3)


TINY = {"num_envs": 2, "num_steps": 32, "num_minibatches": 2, "update_epochs": 2}
TINY |= {"total_timesteps": 256, "eval_episodes": 0, "checkpoint_seconds": 0}
LONG = {"num_steps": 128, "total_timesteps": 1280, "update_epochs": 1}  # 640 steps of 2 each
SHORT = {"num_steps": 64, "total_timesteps": 640, "update_epochs": 1}
ONE_ROBOT = {"num_envs": 1, "num_steps": 256, "total_timesteps": 1280, "update_epochs": 1}

PPO = Script(
    name="ppo",
    tiny={"env_id": "CartPole-v1"} | TINY,
    exact={
        "CartPole": {},
        "Acrobot": {"env_id": "Acrobot-v1"} | LONG,
        "MountainCar": {"env_id": "MountainCar-v0", "shared_network": True} | LONG,
    },
    inexact={
        "no time limit": {"env_id": "EndlessCartPole-v0"},
        "changed": {"env_id": "ChangedCartPole-v0"},
        "LunarLander": {"env_id": "LunarLander-v3"} | LONG,
    },
    poisoned={"env_id": "PoisonedDiscrete-v0"},
    own={"env_id": "OwnDiscrete-v0"},
    wrong_env={
        "Pendulum-v1": ["Pendulum-v1", "Box(-2.0, 2.0", "Discrete"],
        "FrozenLake-v1": ["FrozenLake-v1", "Discrete(16)", "vectors"],
        "ImagesDiscrete-v0": ["ImagesDiscrete-v0", "(8, 8, 3)", "vectors"],
    },
    by_hand=discrete_action,
    details=CORE,
    lines=590,
    loop_before=245,
    plumbing=230,
    zero=ZERO,
    free=FREE,
    annealing={"anneal_lr", "anneal_clip"},
    tags=TAGS,
)

MUJOCO = Script(
    name="ppo_continuous_mujoco",
    parent="ppo",
    tiny={"env_id": "InvertedPendulum-v4", "compile": False} | TINY,
    exact={
        "InvertedPendulum": {},
        "HalfCheetah": {"env_id": "HalfCheetah-v4", "anneal_clip": True} | ONE_ROBOT,
        "Hopper, squashed": {"env_id": "Hopper-v4", "squash_actions": True} | SHORT,
        "Ant": {"env_id": "Ant-v5", "seed": 2} | SHORT,
        "Humanoid": {"env_id": "Humanoid-v4"} | SHORT,
    },
    inexact={
        "no time limit": {"env_id": "EndlessInvertedPendulum-v0"},
        "changed": {"env_id": "ChangedInvertedPendulum-v0"},
        "Pendulum": {"env_id": "Pendulum-v1"} | LONG,
        "async": {"env_id": "InvertedPendulum-v4", "env_backend": "async"},
    },
    poisoned={"env_id": "Poisoned-v0"},
    own={"env_id": "OwnBox-v0"},
    wrong_env={
        "CartPole-v1": ["CartPole-v1", "Discrete(2)", "Box"],
        "Images-v0": ["Images-v0", "(8, 8, 3)", "vectors"],
        "Unbounded-v0 --squash-actions": ["Unbounded-v0", "bounds", "squash"],
        "Unbounded-v0 --scale-actions": ["Unbounded-v0", "bounds", "scale"],
    },
    by_hand=continuous_action,
    details=CORE | CONTINUOUS,
    lines=761,
    loop_before=360,
    plumbing=281,
    changed=341,
    different={
        "Args": "the flags of the details",
        "Agent.__init__": "Gaussian policy, choice of activation",
        "Agent.draw_noise": "normal noise, not Gumbel's",
        "Agent.act": "Gaussian policy",
        "Agent.evaluate_actions": "Gaussian policy, entropy of a squashed one",
        "train: set-up": "flat parameters, normalizers",
        "train: rollout": "normalizers, NumPy policy",
        "train: advantages": "noise of the rollout",
        "train: update": "compiled gradient, flat parameters",
        "train: checkpoint": "normalizers",
        "parse_args": "free flags: compile; anneal_clip",
        "check_args": "flags that may be 0 or less",
        "make_env": "Box actions, MuJoCo's renderer",
        "make_envs": "async",
        "env_states": "MuJoCo's",
        "restore_envs": "MuJoCo's",
        "provenance": "version of mujoco",
        "evaluate": "observation normalizer",
    },
    zero=ZERO | {"init_log_std", "clip_obs", "clip_reward"},
    negative={"init_log_std"},
    bad_flags={"--env-backend ray": ["--env-backend"], "--activation gelu": ["--activation"]},
    free=FREE | {"compile"},
    annealing={"anneal_lr", "anneal_clip"},
    tags=TAGS,
)

SCRIPTS = {script.name: script for script in (PPO, MUJOCO)}


def source_blocks(source: str) -> dict[str, str]:
    """Block of train -> its text: what stands before the loop, then what follows each ruler."""
    (train,) = re.findall(r"(?ms)^def train\(.*?(?=^\S)", source)
    parts = re.split(r"(?m)^ +# -- (.*) --\n", train)
    return {"set-up": parts[0]} | dict(zip(parts[1::2], parts[2::2]))
