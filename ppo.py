# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["torch>=2.11", "gymnasium[box2d,classic-control]>=1.2.1", "numpy>=1.26",
#                 "tensorboard>=2.16", "tqdm>=4.66", "tyro>=1.0", "moviepy>=2.1"]
# ///
"""PPO with its 13 core details: environments with vector observations and discrete actions.

Run:     uv run ppo.py --env-id CartPole-v1
Look:    uvx tensorboard --logdir runs
Expect:  a return of 500 after 500,000 steps and one to five minutes on one core (13 seeds)
Read:    to the end of `train`; the rest is plumbing. [C..] and [X..] name details of "The 37
         Implementation Details of PPO" (Huang et al., ICLR blog track 2022), [S01] is ours.
Letters: T steps of N environments make a batch of B = T * N samples, a minibatch is M of them;
         an observation has O numbers, an action is one of A.
"""

import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    # -- experiment --
    exp_name: str = Path(__file__).stem  # part of the run directory's name
    seed: int = 1  # random seed of networks, actions, minibatches and environments
    torch_deterministic: bool = True  # let cuDNN use deterministic kernels only
    cuda: bool = False  # train on a GPU; networks this small should be faster on the CPU
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "ppo"  # project in Weights & Biases
    wandb_entity: str | None = None  # team in Weights & Biases
    capture_video: bool = False  # record some episodes of environment 0 and of the evaluation

    # -- algorithm --
    env_id: str = "CartPole-v1"  # id of the environment, or module:id
    total_timesteps: int = 500_000  # environment steps in all, rounded down to whole batches
    learning_rate: float = 2.5e-4  # learning rate of Adam
    num_envs: int = 4  # environments stepped together [C01]
    num_steps: int = 128  # steps of each environment in a rollout
    anneal_lr: bool = True  # lower the learning rate linearly to zero [C04]
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation [C05]
    num_minibatches: int = 4  # minibatches of an epoch [C06]
    update_epochs: int = 4  # passes over a rollout
    norm_adv: bool = True  # normalize the advantages of a minibatch [C07]
    clip_coef: float = 0.2  # clip range of the probability ratio [C08] and of the value [C09]
    clip_vloss: bool = True  # clip the value loss [C09]
    ent_coef: float = 0.01  # weight of the entropy bonus [C10]
    vf_coef: float = 0.5  # weight of the value loss [C10]
    max_grad_norm: float = 0.5  # largest norm of the gradient; 0 disables clipping [C11]
    target_kl: float | None = None  # skip the epochs after one whose mean KL exceeds this [X03]

    # -- details --
    anneal_clip: bool = False  # lower clip_coef linearly to zero [X01]
    adam_eps: float = 1e-5  # epsilon of Adam [C03]
    ortho_init: bool = True  # orthogonal weights, or torch's default [C02]
    shared_network: bool = False  # one trunk for policy and value, not two networks [C13]
    bootstrap_truncation: bool = True  # bootstrap where a time limit ends an episode [S01]

    # -- run --
    checkpoint_seconds: int = 60  # between checkpoints; the last iteration always writes one
    resume: str | None = None  # continue the run in this directory, with its configuration
    evaluate: str | None = None  # play the agent in this directory instead of training
    eval_episodes: int = 10  # episodes played after training or by --evaluate; 0: none
    eval_deterministic: bool = False  # play the most probable actions, not sampled ones

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size


# -- agent --
def layer_init(layer: nn.Module, std: float, args: Args) -> nn.Module:
    """Orthogonal weights of gain `std`, zero bias (baselines/a2c/utils.py); or torch's default."""
    if args.ortho_init:  # [C02] orthogonal initialization of weights, zero biases
        nn.init.orthogonal_(layer.weight, std)
        nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value function of a vector: two networks with two layers of 64 units each."""

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.spaces.Discrete, args: Args):
        super().__init__()

        def trunk() -> list[nn.Module]:
            first = layer_init(nn.Linear(obs_space.shape[0], 64), 2**0.5, args)
            second = layer_init(nn.Linear(64, 64), 2**0.5, args)
            return [first, nn.Tanh(), second, nn.Tanh()]

        actor_trunk = trunk()
        critic_trunk = actor_trunk if args.shared_network else trunk()  # [C13] shared or separate
        num_actions = int(action_space.n)
        self.actor = nn.Sequential(*actor_trunk, layer_init(nn.Linear(64, num_actions), 0.01, args))
        self.critic = nn.Sequential(*critic_trunk, layer_init(nn.Linear(64, 1), 1.0, args))

    def draw_noise(self, *shape: int) -> torch.Tensor:
        """Gumbel noise (*shape, A), -log of Exp(1), for `act`; drawn once a rollout for speed."""
        return -torch.empty(*shape, self.actor[-1].out_features).exponential_().log()

    @torch.no_grad()
    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Actions (n,) at observations (n, O): Gumbel-max samples, or the modes if noise is 0."""
        return (self.actor(obs) + noise).argmax(-1)  # with Gumbel noise a sample of the softmax

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """V of observations (n, O) -> (n,)."""
        return self.critic(obs).squeeze(-1)

    def evaluate_actions(self, obs: torch.Tensor, actions: torch.Tensor):
        """Log-probability, entropy and value, each (n,), of actions (n,) at observations (n, O)."""
        policy = Categorical(logits=self.actor(obs), validate_args=False)
        return policy.log_prob(actions), policy.entropy(), self.get_value(obs)


# -- advantages and loss --
def gae(rewards, values, next_values, terminations, dones, gamma: float, gae_lambda: float):
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16); all arrays are (T, N).

    `next_values[t]` is the value of the state that followed step t, before any reset. It is left
    out after a termination; the end of an episode for any reason (`dones`) stops the sum.
    """
    delta = rewards + gamma * np.where(terminations, 0, next_values) - values
    decay = gamma * gae_lambda * (1 - dones)
    advantages = np.zeros_like(delta)
    lastgaelam = np.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        lastgaelam = delta[t] + decay[t] * lastgaelam  # [C05] GAE
        advantages[t] = lastgaelam
    return advantages


def ppo_loss(newlogprob, entropy, newvalue, mb: dict, clip_coef, args: Args):
    """PPO's scalar loss and diagnostics on a minibatch (arXiv:1707.06347, baselines/ppo2/model.py).

    newlogprob, entropy, newvalue: (M,) under the current weights. mb: (M,) tensors of the rollout.
    """
    advantages = mb["advantages"]
    if args.norm_adv:  # [C07] advantage normalization, per minibatch (biased std, as in baselines)
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)

    logratio = newlogprob - mb["logprobs"]
    ratio = logratio.exp()
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)
    pg_loss = torch.max(pg_loss1, pg_loss2).mean()  # [C08] clipped surrogate objective

    v_loss = (newvalue - mb["returns"]) ** 2
    if args.clip_vloss:  # [C09] value-loss clipping
        v_clipped = mb["values"] + (newvalue - mb["values"]).clamp(-clip_coef, clip_coef)
        v_loss = torch.max(v_loss, (v_clipped - mb["returns"]) ** 2)
    v_loss = 0.5 * v_loss.mean()

    entropy = entropy.mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss  # [C10] overall loss
    stats = {  # [C12] debug variables
        "policy_loss": pg_loss,
        "value_loss": v_loss,
        "entropy": entropy,
        "old_approx_kl": -logratio.mean(),  # k1 of http://joschu.net/blog/kl-approx.html
        "approx_kl": (ratio - 1 - logratio).mean(),  # k3
        "clipfrac": ((ratio - 1).abs() > clip_coef).float().mean(),
    }
    return loss, {name: stat.detach() for name, stat in stats.items()}


def train(args: Args) -> dict:
    """Train to the last step, from the checkpoint of --resume if given; returns the result."""
    check_args(args)
    torch.set_num_threads(1)  # networks this small are slower with more
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.manual_seed(args.seed)  # weights, actions, minibatches; environments have their own
    device = torch.device("cuda" if args.cuda else "cpu")
    checkpoint = load_checkpoint(args.resume) if args.resume else None
    env_name = args.env_id.replace("/", "-").replace(":", "-")  # in the name of a directory
    run_name = f"{env_name}__{args.exp_name}__{args.seed}__{int(time.time())}"
    run_dir = Path(args.resume or f"runs/{run_name}")
    complete = checkpoint and checkpoint["iteration"] >= args.num_iterations
    require(not complete, f"{run_dir} is done: --evaluate plays it")

    envs = make_envs(args, run_dir)
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    agent = Agent(obs_space, action_space, args).to(device)
    lr, eps = args.learning_rate, args.adam_eps  # [C03] Adam's epsilon
    optimizer = torch.optim.Adam(agent.parameters(), lr=lr, eps=eps, fused=True)
    max_norm = args.max_grad_norm or math.inf

    # A rollout
    T, N = args.num_steps, args.num_envs
    obs = np.zeros((T, N, *obs_space.shape), np.float32)
    actions = np.zeros((T, N), np.int64)  # counted from 0
    rewards = np.zeros((T, N), np.float32)
    following_obs = np.zeros_like(obs)  # what step t led to, before any reset
    terminations = np.zeros((T, N), np.float32)  # 1: this step ended the task
    dones = np.zeros((T, N), np.float32)  # 1: this step ended the episode, by a time limit too

    # State carried between iterations and saved in checkpoints
    start_iteration = checkpoint["iteration"] + 1 if checkpoint else 1
    global_step = 0
    seconds = 0.0  # of training before this process
    recent_returns = deque(maxlen=100)
    episodic_return, episodic_length = np.zeros(N), np.zeros(N)
    env_seed = args.seed + (start_iteration - 1) * N  # a resumed run does not repeat its episodes
    next_obs, _ = envs.reset(seed=env_seed)
    if checkpoint:
        load_weights(agent, checkpoint)
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng"])
        global_step = checkpoint["global_step"]
        seconds = checkpoint["seconds"]
        recent_returns.extend(checkpoint["recent_returns"])
    if checkpoint and restore_envs(envs, checkpoint["envs"]):
        next_obs, episodic_return, episodic_length = (x.numpy() for x in checkpoint["carried"])

    writer, episodes, bar = open_logs(args, run_dir, checkpoint)
    start_time = time.time() - seconds
    last_checkpoint = 0.0  # the first iteration writes one, so a full disk fails at once
    for iteration in range(start_iteration, args.num_iterations + 1):
        frac = 1 - (iteration - 1) / args.num_iterations
        if args.anneal_lr:  # [C04] learning-rate annealing
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate
        clip_coef = args.clip_coef * (frac if args.anneal_clip else 1)  # [X01] clip-range annealing

        # -- rollout --
        rollout_start = time.time()
        noise = agent.draw_noise(T, N).to(device)
        for t in range(T):  # [C01] vectorized architecture: N environments, T steps of each
            obs[t] = next_obs
            action = agent.act(torch.from_numpy(obs[t]).to(device), noise[t])
            actions[t] = action.cpu().numpy()
            env_action = actions[t] + action_space.start  # Discrete need not begin at 0
            next_obs, reward, terminated, truncated, infos = envs.step(env_action)
            terminations[t] = terminated
            dones[t] = np.logical_or(terminated, truncated)
            rewards[t] = reward
            following_obs[t] = next_obs

            global_step += N
            episodic_return += reward
            episodic_length += 1
            for n in np.flatnonzero(dones[t]):  # next_obs[n] is of a new episode already
                following_obs[t, n] = infos["final_obs"][n]
                recent_returns.append(float(episodic_return[n]))
                writer.add_scalar("charts/episodic_return", episodic_return[n], global_step)
                writer.add_scalar("charts/episodic_length", episodic_length[n], global_step)
                at = time.time() - start_time
                row = f"{global_step},{episodic_return[n]:.9g},{episodic_length[n]:.0f},{at:.2f}"
                print(row, file=episodes)
                episodic_return[n] = episodic_length[n] = 0

        # -- advantages --
        update_start = time.time()
        b_obs = torch.from_numpy(obs).to(device).flatten(0, 1)  # (B, O)
        b_following_obs = torch.from_numpy(following_obs).to(device).flatten(0, 1)  # (B, O)
        b_actions = torch.from_numpy(actions).to(device).flatten(0, 1)
        with torch.no_grad():  # still the rollout's weights: one pass instead of T
            b_logprobs, _, b_values = agent.evaluate_actions(b_obs, b_actions)  # (B,)
            b_next_values = agent.get_value(b_following_obs)  # (B,)
        values = b_values.view(T, N).cpu().numpy()
        next_values = b_next_values.view(T, N).cpu().numpy()
        ends = terminations if args.bootstrap_truncation else dones  # [S01] or as published: dones
        advantages = gae(rewards, values, next_values, ends, dones, args.gamma, args.gae_lambda)

        # -- update --
        b_advantages = torch.from_numpy(advantages).to(device).flatten()
        batch = {"obs": b_obs, "actions": b_actions, "logprobs": b_logprobs, "values": b_values}
        batch |= {"advantages": b_advantages, "returns": b_advantages + b_values}
        metrics = []  # a dict of scalar tensors for each minibatch
        for epoch in range(args.update_epochs):
            b_inds = torch.randperm(args.batch_size).to(device)
            for mb_inds in b_inds.chunk(args.num_minibatches):  # [C06] every sample once an epoch
                mb = {name: b[mb_inds] for name, b in batch.items()}
                newlogprob, entropy, newvalue = agent.evaluate_actions(mb["obs"], mb["actions"])
                loss, stats = ppo_loss(newlogprob, entropy, newvalue, mb, clip_coef, args)
                optimizer.zero_grad()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(agent.parameters(), max_norm)  # [C11] clipping
                optimizer.step()
                metrics.append(stats | {"grad_norm": norm})
            if args.target_kl is not None:  # [X03] early stop
                epoch_kl = [stats["approx_kl"] for stats in metrics[-args.num_minibatches :]]
                if torch.stack(epoch_kl).mean() > args.target_kl:
                    break

        # -- log --
        by_name = {name: torch.stack([stats[name] for stats in metrics]) for name in metrics[0]}
        scalars = {f"losses/{name}": stat.mean().item() for name, stat in by_name.items()}
        finite = all(map(math.isfinite, scalars.values()))
        require(finite, f"losses of iteration {iteration} are not finite: {scalars}")
        scalars["losses/approx_kl_max"] = by_name["approx_kl"].max().item()
        explained = 1 - b_advantages.var() / batch["returns"].var()  # advantages = returns - values
        scalars["losses/explained_variance"] = explained.item()
        scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
        now = time.time()
        scalars["charts/SPS"] = global_step / (now - start_time)
        scalars["time/rollout"] = update_start - rollout_start
        scalars["time/update"] = now - update_start
        for name, value in scalars.items():
            writer.add_scalar(name, value, global_step)
        mean_return = float(np.mean(recent_returns or [math.nan]))
        kl = scalars["losses/approx_kl"]
        bar.set_postfix_str(f"return {mean_return:.1f}, KL {kl:.4f}", refresh=False)
        bar.update(args.batch_size)

        # -- checkpoint --
        if iteration == args.num_iterations or now - last_checkpoint > args.checkpoint_seconds:
            last_checkpoint = now
            writer.flush()
            carried = (next_obs, episodic_return, episodic_length)
            state = {
                "args": asdict(args),
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "iteration": iteration,
                "global_step": global_step,
                "seconds": now - start_time,
                "recent_returns": list(recent_returns),
                "envs": env_states(envs),
                "carried": [torch.from_numpy(array) for array in carried],
                "episodes_size": episodes.tell(),
            }
            save_checkpoint(run_dir, state)

    for closable in (bar, envs, episodes):
        closable.close()
    result = {"run_dir": str(run_dir), "global_step": global_step, "return": mean_return}
    if args.eval_episodes:
        result["eval_returns"] = evaluate(args, run_dir)
        writer.add_scalar("eval/episodic_return", np.mean(result["eval_returns"]), global_step)
    writer.close()
    return result


# ================ plumbing: nothing below is part of the algorithm ================


class UserError(Exception):
    """Something that the user can fix; `main` prints it as one line."""


def require(condition, message: str) -> None:
    """Stop with one line unless the condition holds."""
    if not condition:
        raise UserError(message)


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line; with --resume or --evaluate, flags that are not given come from the run."""
    args = tyro.cli(Args, args=argv)
    require("" not in (args.resume, args.evaluate), "--resume and --evaluate need a directory")
    if run_dir := args.resume or args.evaluate:
        stored = load_checkpoint(run_dir)["args"] | {"resume": None, "evaluate": None}
        args = tyro.cli(Args, args=argv, default=Args(**stored))
    check_args(args)
    return args


def check_unchanged(args: Args, run_dir: str) -> None:
    """Stop with one line if the run in the directory has another script or configuration."""
    script = Path(__file__).name
    require((Path(run_dir) / script).exists(), f"{run_dir} is of another script than {script}")
    old = load_checkpoint(run_dir)["args"]
    new = asdict(args)
    free = "resume evaluate cuda track wandb_project_name wandb_entity capture_video".split()
    free += ["checkpoint_seconds", "eval_episodes", "eval_deterministic"]
    if args.total_timesteps > old["total_timesteps"]:
        annealed = old["anneal_lr"] or old["anneal_clip"]
        longer = f"total_timesteps ({old['total_timesteps']} to {args.total_timesteps})"
        require(not annealed, f"{run_dir} cannot change {longer}: the annealing ends with them")
        free.append("total_timesteps")
    changed = [f"{k} ({old[k]} to {new[k]})" for k in old if old[k] != new[k] and k not in free]
    require(not changed, f"{run_dir} cannot change {', '.join(changed)}: leave these out")


def check_args(args: Args) -> None:
    """Stop with one line that names flag and numbers, before anything is made."""
    require(not (args.resume and args.evaluate), "--resume trains, --evaluate plays: give one")
    if run_dir := args.resume or args.evaluate:
        check_unchanged(args, run_dir)
    may_be_0 = "seed gamma gae_lambda ent_coef vf_coef max_grad_norm".split()  # add your own here
    may_be_0 += ["checkpoint_seconds", "eval_episodes"]
    for name, value in asdict(args).items():
        flag = f"--{name.replace('_', '-')} ({value})"
        kind = type(getattr(Args, name))  # of the default; None: a number or a name
        types = {float: (int, float), type(None): (int, float, str, kind)}.get(kind, (kind,))
        require(type(value) in types, f"{flag} cannot be a {type(value).__name__}")
        if type(value) in (int, float):
            high = {"gamma": 1, "gae_lambda": 1, "seed": 2**30}.get(name, 1e38)
            above = "at least" if name in may_be_0 else "greater than"
            fits = 0 <= value <= high and (value or name in may_be_0)
            require(fits, f"{flag} must be {above} 0 and at most {high:g}")
    batch = f"num_envs * num_steps ({args.num_envs} * {args.num_steps} = {args.batch_size})"
    even = args.batch_size % args.num_minibatches == 0
    require(even, f"{batch} must be divisible by --num-minibatches ({args.num_minibatches})")
    alone = args.norm_adv and args.batch_size == args.num_minibatches
    require(not alone, f"{batch}: minibatches of one sample need --no-norm-adv")
    require(args.num_iterations, f"--total-timesteps ({args.total_timesteps}) is less than {batch}")
    require(args.eval_episodes or not args.evaluate, "--evaluate needs --eval-episodes above 0")
    found = not args.capture_video or find_spec("moviepy")
    require(found, "--capture-video needs moviepy (pip install moviepy)")
    if not args.evaluate:
        require(not args.cuda or torch.cuda.is_available(), "--cuda finds no GPU (try --no-cuda)")
        found = not args.track or find_spec("wandb")
        require(found, "--track needs wandb (uv run --with wandb ...)")


def make_env(args: Args, video_dir: Path | None = None) -> gym.Env:
    """One environment, which records videos if it has a directory."""
    try:
        render = {"render_mode": "rgb_array"} if video_dir else {}
        env = gym.make(args.env_id, **render)
    except (gym.error.Error, ImportError) as error:
        raise UserError(f"--env-id ({args.env_id}): {error}") from error
    obs_space, action_space = env.observation_space, env.action_space
    vector = isinstance(obs_space, gym.spaces.Box) and len(obs_space.shape) == 1
    require(vector, f"{args.env_id} observes {obs_space}; this script needs vectors")
    discrete = isinstance(action_space, gym.spaces.Discrete)
    require(discrete, f"{args.env_id} acts in {action_space}; this script needs Discrete actions")
    if video_dir:
        env.reset()
        try:
            env.render()
            env = gym.wrappers.RecordVideo(env, str(video_dir), disable_logger=True)
        except Exception as error:  # every renderer fails in its own way
            raise UserError(f"--capture-video cannot render: {error!r}") from error
    # A copy of each observation: a reset may reuse the memory of final_obs
    return gym.wrappers.TransformObservation(env, np.array, obs_space)


def make_envs(args: Args, run_dir: Path) -> gym.vector.VectorEnv:
    """N environments that reset within the step that ends an episode (infos: final_obs)."""
    video_dir = run_dir / f"videos_{int(time.time())}" if args.capture_video else None
    makers = [lambda: make_env(args, video_dir)] + [lambda: make_env(args)] * (args.num_envs - 1)
    same_step = gym.vector.AutoresetMode.SAME_STEP
    return gym.vector.SyncVectorEnv(makers, copy=False, autoreset_mode=same_step)


def env_states(envs: gym.vector.VectorEnv) -> list[dict] | None:
    """The exact state of classic-control environments; None for others, such as Box2D's."""
    states = []
    for env in envs.envs:
        game = env.unwrapped
        spec = gym.registry[game.spec.id]  # its own wrappers could have a state too
        exact = str(spec.entry_point).startswith("gymnasium.envs.classic_control")
        if not exact or spec.additional_wrappers or not env.has_wrapper_attr("_elapsed_steps"):
            return None
        state = {"state": torch.tensor(np.array(game.state))}
        state["rng"] = game.np_random.bit_generator.state
        state["elapsed_steps"] = env.get_wrapper_attr("_elapsed_steps")
        states.append(state)
    return states


def restore_envs(envs: gym.vector.VectorEnv, states: list[dict] | None) -> bool:
    """Put the states back; False if there are none."""
    for env, state in zip(envs.envs, states or []):
        env.unwrapped.state = state["state"].numpy()
        env.unwrapped.np_random.bit_generator.state = state["rng"]
        env.set_wrapper_attr("_elapsed_steps", state["elapsed_steps"])
    return states is not None


def open_logs(args: Args, run_dir: Path, checkpoint: dict | None):
    """TensorBoard writer, episodes.csv and bar, of a new run or cut back to its checkpoint."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "episodes.csv"
    if checkpoint:
        whole = path.is_file() and path.stat().st_size >= checkpoint["episodes_size"]
        require(whole, f"{path} is missing, or shorter than at the checkpoint")
        os.truncate(path, checkpoint["episodes_size"])
        if Path(__file__).read_bytes() != (run_dir / Path(__file__).name).read_bytes():
            print(f"note: the run began with another text of this script, kept in {run_dir}")
    name = f"config_{checkpoint['iteration']}.json" if checkpoint else "config.json"
    with open(run_dir / name, "w" if checkpoint else "x") as file:  # x: no two runs in a directory
        json.dump(provenance(args), file, indent=2)
    if not checkpoint:
        shutil.copy(__file__, run_dir)
        path.write_text("step,return,length,seconds\n")
    episodes = open(path, "a", buffering=1)  # a line at a time
    if args.track:
        import wandb

        names = {"project": args.wandb_project_name, "entity": args.wandb_entity}
        names |= dict.fromkeys(["id", "name"], run_dir.resolve().name)
        names |= {"resume": "allow", "dir": run_dir, "config": asdict(args)}
        wandb.init(**names, reinit="finish_previous", sync_tensorboard=True, save_code=True)
    device = torch.cuda.get_device_name() if args.cuda else "CPU"
    uv_run = "uv run --with wandb" if args.track else "uv run"
    again = uv_run if "UV" in os.environ else shlex.quote(sys.executable)
    again += f" {shlex.join([__file__, '--resume', str(run_dir)])}"
    print(f"run: {run_dir}, on {device}\nif it is stopped: {again}", flush=True)
    purge_step = checkpoint["global_step"] + 1 if checkpoint else None
    steps = {"total": args.num_iterations * args.batch_size, "unit": "step"}
    steps["initial"] = checkpoint["iteration"] * args.batch_size if checkpoint else 0
    bar = tqdm(**steps, delay=0.1, mininterval=0.1 if sys.stderr.isatty() else 10)  # seconds
    return SummaryWriter(run_dir, purge_step=purge_step), episodes, bar


def provenance(args: Args) -> dict:
    """What it takes to repeat the run."""
    git = {"args": "git describe --always --dirty --exclude=*".split(), "text": True}
    git |= {"cwd": Path(__file__).resolve().parent, "capture_output": True}
    commit = subprocess.run(**git).stdout.strip() if shutil.which("git") else ""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = cpuinfo.partition("model name\t: ")[2].partition("\n")[0] or platform.processor()
    versions = {name: version(name) for name in ("torch", "gymnasium", "numpy")}
    hardware = [cpu, f"{os.cpu_count()} cores"]
    hardware += [torch.cuda.get_device_name()] if args.cuda else []
    return {
        "args": asdict(args),
        "command": shlex.join(sys.argv),
        "commit": commit,
        "versions": {"python": platform.python_version()} | versions,
        "hardware": ", ".join(hardware),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def save_checkpoint(run_dir: Path, state: dict) -> None:
    """Write, then rename: a kill at any moment leaves a whole file, the old one or the new one."""
    try:
        with open(run_dir / "episodes.csv", "ab") as file:
            os.fsync(file.fileno())  # a power cut leaves the rows that the state counts
        with open(run_dir / "checkpoint.tmp", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:  # torch's form of an OSError, if a tensor is large
        raise OSError(f"cannot write {run_dir / 'checkpoint.tmp'}; is the disk full?") from error
    os.replace(run_dir / "checkpoint.tmp", run_dir / "checkpoint.pt")


def load_checkpoint(run_dir: str | Path) -> dict:
    """Read a checkpoint; only tensors and plain values are accepted, so nothing in it can run."""
    path = Path(run_dir) / "checkpoint.pt"
    require(path.is_file(), f"there is no checkpoint at {path}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        known = checkpoint["args"].keys() == asdict(Args()).keys() and "agent" in checkpoint
    except Exception as error:
        raise UserError(f"cannot read {path} ({type(error).__name__})") from error
    require(known, f"{path} has other flags than this script: use the copy beside it")
    return checkpoint


def load_weights(agent: Agent, checkpoint: dict) -> None:
    """Load the weights of a checkpoint, if it is of an environment of this shape."""
    try:
        agent.load_state_dict(checkpoint["agent"])
    except RuntimeError as error:
        raise UserError(f"the checkpoint does not fit environment and Agent: {error}") from error


def evaluate(args: Args, run_dir: Path) -> list[float]:
    """Undiscounted returns of `eval_episodes` episodes with the agent of the checkpoint."""
    video_dir = run_dir / f"eval_videos_{int(time.time())}" if args.capture_video else None
    env = make_env(args, video_dir)
    agent = Agent(env.observation_space, env.action_space, args)
    checkpoint = load_checkpoint(run_dir)
    load_weights(agent, checkpoint)
    torch.manual_seed(args.seed)
    returns = np.zeros(args.eval_episodes)
    for episode in tqdm(range(args.eval_episodes), unit="episode", leave=False):
        obs, _ = env.reset(seed=1_000_000 + episode)  # training begins at --seed
        done = False
        while not done:
            noise = agent.draw_noise(1)
            noise = torch.zeros_like(noise) if args.eval_deterministic else noise
            action = agent.act(torch.from_numpy(obs[None].astype(np.float32)), noise)
            obs, reward, terminated, truncated, _ = env.step(action.item() + env.action_space.start)
            returns[episode] += reward
            done = terminated or truncated
    env.close()
    print(f"evaluation: {returns.mean():.1f} +- {returns.std():.1f} over {len(returns)} episodes")
    return returns.tolist()


def main() -> None:
    try:
        args = parse_args()
        if args.evaluate:
            evaluate(args, Path(args.evaluate))
        else:
            train(args)
    except KeyboardInterrupt:
        sys.exit("stopped")
    except (UserError, OSError) as error:  # OSError: a full disk, a directory without permission
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
