"""One update of ppo_lstm.py against one of CleanRL's ppo_atari_lstm.py: same weights, same minibatches, in turns.

CLEANRL_SCRIPT=path/to/ppo_atari_lstm.py python benchmark/lstm_update.py [--vectors] [--bf16] [--no-compile]

A minibatch is 2 of 8 environments, 128 steps each; an episode ends every 50 steps on average. CleanRL's side is the
network of its file, called step after step, and then what its loop does: loss, backward, clip_grad_norm_, Adam. The
first update of both must have the same losses and the same gradient norm. Writes milliseconds to results/updates/.
"""

import argparse
import copy
import os
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ppo_lstm  # noqa: E402


def cleanrl_agent(ours: ppo_lstm.Agent, vectors: bool) -> torch.nn.Module:
    """Its class with our weights; with `vectors` our network stands where its convolutions are."""
    unused = "ClipRewardEnv EpisodicLifeEnv FireResetEnv MaxAndSkipEnv NoopResetEnv"  # imported by the script
    sys.modules["cleanrl_utils"] = SimpleNamespace()
    sys.modules["cleanrl_utils.atari_wrappers"] = SimpleNamespace(**dict.fromkeys(unused.split()))
    script = runpy.run_path(os.environ["CLEANRL_SCRIPT"])
    theirs = script["Agent"](SimpleNamespace(single_action_space=SimpleNamespace(n=ours.actor.out_features)))
    weights = ours.state_dict()
    if vectors:
        theirs.network, theirs.lstm = copy.deepcopy(ours.network), torch.nn.LSTM(ours.lstm.input_size, 128)
    else:  # it flattens the features with the channels first
        columns = weights["network.7.weight"].unflatten(1, (7, 7, 64))
        weights["network.7.weight"] = columns.permute(0, 3, 1, 2).flatten(1)
    theirs.load_state_dict(weights)
    return theirs


def rollout(args: ppo_lstm.Args, vectors: bool, device: torch.device) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """A random flat batch, (T, N) bool valid on the CPU and a first state (2, N, 128)."""
    T, N = args.num_steps, args.num_envs
    shape = (T, N, 4) if vectors else (T, N, 1, 84, 84)
    batch = {"obs": torch.randn(shape) if vectors else torch.randint(0, 256, shape, dtype=torch.uint8)}
    batch |= {name: torch.randn(T, N) for name in ("advantages", "returns", "values")}
    valid = torch.rand(T, N) > 1 / 50
    batch |= {"actions": torch.randint(0, 4, (T, N)), "valid": valid.float(), "logprobs": torch.full((T, N), -1.4)}
    return {name: b.to(device).flatten(0, 1) for name, b in batch.items()}, valid, torch.randn(2, N, 128, device=device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--vectors", "--bf16", "--no-compile"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args()
    args = ppo_lstm.Args(bf16=options.bf16, compile=not options.no_compile)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(1)
    torch.set_num_threads(1 if options.vectors else torch.get_num_threads())  # as in the script
    batch, valid, state = rollout(args, options.vectors, device)
    ours = ppo_lstm.Agent((4,) if options.vectors else (1, 84, 84), 4, args)
    theirs = cleanrl_agent(ours, options.vectors).to(device)
    ours = ours.to(device, memory_format=torch.channels_last)
    num_params = sum(p.numel() for p in ours.parameters())
    adam = {"exp_avg": torch.zeros(num_params), "exp_avg_sq": torch.zeros(num_params), "step": torch.zeros(())}
    adam = {name: tensor.to(device) for name, tensor in adam.items()}
    optimizer = torch.optim.Adam(theirs.parameters(), lr=args.learning_rate, eps=args.adam_eps)
    parts = [ppo_lstm.Agent.encode, ppo_lstm.Agent.evaluate_actions, ppo_lstm.ppo_loss, ppo_lstm.adam_step]
    if args.compile:
        parts = ppo_lstm.compiled(parts, device, [*adam.values(), *ours.parameters()])
    their_obs = batch["obs"].float() * (255 if options.vectors else 1)  # as it stores them; it divides by 255
    lr, clip_coef = torch.tensor(args.learning_rate, device=device), torch.tensor(args.clip_coef, device=device)

    def our_update(envs: torch.Tensor) -> torch.Tensor:
        sequences = ppo_lstm.split_episodes(valid, envs, state)
        return ppo_lstm.update(parts, ours, adam, batch, *sequences, lr, clip_coef, args)

    def their_update(envs: torch.Tensor) -> torch.Tensor:
        T, N = valid.shape
        mb_inds = (torch.arange(T)[:, None] * N + envs).flatten().to(device)  # time first
        dones = torch.zeros(T, len(envs), device=device)
        dones[1:] = 1 - batch["valid"].view(T, N)[:-1, envs]  # where our state starts anew
        mb = {name: b[mb_inds] for name, b in batch.items() if name != "obs"}
        first = (state[:1, envs], state[1:, envs])
        _, *new, value, _ = theirs.get_action_and_value(their_obs[mb_inds], first, dones.flatten(), mb["actions"])
        loss, stats = ppo_lstm.ppo_loss(*new, value.flatten(), mb, clip_coef, args)
        stats[5].item()  # its clip fraction
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), args.max_grad_norm)
        optimizer.step()
        return torch.cat([stats, grad_norm[None]])

    rows = []
    for repetition in range(-3, options.repetitions):  # the first three compile and warm up
        envs, row, stats = torch.randperm(args.num_envs)[:2], [], []
        for update in (our_update, their_update):
            start = time.perf_counter()
            stats.append(update(envs).tolist())  # waits for the GPU
            row.append(1000 * (time.perf_counter() - start))
        if repetition == -3:
            np.testing.assert_allclose(*stats, rtol=5e-2 if options.bf16 else 1e-3, atol=1e-4)
        rows += [row] if repetition >= 0 else []
    ratio = np.array([peer / ours for ours, peer in rows])
    flags = " ".join(flag for flag in ("--bf16", "--no-compile") if getattr(options, flag[2:].replace("-", "_")))
    name = "CartPole" if options.vectors else "Atari"
    facts = {"update": f"{name} {flags}".strip(), "device": device.type, "threads": torch.get_num_threads()}
    provenance = ppo_lstm.provenance(args)
    facts |= {"commit": provenance["commit"], "hardware": provenance["hardware"]}
    facts["versions"] = ", ".join(f"{package} {number}" for package, number in provenance["versions"].items())
    facts["ratio"] = f"{np.median(ratio):.3f}, from {ratio.min():.3f} to {ratio.max():.3f}"
    lines = [f"# {key}: {value}" for key, value in facts.items()] + ["ours_ms,peer_ms"]
    lines += [f"{mine:.3f},{other:.3f}" for mine, other in rows]
    path = ROOT / "benchmark" / "results" / "updates" / f"{'_'.join([name, device.type, *flags.split()])}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    print("\n".join(lines[: len(facts)]) + f"\n{path}")


if __name__ == "__main__":
    main()
