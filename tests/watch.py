"""What a run did, seen through the functions of the script, and what it left in its directory."""

import copy
import csv
from pathlib import Path
from unittest.mock import patch

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


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


def weights_of(run_dir: Path) -> torch.Tensor:
    return flat(checkpoint_of(run_dir)["agent"].values())


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
    """Of checkpoints, to the bit."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), name
    elif isinstance(a, dict | list):
        a, b = (x if isinstance(x, dict) else dict(enumerate(x)) for x in (a, b))
        assert a.keys() == b.keys(), name
        for key in a:
            assert_equal(a[key], b[key], f"{name}.{key}")
    else:
        assert a == b, name


def assert_same_run(one: Path, other: Path) -> None:
    """To the bit, all of the checkpoint, episodes and events; only clocks may differ."""
    a, b = checkpoint_of(one), checkpoint_of(other)
    for state in (a, b):  # clocks, and how it was started, differ from run to run
        del state["seconds"], state["episodes_size"], state["args"]["resume"]
    assert_equal(a, b, "checkpoint")
    episodes = episodes_of(one)
    assert episodes == episodes_of(other) and episodes
    clocks = {"charts/SPS", "time/rollout", "time/update", "time/auxiliary"}
    a, b = ({k: v for k, v in scalars_of(run).items() if k not in clocks} for run in (one, other))
    assert a == b and len(a["losses/policy_loss"]) == checkpoint_of(one)["iteration"]


class Killed(BaseException):
    """Instead of a SIGKILL: no script catches it."""
