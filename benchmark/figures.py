"""figures/*.png: learning curves of each folder of results, and the time to CleanRL's scores."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
from ablation import (  # noqa: E402
    DETAILS,
    FLAGS_ALONE,
    STUDY,
    baseline_spread,
    effects,
    published_study,
    study_environments,
)
from matplotlib.lines import Line2D  # noqa: E402
from recipes import HERE, recipes_of  # noqa: E402
from results import (  # noqa: E402
    groups_of,
    peers,
    published,
    published_curves,
    read_curve,
    read_runs,
)
from stats import FEWEST, mean_interval  # noqa: E402
from timing import races  # noqa: E402

FIGURES = HERE / "figures"
DPI = 160
WIDTH = 9  # inches: a point is about a pixel of a README
TITLE, TEXT, SMALL = 12, 11, 9.5
PEER_COLOURS = ["black", "#8c564b", "#e377c2"]
CURVE_COLOURS = ["#17becf", "#bcbd22"]  # of published curves
BEST = "best published, see the table"
TIME = "time_to_score"


def seeds_text(counts: list[int]) -> str:
    """How many seeds the curves of a legend's entry have, from panel to panel."""
    low, high = min(counts), max(counts)
    many = f"{low}" if low == high else f"{low} to {high}"
    return f"{many} seed{'' if many == '1' else 's'}"


def seed_curves(runs: pd.DataFrame, x: str) -> tuple[np.ndarray, np.ndarray]:
    """A grid that all seeds have, and the returns (seeds, points) there."""
    curves = [read_curve(path) for path in runs["path"]]
    start = max(curve[x].iloc[0] for curve in curves)
    end = max(curve[x].iloc[-1] for curve in curves)  # one that diverged keeps its last value
    grid = np.linspace(start, end, 200)
    return grid, np.stack([np.interp(grid, curve[x], curve["return"]) for curve in curves])


def draw_recipe(ax, grid: np.ndarray, y: np.ndarray, colour: str) -> None:
    """The mean over seeds; around it the interval, or a thin line for each of a few seeds."""
    ax.plot(grid, y.mean(axis=0), color=colour, linewidth=2)
    if len(y) >= FEWEST:
        ax.fill_between(grid, *mean_interval(y), color=colour, alpha=0.2, linewidth=0)
    elif len(y) > 1:
        ax.plot(grid, y.T, color=colour, linewidth=0.7, alpha=0.7)


def published_lines(folder: str, of_env: pd.DataFrame) -> dict[str, list[dict]]:
    """Label -> published figures: CleanRL's for each script, else the best of any source."""
    found = {}
    for script, group in groups_of(of_env, "script"):
        if figures := peers(folder, group.iloc[0]):
            found[script] = figures
    if len(found) < 2:
        found = {"CleanRL's final returns, mean ± deviation of each": f for f in found.values()}
    else:
        found = {f"CleanRL's final return {script}": f for script, f in found.items()}
    rows = published(folder, of_env["env"].iloc[0], of_env["total_timesteps"].iloc[0])
    if not found and len(rows):
        found[BEST] = [rows.loc[rows["mean"].idxmax()].to_dict()]
    return found


def draw_published(ax, figures: list[dict], colour: str) -> list[float]:
    """A line for each figure, in a band of its deviation; returns what must be seen."""
    style = {"color": colour, "zorder": 1}
    for row in figures:
        mean, deviation = row["mean"], row["std"]
        ax.axhline(mean, linestyle="--", linewidth=1.3, **style)
        if deviation > 0:
            ax.axhspan(mean - deviation, mean + deviation, alpha=0.08, linewidth=0, **style)
    return [row["mean"] for row in figures]


def limits(ax, seen: list[float]) -> None:
    """A panel is as high as the returns of all seeds: a wider interval or band is cut."""
    margin = 0.05 * (max(seen) - min(seen))
    ax.set_ylim(min(seen) - margin, max(seen) + margin)
    ax.set_xlim(left=0)
    ax.grid(alpha=0.3)
    ax.tick_params(labelsize=SMALL)


def two_lines(env: str) -> str:
    """A long name of an environment, broken before a word in its second half."""
    breaks = [i for i, letter in enumerate(env) if letter.isupper() and i >= len(env) / 2]
    if len(env) < 28 or not breaks:
        return env
    return f"{env[: breaks[0]]}\n{env[breaks[0] :]}"


def draw_environment(ax, folder: str, of_env: pd.DataFrame, x: str, unit: float) -> dict:
    """One panel; {(label, colour): seeds} of recipes, {(label, colour): None} of published ones."""
    recipes = recipes_of(folder)
    seen, entries = [], {}
    for exp, group in groups_of(of_env, "exp"):
        colour = recipes["colour"].get(exp)
        if not colour:
            continue
        grid, y = seed_curves(group, x)
        draw_recipe(ax, grid / unit, y, colour)
        entries[group["label"].iloc[0], colour] = len(group)
        seen += [y.min(), y.max()]
    first = of_env.iloc[0]
    curves = published_curves(folder, first["env"], int(first["total_timesteps"]))
    lines = published_lines(folder, of_env)
    if curves:
        lines.pop(BEST, None)
    for (label, figures), colour in zip(lines.items(), PEER_COLOURS):
        colour = "#7f7f7f" if label == BEST else colour
        seen += draw_published(ax, figures, colour)
        entries[label, colour] = None
    for (label, points), colour in zip(curves.items(), CURVE_COLOURS):
        how = {"linestyle": "--", "linewidth": 1.3, "marker": "o", "markersize": 3.5}
        steps, mean = points["step"] / unit, points["mean"]
        ax.plot(steps, mean, color=colour, zorder=1, **how)
        band = mean - points["std"], mean + points["std"]  # not a number where it is not published
        ax.fill_between(steps, *band, color=colour, alpha=0.15, linewidth=0, zorder=1)
        entries[label, colour] = None
        seen += [mean.min(), mean.max()]
    limits(ax, seen)
    ax.set_title(two_lines(of_env["env"].iloc[0]), fontsize=TITLE)
    return entries


def handles_of(entries: dict) -> list[Line2D]:
    """The legend: recipes with the numbers of their seeds, then what is published."""
    handles = []
    for (label, colour), counts in sorted(entries.items(), key=lambda item: None in item[1]):
        if None in counts:
            handles.append(Line2D([], [], color=colour, linestyle="--", label=label))
        else:
            text = f"{label}, {seeds_text(counts)}"
            handles.append(Line2D([], [], color=colour, linewidth=2, label=text))
    return handles


def add_legend(fig, handles: list[Line2D], columns: int) -> None:
    """Above the panels, which get the rest of the figure; in fewer columns where it is too wide."""
    columns = min(columns, len(handles))
    how = {"loc": "upper center", "fontsize": TEXT, "frameon": False}
    legend = fig.legend(handles=handles, ncols=columns, **how)
    while columns > 1 and legend.get_window_extent().width > fig.bbox.width:
        legend.remove()
        columns -= 1
        legend = fig.legend(handles=handles, ncols=columns, **how)
    rows = -(-len(handles) // columns)
    height = fig.get_figheight()
    below = -0.15 / height if fig.get_supxlabel() else 0  # it stands far from the panels
    fig.tight_layout(rect=(0, below, 1, 1 - (0.1 + 0.23 * rows) / height))


def save(fig, name: str) -> None:
    FIGURES.mkdir(exist_ok=True)
    fig.savefig(FIGURES / f"{name}.png", dpi=DPI, metadata={"Software": None})
    plt.close(fig)


def draw_curves(folder: str) -> None:
    """figures/<folder>.png, one panel for each environment; no figure without recipes to draw."""
    runs, recipes = read_runs(folder), recipes_of(folder)
    if len(runs):
        runs = runs[runs["exp"].isin(recipes.index[recipes["colour"] != ""])]
    if runs.empty:
        return (FIGURES / f"{folder}.png").unlink(missing_ok=True)
    x, unit, label = "step", 1e6, "environment steps (millions)"
    if folder == "start":
        x, unit, label = "seconds", 60, "minutes of training on one thread"
    panels = runs["env"].nunique()
    columns = 2 if panels in (2, 4) else min(3, panels)
    rows = -(-panels // columns)
    width = WIDTH if columns > 1 else 0.62 * WIDTH
    how = {"figsize": (width, 2.7 * rows + 1.1), "squeeze": False}
    fig, axes = plt.subplots(rows, columns, **how)
    entries = {}
    for ax, (_, of_env) in zip(axes.flat, groups_of(runs, "env")):
        for entry, seeds in draw_environment(ax, folder, of_env, x, unit).items():
            entries.setdefault(entry, []).append(seeds)
    for ax in axes.flat[panels:]:
        ax.axis("off")
    fig.supxlabel(label, fontsize=TEXT)
    fig.supylabel("return (mean of 100 episodes)", fontsize=TEXT)
    add_legend(fig, handles_of(entries), 1 if columns == 1 else 2)
    save(fig, folder)


def draw_race(ax, at: float, race, colour: str, end: float) -> None:
    """A dot for each seed, a bar at their median, and how many never get there."""
    reached = race.seconds[np.isfinite(race.seconds)]
    ax.scatter(reached, np.full(len(reached), at), color=colour, s=28, zorder=3, alpha=0.8)
    if missing := len(race.seconds) - len(reached):
        how = {"color": colour, "ha": "right", "va": "center", "fontsize": SMALL}
        ax.text(end, at, f"{missing} of {len(race.seconds)} never", **how)
    median = np.median(race.seconds)
    if np.isfinite(median):
        ax.plot([median, median], [at - 0.13, at + 0.13], color=colour, linewidth=3, zorder=4)


def draw_times() -> None:
    """figures/time_to_score.png: seconds to CleanRL's published score, logarithmic."""
    from timing import FOLDER, estimated_minutes, published_minutes

    found = races()
    if not found:
        return (FIGURES / f"{TIME}.png").unlink(missing_ok=True)
    theirs, ours = published_minutes(), estimated_minutes()
    colours, counts = recipes_of(FOLDER)["colour"], {}
    envs = list(dict.fromkeys(race.env for race in found))
    most = max(sum(race.env == env for race in found) for env in envs)
    end = 12000  # seconds, where it says how many never get there
    fig, ax = plt.subplots(figsize=(WIDTH, 0.75 * len(envs) + 1.9))
    for i, env in enumerate(envs):
        here = [race for race in found if race.env == env]
        for at, race in zip(i + np.linspace(-0.28, 0.28, most), here):
            draw_race(ax, at, race, colours[race.exp], end)
            counts.setdefault((race.label, colours[race.exp]), []).append(len(race.seconds))
        for minutes, mark in ((theirs.get(env, {}).get("minutes"), "D"), (ours.get(env), "s")):
            if minutes:
                ax.plot(60 * minutes, i, mark, color="black", markersize=7)
        if i:
            ax.axhline(i - 0.5, color="#cccccc", linewidth=0.8)
    ax.set_xscale("log")
    ticks = [3, 10, 30, 100, 300, 1000, 3000, end]
    ax.set_xticks(ticks[:-1], map(str, ticks[:-1]), fontsize=SMALL)
    ax.minorticks_off()
    ax.set_xlim(right=1.1 * end)
    names = [f"{env}\n{race_score(found, env):.0f}" for env in envs]
    ax.set_yticks(range(len(envs)), names, fontsize=SMALL)
    ax.set_ylim(len(envs) - 0.5, -0.5)
    ax.grid(axis="x", alpha=0.3)
    text = "seconds of training until CleanRL's score; dots: seeds, bars: medians of all seeds"
    ax.set_xlabel(text, fontsize=TEXT)
    add_legend(fig, handles_of(counts) + peer_handles(), 2)
    save(fig, TIME)


def race_score(found: list, env: str) -> float:
    return next(race.score for race in found if race.env == env)


def peer_handles() -> list[Line2D]:
    """CleanRL's whole runs."""
    how = {"color": "black", "linestyle": "", "markersize": 7}
    published = Line2D([], [], marker="D", label="CleanRL's whole 1M steps, published", **how)
    estimated = Line2D([], [], marker="s", label="the same, estimated here", **how)
    return [published, estimated]


def draw_point(ax, at: float, y: np.ndarray, colour: str) -> None:
    """The mean of the seeds with its interval, or with a dot for each of a few seeds."""
    ax.plot([at], [y.mean()], "o", color=colour, markersize=8)
    if len(y) >= FEWEST:
        low, high = mean_interval(y)
        ax.plot([at, at], [low, high], color=colour, linewidth=2.5)
    else:
        ax.plot([at] * len(y), y, ".", color=colour, markersize=6, alpha=0.7)


def draw_study() -> None:
    """A panel for each environment: ours, and the published interval beside it."""
    runs, recipes, theirs = read_runs(STUDY), recipes_of(STUDY), published_study()
    if runs.empty:
        return (FIGURES / f"{STUDY}.png").unlink(missing_ok=True)
    envs = study_environments()
    fig, axes = plt.subplots(1, len(envs), figsize=(WIDTH, 4))
    counts = {}
    for ax, env in zip(axes, envs):
        for i, (exp, recipe) in enumerate(recipes.iterrows()):
            mine = runs[(runs["exp"] == exp) & (runs["env"] == env)]
            mine = mine["return_of_iterations"].to_numpy()  # as they measured
            if len(mine):
                draw_point(ax, i - 0.15, mine, recipe["colour"])
                counts.setdefault((recipe["label"], recipe["colour"]), []).append(len(mine))
            fact = theirs[exp, env.split("-")[0]]
            ax.plot([i + 0.15] * 2, [fact["low"], fact["high"]], color="black", linewidth=2.5)
        ax.set_title(env, fontsize=TITLE)
        how = {"rotation": 45, "ha": "right", "fontsize": SMALL}
        ax.set_xticks(range(len(recipes)), recipes["label"], **how)
        ax.set_xlim(-0.6, len(recipes) - 0.4)
        ax.set_ylim(bottom=0)
        ax.grid(axis="y", alpha=0.3)
        ax.tick_params(labelsize=SMALL)
    fig.supylabel("return of the last five iterations", fontsize=TEXT)
    published = Line2D([], [], color="black", linewidth=2.5, label="published, 95% interval")
    add_legend(fig, [*handles_of(counts), published], 3)
    save(fig, STUDY)


FAMILIES = {"C": "core", "M": "continuous control", "X": "auxiliary", "S": "ours"}
FAMILY_COLOURS = ["#1f77b4", "#2ca02c", "#9467bd", "#d62728", "#8c8c8c"]


def draw_effects() -> None:
    """A line for each change, sorted within its family: mean over tasks, band, tasks as ticks.

    Above them the seeds of the baseline, whose luck is in all lines.
    """
    found = effects()
    if not found:
        return (FIGURES / f"{DETAILS}.png").unlink(missing_ok=True)
    names = [*FAMILIES.values(), "other"]
    family = {id(effect): FAMILIES.get(effect.detail[:1], "other") for effect in found}
    found.sort(key=lambda effect: (names.index(family[id(effect)]), -effect.mean))
    fig, ax = plt.subplots(figsize=(WIDTH, 0.27 * len(found) + 1.6))
    counts = {}
    spread = [100 * share for share in baseline_spread()]
    ax.plot(spread, [-1] * len(spread), "|", color="black")
    for i, effect in enumerate(found):
        name = family[id(effect)]
        colour = FAMILY_COLOURS[names.index(name)]
        ax.plot(
            [100 * share for share in effect.shares], [i] * len(effect.shares), "|", color=colour
        )
        ax.plot([100 * effect.mean], [i], "o", color=colour)
        if effect.seeds >= FEWEST:
            ax.plot([100 * effect.low, 100 * effect.high], [i, i], color=colour, linewidth=2.5)
        counts.setdefault((name, colour), []).append(effect.seeds)
    ax.axvline(0, color="black", linewidth=1)
    texts = [f"{effect.detail} {effect.text}".strip() for effect in found]
    texts = ["published, each seed", *texts]
    ax.set_yticks(range(-1, len(found)), texts, fontsize=SMALL)
    ax.set_ylim(len(found) - 0.5, -1.5)
    ax.grid(axis="x", alpha=0.3)
    band = ", 95% interval" if max(effect.seeds for effect in found) >= FEWEST else ""
    label = f"change of the return in %: mean over tasks (dot){band}, each task (tick)"
    ax.set_xlabel(label, fontsize=TEXT)
    add_legend(fig, handles_of(counts), 3)
    save(fig, DETAILS)


def draw(name: str) -> None:
    """One figure, by its name."""
    if name == TIME:
        draw_times()
    elif name == STUDY:
        draw_study()
    elif name == DETAILS:
        draw_effects()
    elif name != FLAGS_ALONE:
        draw_curves(name)
