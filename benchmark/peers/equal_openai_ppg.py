"""OpenAI's phasic_policy_gradient, unchanged, with the draws and the first weights of equal.py.

python equal_openai_ppg.py FOLDER WEIGHTS EPS OPTIONS; FOLDER holds the package, WEIGHTS the first
weights, by our names, and gets the last ones; OPTIONS is JSON. Needs torch and procgen-mirror.
There is one process, so what the code asks of MPI is answered here. The run ends after an
auxiliary phase.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributions import Categorical

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from draws import Draws, WatchedAdam, weights_of

folder, file, eps, options = sys.argv[1:]
options = json.loads(options)
N, T = options["num_envs"], options["num_steps"]
draws = Draws()
rollout = []  # the noise of its steps that are still to come

sys.path.insert(0, folder)
os.environ |= {"RCALL_NUM_GPU": "0", "RCALL_LOGDIR": "unused"}
torch.has_cuda = False
alone = SimpleNamespace(size=1, rank=0, Get_size=lambda: 1, Get_rank=lambda: 0)
alone.allgather = alone.gather = lambda value, root=0: [value]
alone.Allreduce = lambda value, into: into.__setitem__(..., value)
mpi = ModuleType("mpi4py")
mpi.MPI = SimpleNamespace(COMM_WORLD=alone, Comm=SimpleNamespace)
sys.modules["mpi4py"] = mpi
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.set_num_threads(1)

from phasic_policy_gradient import logger, ppg, ppo  # noqa: E402
from phasic_policy_gradient import torch_util as tu  # noqa: E402
from phasic_policy_gradient.envs import get_procgen_venv  # noqa: E402
from phasic_policy_gradient.impala_cnn import ImpalaEncoder  # noqa: E402


def theirs(name: str) -> str:
    """Their name of a weight of ours."""
    net, _, rest = name.partition(".")
    heads = {"actor": "pi_head", "aux_critic": "aux_vf_head"}
    heads["critic"] = "vf_vhead" if options["arch"] == "dual" else "pi_vhead"
    if net in heads:
        return f"{heads[net]}.{rest}"
    encoder = {"network": "pi_enc", "value_network": "vf_enc"}[net]
    index, rest = re.fullmatch(r"(\d+)\.(.*)", rest).groups()
    stack, layer = divmod(int(index), 4)  # convolution, pooling, two blocks
    places = {0: f"stacks.{stack}.firstconv", 2: f"stacks.{stack}.blocks.0"}
    places[3] = f"stacks.{stack}.blocks.1"
    place = "dense" if int(index) == 14 else places[layer]
    return f"{encoder}.cnn.{place}.{rest}"


class Adam(WatchedAdam):
    eps = float(eps)

    def meet(self, agent):
        first = torch.load(file)
        agent.load_state_dict({theirs(name): weight for name, weight in first.items()})


def choose(policy: Categorical) -> torch.Tensor:
    if not rollout:
        rollout.extend(draws.gumbel(T, *policy.logits.squeeze(1).shape))
    return (policy.logits + rollout.pop(0)[:, None]).argmax(-1)


def permutation(n: int) -> torch.Tensor:
    """Of environments, or of stored rollouts: ours are numbered by time first, theirs by game."""
    order = draws.permutation(n)
    return order if n == N else order % N * (n // N) + order // N


class EndOfRun(Exception):
    pass


def learn(**settings):
    """A policy phase, unless all have been played."""
    if draws.calls["phase"] == options["phases"]:
        raise EndOfRun
    draws.calls["phase"] += 1
    return original(**settings)


original, ppo.learn = ppo.learn, learn
torch.optim.Adam, Categorical.sample, torch.randperm = Adam, choose, permutation
tu.register_distributions_for_tree_util()
venv = get_procgen_venv(
    env_id=options["env_id"],
    num_envs=N,
    distribution_mode=options["distribution_mode"],
    rand_seed=options["seed"],
    num_threads=0,
)


def encoder(space):
    return ImpalaEncoder(space.shape, outsize=256, chans=(16, 32, 32))


model = ppg.PhasicValueModel(venv.ob_space, venv.ac_space, encoder, arch=options["arch"])
policy_phase = {"lr": 5e-4, "γ": 0.999, "λ": 0.95, "clip_param": 0.2, "kl_penalty": 0.0}
policy_phase |= {"nminibatch": options["num_minibatches"], "nstep": T, "verbose": False}
policy_phase |= dict.fromkeys(("n_epoch_pi", "n_epoch_vf"), options.get("e_policy", 1))
policy_phase["log_save_opts"] = {"ic_per_save": 0}
with tempfile.TemporaryDirectory() as log_dir:
    logger.configure(dir=log_dir, format_strs=["csv"], comm=alone)
    try:
        ppg.learn(
            model=model,
            venv=venv,
            ppo_hps=policy_phase,
            aux_lr=5e-4,
            aux_mbsize=options["num_aux_rollouts"],
            n_aux_epochs=options.get("e_auxiliary", 0),
            n_pi=options["n_iteration"],
            name2coef={"pol_distance": 1.0, "vf_true": 1.0},
            comm=alone,
        )
    except EndOfRun:
        pass
last = weights_of(model)
torch.save({name: last[theirs(name)] for name in torch.load(file)}, file)
