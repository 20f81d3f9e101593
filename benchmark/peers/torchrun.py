"""A script of ours in several processes, for speed.sh.

SCRIPT=ppo_atari.py PROCESSES=2 python torchrun.py FLAGS...

They share the threads of OMP_NUM_THREADS, so that both sides of a pair have the same cores.
"""

import os
import sys
from pathlib import Path

from torch.distributed.run import main

processes = int(os.environ.get("PROCESSES", "2"))
os.environ["OMP_NUM_THREADS"] = str(max(1, int(os.environ["OMP_NUM_THREADS"]) // processes))
script = Path(__file__).resolve().parents[2] / os.environ["SCRIPT"]
main(["--standalone", "--nproc-per-node", str(processes), str(script), *sys.argv[1:]])
