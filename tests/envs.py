"""Environments of a few lines, of each kind that people bring along.

`NAME-v0` acts in a Box, `NAMEDiscrete-v0` in Discrete(3) counted from 5, `NAMEImage-v0` is the
latter seen in images. Other processes find them as `envs:NAME-v0`.
"""

import random

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Sequence, Tuple

VECTOR = Box(-np.inf, np.inf, (3,))


class Toy(gym.Env):
    """Always from the same state; what it shows, and pays if not told, depends on the actions.

    It draws into one buffer: the frame of step t is 20 * t everywhere.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = VECTOR
    screen = np.zeros((64, 64, 3), np.uint8)

    def __init__(self, discrete: bool = False, render_mode=None, length: int = 8, pays=None):
        self.action_space = Discrete(3, start=5) if discrete else Box(-1, 1, (2,))
        self.render_mode, self.length, self.pays, self.episode = render_mode, length, pays, 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.done, self.episode = 0, 0.0, self.episode + 1
        return self.observe(), self.info()

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        self.done = float(np.sum(action))
        return self.observe(), self.reward(), self.t == self.length, False, self.info()

    def observe(self):
        return np.array([self.t / 8, self.done, self.t * self.done], np.float32)

    def reward(self):
        return 1.0 + self.done / 8 if self.pays is None else self.pays

    def info(self) -> dict:
        return {}

    def render(self):
        self.screen[:] = 20 * self.t % 256
        return self.screen


class Image(gym.ObservationWrapper):
    """The same numbers as an image: each is a column of four pixels."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.observation_space = Box(-np.inf, np.inf, (4, *env.observation_space.shape))

    def observation(self, obs):
        return np.tile(obs, (4, 1)).astype(np.float32)


# -- images --
class Picture(Toy):
    """Images of any shape, each step another one; the highest number is the highest of its space.

    `gives` makes of it what the environment returns.
    """

    KINDS = {  # space, height, width and channels as the network gets them
        "gray": (Box(0, 255, (13, 17), np.uint8), (13, 17, 1)),
        "gray, channel last": (Box(0, 255, (13, 17, 1), np.uint8), (13, 17, 1)),
        "gray, channel first": (Box(0, 255, (1, 13, 17), np.uint8), (13, 17, 1)),
        "colour": (Box(0, 255, (13, 17, 3), np.uint8), (13, 17, 3)),
        "colour, channels first": (Box(0, 255, (3, 13, 17), np.uint8), (13, 17, 3)),
        "four channels": (Box(0, 255, (17, 13, 4), np.uint8), (17, 13, 4)),
        "four channels first": (Box(0, 255, (4, 17, 13), np.uint8), (17, 13, 4)),
        "large": (Box(0, 255, (40, 36, 3), np.uint8), (40, 36, 3)),
        "floats": (Box(0, 1, (13, 17, 3), np.float32), (13, 17, 3)),
        "float64, channels first": (Box(-1, 1, (3, 13, 17), np.float64), (13, 17, 3)),
        "floats up to 255": (Box(0, 255, (13, 17), np.float32), (13, 17, 1)),
        "no bounds": (Box(-np.inf, np.inf, (13, 17)), (13, 17, 1)),
        "codes": (Box(0, 10, (7, 7, 3), np.uint8), (7, 7, 3)),
        "int64": (Box(0, 255, (13, 17, 3), np.int64), (13, 17, 3)),
        "bool": (Box(0, 1, (10, 10, 6), np.bool_), (10, 10, 6)),
    }

    def __init__(self, space: Box, gives=np.asarray, **kwargs):
        super().__init__(**kwargs)
        self.observation_space, self.gives = space, gives

    def observe(self):
        space = self.observation_space
        highest = float(min(space.high.max(), 1e3)) if space.dtype.kind == "f" else space.high.max()
        numbers = np.arange(np.prod(space.shape)) * 7 + 31 * self.t + int(8 * self.done)
        fraction = (numbers % 256 / 255).reshape(space.shape)
        return self.gives((highest * fraction).astype(space.dtype))


class WithSpeed(gym.ObservationWrapper):
    """The same observation as part of a Dict."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.observation_space = Dict(image=env.observation_space, speed=Box(-1, 1, (2,)))

    def observation(self, obs):
        return {"image": obs, "speed": np.zeros(2, np.float32)}


class Colour(gym.Env):
    """Twenty images; the colour of a square, anywhere before noise, says which action pays."""

    observation_space = Box(0, 255, (16, 16, 3), np.uint8)

    def __init__(self, discrete: bool = True, render_mode: str | None = None):
        self.discrete, self.render_mode = discrete, render_mode
        self.action_space = Discrete(3) if discrete else Box(-1, 1, (1,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def observe(self):
        self.goal = int(self.np_random.integers(3))
        image = self.np_random.integers(0, 128, (16, 16, 3), dtype=np.uint8)
        y, x = self.np_random.integers(0, 12, 2)
        image[y : y + 4, x : x + 4, self.goal] = 255
        return image

    def step(self, action):
        right = float(action == self.goal) if self.discrete else 1 - abs(self.goal - 1 - action[0])
        self.t += 1
        return self.observe(), float(right), self.t == 20, False, {}


# -- infos --
class Infos(Toy):
    """Their types and shapes change from step to step, and some have Gymnasium's own names."""

    KINDS = (None, 3, "three", np.arange(3), np.arange(2), [1, "two"], {"a": None}, {"a": 1})

    def info(self) -> dict:
        kind = self.KINDS[(self.t + self.episode) % len(self.KINDS)]
        return {"near": kind, "episode": kind, "final_obs": kind, "final_info": kind}


# -- observations --
class Odd(Toy):
    """What it returns is not quite what its space says."""

    KINDS = {  # space, what is returned, what is meant
        "int8": (Box(0, 100, (3,), np.int8), np.array([200, 1, 2]), [200, 1, 2]),
        "int64 for uint8": (Box(0, 255, (3,), np.uint8), np.array([1, 2, 3]), [1, 2, 3]),
        "floats for int32": (Box(-9, 9, (3,), np.int32), np.array([0.5, 1, 2]), [0.5, 1, 2]),
        "column": (Box(-1, 1, (3,)), np.full((3, 1), 0.5), [0.5, 0.5, 0.5]),
        "row": (Box(-1, 1, (3,)), np.full((1, 3), 0.5), [0.5, 0.5, 0.5]),
        "number": (Box(-1, 1, (1,)), np.float32(0.5), [0.5]),
        "longdouble": (Box(-1, 1, (3,), np.longdouble), np.ones(3, np.longdouble), [1, 1, 1]),
        "big endian": (Box(-1, 1, (3,), np.dtype(">f4")), np.ones(3, ">f4"), [1, 1, 1]),
        "uint64": (Box(0, 9, (3,), np.uint64), np.ones(3, np.uint64), [1, 1, 1]),
        "bool": (Box(0, 1, (3,), np.bool_), np.array([True, False, True]), [1, 0, 1]),
        "list": (Box(-1, 1, (3,)), [0.5, 0.25, 1], [0.5, 0.25, 1]),
        "tensor": (Box(-1, 1, (3,)), torch.ones(3), [1, 1, 1]),
        "one for three": (Box(-1, 1, (3,)), np.float32([0.5]), None),
        "two for three": (Box(-1, 1, (3,)), np.float32([0.5, 1]), None),
        "rows": (Box(-1, 1, (3,)), np.ones((2, 3)), None),
    }

    def __init__(self, kind: str, **kwargs):
        super().__init__(**kwargs)
        self.observation_space, self.obs, _ = self.KINDS[kind]

    def observe(self):
        return self.obs


# -- actions --
class Narrow(Toy):
    """Its actions are bytes, or floats of 16 bits."""

    def __init__(self, discrete: bool = False, **kwargs):
        super().__init__(**kwargs)
        narrow = Discrete(3, start=5, dtype=np.uint8), Box(-1, 1, (2,), np.float16)
        self.action_space = narrow[0 if discrete else 1]


# -- pictures --
class Silent(Toy):
    """It draws, and does not say so."""

    def __init__(self, render_mode=None, **kwargs):
        super().__init__(**kwargs)


# -- seeds --
class Seeds(Toy):
    """Those that it got at resets, of all instances in this process."""

    seen: list[int] = []

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.seen.append(seed)
        return super().reset(seed=seed)


class Coin(Toy):
    """What it shows is drawn by generators that are not its own."""

    def observe(self):
        return np.float32([random.random(), np.random.rand(), torch.rand(()).item()])


# -- games --
class Frames(gym.vector.VectorEnv):
    """In place of the games of a script, of one or of N: images, and a reset takes a row.

    Every game has `length` steps and differs by the actions alone. The reward for training is 1,
    the game pays more; each step writes into the images of the one before.
    """

    length = 7  # 8 rows with the reset: games end with the rollouts

    def __init__(self, num_envs: int, channels: int):
        self.observation_space = Box(0, 255, (channels, 84, 84), np.uint8)
        self.action_space = Discrete(4)
        self.single_observation_space = self.observation_space
        self.single_action_space, self.num_envs = self.action_space, num_envs
        self.obs = np.zeros((num_envs, channels, 84, 84), np.uint8)

    def reset(self, seed=None, options=None):
        Seeds.seen += range(seed, seed + self.num_envs)
        self.t = self.length
        obs, *_, infos = self.step(np.zeros(self.num_envs, np.int32))
        return obs, infos

    def step(self, actions):
        assert actions.shape == (self.num_envs,) and actions.dtype == np.int32
        resets = self.t == self.length  # whatever the actions
        self.t = 0 if resets else self.t + 1
        self.done = np.zeros_like(actions) if resets else self.done + actions
        self.obs[:, :, :42] = 16 * self.t
        self.obs[:, :, 42:] = (16 * (self.done % 16))[:, None, None, None]
        reward = np.full(self.num_envs, 0.0 if resets else 1.0)
        infos = {"reward": reward * (1 + actions / 8)}
        infos["terminated"] = np.full(self.num_envs, self.t == self.length)
        return self.obs, reward, infos["terminated"], np.zeros(self.num_envs, bool), infos


# -- errors --
class Blind(Toy):
    """It cannot be asked for pictures: it takes no `render_mode`."""

    metadata: dict = {}

    def __init__(self, discrete: bool = False):
        super().__init__(discrete)


class BlindToo(Toy):
    """It takes a `render_mode` and draws nothing."""

    metadata: dict = {}
    render = gym.Env.render


class BlindInSecret(Toy):
    """Its picture is None."""

    def render(self) -> None:
        return None


class Failing(Toy):
    """A file is missing in the third episode."""

    def reset(self, seed=None, options=None):
        if self.episode == 2:
            open("part_3.csv")
        return super().reset(seed=seed)


class Broken(Toy):
    """From its constructor comes what no script foresees."""

    def __init__(self, **kwargs):
        raise ConnectionRefusedError(111, "Connection refused")


# -- spaces --
class Spaces(gym.Env):
    """Any spaces; ends after five steps. `acted` has the actions of all of them."""

    acted: list = []

    def __init__(self, observation_space, action_space, render_mode=None):
        self.observation_space, self.action_space = observation_space, action_space
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.acted.append(np.array(action))
        self.t += 1
        return self.observation_space.sample(), 1.0, self.t == 5, False, {}


def register() -> None:
    for kind in (
        Infos,
        Narrow,
        Silent,
        Seeds,
        Coin,
        Blind,
        BlindToo,
        BlindInSecret,
        Failing,
        Broken,
    ):
        add(kind.__name__, kind)
    add("Steady", Toy)  # for runs that resume to the bit: episodes end with the rollouts
    add("Screen", Toy)  # for its one buffer
    add("Endless", Toy, length=-1)
    add("RewardArray", Toy, pays=np.array([1.0]))
    add("RewardTensor", Toy, pays=torch.ones(1, 1))
    add("RewardBool", Toy, pays=np.bool_(True))
    add("RewardPair", Toy, pays=np.ones(2))
    for i, kind in enumerate(Odd.KINDS):
        add(f"Odd{i}", Odd, kind=kind)
    for i, (space, _) in enumerate(Picture.KINDS.values()):
        add(f"Picture{i}", Picture, space=space)
    bytes_ = Box(0, 255, (8, 9, 3), np.uint8)
    add("BytesAsFloats", Picture, space=bytes_, gives=lambda image: image.astype(np.float64))
    add("FractionsAsBytes", Picture, space=bytes_, gives=lambda image: image / 255)
    add("AnotherShape", Picture, space=bytes_, gives=lambda image: image[:7])
    add("Colour", Colour, discrete=False)
    gym.register("Dict-v0", lambda **given: WithSpeed(Colour(**given)))
    image, vector = Box(0, 255, (8, 8, 3), np.uint8), Box(-1, 1, (2,))
    huge = np.float32([3e38])
    for name, observation_space, action_space in [
        ("Unbounded", vector, Box(-np.inf, np.inf, (1,))),
        ("Huge", vector, Box(-huge, huge)),
        ("NoRoom", vector, Box(np.float32([-1, 0]), np.float32([1, 0]))),
        ("Integers", vector, Box(0, 5, (2,), np.int64)),
        ("Images", image, vector),
        ("ImagesDiscrete", image, Discrete(2)),
        ("NothingDiscrete", Box(-1, 1, (0,)), Discrete(2)),
        ("ImageInDict", Dict({"see": Dict({"front": image}), "speed": VECTOR}), Discrete(2)),
        ("ImageInTuple", Tuple((Discrete(2), Box(0, 255, (8, 8), np.uint8))), Discrete(2)),
        ("Words", Sequence(Discrete(3)), Discrete(2)),
        ("Buttons", VECTOR, MultiBinary(3)),
        ("Cube", Box(0, 255, (8, 8, 8), np.uint8), vector),
    ]:
        kwargs = {"observation_space": observation_space, "action_space": action_space}
        gym.register(f"{name}-v0", Spaces, kwargs=kwargs)


def add(name: str, env: type, **kwargs) -> None:
    gym.register(f"{name}-v0", env, kwargs=kwargs)
    discrete = kwargs | {"discrete": True}
    gym.register(f"{name}Discrete-v0", env, kwargs=discrete)
    gym.register(f"{name}Image-v0", lambda **given: Image(env(**discrete, **given)))


register()
