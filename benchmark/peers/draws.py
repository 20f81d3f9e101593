"""The same randomness for two scripts: noise of actions, order of samples, first and last weights.

Imported by both sides of equal.py, so it needs torch alone.
"""

import sys
from collections import Counter

import torch

permute = torch.randperm


class Draws:
    """Noise and permutations: the k-th of a kind is always the same."""

    def __init__(self):
        self.calls = Counter()

    def generator(self, kind: int) -> torch.Generator:
        """A fresh one for the next draw of a kind: the length of a permutation, 0 for noise."""
        self.calls[kind] += 1
        return torch.Generator().manual_seed(1_000_003 * kind + self.calls[kind])

    def permutation(self, n: int) -> torch.Tensor:
        return permute(n, generator=self.generator(n))

    def gumbel(self, *shape: int) -> torch.Tensor:
        return -torch.empty(*shape).exponential_(generator=self.generator(0)).log()

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator(0))


class WatchedAdam(torch.optim.Adam):
    """Adam with one epsilon for both sides; it shows the agent of its caller to `meet`."""

    eps = 0.0
    agent = None  # the last one

    def __init__(self, params, **options):
        caller = sys._getframe(1)  # a function or a script
        names = caller.f_globals | caller.f_locals
        super().__init__(params, **options | {"eps": self.eps})
        agent = names.get("agent", names.get("model"))
        if agent is not None and agent is not WatchedAdam.agent:  # at its first optimizer
            WatchedAdam.agent = agent
            self.meet(agent)

    def meet(self, agent: torch.nn.Module) -> None:
        """To be overridden: save the first weights, or load them."""


def weights_of(agent: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of an agent's weights, by name."""
    return {name: x.detach().clone() for name, x in agent.state_dict().items()}
