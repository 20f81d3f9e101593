"""How long one all-reduce of the gradient takes, beside the update that needs it [X02].

torchrun --standalone --nproc-per-node 2 benchmark/all_reduce.py SCRIPT [CALLS]

Times `average_gradients` of SCRIPT (ppo_atari or ppo_procgen) with the gradients of a minibatch of
its default size and number of processes, and a forward and backward pass over that minibatch;
prints the medians of the first process in milliseconds. On the CPU, with gloo.
"""

import sys
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist


def milliseconds(function, calls: int) -> float:
    """The median of some calls, which all processes start together."""
    took = []
    for _ in range(calls):
        dist.barrier()
        start = time.perf_counter()
        function()
        took.append(1000 * (time.perf_counter() - start))
    return float(np.median(took))


def main() -> None:
    name, calls = sys.argv[1].removesuffix(".py"), int((sys.argv[2:] or ["50"])[0])
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    script = import_module(name)
    rank, own = script.join_processes(script.Args(cuda=False, compile=False))
    envs = script.make_envs(own, Path(), 1)
    obs_space = envs.single_observation_space
    agent = script.Agent(obs_space, envs.single_action_space, own)
    agent.to(memory_format=torch.channels_last)
    envs.close()
    obs = torch.zeros((own.batch_size // own.num_minibatches, *obs_space.shape), dtype=torch.uint8)

    def gradient() -> None:
        for part in obs.split(64):
            logits, value = agent(part)
            (logits.mean() + value.mean()).backward()

    gradient()
    stats = {"loss": torch.zeros(())}
    update = milliseconds(gradient, max(3, calls // 10))
    reduce = milliseconds(lambda: script.average_gradients(agent, stats), calls)
    numbers = sum(param.numel() for param in agent.parameters())
    if rank == 0:
        size, threads = dist.get_world_size(), torch.get_num_threads()
        what = f"{name}, {size} processes of {threads} threads, {numbers} numbers"
        print(f"{what}: all-reduce {reduce:.2f} ms, gradient of {len(obs)} images {update:.1f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
