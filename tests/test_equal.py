"""benchmark/equal.py: the same draws on both sides, cases that fit the scripts, a table."""

import sys
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from registry import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))

import equal  # noqa: E402
import results  # noqa: E402
from peers import draws  # noqa: E402


def test_a_rollouts_noise_is_the_same_at_once_and_step_by_step():
    """Of our scripts (which draw exponential noise, in either way) and of an original."""
    at_once, by_step, theirs = draws.Draws(), draws.Draws(3), draws.Draws(3)
    with at_once.instead_of_torchs():
        noise = [-torch.empty(3, 2, 7).exponential_().log() for _ in range(2)]
    with by_step.instead_of_torchs():
        steps = [torch.empty(2, 7).exponential_().log_().neg() for _ in range(6)]
    original = [theirs.of_step(theirs.gumbel, (2, 7)) for _ in range(6)]
    assert torch.cat(noise).equal(torch.stack(steps)) and not noise[0].equal(noise[1])
    assert torch.cat(noise).equal(torch.stack(original))


def test_what_torch_draws_is_its_own_again_after_use():
    before = torch.randperm, torch.randn, torch.Tensor.exponential_, torch.optim.Adam
    mine = draws.Draws()
    with pytest.raises(KeyError), mine.instead_of_torchs(draws.WatchedAdam):
        assert torch.optim.Adam is draws.WatchedAdam
        assert torch.randperm(8).equal(draws.Draws().permutation(8))
        assert torch.randn(3, 2).equal(draws.Draws().normal(3, 2))
        raise KeyError
    after = torch.randperm, torch.randn, torch.Tensor.exponential_, torch.optim.Adam
    assert after == before
    assert mine.calls == {8: 1, 0: 1}


def test_draws_are_the_same_on_both_sides_and_new_each_time():
    one, other = draws.Draws(), draws.Draws()
    noise = one.gumbel(3, 2), one.permutation(8), one.gumbel(3, 2), one.permutation(8)
    again = [other.gumbel(3, 2), other.gumbel(3, 2), other.permutation(8), other.permutation(8)]
    for mine, theirs in zip(noise, (again[0], again[2], again[1], again[3])):
        assert mine.equal(theirs)
    assert not noise[0].equal(noise[2]) and not noise[1].equal(noise[3])
    assert sorted(noise[1].tolist()) == list(range(8))


@pytest.mark.parametrize("name", equal.CASES)
def test_a_case_fits_its_script(name):
    case = equal.CASES[name]
    if "procgen" in case.script and find_spec("procgen") is None:
        pytest.skip("procgen-mirror is not installed")
    module = equal.load(equal.script_of(case.file))
    args = module.parse_args(case.flags.split())
    args = replace(args, **case.shared | case.ours | {"cuda": False})
    module.check_args(args)
    assert args.num_iterations == case.iterations
    assert case.iterations % getattr(args, "n_iteration", 1) == 0  # ends with an auxiliary phase


def test_our_side_is_repeatable_and_sees_a_changed_lambda(monkeypatch, tmp_path):
    case = equal.CASES["cleanrl_ppo"]
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "weights.pt"
    ours = equal.train_ours(case, file)
    changed = equal.train_ours(case, file, gae_lambda=0.94)
    again = equal.train_ours(case, file, seed=case.shared["seed"])
    for name, first in torch.load(file).items():
        assert ours[name].equal(again[name]) and not ours[name].equal(first)
        assert not ours[name].equal(changed[name])


def missing(facts: dict) -> list[str]:
    """The environments' packages that a results file names and this machine lacks."""
    needed = (pair.split(" ") for pair in facts["versions"].split(", "))
    needed = [(name, at) for name, at in needed if name in ("mujoco", "envpool", "procgen-mirror")]
    return [
        f"{name} {at}"
        for name, at in needed
        if find_spec(name.split("-")[0]) is None or version(name) != at
    ]


def elsewhere(path: Path, ours: dict, first: dict) -> list[str]:
    """The tensors that ended elsewhere; the file has three digits of each figure.

    Each processor rounds in its own way: the sum of n weights may be off by ten times sqrt(n) times
    the largest distance between a weight and the original's.
    """
    found = []
    for row in results.read_curve(path).itertuples():
        change = ours[row.weights] - first[row.weights]
        slack = (1e-3 * row.from_first + 10 * row.from_theirs) * change.numel() ** 0.5
        far = change.abs().max().item() != pytest.approx(row.from_first, rel=0.02)
        drift = change.sum().item() != pytest.approx(row.drift, rel=0.02, abs=slack)
        found += [row.weights] * (far or drift)
    return found


@pytest.mark.e2e
@pytest.mark.parametrize("name", equal.CASES)
def test_our_side_still_ends_where_the_original_does(name, monkeypatch, tmp_path):
    """Where it ended when it was compared with the original; a lambda of 0.94 ends elsewhere."""
    path = results.RESULTS / "equal" / f"{name}.csv"
    if lacking := missing(results.read_facts(path)):
        pytest.skip(f"not here: {lacking}")
    monkeypatch.chdir(tmp_path)
    case, file = equal.CASES[name], Path("weights.pt")
    ours = equal.train_ours(case, file)
    assert elsewhere(path, ours, torch.load(file)) == []
    changed = equal.train_ours(case, file, gae_lambda=0.94)
    assert elsewhere(path, changed, torch.load(file)) != []
