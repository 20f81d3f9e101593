"""How often do trained agents win MicroRTS? 100 whole games for each run -> results/wins/.

Run:   python benchmark/win_rate.py runs/MicrortsRandomEnemyShapedReward3-v1__... [more runs]
Needs: the directories of finished runs of ppo_multidiscrete.py; each keeps its script, which plays.

Actions are sampled and masked as in training; the games have other seeds. A game is won or lost by
who has units left at its end, as MicroRTS says, and drawn at the time limit. The shaped rewards of
training pay for other things too, so a return says little about it.
"""

import argparse
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from collect import finished

RESULTS = Path(__file__).resolve().parent / "results" / "wins"
GAMES = 100
SEED = 1_000_000  # not of training


def script_of(run_dir: Path) -> ModuleType:
    """The copy of the script that a run keeps."""
    (path,) = run_dir.glob("*.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def play(run_dir: Path) -> np.ndarray:
    """1, 0 or -1 for each of GAMES games, played side by side: won, drawn, lost."""
    script = script_of(run_dir)
    checkpoint = finished(run_dir)
    args = replace(script.Args(**checkpoint["args"]), num_envs=GAMES, seed=SEED)
    envs = script.MicroRTS(args)  # which start a new game after the end of one
    envs.weights = np.eye(len(envs.reward_names))[0]  # WinLoss alone
    agent = script.Agent(envs.single_observation_space, envs.single_action_space, args)
    script.load_weights(agent, checkpoint)
    obs_rms = script.RunningMeanStd(*(x.numpy() for x in checkpoint["obs_rms"]))
    torch.manual_seed(args.seed)
    raw_obs, infos = envs.reset(seed=args.seed)
    outcome = np.zeros(GAMES)
    playing = np.ones(GAMES, bool)  # still in its first game
    while playing.any():
        obs = torch.from_numpy(script.normalize_obs(obs_rms, raw_obs, args))
        options = script.action_options(args, agent.nvec, infos, args.action_mask)
        action, _ = agent.act(obs, options, agent.draw_noise(GAMES))
        raw_obs, win_loss, terminated, truncated, infos = envs.step(action)
        outcome += win_loss * playing
        playing &= ~(terminated | truncated)
    envs.close()
    return np.sign(outcome).astype(int)


def write(run_dir: Path, outcome: np.ndarray) -> Path:
    """The results file of a run: facts, then a row for each game."""
    config = json.loads((run_dir / "config.json").read_text())
    args = config["args"]
    facts = {"script": "ppo_multidiscrete", "env": args["env_id"], "exp": args["exp_name"]}
    facts |= {"seed": args["seed"], "commit": config["commit"], "hardware": config["hardware"]}
    facts["versions"] = ", ".join(" ".join(pair) for pair in config["versions"].items())
    lines = [f"# {name}: {value}" for name, value in facts.items()]
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{args['env_id']}__{args['exp_name']}__{args['seed']}.csv"
    text = "\n".join([*lines, "outcome", *map(str, outcome)]) + "\n"
    if path.exists() and path.read_text() != text:
        sys.exit(f"error: {path} holds other games; delete it to replace it")
    path.write_text(text)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    for run_dir in parser.parse_args().runs:
        outcome = play(run_dir)
        won, drawn, lost = (int((outcome == kind).sum()) for kind in (1, 0, -1))
        print(f"{run_dir.name}: {won} won, {drawn} drawn, {lost} lost; {write(run_dir, outcome)}")


if __name__ == "__main__":
    main()
