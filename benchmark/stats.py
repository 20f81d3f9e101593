"""Intervals and aggregates. The aggregates are rliable's (arXiv:2108.13264), and tested with it."""

import warnings

import numpy as np
from scipy import stats

FEWEST = 5  # seeds for an interval; of fewer the seeds are listed
RESAMPLES = 2000


def mean_interval(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95% interval of the mean over axis 0, the seeds: Student's t."""
    n = len(x)
    if n < 2:
        return np.full_like(x[0], np.nan, float), np.full_like(x[0], np.nan, float)
    half = stats.t.ppf(0.975, n - 1) * np.std(x, axis=0, ddof=1) / n**0.5
    mean = np.mean(x, axis=0)
    return mean - half, mean + half


def difference(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """mean(y) - mean(x) and its 95% interval: Welch's."""
    mean = np.mean(y) - np.mean(x)
    if min(len(x), len(y)) < 2:
        return mean, np.nan, np.nan
    if np.ptp(x) == 0 and np.ptp(y) == 0:  # both without spread: scipy has no number for it
        return mean, mean, mean
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of one without spread
        interval = stats.ttest_ind(y, x, equal_var=False).confidence_interval(0.95)
    return mean, interval.low, interval.high


def relative_difference(pairs: list[tuple]) -> tuple[float, float, float]:
    """Mean over tasks of (mean(y) - mean(x)) / |mean(x)|, with Welch's 95% interval over all seeds.

    pairs: (x, y) of each task. The error of a ratio is that of the delta method.
    """
    k = len(pairs)
    ratio = sum((np.mean(y) - np.mean(x)) / abs(np.mean(x)) for x, y in pairs) / k
    errors, degrees = [], []
    for x, y in pairs:
        ratio_of_task = np.mean(y) / np.mean(x)
        for z, weight in ((x, ratio_of_task), (y, 1)):
            errors.append((weight / (k * np.mean(x))) ** 2 * np.var(z, ddof=1) / len(z))
            degrees.append(len(z) - 1)
    if sum(errors) == 0:
        return ratio, ratio, ratio
    freedom = sum(errors) ** 2 / sum(e**2 / n for e, n in zip(errors, degrees))
    half = stats.t.ppf(0.975, freedom) * sum(errors) ** 0.5
    return ratio, ratio - half, ratio + half


def pooled(figures: list[dict]) -> tuple[float, float, int]:
    """Mean, deviation and number of the seeds behind published means with deviations."""
    n = np.array([row["seeds"] for row in figures])
    means = np.array([row["mean"] for row in figures])
    stds = np.array([row["std"] for row in figures])
    mean = np.average(means, weights=n)
    squares = (n - 1) * stds**2 + n * (means - mean) ** 2
    total = int(n.sum())
    return float(mean), float((squares.sum() / (total - 1)) ** 0.5), total


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Mean of the middle half of all scores (..., seeds, tasks)."""
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1))
    cut = flat.shape[-1] // 4
    return flat[..., cut : flat.shape[-1] - cut].mean(axis=-1)


def improvement(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """P(a run of `new` > one of `old`), mean over tasks; ties count half. (..., seeds, tasks)."""
    pairs = new[..., :, None, :], old[..., None, :, :]  # (..., seeds of new, seeds of old, tasks)
    better = np.greater(*pairs) + 0.5 * np.equal(*pairs)
    return better.mean(axis=(-3, -2, -1))


def resample(scores: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(resamples, seeds, tasks): as many seeds, drawn with replacement, for each task by itself."""
    draws = rng.integers(len(scores), size=(RESAMPLES, *scores.shape))
    return np.take_along_axis(scores[None], draws, axis=1)


def with_interval(value: float, samples: np.ndarray, level=0.95) -> tuple[float, float, float]:
    """A value and the middle part of its bootstrap samples."""
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return float(value), float(low), float(high)


def normalized(returns: np.ndarray, figures: list[list[dict]]) -> tuple[float, float, float]:
    """Interquartile mean of return / published mean (seeds, tasks), and its 95% interval.

    `figures` are those of each task. Each resample draws seeds, and for each task a published
    mean: from the normal distribution around the mean of its seeds, with their standard error.
    """
    rng = np.random.default_rng(0)
    means, deviations, n = np.array([pooled(rows) for rows in figures]).T
    divisors = rng.normal(means, deviations / n**0.5, size=(RESAMPLES, 1, len(means)))
    samples = interquartile_mean(resample(returns, rng) / divisors)
    return with_interval(interquartile_mean(returns / means), samples)


def improvement_interval(new, old, level: float = 0.95) -> tuple[float, float, float]:
    """`improvement` and its interval, seeds drawn for each task."""
    rng = np.random.default_rng(0)
    samples = improvement(resample(new, rng), resample(old, rng))
    return with_interval(improvement(new, old), samples, level)
