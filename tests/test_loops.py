"""The loop of every script, by the same tests: rewards, discounts, rates, epochs, gradients,
clocks, and what a resumed run goes on with.

What is special about the loop of one script is tested in the file of that script.
"""

import csv

import numpy as np
import pytest
import torch
from harness import each_text_of, killed, known, resume, some, steady, train, watch_envs
from registry import SCRIPTS
from watch import checkpoint_of, flat, scalars_of

ONE = 64  # steps of an iteration of a tiny run
scripts = some(SCRIPTS.values())
OWN = {name: row for name, row in SCRIPTS.items() if not row.games}
FORGETFUL = {name: row for name, row in OWN.items() if not row.whole_sequences}
pytestmark = pytest.mark.usefixtures("small")


def gradient(step: tuple) -> torch.Tensor:
    """One vector (P,) of what an optimizer gets."""
    return flat(grad for grad in step[2] if grad is not None)


# -- what is learned from --
@scripts
def test_targets_are_values_plus_advantages_by_the_discounts_of_the_flags(script, spy):
    gae_calls, losses = spy(script.module, "gae"), spy(script.module, script.loss)
    changes = known(script, norm_adv=False, adv_norm_fullbatch=False)
    train(script, gamma=0.9, gae_lambda=0.8, total_timesteps=ONE, **changes)
    [((_, values, _, _, _, *discounts), advantages)] = gae_calls
    assert discounts == [0.9, 0.8]
    targets = values + advantages
    samples = set(zip(values.ravel().tolist(), targets.ravel().tolist()))
    assert len(losses) >= 2
    for inputs, _ in losses:
        mb = next(x for x in inputs if isinstance(x, dict))
        pairs = (mb[name].flatten().tolist() for name in ("values", "returns"))
        assert set(zip(*pairs)) <= samples
        assert torch.equal(mb["returns"], mb["values"] + mb["advantages"])


@each_text_of(lines="rewards", detail="A06")
def test_the_agent_learns_from_clipped_rewards(script, spy):
    """What the game pays is in infos alone: with envs.Frames it is more than the reward."""
    gae_calls = spy(script.module, "gae")
    train(script, total_timesteps=ONE)
    [((rewards, *_), _)] = gae_calls
    assert set(rewards.ravel().tolist()) == {0, 1}  # 0 where a game is reset


@each_text_of("train: rollout", rows=OWN)
def test_rewards_stand_at_their_steps(script, spy, monkeypatch):
    paid, gae_calls = [], spy(script.module, "gae")
    watch_envs(script, monkeypatch, step=lambda result, _: paid.append(result[1].copy()) or result)
    train(script, env_id=script.env("Steady"), **known(script, norm_reward=False))
    rewards = np.concatenate([inputs[0] for inputs, _ in gae_calls])
    np.testing.assert_allclose(rewards, paid, rtol=1e-6)
    assert np.ptp(paid) > 0


@each_text_of("train: advantages", detail="S01")
@pytest.mark.parametrize("bootstrap", [True, False])
def test_a_time_limit_ends_the_bootstrap_if_asked(script, bootstrap, spy, monkeypatch):
    """With terminations and truncations exchanged: all episodes end at a limit."""
    gae_calls = spy(script.module, "gae")
    exchanged = lambda result, _: (*result[:2], result[3], result[2], result[4])  # noqa: E731
    watch_envs(script, monkeypatch, step=exchanged)
    train(script, bootstrap_truncation=bootstrap, total_timesteps=ONE, **steady(script))
    [((_, _, _, ends, dones, *_), _)] = gae_calls
    assert dones.any() and (ends == (0 if bootstrap else dones)).all()


@each_text_of("train: rollout", "train: advantages", detail="S01", rows=FORGETFUL)
@pytest.mark.parametrize("name, cuts", [("Truncating", 0), ("Terminating", 6)])
def test_next_values_are_those_of_the_states_that_followed(script, name, cuts, spy):
    """Before any reset. Episodes of five steps show (step, episode); the weights stay."""
    gae_calls, size = spy(script.module, "gae"), {"num_steps": 16, "total_timesteps": 32}
    still = known(script, max_kl=1e-30, norm_obs=False, frame_stack=1, ortho_init=False)
    run_dir = train(script, env_id=script.env(name), learning_rate=1e-30, **size, **still)
    [((_, values, next_values, ends, dones, *_), _)] = gae_calls
    args = script.module.Args(**checkpoint_of(run_dir)["args"])
    env = script.module.make_env(args)
    agent = script.module.Agent(env.observation_space, env.action_space, args)
    agent.load_state_dict(checkpoint_of(run_dir)["agent"])

    def value(steps: list) -> np.ndarray:
        obs = torch.tensor(steps).float()
        if script.images:  # of tests/envs.py: the numbers are columns of four pixels
            obs = obs[:, None, None, :, None].expand(-1, 1, 4, -1, -1)
        return agent.get_value(obs).detach().numpy()[:, None].repeat(2, 1)

    assert np.flatnonzero(dones[:, 0]).tolist() == [4, 9, 14]
    assert ends.sum() == cuts and dones.sum() == 6
    followed = value([[t % 5 + 1, t // 5] for t in range(16)])
    counts = ends == 0
    np.testing.assert_allclose(next_values[counts], followed[counts], atol=1e-6)
    np.testing.assert_allclose(values, value([[t % 5, t // 5] for t in range(16)]), atol=1e-6)
    assert len(np.unique(followed.round(5))) == 16  # none could stand for another


# -- schedules --
@scripts
def test_rates_start_full_and_end_one_iteration_above_zero(script, spy, optimizer_steps):
    """The learning rate and the range of the clip. And every weight learns."""
    gae_calls, losses = spy(script.module, "gae"), spy(script.module, script.loss)
    evaluations = spy(script.module.Agent, "evaluate_actions")
    switches = dict.fromkeys(script.annealing, True)
    run_dir = train(script, learning_rate=1e-3, **switches, **known(script, clip_coef=0.3))
    fractions = [1, 0.75, 0.5, 0.25]
    rates = [rate for _, rate, *_ in optimizer_steps]
    changed = [rate for before, rate in zip([None, *rates], rates) if rate != before]
    assert len(gae_calls) == 4 and changed == pytest.approx([1e-3 * f for f in fractions])
    logged = [value for _, value in scalars_of(run_dir)["charts/learning_rate"]]
    assert logged == pytest.approx([1e-3 * fraction for fraction in fractions])
    if "X01" in script.details:
        each = len(losses) // 4
        ranges = [float(inputs[4]) for inputs, _ in losses]
        assert ranges == pytest.approx([0.3 * f for f in fractions for _ in range(each)])
    (agent, *_), _ = evaluations[0]  # before the first update
    trained = checkpoint_of(run_dir)["agent"]
    for name, start in agent.state_dict().items():
        assert not torch.equal(trained[name], start), name


@each_text_of("train: update", detail="X03")
def test_epochs_end_after_one_whose_mean_kl_is_above_the_target(script, monkeypatch):
    """The mean of that epoch: not of all so far, not its largest nor its last minibatch."""
    divergences = [0.0, 0.0, 0.05, 0.0, 0.04, 0.03, *[0.01] * 4]  # two of each epoch
    ppo_loss, calls = script.module.ppo_loss, []

    def with_divergence(*args):
        loss, stats = ppo_loss(*args)
        calls.append(divergences[len(calls)])
        return loss, stats | {"approx_kl": torch.tensor(calls[-1])}

    monkeypatch.setattr(script.module, "ppo_loss", with_divergence)
    for target_kl, epochs in ((0.03, 3), (0.02, 2), (None, 5)):
        calls.clear()
        train(script, target_kl=target_kl, total_timesteps=ONE, **{script.epochs: 5})
        assert len(calls) == 2 * epochs


# -- gradients --
@each_text_of("train: update", detail="C11")
def test_each_minibatch_has_a_gradient_of_its_own(script, optimizer_steps):
    still = {"learning_rate": 1e-30, "max_grad_norm": 0.0, "num_minibatches": 1}
    train(script, total_timesteps=ONE, **still, **{script.epochs: 2})
    one, two = map(gradient, optimizer_steps[:2])
    assert (one - two).norm() < 0.5 * one.norm()  # ppo_atari.py has some samples twice


@each_text_of("train: update", detail="C11")
def test_max_grad_norm_bounds_what_adam_gets(script, optimizer_steps):
    """The same direction, whatever the bound, and 0 is none; the norm before it is logged."""
    once = {"num_minibatches": 1, "total_timesteps": ONE, script.epochs: 1}
    firsts = []
    for bound in (0.0, 1e9, 1e-5):
        optimizer_steps.clear()
        run_dir = train(script, max_grad_norm=bound, exp_name=f"{bound:g}", **once)
        grads = [*map(gradient, optimizer_steps)]
        assert all(grad.norm() < 1.2 * bound for grad in grads) or not bound
        firsts.append(grads[0])
        [(_, logged)] = scalars_of(run_dir)["losses/grad_norm"]
        assert logged == pytest.approx(firsts[0].norm().item(), rel=1e-4)
    whole, loose, clipped = firsts
    norm = whole.norm().item()
    assert norm > 1e-3 and torch.equal(loose, whole)
    assert clipped.norm().item() == pytest.approx(1e-5, rel=0.2)  # torch adds 1e-6 to the norm
    torch.testing.assert_close(clipped / clipped.norm(), whole / norm, rtol=1e-3, atol=1e-6)


# -- what is logged --
@scripts
def test_speed_and_shares_of_time(script, spy, monkeypatch):
    """By a clock by which a rollout takes 5 seconds, an update 20, a part of a phase 3."""
    module, steps = script.module, []
    log_step, updates = module.Log.step, spy(module, "gae")
    phases = spy(module, "aux_loss") if hasattr(module, "aux_loss") else []
    monkeypatch.setattr(module.Log, "step", lambda *x: steps.append(1) or log_step(*x))

    def now() -> float:
        rollouts = np.ceil(len(steps) / script.tiny["num_steps"])
        return 1e9 + 5 * rollouts + 20 * len(updates) + 3 * len(phases)

    monkeypatch.setattr(module.time, "time", now)
    run_dir = train(script)
    scalars = scalars_of(run_dir)
    assert [seconds for _, seconds in scalars["time/rollout"]] == [5] * 4
    assert [seconds for _, seconds in scalars["time/update"]] == [20] * 4
    auxiliary = [seconds for _, seconds in scalars.get("time/auxiliary", [])]
    assert sum(auxiliary) == 3 * len(phases) and bool(phases) == bool(auxiliary)
    step, speed = scalars["charts/SPS"][-1]
    assert speed == pytest.approx(step / (4 * 25 + sum(auxiliary)))
    if script.games and not script.reset_rows:
        return  # Procgen's games may be longer than the run
    with open(run_dir / "episodes.csv") as file:
        episodes = [(int(row["step"]), float(row["seconds"])) for row in csv.DictReader(file)]
    assert episodes
    for step, seconds in episodes:  # those of a rollout end after its 5 seconds
        assert seconds == 25 * ((step - 1) // ONE) + 5


# -- resuming --
@some(row for row in SCRIPTS.values() if row.name in ("ppo", "ppg_procgen"))
def test_a_resumed_run_goes_on_with_its_clock_and_its_last_100_returns(script):
    run_dir = killed(script, "after renaming", 2, lambda: train(script))
    earlier = [1000.0 + i for i in range(100)]
    past = checkpoint_of(run_dir) | {"seconds": 1e6, "recent_returns": earlier}
    torch.save(past, run_dir / "checkpoint.pt")
    result, checkpoint = resume(script, run_dir), checkpoint_of(run_dir)
    assert 1e6 < checkpoint["seconds"] < 1e6 + 600
    returns = checkpoint["recent_returns"]
    new = 100 - sum(value in earlier for value in returns)
    assert returns[: 100 - new] == earlier[new:]  # the oldest have gone, as many as came
    assert len(returns) == 100 and result["return"] == pytest.approx(np.mean(returns))


@some(row for row in SCRIPTS.values() if "M06" in row.details)
def test_where_new_episodes_start_their_observations_are_normalized(script, spy, monkeypatch):
    """The first ones, as all: by the statistics of the checkpoint."""
    starts = []
    watch_envs(script, monkeypatch, reset=lambda result: starts.append(result[0].copy()) or result)
    run_dir = killed(script, "after renaming", 2, lambda: train(script))
    mean, var, _ = (x.numpy() for x in checkpoint_of(run_dir)["obs_rms"])
    rollouts = spy(script.module.Agent, "evaluate_actions")
    resume(script, run_dir)
    (_, obs, *_), _ = rollouts[0]
    expected = ((starts[-1] - mean) / np.sqrt(var + 1e-8)).clip(-10, 10)
    np.testing.assert_allclose(obs[: len(expected)], expected, rtol=1e-5, atol=1e-6)
    assert len(starts) == 2 and abs(starts[0] - starts[1]).max() > 1e-3


# -- bfloat16 --
@some(row for row in SCRIPTS.values() if hasattr(row.module.Args, "bf16"))
def test_bf16_stays_inside_the_network(script, spy):
    """Images are scaled in float32; what the heads give is float32, and so are the gradients."""
    evaluated, scaled, inside = spy(script.module.Agent, "evaluate_actions"), [], []
    flags = known(script, ortho_init=False, init="torch")
    train(script, total_timesteps=ONE, bf16=True, **flags)
    (agent, obs, *rest), _ = evaluated[0]
    agent.network.register_forward_pre_hook(lambda _, inputs: scaled.append(inputs[0]))
    agent.network.register_forward_hook(lambda _, inputs, output: inside.append(output.dtype))
    results = agent.evaluate_actions(obs, *rest)
    agent.dtype = torch.float32
    for mine, plain in zip(results, agent.evaluate_actions(obs, *rest)):
        assert mine.dtype == torch.float32 and 0 < (mine - plain).abs().max() < 0.05
    assert inside == [torch.bfloat16, torch.float32]
    assert torch.equal(scaled[0].unique(), (obs.float() / 255).bfloat16().unique())
    (results[0].sum() + results[2].sum()).backward()
    assert {p.grad.dtype for p in agent.parameters() if p.grad is not None} == {torch.float32}
