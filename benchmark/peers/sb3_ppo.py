"""Stable-Baselines3's PPO with ppo_continuous_mujoco.py's hyperparameters, for speed.sh.

Needs: stable-baselines3, gymnasium[mujoco] and tensorboard.
Run:   python benchmark/peers/sb3_ppo.py --env-id HalfCheetah-v4 --total-timesteps 102400
"""

import argparse
import time

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from torch.utils.tensorboard import SummaryWriter


class LogSpeed(BaseCallback):
    """Write charts/SPS, steps per second since the start, after every rollout."""

    def __init__(self, run_dir: str):
        super().__init__()
        self.writer, self.start = SummaryWriter(run_dir), time.time()

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        sps = self.num_timesteps / (time.time() - self.start)
        self.writer.add_scalar("charts/SPS", sps, self.num_timesteps)

    def _on_training_end(self) -> None:
        self.writer.close()


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--env-id", default="HalfCheetah-v4")
    parser.add_argument("--total-timesteps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(1)
    env = VecNormalize(make_vec_env(args.env_id, n_envs=1, seed=args.seed), gamma=0.99)
    model = PPO(
        "MlpPolicy",
        env,
        learning_rate=lambda progress_remaining: 3e-4 * progress_remaining,
        n_steps=2048,
        batch_size=64,
        n_epochs=10,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        clip_range_vf=0.2,
        ent_coef=0.0,
        vf_coef=0.5,
        max_grad_norm=0.5,
        policy_kwargs={
            "net_arch": {"pi": [64, 64], "vf": [64, 64]},
            "activation_fn": torch.nn.Tanh,
            "ortho_init": True,
            "optimizer_kwargs": {"eps": 1e-5},
        },
        seed=args.seed,
        device="cpu",
    )
    run_dir = f"runs/{args.env_id}__sb3_ppo__{args.seed}__{int(time.time())}"
    model.learn(args.total_timesteps, LogSpeed(run_dir))


if __name__ == "__main__":
    main()
