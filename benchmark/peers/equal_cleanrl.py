"""A script of CleanRL, unchanged, that draws what equal.py draws and begins with its weights.

python equal_cleanrl.py SCRIPT WEIGHTS EPS NUM_STEPS FLAGS...; WEIGHTS holds the first ones, by our
names, and gets the last ones. Needs what the script needs; scripts on EnvPool go through
the file beside this one that lends them its old interface.

Three things are made the same: the deviation of advantages is biased, the levels of Procgen have
the seed, and the gradient is emptied after each step, so that none is left for PPG's auxiliary
phase.
"""

import os
import runpy
import sys
from pathlib import Path

import numpy as np
import torch
from torch.distributions import Categorical, Normal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from draws import Draws, WatchedAdam, weights_of

script, file, eps, num_steps, *flags = sys.argv[1:]
draws = Draws(int(num_steps))


class Adam(WatchedAdam):
    eps = float(eps)

    def meet(self, agent):
        ours, theirs = torch.load(file), agent.state_dict()
        assert len(ours) == len(theirs)
        for (name, weight), (other, into) in zip(ours.items(), pairs(ours, theirs)):
            assert weight.numel() == into.numel(), (name, other)
            into.copy_(weight.view_as(into))

    def step(self):
        super().step()
        self.zero_grad()


def pairs(ours: dict, theirs: dict) -> list[tuple]:
    """Their names and weights in the order of ours: of the same name, or else of the same place."""
    if set(ours) == set(theirs):
        return [(name, theirs[name]) for name in ours]
    return list(theirs.items())


def choose(policy: Categorical) -> torch.Tensor:
    return (policy.logits + draws.of_step(draws.gumbel, policy.logits.shape)).argmax(-1)


def draw(policy: Normal) -> torch.Tensor:
    return policy.mean + policy.stddev * draws.of_step(draws.normal, policy.mean.shape)


def shuffle(array: np.ndarray) -> None:
    array[:] = draws.permutation(len(array)).numpy()


unbiased_std = torch.Tensor.std
torch.Tensor.std = lambda tensor: unbiased_std(tensor, correction=0)
Categorical.sample, Normal.sample, np.random.shuffle = choose, draw, shuffle
torch.optim.Adam = Adam
torch.set_num_threads(1)

path = Path(script)
seed = int(flags[flags.index("--seed") + 1])
if "procgen" in path.name:
    import procgen

    envs = procgen.ProcgenEnv
    procgen.ProcgenEnv = lambda **options: envs(rand_seed=seed, **options)
shim = Path(__file__).with_name(f"cleanrl_{path.name}")
os.environ["PEER_SCRIPT"] = str(path)
sys.argv = [str(path), *flags]
runpy.run_path(str(shim if shim.exists() else path), run_name="__main__")

ours, last = torch.load(file), weights_of(Adam.agent)
named = zip(ours.items(), pairs(ours, last))
torch.save({name: weight.view_as(into) for (name, into), (_, weight) in named}, file)
