"""benchmark/selection.py: candidates, rounds, and what each round leaves."""

import sys
from importlib import import_module

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from test_benchmark import ROOT, copy, output_of, recipes, suite

import selection  # isort: skip

__all__ = ["copy"]  # a fixture


@pytest.fixture
def results(tmp_path, monkeypatch):
    """`results(candidate, seeds, share)`: runs with this share of the aim, of each environment.

    Shares may also be four, of HalfCheetah, Hopper, Walker2d and Ant; `changes` are flags.
    """
    monkeypatch.setattr(selection, "RESULTS", tmp_path)
    aims = {"HalfCheetah-v4": 6000, "Hopper-v4": 2600, "Walker2d-v4": 3700, "Ant-v4": 3500}

    def make(candidate: str, seeds: str, share: float | list[float], changes: str = "") -> None:
        row = selection.candidates().loc[candidate]
        script = selection.script_of(row["script"])
        for (env, aim), part in zip(aims.items(), np.broadcast_to(share, 4)):
            for seed in seeds.split():
                path = tmp_path / "selection" / env / f"{candidate}__{seed}.csv"
                path.parent.mkdir(parents=True, exist_ok=True)
                flags = f"{script.name} --env-id {env} --seed {seed} {row['flags']} {changes}"
                facts = {"command": flags, "script": script.stem} | selection.have.patch_in(script)
                facts["final_return"] = part * aim
                top = "".join(f"# {name}: {value}\n" for name, value in facts.items())
                path.write_text(f"{top}step,return\n")

    return make


def test_candidates_are_the_strong_recipe_with_one_idea_each():
    rows = selection.candidates()
    assert rows["flags"]["today"] == rows["flags"]["staggered"] == selection.STRONG
    plan = (ROOT / "docs/selection.md").read_text()
    assert [flag for flag in selection.STRONG.split() if flag not in plan] == []
    assert not rows.duplicated(["script", "flags"]).any() and rows.index.is_unique
    script = import_module("ppo_continuous_mujoco")
    for flags in rows["flags"]:
        script.check_args(script.parse_args(flags.split()))
        named = selection.options(flags)
        assert int(named["num-envs"]) * int(named["num-steps"]) == 2048
    assert "--gae-lambda 0.9" in rows["flags"]["lambda_09"]
    assert rows["flags"]["staggered_std"].count("init-log-std") == 1


def test_each_round_leaves_the_best_over_all_seeds_so_far(results):
    """By the seeds of the last round alone another one would have won."""
    names = list(selection.candidates().index)
    for i, name in enumerate(names):
        results(name, "103 104", 1 + i / 100)
    assert selection.left(1) == names[:-5:-1]
    for name, share in zip(selection.left(1), (0.5, 1.2, 1.3, 0.9)):
        results(name, "105 106", share)
    assert selection.left(2) == [names[-3], names[-2]]
    results(names[-3], "107 108 109 110", 1.1)
    results(names[-2], "107 108 109 110", 1.12)
    assert selection.left(3) == [names[-3]]


def test_the_score_is_the_mean_over_environments_of_the_share_of_the_aim(results):
    """The aims of docs/selection.md; no environment alone decides."""
    names = list(selection.candidates().index)
    for name in names:
        results(name, "103 104", 1)
    results(names[3], "103 104", [0.9, 1.2, 1, 1])
    results(names[5], "103 104", [1, 1, 1.3, 0.8])
    results(names[7], "103 104", [1.1, 0.8, 1, 1.08])
    assert [names.index(name) for name in selection.left(1)[:2]] == [3, 5]
    assert selection.left(1)[-1] != names[7]
    plan = (ROOT / "docs/selection.md").read_text()
    assert "aim of its environment: 6000, 2600, 3700, 3500." in plan
    assert selection.shares(names[7], ["103"]).tolist() == [pytest.approx([1.1, 0.8, 1, 1.08])]


@pytest.mark.parametrize("changes", ["--gamma 0.98", "--total-timesteps 5"])
def test_a_run_that_is_not_of_the_plan_stops_the_selection(changes, results, monkeypatch):
    """If the flags were not for every run, in a folder of its own."""
    for name in selection.candidates().index:
        results(name, "103 104", 1)
    results("staggered", "103", 2, changes)
    words = f"staggered__103.csv is no run of the plan: .*{changes.split()[1]}"
    with pytest.raises(ValueError, match=words):
        selection.plan(2)
    with pytest.raises(SystemExit, match=words):
        selection.selection_section()
    for name in selection.candidates().index:
        results(name, "103 104", 1, changes)
    selection.read_facts.cache_clear()
    monkeypatch.setattr(selection, "FLAGS", changes)
    assert len(selection.plan(2).splitlines()) == 1 + 4 * 4


def test_a_run_of_another_patch_stops_the_selection(results, tmp_path):
    for name in selection.candidates().index:
        results(name, "103 104", 1)
    path = tmp_path / "selection" / "Ant-v4" / "staggered__104.csv"
    path.write_text(path.read_text().replace("# patch: ", "# patch: 0"))
    with pytest.raises(ValueError, match="staggered__104.csv is no run of the plan: patch 0"):
        selection.plan(2)


def test_a_task_ends_with_its_run(copy):
    """Though the next round is not known yet; one of the next round has to wait."""
    output = output_of(suite(copy, "benchmark/selection.sh", "--dry-run", TASK="79"))
    assert "--env-id Ant-v4 --seed 104 --exp-name staggered_std " in output
    assert "round 1 is not complete" not in output
    output = output_of(suite(copy, "benchmark/selection.sh", "--dry-run", TASK="80"), code=1)
    assert "round 1 is not complete" in output


def test_the_plan_has_144_runs(results):
    for name in selection.candidates().index:
        results(name, "103 104 105 106", 1)
    plans = [selection.plan(i + 1).splitlines() for i in range(3)]
    runs = [len(seeds.split()) * len(lines) for seeds, *lines in plans]
    assert runs == [80, 32, 32]
    seeds = " ".join(plan[0] for plan in plans).split()
    assert seeds == [str(seed) for seed in range(103, 111)]
    assert plans[1][1].startswith("ppo_continuous_mujoco.py HalfCheetah-v4 today --num-envs 64 ")


def test_the_results_are_of_the_chosen_recipe_on_seeds_of_their_own(results):
    for name in selection.candidates().index:
        results(name, "103 104 105 106 107 108 109 110", 2 if name == "staggered_rate" else 1)
    assert "Chosen: `staggered_rate`." in selection.selection_section()
    known, unseen = (selection.final_plan(part).splitlines() for part in ("known", "unseen"))
    runs = [len(seeds.split()) * len(lines) for seeds, *lines in (known, unseen)]
    assert runs == [10 * 6 * 4, 5 * 3 * 4]
    assert known[0] == "201 202 203 204 205 206 207 208 209 210"
    assert unseen[0] == "201 202 203 204 205"
    assert known[2] == f"ppo_continuous_mujoco.py HalfCheetah-v4 strong {selection.STRONG}"
    flags = selection.candidates()["flags"]["staggered_rate"] + " --staggered-resets"
    assert known[1] == f"ppo_continuous_mujoco.py HalfCheetah-v4 chosen {flags}"
    assert unseen[-1] == (
        "ppo_continuous_mujoco.py Pusher-v5 no_bootstrap --no-bootstrap-truncation"
    )


def test_the_chosen_recipe_is_that_of_the_suite():
    """`bash benchmark/mujoco.sh chosen` and `pendulum` run what the selection's runs chose."""
    rows = recipes.read_recipes().query("experiment == 'chosen'").set_index("recipe")
    row, other = rows.loc["chosen"], rows.loc["pendulum"]
    assert row["flags"] == other["flags"]
    line = selection.final_plan("known").splitlines()[1]
    assert line.split()[:3] == [row["script"], "HalfCheetah-v4", "chosen"]
    args = import_module("ppo_continuous_mujoco").parse_args
    assert args(line.split()[3:]) == args(row["flags"].split())
    assert set(selection.FINAL["known"][1]) == set(recipes.environments_of(row))


def test_the_environments_exist():
    """Pusher-v4 does not: it needs a MuJoCo older than 3."""
    for _, envs in selection.FINAL.values():
        for env_id in envs:
            gym.make(env_id).close()


def test_newcomers_need_five_seeds_and_99_percent(monkeypatch):
    rows = recipes.read_recipes()
    envs = recipes.environments_of(rows[rows["folder"] == "variants"].iloc[0])
    returns = {("baseline", env): np.arange(5.0) for env in envs}
    returns |= {("spo", env): np.arange(5.0) + 3 for env in envs}
    returns |= {("adam_reset", env): np.arange(5.0) + 1.5 for env in envs}  # better with 95%
    returns |= {("weight_decay", env): np.arange(4.0) + 9 for env in envs}
    monkeypatch.setattr(selection, "returns_of", lambda folder: returns)
    assert selection.newcomers() == ["spo"]
    returns |= {("cosine_annealing", env): np.arange(5.0) + 9 for env in envs}
    assert selection.newcomers() == ["cosine_annealing", "spo"]


def test_a_missing_run_stops_the_next_round(results, tmp_path):
    for name in selection.candidates().index:
        results(name, "103 104", 1)
    (tmp_path / "selection" / "Ant-v4" / "staggered__104.csv").unlink()
    with pytest.raises(ValueError, match="round 1 is not complete.*: staggered$"):
        selection.plan(2)


def test_the_table_names_seeds_and_score(results):
    results("today", "103 104 105 106", 0.9)
    results("staggered", "103 104", 1.1)
    text = selection.selection_section()
    assert "| `today` | the strong recipe as it is | 4 | 5400 (5400, 5400, 5400, 5400) |" in text
    today, staggered = (line for line in text.splitlines() if line.startswith("| `"))
    assert today.endswith("| 0.900 |") and "| 2 | 6600 (6600, 6600) |" in staggered


def test_incomplete_seeds_count_for_nothing(results, tmp_path):
    results("today", "103 104", 0.9)
    (tmp_path / "selection" / "Ant-v4" / "today__104.csv").unlink()
    assert np.isnan(selection.shares("today", ["103", "104"])).tolist() == [
        [False] * 4,
        [False] * 3 + [True],
    ]
    assert "| 1 | 5400 |" in selection.selection_section()


@pytest.fixture
def final_runs(monkeypatch):
    """`final_runs(change)`: all 300 runs; `change(env, exp, i)` is the return of a recipe's seed i.

    A part's seeds may be fewer: `some` has how many of which part.
    """
    monkeypatch.setattr(selection, "check_plan", lambda runs: None)
    monkeypatch.setattr(selection, "labels", lambda facts: "")

    def make(change, some: dict[str, int] | None = None) -> None:
        rows = []
        same = {"hardware": "a CPU", "versions": "python", "commit": "0" * 12, "diverged": False}
        for part, (seeds, envs) in selection.FINAL.items():
            names = seeds.split()[: (some or {}).get(part)]
            for exp in ["chosen", *selection.BESIDE]:
                for env in envs:
                    for i, seed in enumerate(names):
                        facts = {"env": env, "exp": exp, "seed": int(seed)}
                        rows.append(same | facts | {"final_return": float(change(env, exp, i))})
        monkeypatch.setattr(selection, "read_runs", lambda folder: selection.pd.DataFrame(rows))

    return make


def cells_of(text: str, start: str) -> list[str]:
    """The cells of the table's row that begins so."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_results_stand_beside_the_other_recipes(final_runs):
    """A part with all of its seeds has a probability, the other one has none yet."""
    worth = {"chosen": 400, "strong": 300, "ppo_continuous_mujoco": 200, "no_bootstrap": 100}
    final_runs(lambda env, exp, i: worth[exp], {"unseen": 3})
    text = selection.results_section()
    head = (
        "| environment | seeds | chosen | strong | default (bootstraps time limits) | published |"
    )
    assert text.startswith(head)
    cells = cells_of(text, "Humanoid-v4")
    assert cells[1:4] == ["10", "400 [400, 400]", "300 [300, 300]"]
    assert cells[-2:] == ["+100 [+100, +100]", "1030"]
    assert cells_of(text, "Swimmer-v4")[-2:] == ["-", "-"]
    probability = "probability that a run of *chosen* beats one of this recipe, "
    assert cells_of(text, f"{probability}6 known").count("1.00 [1.00, 1.00]") == 3
    assert cells_of(text, f"{probability}3 unseen").count("-") == 3


def test_the_plan_is_counted_among_the_suites(monkeypatch, tmp_path):
    """144 and 300 runs, as the plan says; the time is that of the results that there are."""
    monkeypatch.setattr(selection, "RESULTS", tmp_path)
    rows = selection.suite_rows()
    assert [row[1] for row in rows] == ["0 of 144", "0 of 300"]
    for seed, seconds in ((201, 360), (202, 60), (203, 120)):
        path = tmp_path / "selection_results" / "Ant-v4" / f"chosen__{seed}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {"seconds": seconds, "total_timesteps": 1000000, "hardware": "a processor"}
        path.write_text("".join(f"# {name}: {value}\n" for name, value in facts.items()))
    row = ["3 of 300", "1,000,000", "2.0", "0.1", "a processor"]  # median of minutes, sum of hours
    assert selection.suite_rows() == [rows[0], ["`bash benchmark/selection.sh results`", *row]]


def test_the_probability_is_the_mean_over_the_environments_of_its_part(final_runs):
    """Chosen loses one of six, and one of three; ten and five seeds, or none is printed."""
    lost = {"Ant-v4", "Pusher-v5"}
    final_runs(lambda env, exp, i: 1 if (exp == "chosen") != (env in lost) else 0)
    known, unseen = (line for line in selection.results_section().splitlines() if "beats" in line)
    assert known.count("0.83 [0.83, 0.83]") == 3 and unseen.count("0.67 [0.67, 0.67]") == 3
    final_runs(lambda env, exp, i: i, {"known": 9, "unseen": 4})
    assert "0.50" not in selection.results_section().split("*chosen - strong*")[0]


def test_the_difference_of_the_means_has_the_interval_of_welch():
    new, old = np.arange(5.0), np.arange(0.0, 30.0, 3)
    interval = stats.ttest_ind(new, old, equal_var=False).confidence_interval(0.95)
    assert selection.gap_cell(new, old) == f"-11.5 [{interval.low:.1f}, {interval.high:.1f}]"
    assert selection.gap_cell(new[:4], old) == "-"


def test_a_result_of_another_run_stops_the_report():
    """Of another recipe, seed or environment than planned, or of another text of the script."""
    runs = selection.read_runs(selection.RESULTS_FOLDER)
    selection.check_plan(runs)
    chosen = runs[runs["exp"] == "chosen"]
    wrong = [runs.assign(seed=runs["seed"] + 100), chosen.assign(exp="strong")]
    wrong += [runs.assign(env="Hopper-v5"), runs.assign(exp="staggered")]
    for other in wrong:
        with pytest.raises(SystemExit, match="is no run of the plan"):
            selection.check_plan(other)
    two = pd.concat([chosen.head(1), chosen.head(1).assign(sha256="0")])
    with pytest.raises(SystemExit, match="several texts of the script"):
        selection.check_plan(two)


def test_a_suite_with_failed_runs_ends_after_its_round(copy):
    """A stand-in for Python fails to train, and results of other runs lie where its own belong."""
    for name in selection.candidates().index:
        for env in selection.AIMS:
            for seed in ("103", "104"):
                path = copy / "benchmark/results/selection" / env / f"{name}__{seed}.csv"
                path.parent.mkdir(parents=True, exist_ok=True)
                facts = "# command: ppo.py\n# exp: other\n# args: {}\n# final_return: 1\n"
                path.write_text(facts + "step,return\n")
    trains = 'case $1 in benchmark/*) exec "$REAL" "$@" ;; *) exit 1 ;; esac'
    (copy / "python.sh").write_text(trains)
    there = {"PYTHON": "bash python.sh", "REAL": sys.executable, "WORKERS": "4"}
    output = output_of(suite(copy, "benchmark/selection.sh", **there), code=1)
    assert output.count("FAIL ") == 80 and "105" not in output


def test_the_first_round_can_be_shown(copy):
    output = output_of(suite(copy, "benchmark/selection.sh", "--dry-run"))
    assert output.count("--env-id") == 80 and "--seed 105" not in output
    assert "usage: " in output_of(suite(copy, "benchmark/selection.sh", "nonsense"), code=2)
