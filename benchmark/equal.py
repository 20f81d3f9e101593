"""Do the originals and our scripts end with the same weights? -> results/equal/CASE.csv

Run:  python benchmark/equal.py CASE FOLDER PYTHON
      FOLDER is a clone of the other project, PYTHON an interpreter with what it needs

Both sides begin with the same weights and environments, sample with the same noise and see the
samples in the same order (peers/draws.py); all else is their own code, unchanged (peers/equal_*.py
says what is made the same). Adam has a large epsilon on both sides: with a small one the first
steps have the same length whatever the gradient is, so rounding of a gradient near zero would
grow. For comparison our script also runs with a lambda of 0.94.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd
import torch
from collect import commit_of, machine
from patches import script_of
from peers.draws import Draws, WatchedAdam, weights_of
from results import HERE, RESULTS, read_recipes
from run import load

EPSILON = 1e-2
COLUMNS = ["from_first", "from_theirs", "from_changed"]  # largest distance of one weight
AUXILIARY = {"n_iteration": 2, "e_auxiliary": 2, "num_aux_rollouts": 2}
OPENAI = {"distribution_mode": "hard", "aux_adam": True, "env_minibatches": True, "vf_coef": 1.0}
OPENAI |= {"clip_vloss": False, "max_grad_norm": 0.0, "reward_gamma": 0.99}
OPENAI |= {"norm_reward_rollout": True}
GRID = "peers.masked_grid:MaskedGrid-v0"


@dataclass
class Case:
    script: str
    original: str  # in its clone
    env_id: str
    iterations: int
    num_envs: int
    num_steps: int
    num_minibatches: int
    both: dict = field(default_factory=dict)  # further flags of both
    ours: dict = field(default_factory=dict)
    flags: str = ""  # of ours, too

    @property
    def file(self) -> str:
        return self.script if self.script.endswith(".patch") else f"{self.script}.py"

    @property
    def shared(self) -> dict:
        """The flags that both sides have."""
        sizes = {name: getattr(self, name) for name in ("num_envs", "num_steps", "num_minibatches")}
        steps = self.iterations * self.num_envs * self.num_steps
        return {"env_id": self.env_id, "seed": 3, "total_timesteps": steps} | sizes | self.both


CLEANRL = {  # their script -> ours, environment, iterations, environments, steps, minibatches
    "ppo": ("ppo", "CartPole-v1", 8, 4, 128, 4),
    "ppo_continuous_action": ("ppo_continuous_mujoco", "Pendulum-v1", 4, 1, 48, 4),
    "ppo_atari_envpool": ("ppo_atari", "Pong-v5", 4, 4, 64, 4),
    "ppo_atari_lstm": ("ppo_atari_lstm", "Pong-v5", 4, 4, 64, 4),
    "ppo_procgen": ("ppo_procgen", "bigfish", 4, 4, 64, 2),
    "ppg_procgen": ("ppg_procgen", "bigfish", 4, 4, 64, 2),
}
CASES = {}
for name, (script, *sizes) in CLEANRL.items():
    both = AUXILIARY if name == "ppg_procgen" else {}
    CASES[f"cleanrl_{name}"] = Case(script, f"cleanrl/{name}.py", *sizes, both)
for arch in ("dual", "detach", "shared"):
    ppo = arch == "shared"  # their PPO: no auxiliary phases
    both = {"n_iteration": 2, "num_aux_rollouts": 2, "e_policy": 3} if ppo else AUXILIARY
    ours = OPENAI | {"arch": arch, "skip_aux_every": int(ppo)}
    CASES[f"openai_{'ppo' if ppo else f'ppg_{arch}'}"] = Case(
        "ppg_procgen", "phasic_policy_gradient", "bigfish", 6, 4, 64, 2, both, ours
    )

for original, masked in (("ppo_multidiscrete.py", False), ("ppo_multidiscrete_mask.py", True)):
    CASES[f"blog_{Path(original).stem}"] = Case(
        "ppo_microrts", original, GRID, 4, 4, 64, 4, ours={"action_mask": masked}
    )


for row in read_recipes().query("folder == 'ablation_study'").itertuples():
    task = re.match("only ([a-z]+)", row.environments.lower())[1]  # hopper, walker, humanoid
    config = f"configs/{task}_{row.experiment.replace('ppo_m', 'ppom')}.py"
    CASES[f"madry_{row.experiment}_{task}"] = Case(
        row.script, config, row.environments.split()[1], 2, 1, 128, 4, flags=row.flags
    )


def train_ours(case: Case, file: Path, **changed) -> dict[str, torch.Tensor]:
    """The last weights of our script; the first go to the file, if that is new."""
    module = load(script_of(case.file))
    module.env_seed = lambda args, *_: args.seed  # as the originals have it

    class Adam(WatchedAdam):
        eps = EPSILON

        def meet(self, agent):
            if not file.exists():
                torch.save(weights_of(agent), file)

    alone = {"eval_episodes": 0, "cuda": False, "compile": False, "bootstrap_truncation": False}
    alone = {name: value for name, value in alone.items() if hasattr(module.Args, name)}
    changed = {"exp_name": "_".join(["ours", *changed])} | changed
    args = module.parse_args(case.flags.split())
    args = replace(args, **case.shared | case.ours | alone | changed)
    with Draws(case.num_steps).instead_of_torchs(Adam):
        module.train(args)
    return weights_of(Adam.agent)


def command_of(case: Case, clone: Path, python: str, file: Path) -> list[str]:
    """What trains the original."""
    if case.original == "phasic_policy_gradient":
        options = case.shared | {"distribution_mode": "hard", "arch": case.ours["arch"]}
        options["phases"] = case.iterations // options["n_iteration"]
        peer, rest = "equal_openai_ppg.py", [clone, file, EPSILON, json.dumps(options)]
    elif case.env_id == GRID or case.flags:
        peer = "equal_madry.py" if case.flags else "equal_blog.py"
        rest = [clone / case.original, file, EPSILON, json.dumps(case.shared)]
    else:
        flags = [(f"--{name.replace('_', '-')}", value) for name, value in case.shared.items()]
        peer = "equal_cleanrl.py"
        rest = [clone / case.original, file, EPSILON, case.num_steps, *sum(flags, ()), "--no-cuda"]
    return [python, str(HERE / "peers" / peer), *map(str, rest)]


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("clone", type=Path, metavar="FOLDER")
    parser.add_argument("python", metavar="PYTHON")
    options = parser.parse_args()
    case, clone = CASES[options.case], options.clone.resolve()
    python = os.path.abspath(shutil.which(options.python) or sys.exit("error: no such PYTHON"))
    if not (clone / case.original).exists():
        sys.exit(f"error: there is no {case.original} in {clone}")
    commits = {"commit": commit_of(HERE), "original": f"{case.original}, {commit_of(clone)}"}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        file = Path(folder) / "weights.pt"
        ours = train_ours(case, file)
        changed = train_ours(case, file, gae_lambda=0.94)
        first = torch.load(file)
        command = command_of(case, clone, python, file)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stderr}error: exit code {done.returncode}: {shlex.join(command)}")
        theirs = torch.load(file)
        (config,) = Path(folder).glob("runs/*__ours__*/config.json")
        config = json.loads(config.read_text())
        os.chdir(HERE)
    apart = pd.DataFrame(index=pd.Index(ours, name="weights"))
    for column, others in zip(COLUMNS, (first, theirs, changed)):
        apart[column] = [(ours[name] - others[name]).abs().max().item() for name in ours]
    apart["drift"] = [(ours[name] - first[name]).sum().item() for name in ours]
    facts = {"case": options.case, "script": case.script, "env": case.env_id} | commits
    facts |= {"iterations": case.iterations, "epsilon": EPSILON, "hardware": machine()}
    facts["args"] = json.dumps(config["args"])
    facts["versions"] = ", ".join(" ".join(pair) for pair in config["versions"].items())
    path = RESULTS / f"equal{os.environ.get('SUFFIX', '')}" / f"{options.case}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    top = "".join(f"# {key}: {value}\n" for key, value in facts.items())
    path.write_text(top + apart.to_csv(float_format="%.3g"))
    moved, far, control = apart[COLUMNS].max()
    print(f"{options.case}: weights move by up to {moved:.1e}, end up to {far:.1e} from theirs and")
    print(f"{control:.1e} from those of a lambda of 0.94; {path}")


if __name__ == "__main__":
    main()
