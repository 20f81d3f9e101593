"""figures/*.png: learning curves of each folder of results, and what the details are worth."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import results
import stats
from matplotlib.lines import Line2D
from tables import BROKEN, DETAILS, details_with_worth, effects, worth_of

FIGURES = results.HERE / "figures"
WIDTH = 9  # inches
FAMILIES = {"C": "core", "M": "continuous control", "X": "auxiliary", "S": "ours", "": "other"}
FAMILY_COLOURS = dict(zip(FAMILIES, ["#1f77b4", "#2ca02c", "#9467bd", "#d62728", "#8c8c8c"]))
AXES = {  # x of a curve -> its unit and label
    "step": (1e6, "environment steps (millions)"),
    "seconds": (60, "minutes of training"),
}


# -- shared with plot.py --
def draw_seeds(ax, grid: np.ndarray, y: np.ndarray, colour: str) -> None:
    """The mean over seeds; around it the interval, or a thin line for each of a few seeds."""
    ax.plot(grid, y.mean(axis=0), color=colour, linewidth=2)
    if len(y) >= stats.FEWEST:
        ax.fill_between(grid, *stats.mean_interval(y), color=colour, alpha=0.2, linewidth=0)
    elif len(y) > 1:
        ax.plot(grid, y.T, color=colour, linewidth=0.7, alpha=0.7)
    ax.set_xlim(left=0, auto=True)  # auto: a longer curve may follow
    ax.grid(alpha=0.3)


def panels_for(n: int) -> tuple[plt.Figure, list]:
    """A figure with n panels."""
    columns = 2 if n in (2, 4) else min(3, n)
    rows = -(-n // columns)
    width = WIDTH if columns > 1 else 0.62 * WIDTH
    how = {"figsize": (width, 2.7 * rows + 1.1), "squeeze": False, "layout": "constrained"}
    fig, axes = plt.subplots(rows, columns, **how)
    for ax in axes.flat[n:]:
        ax.axis("off")
    return fig, list(axes.flat[:n])


def add_legend(fig, entries: dict[tuple[str, str], list]) -> None:
    """(label, colour) -> numbers of seeds, from panel to panel; None for what is published."""
    handles = []
    for (label, colour), counts in sorted(entries.items(), key=lambda entry: None in entry[1]):
        if None in counts:
            handles.append(Line2D([], [], color=colour, linestyle="--", label=label))
            continue
        low, high = min(counts), max(counts)
        seeds = f"{low}" if low == high else f"{low} to {high}"
        words = f"{label}, {seeds} seed{'' if seeds == '1' else 's'}"
        handles.append(Line2D([], [], color=colour, linewidth=2, label=words))
    columns = 1 if fig.get_figwidth() < WIDTH else 2
    fig.legend(handles=handles, ncols=columns, loc="outside upper center", frameon=False)


def save(fig, path, dpi: int = 160) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unchanging = {".svg": {"Date": None}, ".png": {"Software": None}}.get(path.suffix)
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        fig.savefig(path, dpi=dpi, metadata=unchanging)
    plt.close(fig)


# -- learning curves of a folder --
def draw_environment(ax, folder: str, of_env: pd.DataFrame, x: str) -> dict:
    """One panel; {(label, colour): seeds} of recipes, {(label, colour): None} of published ones."""
    unit, colours, entries = AXES[x][0], results.recipes_of(folder)["colour"], {}
    for exp, group in results.groups_of(of_env, "exp"):
        if colour := colours.get(exp):
            curves = [results.read_curve(path) for path in group["path"]]
            grid, y = results.on_one_grid(curves, x)
            draw_seeds(ax, grid / unit, y, colour)
            entries[group["label"].iloc[0], colour] = len(group)
    limits = ax.get_ylim()  # wider bands of published figures are cut
    first = of_env.iloc[0]
    for row in results.peers(folder, first):
        ax.axhline(row["mean"], color="black", linestyle="--", linewidth=1.3)
        entries["CleanRL's final return", "black"] = None
        limits = min(limits[0], row["mean"]), max(limits[1], row["mean"])
    curves = results.published_curves(folder, first["env"], int(first["total_timesteps"]))
    for (label, points), colour in zip(curves.items(), ["#17becf", "#bcbd22"]):
        if x == "step":
            ax.plot(points["step"] / unit, points["mean"], ".--", color=colour)
            entries[label, colour] = None
    ax.set_ylim(*limits if not curves else (None, None))
    ax.set_title(first["env"], fontsize=11 if len(first["env"]) < 28 else 8)
    return entries


def draw_curves(folder: str, x: str = "step", name: str = "") -> None:
    """figures/<folder>.png, one panel for each environment; no figure without recipes to draw."""
    runs, colours = results.read_runs(folder), results.recipes_of(folder)["colour"]
    if len(runs):
        runs = runs[runs["exp"].isin(colours.index[colours != ""])]
    if runs.empty:
        return
    fig, axes = panels_for(runs["env"].nunique())
    entries = {}
    for ax, (_, of_env) in zip(axes, results.groups_of(runs, "env")):
        for entry, seeds in draw_environment(ax, folder, of_env, x).items():
            entries.setdefault(entry, []).append(seeds)
    fig.supxlabel(AXES[x][1])
    fig.supylabel("return (mean of 100 episodes)")
    add_legend(fig, entries)
    save(fig, FIGURES / f"{name or folder}.png")


# -- what is worth what --
def draw_effects() -> None:
    """A line for each change, sorted within its family: mean over tasks, band, tasks as ticks."""
    order = list(FAMILIES)
    found = [effect | {"family": effect["detail"][:1]} for effect in effects()]
    found.sort(key=lambda effect: (order.index(effect["family"]), -effect["mean"]))
    how = {"figsize": (WIDTH, 0.27 * len(found) + 1.6), "layout": "constrained"}
    fig, ax = plt.subplots(**how)
    for i, effect in enumerate(found):
        colour = FAMILY_COLOURS[effect["family"]]
        shares = [100 * share for share in effect["shares"]]
        ax.plot(shares, [i] * len(shares), "|", color=colour)
        ax.plot([100 * effect["mean"]], [i], "o", color=colour)
        ax.plot([100 * effect["low"], 100 * effect["high"]], [i, i], color=colour, linewidth=2.5)
    ax.axvline(0, color="black", linewidth=1)
    texts = [f"{effect['detail']} {effect['text']}".strip() for effect in found]
    ax.set_yticks(range(len(found)), texts, fontsize=9.5)
    ax.set_ylim(len(found) - 0.5, -0.5)
    ax.grid(axis="x", alpha=0.3)
    ax.set_xlabel(
        "change of the return in %: mean over tasks (dot), 95% interval, each task (tick)"
    )
    handles = [Line2D([], [], color=FAMILY_COLOURS[f], label=name) for f, name in FAMILIES.items()]
    fig.legend(handles=handles, ncols=5, loc="outside upper center", frameon=False)
    save(fig, FIGURES / f"{DETAILS}.png")


def draw_worth(detail: str) -> None:
    """A line for each change of a detail on each task: its interval as a share of the return."""
    cases = worth_of(detail)
    how = {"figsize": (0.75 * WIDTH, 0.25 * len(cases) + 0.7), "layout": "constrained"}
    fig, ax = plt.subplots(**how)
    for i, case in enumerate(cases):
        size, y = abs(np.mean(case["old"])), case["new"]
        mean, low, high = (100 * x / size for x in stats.difference(case["old"], y))
        colour = FAMILY_COLOURS.get(detail[0], "#8c8c8c")
        if len(y) < stats.FEWEST:  # too few for an interval: each seed
            low = high = np.nan
            seeds = 100 * (y - np.mean(case["old"])) / size
            ax.plot(seeds, [i] * len(y), "|", color=colour)
        ax.plot([low, high], [i, i], color=colour, linewidth=2.5)
        ax.plot([mean], [i], "o", color=colour)
    ax.axvline(0, color="black", linewidth=1)
    is_one = len({case["text"] for case in cases}) == 1
    texts = [case["env"] if is_one else f"{case['text']}, {case['env']}" for case in cases]
    ax.set_yticks(range(len(cases)), texts, fontsize=9)
    ax.set_ylim(len(cases) - 0.5, -0.5)
    ax.grid(axis="x", alpha=0.3)
    unit = "%"
    if max(map(abs, ax.get_xlim())) > 250:  # of returns near 0
        ax.set_xscale("symlog", linthresh=100)
        ax.xaxis.set_major_formatter("{x:.0f}")
        unit = "%, beyond 100 logarithmic"
    ax.set_xlabel(f"change of the return in {unit}", fontsize=9)
    save(fig, FIGURES / "details" / f"{detail}.svg")


# -- broken runs --
def draw_broken(folder: str) -> None:
    """A row for each mistake, a column for return and diagnostics; healthy runs in grey."""
    runs = results.read_runs(folder)
    rows = list(results.groups_of(runs[runs["exp"] != "healthy"], "env", "exp"))
    if not rows:
        return
    columns = {"return": "return"} | results.DIAGNOSTICS
    how = {"figsize": (1.4 * len(columns), 1.05 * len(rows)), "squeeze": False}
    fig, axes = plt.subplots(len(rows), len(columns), **how, layout="constrained")
    for line, ((env, exp), broken) in zip(axes, rows):
        healthy = runs[(runs["env"] == env) & (runs["exp"] == "healthy")]
        line[0].set_ylabel(f"{exp}\n{env}", fontsize=5.5)
        for ax, name in zip(line, columns):
            for group, colour in ((healthy, "#8c8c8c"), (broken, "#d62728")):
                curves = [results.read_curve(path) for path in group["path"]]
                grid, y = results.on_one_grid(curves, "step", name)
                draw_seeds(ax, grid / 1e3, y, colour)
            ax.tick_params(labelsize=6)
            ax.xaxis.set_major_formatter("{x:.0f}")
            if name in ("value_loss", "grad_norm"):
                ax.set_yscale("log")
                ax.yaxis.set_minor_formatter("")
            if name == "approx_kl":
                ax.set_yscale("symlog", linthresh=1e-4)  # it may be 0
            if name in ("approx_kl", "clipfrac"):
                ax.set_ylim(bottom=0)
            if name == "explained_variance":
                ax.set_ylim(-1, 1.05)
    for ax, title in zip(axes[0], columns.values()):
        ax.set_title(title, fontsize=9)
    handles = [Line2D([], [], color="#8c8c8c", label="healthy")]
    handles += [Line2D([], [], color="#d62728", label="broken")]
    fig.supxlabel("environment steps (thousands)")
    fig.legend(handles=handles, ncols=2, loc="outside upper center", frameon=False)
    save(fig, FIGURES / f"{folder}.png", dpi=100)  # it is large


def draw(folder: str) -> None:
    """The figures of a folder of results, if its experiments have colours."""
    if folder == DETAILS:
        draw_effects()
        for detail in details_with_worth():
            draw_worth(detail)
    elif results.without_suffix(folder) == BROKEN:
        draw_broken(folder)
    else:
        draw_curves(folder)
    if results.without_suffix(folder) == "mujoco":
        draw_curves(folder, "seconds", f"{folder}_seconds")
