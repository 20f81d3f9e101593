"""The scripts and what the tests know of each: one row of ROWS.

tests/test_form.py, tests/test_static.py and tests/test_loops.py hold every row to the contract.
"""

import ast
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
RULER = "# ============ plumbing: nothing below is needed to understand the algorithm ============"


def changed(text: str) -> set[str]:
    """What differs from the parent: these, and what does in every script."""
    return {"Args", "Agent.__init__", "train: set-up", "check_args", *text.split(", ")}


LOSSES = "policy_loss value_loss entropy old_approx_kl approx_kl approx_kl_max clipfrac grad_norm"
TAGS = {f"losses/{name}" for name in [*LOSSES.split(), "explained_variance"]}
TAGS |= {"charts/episodic_return", "charts/episodic_length", "charts/learning_rate", "charts/SPS"}
TAGS |= {"time/rollout", "time/update", "eval/episodic_return"}

ZERO = {"seed", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm"}
ZERO |= {"checkpoint_seconds", "eval_episodes"}
FREE = {"cuda", "track", "wandb_project_name", "wandb_entity", "capture_video"}
FREE |= {"checkpoint_seconds", "eval_episodes", "eval_deterministic"}


@dataclass(frozen=True)
class Script:
    name: str
    tiny: dict  # fields of Args of a run of a fraction of a second
    wrong_env: dict[str, list[str]]  # flags with an environment that does not fit -> words
    details: dict[str, str]  # id -> pattern of the code beside its marker
    inside: dict = field(default_factory=dict)  # fields of one in the tests' own process
    discrete: bool = False  # it plays `NameDiscrete-v0` of tests/envs.py
    images: bool = False  # it plays `NameImage-v0` of tests/envs.py
    games: bool = False  # it plays its own games only, none of tests/envs.py
    parent: str | None = None
    # What exists in the parent too and has another text. `train: update` is the block of train
    # under the ruler `# -- update --`, `train: set-up` what stands before the loop.
    different: set[str] = field(default_factory=set)
    whole_sequences: bool = False  # a minibatch has all steps of its environments
    reset_rows: bool = False  # a reset takes a row of the rollout, which is no step
    epochs: str = "update_epochs"  # the field of passes over a rollout
    loss: str = "ppo_loss"  # the function that gets every minibatch, or its indices
    lacks: set[str] = field(default_factory=set)  # flags of CleanRL that mean nothing here
    other_shape: dict = field(default_factory=dict)  # fields that give weights of other shapes
    card: dict = field(default_factory=dict)  # fields of a tiny run on a GPU, tests/test_cuda.py
    python: str = ">=3.11,<3.14"
    omitted: set[str] = field(default_factory=set)  # `# ~[S01] why` says why there is none
    zero: set[str] = field(default_factory=lambda: ZERO)  # numeric fields that may be 0
    negative: set[str] = field(default_factory=set)  # and less
    # Bad flags of this script only -> words
    bad_values: dict[str, list[str]] = field(default_factory=dict)
    # Fields that --resume and --evaluate may change
    free: set[str] = field(default_factory=lambda: FREE)
    free_to_play: set[str] = field(default_factory=set)  # what --evaluate may also change
    # Switches that fix --total-timesteps, and tags of TensorBoard
    annealing: set[str] = field(default_factory=lambda: {"anneal_lr", "anneal_clip"})
    tags: set[str] = field(default_factory=lambda: TAGS)

    @property
    def path(self) -> Path:
        return ROOT / f"{self.name}.py"

    @property
    def source(self) -> str:
        return self.path.read_text()

    def env(self, name: str) -> str:
        """The id of an environment of tests/envs.py or tests/conftest.py that it can play."""
        return f"{name}{'Discrete' * self.discrete}{'Image' * self.images}-v0"

    @cached_property
    def pieces(self) -> dict[str, str]:
        """Functions, methods, fields of classes and blocks of train -> their text."""
        lines, pieces = self.source.splitlines(), {}

        def add(name: str, node: ast.AST) -> None:
            start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            text = "\n".join(lines[start - 1 : node.end_lineno])
            pieces[name] = pieces[name] + "\n" + text if name in pieces else text

        for node in ast.parse(self.source).body:
            if isinstance(node, ast.FunctionDef) and node.name != "train":
                add(node.name, node)
            for part in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(part, ast.FunctionDef):
                    add(f"{node.name}.{part.name}", part)
                elif not isinstance(part, ast.Expr):  # docstrings may differ
                    add(node.name, part)
        blocks = source_blocks(self.source)
        return pieces | {f"train: {name}": text for name, text in blocks.items()}

    @cached_property
    def module(self) -> ModuleType:
        return import_module(self.name)


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
EARLY_STOP = {"X03": r"torch\.stack\(epoch_kl\)"}
ONE_NETWORK = {name: code for name, code in CORE.items() if name != "C13"} | EARLY_STOP
CONTINUOUS = {
    "M01": r"Normal\(mean, self\.actor_logstd\.exp\(\)",
    "M02": r"nn\.Parameter\(torch\.zeros\(A\) \+ args\.init_log_std\)",
    "M03": r"log_prob\(actions\)\.sum\(-1\)",
    "M04": r"actor_trunk if args\.shared_network else trunk\(\)",
    "M05": r"action\.clip\(self\.low, self\.high\)",
    "M06": r"obs - obs_rms\.mean\) / np\.sqrt\(obs_rms\.var",
    "M07": r"clip\(-args\.clip_obs",
    "M08": r"reward / np\.sqrt\(return_rms\.var",
    "M09": r"clip\(-args\.clip_reward",
    "S03": r"logprob - self\.squash_log_det",
    "S04": r"action = self\.low \+",
    "S09": r"args\.staggered_resets",
}
ATARI = {
    "A01": r"np_random\.integers\(1, self\.noop_max \+ 1\)",
    "A02": r"np\.maximum\(previous, obs\)",
    "A03": r"self\.episodic_life and lost",
    "A04": r"for action in \(1, 2\)",
    "A05": r"cv2\.INTER_AREA",
    "A06": r"TransformReward\(env, np\.sign\)",
    "A07": r"padding_type=\"zero\"\)",
    "A08": r"self\.network = nature_cnn\(\)",
    "A09": r"/ 255",
    "S02": r"valid.* = dones\[t\] == 0",
}
LSTM = {
    "L01": r"init = nn\.init\.zeros_ if",
    "L02": r"lstm_state = torch\.zeros",
    "L03": r"lstm_state \* keeps\[start\]",
    "L04": r"env_inds = torch\.randperm\(N\)",
    "L05": r"initial_lstm_state\[:, mb_envs\]",
}
PROCGEN = {
    "A09": r"/ 255",
    "C02": r"nn\.init\.orthogonal_",
    "C07": r'mb\["advantages"\] - mb\["advantages"\]\.mean\(\)',
    "C13": r"self\.network = impala_cnn\(\)",
    "M08": CONTINUOUS["M08"],
    "M09": CONTINUOUS["M09"],
}
PHASIC = {
    "P01": r"self\.aux_critic = ",
    "P02": r"value_hidden\.detach\(\)",
    "P03": r"for epoch in range\(args\.e_policy\)",
    "P04": r"for epoch in range\(1, args\.e_auxiliary",
    "P05": r"args\.beta_clone \* kl_loss",
    "P06": r"if args\.adv_norm_fullbatch",
    "P07": r"nn\.functional\.normalize",
    "P08": r"adam_eps: float = 1e-8",
    "P09": r"if args\.aux_adam",
    "P10": r"if args\.norm_reward_rollout",
}
MULTIDISCRETE = {
    "D01": r"torch\.stack\(logprobs\)\.sum\(0\)",
    "X04": r"where\(masks, -1e8\)",
}


TINY = {"num_envs": 2, "num_steps": 32, "num_minibatches": 2, "update_epochs": 2}
TINY |= {"total_timesteps": 256, "eval_episodes": 0, "checkpoint_seconds": 0}

PPO = Script(
    name="ppo",
    discrete=True,
    tiny={"env_id": "CartPole-v1"} | TINY,
    wrong_env={
        "Pendulum-v1": ["Box(-2.0, 2.0", "Discrete", "(try ppo_continuous_mujoco.py)"],
        "FrozenLake-v1": ["FrozenLake-v1", "Discrete(16)", "vector"],
        "ImagesDiscrete-v0": ["ImagesDiscrete-v0", "(8, 8, 3)", "vector"],
        "NothingDiscrete-v0": ["NothingDiscrete-v0", "(0,)", "vector"],
    },
    details=CORE | EARLY_STOP,
)

MUJOCO = Script(
    name="ppo_continuous_mujoco",
    parent="ppo",
    tiny={"env_id": "InvertedPendulum-v4", "compile": False} | TINY,
    wrong_env={
        "CartPole-v1": ["CartPole-v1", "Discrete(2)", "vector of reals", "(try ppo.py)"],
        "Images-v0": ["Images-v0", "(8, 8, 3)", "vector"],
        "Integers-v0": ["Integers-v0", "int64", "reals"],
        "Unbounded-v0 --squash-actions": ["Unbounded-v0", "bounds", "squash"],
        "NoRoom-v0 --squash-actions": ["NoRoom-v0", "bounds without room"],
        "Unbounded-v0 --scale-actions": ["Unbounded-v0", "bounds", "scale"],
        "Huge-v0 --scale-actions": ["Huge-v0", "bounds", "scale"],
        "Unbounded-v0 --staggered-resets": ["Unbounded-v0", "time limit", "staggered"],
    },
    details=CORE | EARLY_STOP | CONTINUOUS,
    different=changed(
        "Agent.act, Agent.evaluate_actions, train: rollout, train: update, train: log and "
        "checkpoint, check_runs, PlainEnv.__init__, PlainEnv.step, make_env, film, try_env, "
        "make_envs, provenance, evaluate"
    ),
    zero=ZERO | {"init_log_std", "clip_obs", "clip_reward"},
    negative={"init_log_std"},
    free=FREE | {"compile", "env_backend"},
)

# What the trust region takes the place of, and what needs one network for policy and value.
WITHOUT_CLIP = {"C08", "C13", "X01", "X03"}
TRUST_REGION = {name: code for name, code in MUJOCO.details.items() if name not in WITHOUT_CLIP} | {
    "C10": r"args\.ent_coef \* entropy",
    "M04": r"critic_trunk = trunk\(\)",
    "S05": r"conjugate_gradient\(fisher",
    "S06": r"args\.cg_damping \* vector",
    "S07": r'stats\["approx_kl"\] <= max_kl',
    "S08": r"\(1 - frac\) \* final_kl",
}
TRPO = replace(
    MUJOCO,
    name="trpo_continuous_mujoco",
    parent="ppo_continuous_mujoco",
    details=TRUST_REGION,
    omitted={"C08"},
    bad_values={"--fisher-every 33 --num-steps 32": ["--fisher-every (33)", "--num-steps"]},
    different=changed("loss_and_grad, train: advantages, train: update, check_runs, Log.iteration"),
    loss="loss_and_grad",
    lacks={"vf_coef", "target_kl"},
    zero=MUJOCO.zero - {"vf_coef"} | {"cg_damping"},
    annealing={"anneal_lr"},  # and max_kl_final, which is a number: tests/test_trpo.py
    tags=TAGS - {"losses/clipfrac"} | {"losses/step_fraction"},
)

GAMES = {"num_envs": 2, "num_steps": 32, "num_minibatches": 2, "update_epochs": 1}
GAMES |= {"total_timesteps": 256, "eval_episodes": 0, "checkpoint_seconds": 0, "noop_max": 8}
GAMES |= {"env_id": "Centipede-v5", "env_backend": "gymnasium", "max_episode_steps": 40}
GAMES |= {"cuda": False, "compile": False}

ATARI_SCRIPT = Script(
    name="ppo_atari",
    games=True,
    reset_rows=True,
    parent="ppo",
    tiny=GAMES,
    wrong_env={"HalfCheetah-v4": ["--env-id (HalfCheetah-v4)", "no Atari game"]},
    details=ONE_NETWORK | ATARI,
    bad_values={
        "--env-backend envpool --noop-max 0": ["--noop-max (0)", "--env-backend gymnasium"],
        "--capture-video": ["--capture-video", "--env-backend gymnasium"],
        "--num-steps 1": ["--num-steps (1)"],
        "--repeat-action-probability 1.5": ["--repeat-action-probability (1.5)"],
        "--env-id Brekout-v5": ["--env-id (Brekout-v5)", "Breakout"],
        "--env-id pong": ["--env-id (pong)", "Pong"],
        "--env-id ''": ["--env-id", "no Atari game"],
        "--max-episode-steps 1000000000": ["--max-episode-steps", "(4000000000)"],  # no C int
        "--noop-max 10000000000": ["--noop-max (10000000000)"],
        "--env-threads 10000000000": ["--env-threads (10000000000)"],
        "--frame-stack 10000000000": ["--frame-stack (10000000000)"],
    },
    different=changed(
        "Agent.act, Agent.evaluate_actions, train: rollout, train: advantages, train: update, "
        "train: log and checkpoint, check_runs, make_env, make_envs, film, try_env, provenance, "
        "evaluate"
    ),
    other_shape={"shared_network": False},
    zero=ZERO | {"repeat_action_probability"},
    free=FREE | {"compile", "env_threads"},
    free_to_play={"env_backend"},
)

PIXEL = {
    "A05": r"gym\.wrappers\.ResizeObservation",
    "A07": r"gym\.wrappers\.FrameStackObservation",
    "A08": r"self\.network = cnn\(\)",
    "A09": r"/ self\.scale",
    "M01": r"Normal\(output, std",
    "M02": CONTINUOUS["M02"],
    "M03": r"Independent\(normal, 1",
    "M05": r"gym\.wrappers\.ClipAction",
    "M08": CONTINUOUS["M08"],
    "M09": CONTINUOUS["M09"],
}
PIXELS = Script(
    name="ppo_pixels",
    images=True,
    parent="ppo",
    tiny=TINY
    | {"env_id": "CartPole-v1", "frame_skip": 1, "image_size": 12, "cuda": False, "compile": False},
    inside={"env_id": "ColourDiscrete-v0"},  # images that need not be rendered
    wrong_env={
        "ALE/Pong-v5": ["--env-id (ALE/Pong-v5)", "ppo_atari.py"],
        "PongNoFrameskip-v4": ["--env-id (PongNoFrameskip-v4)", "ppo_atari.py"],
        "Pong-v5": ["--env-id (Pong-v5)", "ppo_atari.py"],
        "CartPole-v1 --no-render-as-observation": ["(4,)", "no image", "--render-as"],
        "Dict-v0": ["Dict-v0", "Dict(", "TransformObservation"],
        "Cube-v0": ["Cube-v0", "(8, 8, 8)", "channels"],
        "Integers-v0": ["Integers-v0", "int64", "floats"],
    },
    details=ONE_NETWORK | PIXEL,
    different=changed(
        "Agent.act, Agent.get_value, Agent.evaluate_actions, train: rollout, train: advantages, "
        "train: log and checkpoint, check_runs, PlainEnv.__init__, PlainEnv.reset, PlainEnv.step, "
        "PlainEnv.plain, make_env, try_env, make_envs, evaluate"
    ),
    zero=ZERO | {"init_log_std", "image_size", "clip_reward"},
    negative={"init_log_std"},
    free=FREE | {"compile", "env_backend"},
)

LSTM_SCRIPT = Script(
    name="ppo_lstm",
    discrete=True,
    parent="ppo",
    tiny={"env_id": "MaskedCartPole-v1"} | TINY,
    wrong_env=PPO.wrong_env | {"Breakout-v5": ["Breakout", "ppo_atari_lstm.py"]},
    whole_sequences=True,
    details=ONE_NETWORK | LSTM,
    bad_values={"--num-envs 6 --num-minibatches 4": ["--num-minibatches (4)", "--num-envs (6)"]},
    different=changed(
        "Agent.act, Agent.get_value, Agent.evaluate_actions, train: rollout, train: advantages, "
        "train: update, check_runs, make_env, evaluate"
    ),
)

ATARI_LSTM = replace(
    ATARI_SCRIPT,
    name="ppo_atari_lstm",
    parent="ppo_atari",
    whole_sequences=True,
    details=ATARI_SCRIPT.details | LSTM | {"A08": r"self\.network = nature_cnn\(\)"},
    bad_values={"--num-envs 6 --num-minibatches 4": ["--num-minibatches (4)", "--num-envs (6)"]},
    different=changed(
        "Agent.forward, Agent.act, Agent.evaluate_actions, train: rollout, train: advantages, "
        "train: update, train: log and checkpoint, check_runs, evaluate"
    ),
    other_shape={"frame_stack": 2},
)


MULTI = Script(
    name="ppo_multidiscrete",
    discrete=True,
    parent="ppo",
    tiny={"env_id": "CartPole-v1"} | TINY,
    wrong_env={
        "Unbounded-v0": ["Unbounded-v0", "-inf", "bounds"],
        "ImagesDiscrete-v0": ["ImagesDiscrete-v0", "(8, 8, 3)", "vectors"],
        "NothingDiscrete-v0": ["NothingDiscrete-v0", "(0,)", "vectors"],
        "ImageInDict-v0": ["ImageInDict-v0", "(8, 8, 3)", "vectors"],
        "ImageInTuple-v0": ["ImageInTuple-v0", "(8, 8)", "vectors"],
        "Words-v0": ["Words-v0", "Sequence", "vectors"],
        "Buttons-v0": ["Buttons-v0", "MultiBinary(3)", "MultiDiscrete"],
    },
    details=CORE | EARLY_STOP | MULTIDISCRETE,
    different=changed(
        "Agent.act, Agent.evaluate_actions, train: rollout, train: advantages, train: update, "
        "check_runs, PlainEnv.__init__, PlainEnv.reset, PlainEnv.step, make_env, try_env, "
        "make_envs, evaluate"
    ),
    free=FREE | {"env_backend"},
    free_to_play={"action_mask"},
)

MICRORTS = replace(
    MULTI,
    name="ppo_microrts",
    parent="ppo_multidiscrete",
    tiny=MULTI.tiny | {"compile": False},
    wrong_env={name: words for name, words in MULTI.wrong_env.items() if name[:7] != "ImagesD"}
    | {  # an image of 8 x 8 is a grid
        "Microrts-v1": ["Microrts-v1", "MicrortsMining-v1"],
        "CartPole-v1 --frame-skip 3": ["--frame-skip (3)", "CartPole-v1"],
    },
    details=MULTI.details | {"A09": r"/ self\.scale"},
    bad_values={
        "--env-id MicrortsMining-v2": ["MicrortsMining-v2", "MicrortsMining-v1"],
        "--discretize-actions 1": ["--discretize-actions (1)", "2"],
        "--frame-skip 2000": ["--frame-skip (2000)", "2000 ticks"],
        "--env-backend async": ["--env-backend (async)", "MicroRTS", "sync"],
    },
    different=changed(
        "Agent.act, Agent.get_value, Agent.evaluate_actions, train: rollout, train: advantages, "
        "train: log and checkpoint, MaskedEnv.plain_mask, PlainEnv.__init__, make_env, make_envs, "
        "provenance, evaluate"
    ),
    zero=ZERO | {"frame_skip"},
    free=MULTI.free | {"compile"},
    tags=TAGS | {"charts/idle"},
)

LEVELS = {"env_id": "fruitbot", "num_levels": 200, "num_envs": 2, "num_steps": 32}
LEVELS |= {"num_minibatches": 2, "total_timesteps": 256, "eval_episodes": 0, "env_threads": 0}
LEVELS |= {"anneal_lr": True, "checkpoint_seconds": 0, "cuda": False, "compile": False}

PROCGEN_SCRIPT = Script(
    name="ppo_procgen",
    games=True,
    parent="ppo_atari",
    tiny=LEVELS | {"update_epochs": 2},
    wrong_env={
        "CartPole-v1": ["--env-id (CartPole-v1)", "starpilot"],
        "starpilto": ["--env-id (starpilto)", "bigfish"],
    },
    other_shape={"shared_network": False},
    python=">=3.11,<3.13",  # Procgen has no wheels of later ones
    details={name: code for name, code in CORE.items() if name != "S01"} | EARLY_STOP | PROCGEN,
    omitted={"S01"},
    bad_values={
        "--eval-levels unseen": ["--eval-levels unseen", "--num-levels"],
        "--start-level 5": ["--start-level (5)", "--num-levels"],
        "--start-level 2000000000 --num-levels 5": ["--start-level (2000000000)"],
        "--num-levels 1073741824": ["--num-levels (1073741824)"],  # no level is left
        "--env-threads 2000000000": ["--env-threads (2000000000)"],
        "--reward-gamma 1.1": ["--reward-gamma (1.1)"],
    },
    different=changed(
        "Agent.forward, ppo_loss, train: rollout, train: advantages, train: update, train: log "
        "and checkpoint, check_runs, film, try_env, make_envs, provenance, evaluate"
    ),
    zero=ZERO
    | {"reward_gamma", "clip_reward", "num_levels", "start_level", "env_threads", "micro_batch"},
    free=FREE | {"compile", "env_threads", "micro_batch", "eval_levels"},
)

OPENAI = {"arch": "dual", "aux_adam": True, "env_minibatches": True, "clip_vloss": False}
OPENAI |= {"vf_coef": 1.0, "max_grad_norm": 0.0, "norm_reward_rollout": True, "reward_gamma": 0.99}
PPG = replace(
    PROCGEN_SCRIPT,
    name="ppg_procgen",
    parent="ppo_procgen",
    tiny=LEVELS | {"e_policy": 2, "n_iteration": 2, "e_auxiliary": 1, "num_aux_rollouts": 2},
    epochs="e_policy",
    card={"n_iteration": 1},  # so that each iteration has an auxiliary phase
    other_shape={"arch": "dual"},
    details={n: code for n, code in PROCGEN_SCRIPT.details.items() if n != "C13"} | PHASIC,
    bad_values={
        "--env-minibatches --num-minibatches 128": ["--num-minibatches (128)", "--num-envs (64)"]
    },
    different=changed(
        "layer_init, ResidualBlock.__init__, Agent.forward, Agent.act, Agent.evaluate_actions, "
        "train: rollout, train: update, train: log and checkpoint, check_runs, Log.iteration"
    ),
    zero=PROCGEN_SCRIPT.zero | {"beta_clone", "skip_aux_every"},
    tags=TAGS
    | {"time/auxiliary"}
    | {f"losses/aux/{name}" for name in ("kl_loss", "aux_value_loss", "real_value_loss")}
    | {"losses/aux/grad_norm"},
)

ROWS = (PPO, MUJOCO, TRPO, PIXELS, MULTI, MICRORTS, LSTM_SCRIPT, ATARI_SCRIPT, ATARI_LSTM)
ROWS += (PROCGEN_SCRIPT, PPG)
SCRIPTS = {script.name: script for script in ROWS}


def pages() -> list[Path]:
    """README.md and those of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def source_blocks(source: str) -> dict[str, str]:
    """Block of train -> its text: what stands before the loop, then what follows each ruler."""
    (train,) = re.findall(r"(?ms)^def train\(.*?(?=^\S)", source)
    parts = re.split(r"(?m)^ +# -- (.*) --\n", train)
    return {"set-up": parts[0]} | dict(zip(parts[1::2], parts[2::2]))
