"""A PPO script of LeanRL, unchanged: its speed goes to TensorBoard as charts/SPS.

PEER_SCRIPT=path/to/leanrl/ppo_....py python leanrl.py FLAGS...; needs torch, tensordict,
tensorboard, tyro, tqdm and gymnasium[mujoco], or for Atari what cleanrl_ppo_atari_envpool.py beside
this file needs.
"""

import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

from torch.utils.tensorboard import SummaryWriter

wandb = ModuleType("wandb")
wandb.init = lambda **settings: None
wandb.log = lambda values, step: writer.add_scalar("charts/SPS", values["speed"], step)
sys.modules["wandb"] = wandb

script = os.environ["PEER_SCRIPT"]
if "envpool" in Path(script).name:
    script = str(Path(__file__).with_name("cleanrl_ppo_atari_envpool.py"))
with SummaryWriter("runs/leanrl") as writer:
    runpy.run_path(script, run_name="__main__")
