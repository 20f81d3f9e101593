"""What a GPU must not change: the compiled update, a resumed run, bfloat16, and no waiting for it.

Run:       pytest -m cuda tests/test_cuda.py
Rehearse:  TEST_DEVICE=cpu pytest -m cuda tests/test_cuda.py, the same on the CPU
One row of SCRIPTS each. The tolerances of a card leave room for cuDNN's TF32 (docs/gpu.md).
"""

import itertools
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor
from harness import killed, play_frames, resume, steady, train
from registry import SCRIPTS, Script
from torch.profiler import ProfilerActivity, profile
from watch import assert_same_run, checkpoint_of, flat, scalars_of

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
ON_CARD = DEVICE == "cuda"
MISSING = ON_CARD and not torch.cuda.is_available()
REASON = "no GPU here; TEST_DEVICE=cpu rehearses"
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(MISSING, reason=REASON)]

# Between two ways of one computation, relative to its norm; of the first minibatch's log-ratio
SAME = 1e-2 if ON_CARD else 1e-4
RATIO_ONE = 1e-3 if ON_CARD else 1e-6
# What waits for the device. `item` of a tensor on the card is a copy to the host; on the CPU it is
# all that there is to see, but for that of operations, such as Adam's, which is none on a card.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "Memcpy DtoH")
WAITS = WAITS if ON_CARD else ("aten::item",)


def scripts_with(name: str | None = None):
    """Those with such a flag."""
    rows = {key: row for key, row in SCRIPTS.items() if not name or hasattr(row.module.Args, name)}
    return pytest.mark.parametrize("script", rows.values(), ids=rows)


# All but TRPO, which logs the ratio after its step
CLIPPED = {name: row for name, row in SCRIPTS.items() if "losses/clipfrac" in row.tags}


def run(script: Script, **changes) -> Path:
    """The directory of a tiny run on the device, eager unless asked for."""
    eager = {"compile": False} if hasattr(script.module.Args, "compile") else {}
    return train(script, **script.card | {"cuda": ON_CARD} | eager | changes)


def one_iteration(script: Script) -> dict:
    fields = script.tiny | script.card
    return {"total_timesteps": fields["num_envs"] * fields["num_steps"]}


def gradients_of(run_dir: Path) -> torch.Tensor:
    """Adam's moving averages: with a learning rate of almost nothing, sums of gradients."""
    state = checkpoint_of(run_dir)["optimizer"]["state"].values()
    return flat(moments["exp_avg"] for moments in state)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative; NaN, which no bound holds, if there is nothing but zeros."""
    return float((one - other).norm() / one.norm())


@inductor.patch({"triton.cudagraph_or_error": True})  # none is quietly left out
@scripts_with("compile")
def test_compiled_is_eager(script, folder, capsys):
    """Several updates of one rollout; what one graph gives, the next must not overwrite."""
    runs, still = [], {"learning_rate": 1e-7, script.epochs: 3} | one_iteration(script)
    for name, compile in (("eager", False), ("compiled", True)):
        folder(name)
        runs.append(run(script, compile=compile, **still))
    out = capsys.readouterr().out
    assert "compiling takes" in out and "eagerly" not in out
    assert difference(*map(gradients_of, runs)) < SAME


@scripts_with("bf16")
def test_bf16_is_close_to_float32(script, folder, monkeypatch):
    """With noise so loud that it alone chooses the actions: both see the same rollout."""
    log_ = torch.Tensor.log_
    monkeypatch.setattr(torch.Tensor, "log_", lambda x: log_(x).mul_(1e4))
    runs, still = [], {"learning_rate": 1e-7} | one_iteration(script)
    for name, bf16 in (("float32", False), ("bfloat16", True)):
        folder(name)
        runs.append(run(script, bf16=bf16, **still))
    assert 1e-4 < difference(*map(gradients_of, runs)) < 0.1


@scripts_with()
def test_killed_and_resumed_is_never_stopped(script, folder, monkeypatch):
    """To the bit, eager and with the deterministic kernels, which are the default."""
    folder("whole")
    if script.reset_rows:
        play_frames(script.module, monkeypatch)
    ends = steady(script)
    whole = run(script, **ends)
    folder("killed")
    run_dir = killed(script, "after renaming", 2, lambda: run(script, **ends))
    assert checkpoint_of(run_dir)["iteration"] < checkpoint_of(whole)["iteration"]
    resume(script, run_dir)
    assert_same_run(run_dir, whole)


@pytest.mark.parametrize("script", CLIPPED.values(), ids=CLIPPED)
def test_the_first_ratio_is_one(script):
    """Rollout and update are other shapes, so other kernels, of the same network."""
    first = {"num_minibatches": 1, script.epochs: 1} | one_iteration(script)
    scalars = scalars_of(run(script, **first))
    [(_, logratio)] = scalars["losses/old_approx_kl"]
    [(_, clipped)] = scalars["losses/clipfrac"]
    assert abs(logratio) < RATIO_ONE and clipped == 0


def waits(script: Script, patch, num_minibatches: int) -> Counter:
    """What waits for the device in one whole iteration, the third: nothing is new to it."""
    profiler = profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * ON_CARD)
    gae, calls = script.module.gae, itertools.count(1)

    def watched(*args):
        match next(calls):
            case 3:
                profiler.start()
            case 4:
                profiler.stop()
        return gae(*args)

    patch.setattr(script.module, "gae", watched)
    size = {"num_envs": 4, "num_steps": 16, "total_timesteps": 4 * 4 * 16}
    size["num_minibatches"] = num_minibatches
    compile = {"compile": True} if ON_CARD and hasattr(script.module.Args, "compile") else {}
    run(script, **size | compile)
    patch.setattr(script.module, "gae", gae)
    events = [event for event in profiler.events() if ON_CARD or event.cpu_parent is None]
    return Counter(name for event in events for name in WAITS if event.name.startswith(name))


@scripts_with()
def test_no_minibatch_waits_for_the_device(script, monkeypatch, folder):
    """However many minibatches an iteration has, it waits as often."""
    found = []
    for num_minibatches in (2, 4):
        folder(f"{num_minibatches} minibatches")
        found.append(waits(script, monkeypatch, num_minibatches))
    assert found[0]  # the rollout's and the log's
    assert not found[1] - found[0]
