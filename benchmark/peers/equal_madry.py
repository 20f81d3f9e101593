"""The code of Implementation Matters, unchanged, with the draws and the first weights of equal.py.

python equal_madry.py CONFIG WEIGHTS EPS OPTIONS; CONFIG is a file of the folder configs/ of
MadryLab/implementation-matters, WEIGHTS holds the first weights, by our names, and gets the last
ones; OPTIONS is JSON. Needs torch, tqdm and gymnasium[mujoco], to which its old gym is translated.

Made the same: its normalizers are ours, with a prior, N instead of N - 1, the first observation of
all and none of an episode's last ones; the deviation of advantages is biased.
"""

import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import gymnasium
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from draws import Draws

config, file, eps, options = sys.argv[1:]
config, file, options = Path(config), Path(file).resolve(), json.loads(options)
T = options["num_steps"]
draws = Draws()
sys.path.insert(0, str(config.parent.parent / "src"))
unused = "matplotlib matplotlib.pyplot sklearn sklearn.metrics sklearn.metrics.pairwise dill"
for name in unused.split():  # of its figures and logs
    sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))


class OldEnv:
    """A task of gymnasium with gym's interface of then; only its first reset has a seed."""

    def __init__(self, env_id: str):
        self.env, self.seed = gymnasium.make(env_id), options["seed"]
        self.observation_space = self.env.observation_space
        self.action_space = self.env.action_space

    def reset(self) -> np.ndarray:
        obs, _ = self.env.reset(seed=self.seed)
        self.seed, self.first_obs = None, obs if self.seed else self.first_obs
        return obs.copy()

    def step(self, action: np.ndarray):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs.copy(), float(reward), terminated or truncated, info


gym, discrete, box = (ModuleType(f"gym{name}") for name in ("", ".spaces.discrete", ".spaces.box"))
gym.make, discrete.Discrete, box.Box = OldEnv, gymnasium.spaces.Discrete, gymnasium.spaces.Box
sys.modules |= {"gym": gym, "gym.spaces": MagicMock()}
sys.modules |= {"gym.spaces.discrete": discrete, "gym.spaces.box": box}

from policy_gradients import custom_env, steps, torch_utils  # noqa: E402
from policy_gradients.agent import Trainer  # noqa: E402


class RunningStat:
    """Mean and deviation as ours has them (baselines/common/running_mean_std.py)."""

    def __init__(self, shape):
        self.shape = tuple(shape)
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def push(self, x) -> None:
        total, delta = self.count + 1, np.asarray(x, np.float64) - self.mean
        spread = self.var * self.count + delta**2 * self.count / total
        self.mean, self.var, self.count = self.mean + delta / total, spread / total, total

    @property
    def std(self):
        return np.sqrt(self.var + 1e-8) - 1e-8  # to which they add 1e-8


def step(self, action: np.ndarray):
    """Env.step, but the last observation of an episode, which nobody uses, is not counted."""
    obs, reward, done, info = self.env.step(action)
    obs = obs if done else self.state_filter(obs)
    self.total_true_reward += reward
    self.counter += 1
    if done:
        info["done"] = (self.counter, self.total_true_reward)
    return obs, self.reward_filter(reward), done, info


class Adam(torch.optim.Adam):
    def __init__(self, params, **options):
        super().__init__(params, **options | {"eps": float(eps)})


def layers(prefix: str, modules: list) -> dict[str, torch.Tensor]:
    """The weights of linear layers by our names."""
    named = {}
    for i, module in enumerate(modules):
        named |= {f"{prefix}.{2 * i}.{name}": x for name, x in module.named_parameters()}
    return named


torch_utils.RunningStat, custom_env.Env.step, torch.optim.Adam = RunningStat, step, Adam
steps.adv_normalize = lambda adv: (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
os.chdir(config.parent)
names = {}
exec(config.read_text().partition("all_configs")[0], names)
params = names["BASE_CONFIG"] | {name: values[0] for name, values in names["PARAMS"].items()}
params |= {"game": options["env_id"], "t": T, "num_minibatches": options["num_minibatches"]}
params |= {"train_steps": options["total_timesteps"] // T, "advanced_logging": False}
trainer = Trainer.agent_from_params(params)
policy, value = trainer.policy_model, trainer.val_model
weights = layers("actor_mean", [*policy.affine_layers, policy.final_mean])
weights |= layers("critic", [*value.affine_layers, value.final])
weights["actor_logstd"] = policy.log_stdev
first = torch.load(file)
assert first.keys() == weights.keys()
with torch.no_grad():
    for name, into in weights.items():
        into.copy_(first[name].view_as(into))
(env,) = trainer.envs
env.state_filter(env.env.first_obs)

orders = []  # of the samples in this iteration: one to choose from, if any, then one for each epoch
rollout = []  # the noise of its steps that are still to come


def choose(values, count: int, replace: bool) -> np.ndarray:
    return orders[0][:count].numpy()


def shuffle(array: np.ndarray) -> None:
    """In each epoch, of the value's epochs and of the policy's; both have the same orders."""
    orders.append(orders.pop(-params["val_epochs"]))
    array[:] = orders[-1].numpy()


np.random.choice, np.random.shuffle = choose, shuffle
torch.randn_like = lambda mean: rollout.pop(0)
for _ in range(params["train_steps"]):
    rollout[:] = draws.normal(T, 1, policy.action_dim)
    orders[:] = [
        draws.permutation(T) for _ in range(params["val_epochs"] + (params["mode"] == "trpo"))
    ]
    samples, *_ = trainer.collect_saps(T, should_log=False)
    trainer.take_steps(samples, logging=False)
    trainer.n_steps += 1
torch.save({name: x.detach().view_as(first[name]) for name, x in weights.items()}, file)
