"""A small game with grids, several components and action masks, for equal.py.

It has what the post's scripts for MicroRTS need, 10 x 10 cells with 27 planes, and needs no Java.
"""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, MultiDiscrete

DIRECTIONS = np.array([(-1, 0), (0, 1), (1, 0), (0, -1)])


class MaskedGrid(gymnasium.Env):
    """Two units look for food. An action is a cell, a direction and one to three cells' way.

    Allowed are the cells of units, no turn back and another length than last time. Actions that
    are not allowed work all the same, but for an empty cell, which does nothing. Food is eaten from
    the next cell, too; the second meal ends the episode.
    """

    observation_space = Box(0, 1, (10, 10, 27), np.int8)
    action_space = MultiDiscrete([100, 4, 3])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.units, self.food = self.np_random.integers(10, size=(2, 2)), np.array([4, 5])
        self.direction = self.length = self.meals = 0
        return self.observed()

    def step(self, action):
        cell, self.direction, self.length = action
        before = self.distances()
        for n in np.flatnonzero(self.units @ (10, 1) == cell):
            self.units[n] = (self.units[n] + (1 + self.length) * DIRECTIONS[self.direction]) % 10
        reward = 0.1 * float((before - self.distances()).sum())
        if self.distances().min() <= 1:
            self.meals, self.food = self.meals + 1, self.np_random.integers(10, size=2)
            reward += 1
        obs, info = self.observed()
        return obs, reward, self.meals == 2, False, info

    def distances(self) -> np.ndarray:
        """Of both units from the food."""
        return np.abs(self.units - self.food).sum(axis=1)

    def observed(self) -> tuple[np.ndarray, dict]:
        """Planes: units, their number, the distance of each cell from the food; and the mask."""
        rows, columns = np.indices((10, 10))
        obs = np.zeros((10, 10, 27), np.int8)
        for n, (row, column) in enumerate(self.units):
            obs[row, column, [0, 1 + n]] = 1
        obs[rows, columns, 3 + abs(rows - self.food[0]) + abs(columns - self.food[1])] = 1
        cells, turns, lengths = np.zeros(100, bool), np.ones(4, bool), np.ones(3, bool)
        cells[self.units @ (10, 1)] = True
        turns[(self.direction + 2) % 4] = lengths[self.length] = False
        return obs, {"action_mask": np.concatenate([cells, turns, lengths])}


gymnasium.register("MaskedGrid-v0", entry_point=MaskedGrid, max_episode_steps=20)
