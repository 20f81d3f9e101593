"""ppo_pixels.py: what its network sees of images of any kind, and its two kinds of actions."""

import os
import re
import subprocess
import sys
from pathlib import Path

import cv2
import envs
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import Scripted
from gymnasium.spaces import Box, Discrete
from harness import train
from registry import ROOT, SCRIPTS
from torch.distributions import Categorical, Independent, Normal
from torch.testing import assert_close
from watch import checkpoint_of, episodes_of

import ppo_atari
import ppo_pixels
from ppo_pixels import Agent, Args, Refused

PIXELS = SCRIPTS["ppo_pixels"]
KINDS = list(envs.Picture.KINDS)
PICTURE = Box(0, 255, (2, 84, 84, 3), np.uint8)
envs.add("Nine", envs.Picture, space=Box(0, 255, (20, 20, 9), np.uint8))
envs.add("Stacked", envs.Picture, space=Box(0, 255, (4, 40, 40, 3), np.uint8))
bright = {"space": Box(0, 1, (8, 9, 3)), "gives": lambda image: 255 * image}
envs.add("Bright", envs.Picture, **bright)
far = {"space": Box(0, 2**31 - 1, (8, 9, 3), np.int32), "gives": lambda image: image // 2**24}
envs.add("Far", envs.Picture, **far)
envs.add("Farther", envs.Picture, space=Box(-1.7e308, 1.7e308, (8, 9, 3), np.float64))


def made(env_id: str, **flags) -> gym.Env:
    return ppo_pixels.make_env(Args(**{"env_id": env_id, "frame_skip": 1} | flags))


def picture(kind: str) -> str:
    """The id of the environment with Discrete actions that shows images of this kind."""
    return f"Picture{KINDS.index(kind)}Discrete-v0"


def agent_of(space: gym.Space, actions: gym.Space, **flags) -> Agent:
    torch.manual_seed(0)
    return Agent(space, actions, Args(**flags))


# -- images --
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_of_any_kind_is_what_the_environment_shows(kind):
    """Every pixel, its channels last; bytes stay bytes, and the network gets them up to 1.

    And it is trained on and evaluated, with actions of a Box or Discrete in turns.
    """
    space, shape = envs.Picture.KINDS[kind]
    env, raw = made(picture(kind), frame_stack=1), gym.make(picture(kind)).unwrapped
    obs, _ = env.reset(seed=1)
    seen = [(obs, raw.reset(seed=1)[0])]
    seen += [(env.step(1)[0], raw.step(6)[0]) for _ in range(2)]
    assert env.observation_space.shape == (1, *shape) == seen[0][0].shape
    is_bytes = space.dtype.kind in "uib"
    for obs, image in seen:
        assert env.observation_space.contains(obs)
        assert obs.dtype == (np.uint8 if is_bytes else np.float32)
        channels_first = len(image.shape) == 3 and image.shape[0] < image.shape[2]
        expected = image.transpose(1, 2, 0) if channels_first else image.reshape(shape)
        np.testing.assert_array_equal(obs[0], expected.astype(obs.dtype))
    inputs = []
    agent = agent_of(env.observation_space, env.action_space)
    agent.network.register_forward_pre_hook(lambda module, x: inputs.append(x[0]))
    agent.act(torch.from_numpy(seen[0][0][None]))
    highest = 1 if kind != "no bounds" else 1000
    assert inputs[0].shape == (1, shape[2], *shape[:2])
    assert inputs[0].max() == pytest.approx(highest)
    env_id = picture(kind).replace("Discrete", "Discrete" * (KINDS.index(kind) % 2))
    run_dir = train(PIXELS, env_id=env_id, total_timesteps=64, eval_episodes=1)
    assert checkpoint_of(run_dir)["iteration"] == 1 and len(episodes_of(run_dir)) == 8


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (7, 7), (35, 90), (36, 36), (84, 84), (97, 131)])
def test_the_network_fits_any_size(size):
    space = Box(0, 255, (2, *size, 3), np.uint8)
    agent = agent_of(space, Discrete(4), ortho_init=False)
    output, value = agent(torch.zeros(5, *space.shape, dtype=torch.uint8))
    assert output.shape == (5, 4) and value.shape == (5,)


def test_images_are_divided_by_their_largest_number():
    assert ppo_pixels.image_scale(Box(1, 10, (4, 4, 3), np.uint8)) == 10
    assert ppo_pixels.image_scale(Box(-20, 10, (4, 4, 3), np.float32)) == 20


def test_for_84_pixels_it_is_the_nature_cnn():
    args = ppo_atari.Args(env_backend="gymnasium")
    nature = ppo_atari.Agent(Box(0, 255, (6, 84, 84), np.uint8), Discrete(4), args)
    assert str(agent_of(PICTURE, Discrete(4)).network) == str(nature.network)


def test_what_is_no_byte_is_refused_where_the_space_says_bytes():
    """Cast to bytes, fractions would be a black image; whole numbers of any type are right."""
    obs, _ = made("BytesAsFloatsDiscrete-v0", frame_stack=1).reset()
    assert obs.dtype == np.uint8 and obs.max() == 255
    with pytest.raises(Refused, match="float64 that are no bytes as in its space"):
        made("FractionsAsBytesDiscrete-v0").reset()
    with pytest.raises(Refused, match=r"the shape \(7, 9, 3\) where \(8, 9, 3\)"):
        made("AnotherShapeDiscrete-v0").reset()


def test_a_run_says_what_its_network_sees(capsys):
    """More channels than OpenCV reduces are left as they are."""
    for env_id, seen in {
        "NineDiscrete-v0": "4 images of 20x20x9, divided by 255, largest number in the first 1;",
        "CartPole-v1": "4 rendered pictures of 12x12x3",
        "FarDiscrete-v0": "4 images of 8x9x3, divided by 1, largest number in the first 1.3e+02",
        "FartherDiscrete-v0": "4 images of 8x9x3, divided by 1, largest number in the first 1e+03",
    }.items():
        train(PIXELS, env_id=env_id, total_timesteps=64)
        assert f"the network sees {seen}" in capsys.readouterr().out


def test_stacks_of_images_and_wrong_bounds_are_refused():
    with pytest.raises(Refused, match="two or three axes, not 4; --frame-stack"):
        train(PIXELS, env_id="StackedDiscrete-v0")
    with pytest.raises(Refused, match="an image has 255 where its space ends at 1"):
        train(PIXELS, env_id="BrightDiscrete-v0")
    assert not Path("runs").exists()


@pytest.mark.timeout(60)  # where it is not refused it hangs
def test_mujoco_does_not_render_in_a_process_for_each():
    with pytest.raises(Refused, match="--env-backend async: MuJoCo cannot render in copies"):
        made("InvertedPendulum-v4", render_as_observation=True, env_backend="async")


def test_an_agent_that_saw_something_else_is_refused():
    run_dir = train(PIXELS, total_timesteps=64)
    with pytest.raises(Refused, match="that run has another --frame-skip"):
        train(PIXELS, init_from=str(run_dir), frame_skip=2)


def test_the_image_of_a_dict_as_the_page_picks_it():
    """Any other image in a Dict is refused, not flattened: tests/registry.py."""
    [code] = re.findall(r"(?ms)^```python\n(.*?)^```$", (ROOT / "docs" / "pixels.md").read_text())
    exec(code, {"gym": gym, "MyEnv": lambda **kwargs: envs.WithSpeed(envs.Colour(**kwargs))})
    obs, _ = made("MyEnv-v0", frame_stack=1).reset(seed=1)
    np.testing.assert_array_equal(obs[0], envs.Colour().reset(seed=1)[0])
    del gym.registry["MyEnv-v0"]


# -- wrappers --
def test_images_are_made_smaller_and_gray_where_asked():
    """But neither enlarged, nor what is no picture: codes of a grid, floats."""
    for kind, flags, shape in [
        ("large", {"image_size": 20}, (20, 20, 3)),
        ("large", {"image_size": 38}, (38, 36, 3)),
        ("large", {"image_size": 0}, (40, 36, 3)),
        ("colour", {"image_size": 15, "grayscale": True}, (13, 15, 1)),
        ("codes", {"image_size": 5, "grayscale": True}, (7, 7, 3)),
        ("floats", {"image_size": 5, "grayscale": True}, (13, 17, 3)),
    ]:
        assert made(picture(kind), **flags).observation_space.shape == (4, *shape)
    env = made(picture("large"), image_size=20, grayscale=True, frame_stack=1)
    obs, image = env.reset()[0], env.unwrapped.observe()
    resized = cv2.resize(image, (20, 20), interpolation=cv2.INTER_AREA)
    gray = resized @ np.array([0.2125, 0.7154, 0.0721])
    assert abs(obs[0, ..., 0] - gray).max() <= 1


def test_what_is_rendered_takes_the_place_of_what_is_no_image():
    """20 times the step, in a buffer that is drawn again; a stack begins with one image."""
    env = made("ScreenDiscrete-v0", frame_stack=3)
    assert env.observation_space == Box(0, 255, (3, 48, 48, 3), np.uint8)
    brightness = [env.reset(seed=1)[0].max((1, 2, 3)).tolist()]
    brightness += [env.step(0)[0].max((1, 2, 3)).tolist() for _ in range(4)]
    assert brightness == [[0, 0, 0], [0, 0, 20], [0, 20, 40], [20, 40, 60], [40, 60, 80]]
    with pytest.raises(Refused, match="--render-as-observation"):
        made("ScreenDiscrete-v0", render_as_observation=False)
    for name in ("BlindDiscrete-v0", "BlindTooDiscrete-v0"):
        with pytest.raises(Refused, match=f"{name} observes .*no image.* cannot render"):
            made(name)
    obs, _ = made(picture("gray"), frame_stack=2).reset(seed=1)  # images stay what they are
    assert obs.shape == (2, 13, 17, 1) and (obs[0] == obs[1]).all() and obs.any()


def test_an_action_is_repeated_and_its_rewards_add_up():
    """Eight steps by threes, in an environment that may spoil the actions that it gets."""
    run_dir = train(PIXELS, env_id="RewardArrayImage-v0", frame_skip=3, total_timesteps=64)
    assert {(value, length) for _, value, length in episodes_of(run_dir)} == {(8.0, 3)}
    env = ppo_pixels.PlainEnv(Scripted("termination"), 3)  # it doubles the actions that it gets
    env.reset()
    env.step(np.float32([0.5, -0.25]))
    np.testing.assert_array_equal(Scripted.actions, [[0.5, -0.25]] * 3)


# -- actions --
def test_rewards_are_scaled_as_in_the_script_for_vectors(spy):
    both = []
    for name in ("ppo_pixels", "ppo_continuous_mujoco"):
        row = SCRIPTS[name]
        calls = spy(row.module, "gae")
        train(row, env_id=row.env("Truncating"), gamma=0.9)
        both.append(np.concatenate([rewards for (rewards, *_), _ in calls]))
    assert len(np.unique(both[0])) > 10
    np.testing.assert_allclose(*both, rtol=1e-6)


@pytest.mark.parametrize("space", [Discrete(3), Box(-1, 1, (2,))], ids=["Discrete", "Box"])
def test_actions_are_those_of_the_policy(space):
    """600 draws for one image; the tolerances of their moments are four deviations."""
    agent = agent_of(PICTURE, space, ortho_init=False)
    agent.actor_logstd = torch.nn.Parameter(torch.tensor([-1.0, 0.5]))
    obs = torch.randint(256, (1, *PICTURE.shape), dtype=torch.uint8).expand(600, -1, -1, -1, -1)
    with torch.no_grad():
        output, value = agent(obs[:1])
    action, logprob, values = agent.act(obs)
    if agent.is_discrete:
        policy, atol = Categorical(logits=output[0].double()), 1e-5
        share = torch.bincount(action, minlength=3) / 600
        assert_close(share.double(), policy.probs, atol=0.08, rtol=0)
    else:
        std = agent.actor_logstd.detach().double().exp()
        policy, atol = Independent(Normal(output[0].double(), std), 1), 1e-4
        z = (action - policy.mean) / std
        assert (z.mean(0).abs() < 4 / 600**0.5).all() and ((z.std(0) - 1).abs() < 0.12).all()
    newlogprob, entropy, _ = agent.evaluate_actions(obs[:9], action[:9])
    assert_close(logprob.double(), policy.log_prob(action), atol=atol, rtol=0)
    assert_close(newlogprob.double(), policy.log_prob(action[:9]), atol=atol, rtol=0)
    assert_close(entropy.double(), policy.entropy().expand(9), atol=1e-5, rtol=0)
    assert_close(values, value.expand(600), atol=1e-5, rtol=0)
    (mode,), _, _ = agent.act(obs[:1], greedy=True)
    assert_close(mode, policy.mode.to(mode.dtype), atol=1e-5, rtol=0)


def test_box_actions_are_clipped_for_the_environment_alone(spy):
    """It asserts that they are within -1 and 1; the loss gets those that were drawn."""
    evaluated = spy(Agent, "evaluate_actions")
    wide = {"env_id": picture("colour").replace("Discrete", ""), "init_log_std": 1.0}
    train(PIXELS, **wide, total_timesteps=64)
    assert max(actions.abs().max() for (_, _, actions), _ in evaluated) > 3
    with pytest.raises(AssertionError):
        train(PIXELS, **wide, total_timesteps=64, clip_actions=False)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_clipped_actions_are_of_the_space_whatever_its_type(dtype):
    """The environment asserts it; float32 rounds the bounds of one to numbers outside."""
    raw = gym.make(picture("colour").replace("Discrete", ""), disable_env_checker=True)
    raw.unwrapped.action_space = Box(-0.1, 0.1, (2,), dtype)
    env = ppo_pixels.wrap_images(raw, Args())
    env.reset()
    for action in ([-5, 5], [0.05, -0.05]):
        env.step(np.float32(action))


# -- memory --
@pytest.mark.e2e
def test_a_run_needs_little_more_memory_than_its_images(tmp_path):
    """A rollout of 400 MB more takes 400 MB, beside as many minibatches of the same size.

    Freed memory goes back at once here: what is kept for later would hide what is needed.
    """
    large = f"envs:{picture('large')}"
    flags = f"--env-id {large} --num-envs 4 --frame-stack 16 --eval-episodes 0"
    code = "import ppo_pixels as script; script.keep_freed_memory = lambda: None; "
    code += "script.train(script.parse_args()); "
    code += "[peak] = [x for x in open('/proc/self/status') if x.startswith('VmHWM')]; "
    code += "print(1024 * int(peak.split()[1]))"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
    environment["MALLOC_MMAP_THRESHOLD_"] = str(2**16)  # bytes
    peaks = []
    for steps in (64, 64 + 1472):
        size = f"--num-steps {steps} --num-minibatches {steps // 16} --total-timesteps {4 * steps}"
        size += f" --update-epochs {1536 // steps}"  # as many minibatches, of the same size
        command = [sys.executable, "-c", code, *f"{flags} {size} --no-cuda --no-compile".split()]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]))
    images = 1472 * 4 * 16 * 40 * 36 * 3  # bytes
    assert 4.0e8 < images and 0.9 < (peaks[1] - peaks[0]) / images < 1.1
