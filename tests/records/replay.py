"""What is done with an adapter for each case of a record; used to record and to compare."""

import json
from pathlib import Path

import numpy as np
import torch

from records import fill

HERE = Path(__file__).resolve().parent


def load(script: str) -> tuple[dict, dict]:
    """Cases by name and the arrays (`GROUP/in/NAME`, `CASE/out/NAME`) of a script's record."""
    with np.load(HERE / f"{script}.npz") as file:
        arrays = dict(file)
    return json.loads(str(arrays.pop("cases"))), arrays


def inputs_of(case: dict, arrays: dict) -> dict:
    """The stored inputs of a case, those of one or two groups, and its images, made anew."""
    inputs = {}
    for start in [f"{group}/in/" for group in case["inputs"].split("+")]:
        inputs |= {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}
    for name, recipe in case.get("images", {}).items():
        inputs[name] = fill.images(**recipe | {"shape": tuple(recipe["shape"])})
    return inputs


def filled_agent(adapter, case: dict):
    agent = adapter.agent(case["sizes"], **case["flags"])
    params = fill.parameters(case["names"], case["shapes"], case["seed"])
    adapter.set(agent, params)
    return agent, params


def numpy(outputs: dict) -> dict[str, np.ndarray]:
    return {name: np.array(torch.as_tensor(x).detach()) for name, x in outputs.items()}


def with_gradients(function, tensors: dict) -> dict[str, np.ndarray]:
    """Loss, statistics and gradients of `function(**tensors) -> loss, statistics`."""
    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in tensors.items()}
    loss, stats = function(**leaves)
    grads = torch.autograd.grad(loss, list(leaves.values()))
    grads = {f"grad_{name}": grad for name, grad in zip(leaves, grads)}
    stats = {name: stat for name, stat in stats.items() if name != "loss"}
    return numpy({"loss": loss} | stats | grads)


def gae(adapter, case, inputs):
    """Advantages; 0 in the reset rows of the Atari and LSTM scripts, whatever they give there."""
    arrays = {k: inputs[k] for k in "rewards values next_values terminations dones".split()}
    advantages = adapter.gae(*arrays.values(), **case["flags"])
    return {"advantages": np.where(inputs["valid"] == 1, advantages, 0)}


def loss(adapter, case, inputs):
    mb = {k: v for k, v in inputs.items() if k not in ("newlogprob", "entropy", "newvalue")}
    mb = {name: torch.tensor(array) for name, array in mb.items()}
    leaves = {k: v for k, v in inputs.items() if k not in mb}

    def function(newlogprob, entropy, newvalue):
        return adapter.loss(newlogprob, entropy, newvalue, mb, **case["flags"])

    return with_gradients(function, leaves)


def aux_loss(adapter, case, inputs):
    leaves = {k: inputs[k] for k in ("logits", "value", "aux_value")}
    rest = [torch.tensor(inputs[k]) for k in ("old_logits", "returns")]
    return with_gradients(lambda **x: adapter.aux_loss(*x.values(), *rest, **case["flags"]), leaves)


def batches_of(inputs) -> list:
    """Rows of `rows`, as many to a batch as `counts` says."""
    return np.split(inputs["rows"], np.cumsum(inputs["counts"])[:-1])


def moments(adapter, case, inputs):
    states = adapter.moments(batches_of(inputs), inputs["rows"].shape[1:])
    return dict(zip(("mean", "var", "count"), map(np.array, zip(*states))))


def normalize_obs(adapter, case, inputs):
    obs = adapter.normalize_obs(batches_of(inputs), inputs["obs"], **case["flags"])
    return {"obs": obs}


def scale_rewards(adapter, case, inputs):
    rewards = adapter.scale_rewards(inputs["rewards"], inputs["dones"], **case["flags"])
    return {"rewards": rewards}


def play(adapter, case, inputs):
    return adapter.play(inputs["actions"], **case["flags"])


def env_action(adapter, case, inputs):
    agent = adapter.agent(case["sizes"], **case["flags"])
    return {"actions": adapter.env_action(agent, inputs["actions"])}


def forward(adapter, case, inputs):
    """Of valid rows; the others are 0. Of an LSTM also the state where the last row is valid."""
    agent, _ = filled_agent(adapter, case)
    valid = inputs.get("valid", np.ones(len(inputs["actions"]), np.float32)) == 1
    with torch.no_grad():
        outputs = numpy(adapter.forward(agent, inputs, **case["flags"]))
        for name, array in outputs.items():
            outputs[name] = np.where(valid.reshape(-1, *[1] * (array.ndim - 1)), array, 0)
        if "state" in inputs:
            state = np.array(adapter.states(agent, inputs, **case["flags"]))
            outputs["last_state"] = state * valid[-state.shape[1] :, None]
    return outputs


def updates(adapter, case, inputs):
    """Norms and projections of all parameters' changes, and statistics of each step."""
    agent, before = filled_agent(adapter, case)
    steps = {k: inputs[k] for k in ("minibatches", "lr", "clip_coef")}
    if case.get("aux"):
        steps["aux_minibatches"] = inputs["aux_minibatches"]
    batch = {k: v for k, v in inputs.items() if k not in (*steps, "aux_minibatches")}
    stats = adapter.updates(agent, batch, **steps, **case["flags"])
    return fill.summary(before, adapter.get(agent)) | (stats or {})


PARTS = {
    function.__name__: function
    for function in (
        gae,
        loss,
        aux_loss,
        moments,
        normalize_obs,
        scale_rewards,
        play,
        env_action,
        forward,
        updates,
    )
}


def outputs_of(adapter, case: dict, arrays: dict) -> dict[str, np.ndarray]:
    return PARTS[case["part"]](adapter, case, inputs_of(case, arrays))
