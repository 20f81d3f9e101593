"""Intervals, and the probability of improvement of rliable (arXiv:2108.13264)."""

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


def improvement(new: np.ndarray, old: np.ndarray) -> tuple[float, float, float]:
    """P(a run of `new` > one of `old`) of (seeds, tasks), mean over tasks; its 95% interval."""

    def share(new, old) -> np.ndarray:  # (..., seeds, tasks) each; ties count half
        pairs = new[..., :, None, :], old[..., None, :, :]
        return (np.greater(*pairs) + 0.5 * np.equal(*pairs)).mean(axis=(-3, -2, -1))

    rng = np.random.default_rng(0)
    samples = share(resample(new, rng), resample(old, rng))
    return float(share(new, old)), *np.quantile(samples, [0.025, 0.975])


def resample(scores: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(resamples, seeds, tasks): as many seeds, drawn with replacement, for each task by itself."""
    draws = rng.integers(len(scores), size=(RESAMPLES, *scores.shape))
    return np.take_along_axis(scores[None], draws, axis=1)
