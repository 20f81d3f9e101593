"""MicroRTS without an agent, for benchmark/speed.sh: 8 games, random valid actions.

NAME=microrts_env ENV_ID=MicrortsMining-v1 STEPS=4096000 OURS_FLAGS="--wrapper ours" \
    PEER_FLAGS="--wrapper gym_microrts" \
    bash benchmark/speed.sh benchmark/peers/microrts_env.py benchmark/peers/microrts_env.py PYTHON

Both sides play one tick a step, with observations and masks; the time is that of their steps, the
choice of the actions is left out. Needs what ppo_multidiscrete.py needs, and gym==0.26.2.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import ppo_multidiscrete as ppo  # noqa: E402


class GymMicroRTS:
    """gym-microrts 0.4.3, its own code for each step, with masks as its README takes them."""

    def __init__(self, args: ppo.Args):
        ppo.start_java()
        np.int = int  # a name that gym-microrts uses and NumPy no longer has
        import jpype.imports

        jpype.imports.registerDomain("ts", alias="tests")
        jpype.imports.registerDomain("ai")
        from gym_microrts import microrts_ai
        from gym_microrts.envs.vec_env import MicroRTSGridModeVecEnv

        weights = np.array([0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
        world = {"map_path": "maps/10x10/basesWorkers10x10.xml", "reward_weight": weights}
        world |= {"ai2s": [microrts_ai.passiveAI] * args.num_envs, "max_steps": 2000}
        self.envs = MicroRTSGridModeVecEnv(0, args.num_envs, **world)
        self.num_envs = args.num_envs

    def masks(self) -> dict:
        mask = np.array(self.envs.vec_client.getMasks(0))
        return {"action_mask": mask.reshape(self.num_envs, -1, mask.shape[-1])}

    def reset(self, seed: int):
        return self.envs.reset(), self.masks()

    def step(self, actions: np.ndarray):
        return *self.envs.step(actions[:, None].tolist()), self.masks()


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--wrapper", choices=["ours", "gym_microrts"], required=True)
    parser.add_argument("--env-id", default="MicrortsMining-v1")
    parser.add_argument("--total-timesteps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    args = ppo.Args(env_id=options.env_id, seed=options.seed, frame_skip=0)
    envs = ppo.MicroRTS(args) if options.wrapper == "ours" else GymMicroRTS(args)
    run_dir = Path(f"runs/{options.env_id}__{options.wrapper}__{options.seed}__{int(time.time())}")
    writer = SummaryWriter(run_dir)
    (run_dir / "config.json").write_text(json.dumps(ppo.provenance(args)))
    rng = np.random.default_rng(options.seed)
    ends = np.cumsum([6, 4, 4, 4, 4, 7])  # of the components after the source cell
    rows = np.arange(args.num_envs)
    _, infos = envs.reset(seed=options.seed)
    seconds = 0.0
    for step in range(1, options.total_timesteps // args.num_envs + 1):
        mask = infos["action_mask"]
        source = (mask[:, :, 0] * rng.random(mask.shape[:2])).argmax(1)
        scores = np.split(mask[rows, source, 1:] * rng.random((args.num_envs, 78)), ends, axis=1)
        actions = np.stack([source, *(score.argmax(1) for score in scores)], 1)
        start = time.perf_counter()
        *_, infos = envs.step(actions)
        seconds += time.perf_counter() - start
        if step % 500 == 0:
            played = step * args.num_envs  # speed.py goes by the clock of the events
            writer.add_scalar("charts/SPS", played / seconds, played, walltime=seconds)
    writer.close()


if __name__ == "__main__":
    main()
