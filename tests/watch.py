"""What a run did, seen through the functions of the script, and what it left in its directory."""

import copy
import csv
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
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


def assert_orthogonal(weight: torch.Tensor, gain: float) -> None:
    """W W^T, or W^T W of a tall W, is the square of the gain times the identity."""
    weight = weight.detach().flatten(1).double()
    gram = weight @ weight.T if len(weight) <= weight.shape[1] else weight.T @ weight
    eye = torch.eye(len(gram)).double()
    torch.testing.assert_close(gram, gain**2 * eye, atol=5e-5 * gain**2 + 1e-9, rtol=0)


def one_layer_agent(script) -> type:
    """The Agent of a script for images with one linear layer for its convolutions."""

    class Agent(script.Agent):
        def __init__(self, obs_space, *rest):
            original = torch.nn.init.orthogonal_
            of_heads = lambda weight, gain=1: len(weight) < 32 and original(weight, gain)  # noqa: E731
            with patch.object(torch.nn.init, "orthogonal_", of_heads):  # of large ones it is slow
                super().__init__(obs_space, *rest)
            channels = min(obs_space.shape)

            def layer() -> torch.nn.Sequential:
                has_lstm = hasattr(self, "lstm")
                features = self.lstm.input_size if has_lstm else self.actor.in_features
                linear = torch.nn.Linear(64 * channels, features)
                pool = torch.nn.AdaptiveAvgPool2d(8)
                return torch.nn.Sequential(pool, torch.nn.Flatten(), linear, torch.nn.ReLU())

            self.network = layer()
            self.value_network = getattr(self, "value_network", None) and layer()

    return Agent


# -- what it left --
def checkpoint_of(run_dir: Path) -> dict:
    return torch.load(run_dir / "checkpoint.pt", weights_only=True)


def state_of(run_dir: Path) -> dict:
    """Its checkpoint without what differs from run to run: clocks, and how it was started."""
    checkpoint = checkpoint_of(run_dir)
    del checkpoint["seconds"], checkpoint["episodes_size"], checkpoint["args"]["resume"]
    return checkpoint


def episodes_of(run_dir: Path) -> list[tuple[int, float, int]]:
    """(step, return, length) of every episode; the seconds differ from run to run."""
    with open(run_dir / "episodes.csv") as file:
        rows = list(csv.DictReader(file))
    return [(int(row["step"]), float(row["return"]), int(row["length"])) for row in rows]


def scalars_of(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every TensorBoard scalar by tag."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def assert_equal(a, b, name: str) -> None:
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), name
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), name
        for key in a:
            assert_equal(a[key], b[key], f"{name}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), name
        for i, (x, y) in enumerate(zip(a, b)):
            assert_equal(x, y, f"{name}[{i}]")
    else:
        assert a == b, name


def assert_same_run(one: Path, other: Path) -> None:
    """To the bit, all of the checkpoint, episodes and events; only clocks may differ."""
    a, b = state_of(one), state_of(other)
    assert_equal(a, b, "checkpoint")
    episodes = episodes_of(one)
    assert episodes == episodes_of(other) and episodes
    clocks = {"charts/SPS", "time/rollout", "time/update", "time/auxiliary"}
    a, b = ({k: v for k, v in scalars_of(run).items() if k not in clocks} for run in (one, other))
    assert a == b and len(a["losses/policy_loss"]) == checkpoint_of(one)["iteration"]


class Killed(BaseException):
    """Instead of a SIGKILL: no script catches it."""


# -- what it did --
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
