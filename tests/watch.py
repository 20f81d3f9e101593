"""What a run did: its rollouts and optimizer steps, seen through the functions of the script."""

import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


def copied(x):
    """A deep copy; of tensors their values only, without what they were computed from."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone()
    if type(x) in (tuple, list):
        return type(x)(map(copied, x))
    if type(x) is dict:
        return {key: copied(value) for key, value in x.items()}
    return copy.deepcopy(x)


def flat(tensors) -> torch.Tensor:
    """All numbers of the tensors as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@dataclass
class Step:
    """One minibatch: what `ppo_loss` got and gave, then what the optimizer saw."""

    newvalue: torch.Tensor  # (M,)
    mb: dict
    clip_coef: float
    stats: dict
    lr: float = 0.0
    grad: torch.Tensor | None = None  # (P,)
    weights: torch.Tensor | None = None  # (P,) before the step


@dataclass
class Rollout:
    """One iteration: tensors (B, ...), arrays (T, N) and the optimizer steps that followed."""

    agent: torch.nn.Module  # a copy, with the weights of the rollout
    obs: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor
    values: torch.Tensor
    rewards: np.ndarray | None = None
    next_values: np.ndarray | None = None
    terminations: np.ndarray | None = None
    dones: np.ndarray | None = None
    advantages: np.ndarray | None = None
    steps: list[Step] = field(default_factory=list)


class Watch:
    """Watches Agent.evaluate_actions, gae and ppo_loss of a script, and the optimizer."""

    def __init__(self, script, monkeypatch):
        self.rollouts: list[Rollout] = []
        evaluate_actions, gae = script.Agent.evaluate_actions, script.gae
        ppo_loss = script.ppo_loss

        def watched_evaluate(agent, obs, actions, *rest):
            result = evaluate_actions(agent, obs, actions, *rest)
            if not torch.is_grad_enabled():  # once an iteration, on the whole rollout
                logprobs, _, values = copied(result)
                tensors = (*copied((obs, actions)), logprobs, values)
                self.rollouts.append(Rollout(copy.deepcopy(agent), *tensors))
            return result

        def watched_gae(rewards, values, next_values, terminations, dones, *discounts):
            rollout = self.rollouts[-1]
            rollout.rewards = rewards.copy()
            rollout.next_values = next_values.copy()
            rollout.terminations = terminations.copy()
            rollout.dones = dones.copy()
            advantages = gae(rewards, values, next_values, terminations, dones, *discounts)
            rollout.advantages = advantages.copy()
            return advantages

        def watched_loss(newlogprob, entropy, newvalue, mb, clip_coef, args):
            before = copied(mb)
            loss, stats = ppo_loss(newlogprob, entropy, newvalue, mb, clip_coef, args)
            self.rollouts[-1].steps.append(
                Step(copied(newvalue), before, float(clip_coef), copied(stats))
            )
            return loss, stats

        def before_step(optimizer, *_):
            [group] = optimizer.param_groups
            step = self.steps[-1]
            step.lr = group["lr"]
            step.grad = flat(param.grad for param in group["params"])
            step.weights = flat(group["params"])

        monkeypatch.setattr(script.Agent, "evaluate_actions", watched_evaluate)
        monkeypatch.setattr(script, "gae", watched_gae)
        monkeypatch.setattr(script, "ppo_loss", watched_loss)
        self.hook = register_optimizer_step_pre_hook(before_step)

    @property
    def steps(self) -> list[Step]:
        return [step for rollout in self.rollouts for step in rollout.steps]

    def clear(self) -> None:
        self.rollouts.clear()
