"""The tables of what each detail is worth, from results files that are made up."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from registry import ROOT

sys.path.insert(0, str(ROOT / "benchmark"))

import ablation  # noqa: E402
import figures  # noqa: E402
import recipes  # noqa: E402
import results  # noqa: E402
import stats  # noqa: E402
import tables  # noqa: E402


@pytest.fixture
def put(tmp_path, monkeypatch):
    """`put(folder, env, exp, returns)`: a results file for each seed; figures go nearby."""
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(figures, "FIGURES", tmp_path / "figures")

    def write(folder: str, env: str, exp: str, returns: list[float], text="1", **more) -> None:
        for seed, value in enumerate(returns, 1):
            path = tmp_path / "results" / folder / env / f"{exp}__{seed}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            facts = {"script": "s", "env": env, "exp": exp, "seed": seed, "commit": "1"}
            facts |= {"total_timesteps": 10, "steps": 10, "seconds": 1.0, "final_return": value}
            facts |= {"hardware": "a", "versions": "b", "command": "s.py"}
            facts |= {"return_of_iterations": value + 5, "sha256": text} | more
            lines = [f"# {name}: {fact}" for name, fact in facts.items()]
            path.write_text("\n".join([*lines, "step,return,seconds", f"10,{value},1"]) + "\n")

    return write


def rows_of(text: str) -> dict[str, list[str]]:
    """First cell -> the others, of all tables of a text."""
    cells = [re.split(r" \| ", line.strip("| ")) for line in text.splitlines() if line[:1] == "|"]
    return {row[0]: row[1:] for row in cells}


# -- nothing yet --
def test_without_runs_the_tables_say_so(put):
    for section in (ablation.study_section, ablation.details_section, ablation.variants_section):
        assert section().startswith("No runs yet")
    assert ablation.effects_section() == "No runs yet." and ablation.effects() == []
    for name in (ablation.STUDY, ablation.DETAILS):
        figures.draw(name)
        assert not (figures.FIGURES / f"{name}.png").exists()


def test_published_indices_are_those_of_the_paper(put):
    """But for Hopper's ACLI: it prints 421, its means make 423."""
    rows = rows_of(ablation.study_section())
    assert rows["AAI, the algorithm"] == ["242", "99", "224"]
    assert rows["ACLI, the code-level details"] == ["557", "423", "444"]
    assert rows["TRPO"][1] == "2043 [1948, 2136]"
    theirs = ablation.published_study()
    assert {exp for exp, _ in theirs} == set(recipes.recipes_of("ablation_study").index)


def test_a_script_that_changed_between_runs_is_named(put):
    put("ablation_details", "Hopper-v4", "published", [1, 2])
    assert "versions" not in ablation.details_section()
    put("ablation_details", "Hopper-v4", "relu", [1], text="2")
    assert "s ran in 2 versions." in ablation.details_section()


def test_runs_that_cannot_be_compared_are_refused(put):
    """Seeds with other flags, but for free ones, and rows with other steps."""
    args = ['{"gamma": 0.9, "seed": 1}', '{"gamma": 0.9, "seed": 2, "track": true, "newer": 1}']
    for env, second in (("Hopper-v4", args[1]), ("Walker2d-v4", '{"gamma": 0.8}')):
        put("ablation_details", env, "published", [1, 2], args=second)
        put("ablation_details", env, "published", [1], args=args[0])
        if env == "Hopper-v4":
            put("ablation_details", env, "relu", [1])
            assert "M04" in ablation.details_section()
    with pytest.raises(SystemExit, match="seeds of published on Walker2d-v4 .* differ in gamma$"):
        ablation.details_section()
    for exp, steps in (("baseline", 10), ("spo", 20)):
        put("variants", "Hopper-v4", exp, [1], total_timesteps=steps)
    with pytest.raises(SystemExit, match="Hopper-v4 in variants differ in steps: baseline, spo$"):
        ablation.variants_section()
    for exp, steps in (("ppo", 10), ("trpo", 20)):
        put(ablation.STUDY, "Hopper-v4", exp, [1], total_timesteps=steps)
    with pytest.raises(SystemExit, match="ablation_study differ in steps: ppo, trpo$"):
        ablation.study_section()
    put("variants_mine", "Hopper-v4", "baseline", [1])  # a folder of its own, with other steps
    put("variants_mine", "Hopper-v4", "spo", [1], diverged="losses not finite, ...")
    assert rows_of(ablation.variants_section("variants_mine"))["`spo`"][1] == "1, 1 diverged"
    put("ablation_details_mine", "Hopper-v4", "published", [1], total_timesteps=2000)
    put("ablation_details_mine", "Hopper-v4", "relu", [1], total_timesteps=2000)
    assert "`ppo_continuous_mujoco.py`, 2,000 steps:" in ablation.details_section(
        "ablation_details_mine"
    )


@pytest.mark.parametrize("name", ["script", "patch", ""])
def test_seeds_of_another_script_or_patch_are_refused(name, put):
    facts = {"script": "ppo_continuous_mujoco", "patch": "012"}
    put("variants", "Hopper-v4", "spo", [1, 2], **facts)
    put("variants", "Hopper-v4", "spo", [3], **facts | ({name: "another"} if name else {}))
    if not name:
        assert len(results.read_runs("variants")) == 2
        return
    with pytest.raises(SystemExit, match=f"seeds of spo on Hopper-v4 .* differ in {name}$"):
        results.read_runs("variants")


def test_a_copy_of_a_results_file_is_refused(put):
    """It would count as one more seed."""
    put("variants", "Hopper-v4", "spo", [1, 2])
    folder = results.RESULTS / "variants" / "Hopper-v4"
    shutil.copy(folder / "spo__2.csv", folder / "spo__2 (copy).csv")
    with pytest.raises(SystemExit, match="is a copy, or has another name than its run"):
        results.read_runs("variants")


def test_recipes_with_other_steps_do_not_stand_in_a_table(put):
    put("mujoco_mine", "Hopper-v4", "strong", [1, 2], total_timesteps=20)
    put("mujoco_mine", "Hopper-v4", "ppo_continuous_mujoco", [1, 2], total_timesteps=10)
    for section in (tables.folder_section, tables.summary_section):
        with pytest.raises(SystemExit, match="Hopper-v4 in mujoco_mine differ in steps"):
            section("mujoco_mine")


def test_diverged_runs_are_named(put):
    put("ablation_details", "Hopper-v4", "published", [1, 2])
    put("ablation_details", "Hopper-v4", "relu", [0], diverged="losses not finite, ...")
    rows = rows_of(ablation.details_section())
    assert "1, 1 diverged" in next(row for row in rows.values() if "relu instead of tanh" in row)


# -- the study --
MEANS = {"ppo": 3000, "ppo_m": 2000, "ppo_noclip": 2500, "trpo": 1900, "trpo_plus": 2600}


def test_indices_are_the_largest_differences(put):
    for exp, mean in MEANS.items():
        if exp != "trpo":
            put("ablation_study", "Hopper-v4", exp, [mean - 10, mean + 10])
    rows = rows_of(ablation.study_section())
    assert rows["AAI, the algorithm"] == rows["ACLI, the code-level details"] == ["-"]
    put("ablation_study", "Hopper-v4", "trpo", [1900])
    rows = rows_of(ablation.study_section())
    assert "400" in rows["AAI, the algorithm"] and "1000" in rows["ACLI, the code-level details"]
    assert "3000 (2990, 3010)" in rows["PPO"] and "1900" in rows["TRPO"]
    assert "+400 (+390, +410)" in rows["PPO - TRPO+"]
    as_in_the_paper = ablation.study_section().split(ablation.THEIR_MEASURE)[0]
    assert {"3005 (2995, 3015)", "2513 [2391, 2632]"} <= set(rows_of(as_in_the_paper)["PPO"])
    figures.draw(ablation.STUDY)
    assert (figures.FIGURES / "ablation_study.png").stat().st_size > 10_000


def test_an_index_by_chance_is_that_of_equal_presets():
    """Known for two normal means: the larger of two distances has the mean 1.128 deviations."""
    rng = np.random.default_rng(1)
    samples = [rng.normal(1000, 50, 8) for _ in range(5)]
    deviation = np.mean([x.var(ddof=1) for x in samples]) ** 0.5 / 8**0.5
    mean, below = map(float, ablation.chance_cell(samples).split(", below "))
    distances = (
        2**0.5 * deviation * abs(np.random.default_rng(2).normal(size=(10**6, 2))).max(axis=1)
    )
    assert mean == pytest.approx(distances.mean(), rel=0.03)
    assert below == pytest.approx(np.quantile(distances, 0.95), rel=0.03)
    assert ablation.chance_cell([*samples[:4], None]) == "-"
    assert ablation.chance_cell([*samples[:4], samples[4][:1]]) == "-"


def test_five_seeds_have_intervals(put):
    rng = np.random.default_rng(0)
    returns = {exp: rng.normal(mean, 100, 5).tolist() for exp, mean in MEANS.items()}
    for exp, values in returns.items():
        put("ablation_study", "Hopper-v4", exp, values)
    rows = rows_of(ablation.study_section())
    assert tables.mean_cell(np.array(returns["trpo"])) in rows["TRPO"]
    test = scipy.stats.ttest_ind(returns["ppo"], returns["ppo_m"], equal_var=False)
    low, high = test.confidence_interval(0.95)
    mean = np.mean(returns["ppo"]) - np.mean(returns["ppo_m"])
    assert f"+{mean:.0f} [+{low:.0f}, +{high:.0f}]" in rows["PPO - PPO-M"]


# -- details --
def test_differences_are_from_the_first_row(put):
    put("ablation_details", "Hopper-v4", "published", [1000.0, 1200.0])
    put("ablation_details", "Hopper-v4", "no_norm_obs", [600.0, 400.0, 800.0])
    put("ablation_details", "CartPole-v1", "published", [400.0, 500.0])
    put("ablation_details", "CartPole-v1", "one_env", [500.0])
    put("ablation_details", "CartPole-v1", "lstm", [300.0])
    text = ablation.details_section()
    parts = re.split(r"(?m)^`", text)
    (mujoco,) = [part for part in parts if part.startswith("ppo_continuous_mujoco.py")]
    assert "| M06 | raw observations | 3 | -500 (-500, -700, -300) |" in mujoco
    assert "|  | published | 2 | 1100 (1000, 1200) |" in mujoco
    (core,) = [part for part in parts if part.startswith("ppo.py")]
    assert "| C01 | one environment of 512 steps | 1 | +50 |" in core
    (memory,) = [part for part in parts if part.startswith("ppo_lstm.py")]
    assert "|  | LSTM with velocities hidden | 1 | 300 |" in memory
    assert "450" not in memory and "300" not in core and "450" not in mujoco


def test_every_switch_of_the_script_has_a_row():
    """All bool flags of the details, and all ids of the table are of this project."""
    text = (ROOT / "docs" / "details.md").read_text()
    known = set(re.findall(r"(?m)^\| ([A-Z]\d\d) \|", text))
    for recipe in ablation.TITLES:
        rows = ablation.details_of(recipe)
        ids = {ablation.id_and_text(label)[0] for label in rows["label"]} - {""}
        assert ids and ids <= known
    import ppo_continuous_mujoco as script

    flags = " ".join(ablation.details_of("details")["flags"])
    others = "torch_deterministic cuda track capture_video compile eval_deterministic".split()
    others += ["staggered_resets"]  # nothing to the one environment of the recipe: docs/variants.md
    for name, default in vars(script.Args()).items():
        if isinstance(default, bool) and name not in others:
            flag = f"--{'no-' if default else ''}{name.replace('_', '-')}"
            assert flag in flags.split(), flag


ENVS = ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4")


def test_a_smaller_loss_is_a_gain():
    """Of tasks with negative returns."""
    worse, better = np.array([-10.0, -12.0, -14.0]), np.array([-5.0, -6.0, -7.0])
    assert stats.relative_difference([(worse, better)])[0] == pytest.approx(0.5)


def test_effects_are_shares_over_all_tasks(put):
    """A change that lacks a task, or seeds, has none yet."""
    rng = np.random.default_rng(0)
    returns = {}
    for env, size in zip(ENVS, (1000, 2000, 4000)):
        returns[env] = rng.normal(size, size / 10, 5), rng.normal(0.8 * size, size / 10, 5)
        put("ablation_details", env, "published", returns[env][0].tolist())
        put("ablation_details", env, "no_norm_obs", returns[env][1].tolist())
    put("ablation_details", "Hopper-v4", "relu", [1.0, 2.0])
    put("ablation_details", "Hopper-v4", "squash_actions", [1.0])
    (effect,) = ablation.effects()
    assert (effect.detail, effect.seeds) == ("M06", 5)
    shares = [y.mean() / x.mean() - 1 for x, y in returns.values()]
    assert effect.shares == pytest.approx(shares)
    assert effect.mean == pytest.approx(np.mean(shares))
    assert effect.low < effect.mean < effect.high < 0
    assert "benchmark/figures/ablation_details.png" in ablation.effects_section()
    figures.draw(ablation.DETAILS)
    assert (figures.FIGURES / "ablation_details.png").stat().st_size > 10_000


def test_a_relative_difference_of_one_task_is_welchs():
    """As long as the means are equal, or the first is known exactly."""
    x, y = np.array([10.0, 12.0, 14.0]), np.array([9.0, 11.0, 13.0, 15.0])
    expected = np.array(stats.difference(x, y)) / 12
    exact, lower = np.array([12.0, 12.0]), np.array([4.0, 6.0, 8.0, 11.0])
    interval = np.array(stats.difference(exact, lower)) / 12
    assert stats.relative_difference([(exact, lower)]) == pytest.approx(tuple(interval))
    assert stats.relative_difference([(x, y)]) == pytest.approx(tuple(expected))
    twice = stats.relative_difference([(x, y), (100 * x, 100 * y)])
    assert twice[0] == pytest.approx(expected[0]) and twice[2] < expected[2]
    same = np.array([500.0, 500.0])
    assert stats.relative_difference([(same, same)]) == (0, 0, 0)


@pytest.mark.parametrize("factor", [0.1, 0.9, 2, 3])
def test_the_interval_of_a_relative_difference_covers(factor):
    """95 of 100 times, over 2,000 draws of three tasks with five seeds each."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        x, y = rng.normal(100, 25, (3, 5)), factor * rng.normal(100, 25, (3, 5))
        _, low, high = stats.relative_difference(list(zip(x, y)))
        hits += low <= factor - 1 <= high
    assert 0.93 < hits / 2000 < 0.975


# -- variants --
def test_a_variant_has_differences_and_a_probability(put):
    for env in ENVS[:2]:
        put("variants", env, "baseline", [100.0, 200.0, 300.0])
        put("variants", env, "spo", [150.0, 250.0])
    text = ablation.variants_section()
    rows = rows_of(text)
    assert rows["`baseline`"][1:4] == ["3", "200 (100, 200, 300)", "200 (100, 200, 300)"]
    assert rows["`spo`"] == [
        "SPO's penalty instead of the clip",
        "2",
        "+0 (-50, +50)",
        "+0 (-50, +50)",
        "0.50",  # all pairs: 250 beats two of three, 150 one
    ]
    assert "`adam_reset`" not in rows and "No runs yet: `staggered_resets`" in text


# -- the order of runs --
def test_three_seeds_of_everything_come_first():
    """Then the next two; the study's last five at the end."""
    command = ["bash", "benchmark/ablation.sh", "study", "--dry-run"]
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True, text=True,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line]
    seeds = [
        int(re.search(r"--seed (\d+)", line)[1]) if "--seed" in line
        else int(re.search(r"__(\d+)\.csv", line)[1])
        for line in lines
    ]  # fmt: skip
    turns = [(seed > 3) + (seed > 5) for seed in seeds]
    assert turns == sorted(turns)
    assert len(seeds) == 5 * 2 * 10 + 5 * 5 and Path(ROOT / "benchmark/ablation.sh").is_file()
