"""Numbers that are the same everywhere: parameters, images, and the summary of a change of weights.

All of them come from np.random.RandomState, whose streams NumPy has frozen.
"""

import numpy as np


def parameters(names: list[str], shapes: list[tuple], seed: int) -> dict[str, np.ndarray]:
    """One float32 array for each name, in the order of the record.

    Parameter i is RandomState(1000 * seed + i).standard_normal(shape), times 0.1 for a vector
    (bias, log standard deviation) and times 1 / sqrt(fan_in) for anything else; fan_in is the
    number of weights that one output has, prod(shape[1:]). With less than that the outputs of
    deep networks would hardly depend on their inputs.
    """
    filled = {}
    for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        scale = 0.1 if len(shape) < 2 else 1 / np.sqrt(np.prod(shape[1:]))
        values = np.random.RandomState(1000 * seed + i).standard_normal(tuple(shape))
        filled[name] = (scale * values).astype(np.float32)
    return filled


def images(seed: int, count: int, shape: tuple, block: int, high: int = 256) -> np.ndarray:
    """`count` uint8 images of random squares of `block` pixels, numbers from 0 to high - 1.

    shape is (channels, height, width) or (height, width, channels), whichever has the two larger
    numbers where height and width are.
    """
    rng = np.random.RandomState(seed)
    axes = (2, 3) if shape[0] < shape[2] else (1, 2)
    small = [count, *shape]
    for axis in axes:
        small[axis] //= block
    result = rng.randint(0, high, small).astype(np.uint8)
    for axis in axes:
        result = result.repeat(block, axis)
    return result


def summary(before: dict, after: dict) -> dict[str, np.ndarray]:
    """Of each parameter's change, in the order of `before`: norms (P,) and projections (P,).

    A projection is the dot product with RandomState(0).standard_normal(size), C order.
    """
    norms, projections = [], []
    for name, start in before.items():
        change = (after[name].astype(np.float64) - start).ravel()
        norms.append(np.linalg.norm(change))
        projections.append(change @ np.random.RandomState(0).standard_normal(change.size))
    return {"norms": np.array(norms), "projections": np.array(projections)}


def channels_last(weight: np.ndarray, channels: int) -> np.ndarray:
    """For a linear layer behind convolutions: columns in order (C, H, W) to order (H, W, C).

    ppo_atari, ppo_lstm and ppo_multidiscrete flattened channels last at f6f8a49, and the records
    are in that order. A script that flattens (C, H, W) needs this in its adapter's `get`, and
    `channels_first` in `set`.
    """
    split = weight.reshape(len(weight), channels, -1)
    return split.transpose(0, 2, 1).reshape(weight.shape)


def channels_first(weight: np.ndarray, channels: int) -> np.ndarray:
    """The inverse of `channels_last`."""
    split = weight.reshape(len(weight), -1, channels)
    return split.transpose(0, 2, 1).reshape(weight.shape)
