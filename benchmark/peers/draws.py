"""The same randomness for two scripts: noise of actions, order of samples, first and last weights.

Imported by both sides of equal.py, so it needs torch alone.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import torch

draw_exponential, draw_normal = torch.Tensor.exponential_, torch.randn
permute = torch.randperm


class Draws:
    """Noise and permutations: the k-th of a kind is always the same.

    Noise is drawn for a whole rollout of `num_steps` steps, whether a script asks for it at once or
    for that of one step after the other.
    """

    def __init__(self, num_steps: int = 0):
        self.num_steps = num_steps
        self.calls = Counter()
        self.rollout = []  # the noise of its steps that are still to come

    def generator(self, kind: int) -> torch.Generator:
        """A fresh one for the next draw of a kind: the length of a permutation, 0 for noise."""
        self.calls[kind] += 1
        return torch.Generator().manual_seed(1_000_003 * kind + self.calls[kind])

    def permutation(self, n: int) -> torch.Tensor:
        return permute(n, generator=self.generator(n))

    def exponential(self, *shape: int) -> torch.Tensor:
        return draw_exponential(torch.empty(*shape), generator=self.generator(0))

    def gumbel(self, *shape: int) -> torch.Tensor:
        return -self.exponential(*shape).log()

    def normal(self, *shape: int) -> torch.Tensor:
        return draw_normal(*shape, generator=self.generator(0))

    def of_step(self, kind, shape: torch.Size) -> torch.Tensor:
        """The next step's noise: `kind` is `self.gumbel`, say."""
        if not self.rollout:
            self.rollout.extend(kind(self.num_steps, *shape))
        return self.rollout.pop(0)

    @contextmanager
    def instead_of_torchs(self, adam=torch.optim.Adam):
        """For our scripts: exponential noise, normal noise, orders of samples, and an Adam."""

        def exponential_(noise: torch.Tensor) -> torch.Tensor:
            """Fill (T, N, A), of a rollout, or (N, A), of its next step."""
            if noise.dim() == 3:
                return noise.copy_(self.exponential(*noise.shape))
            return noise.copy_(self.of_step(self.exponential, noise.shape))

        with (
            patch.object(torch.Tensor, "exponential_", exponential_),
            patch.object(torch, "randn", self.normal),
            patch.object(torch, "randperm", self.permutation),
            patch.object(torch.optim, "Adam", adam),
        ):
            yield


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
