"""Adapters to the scripts as they are now, for tests/test_records.py.

Whoever rewrites a script writes a subclass of its adapter here and puts it into ADAPTERS; the
methods to override and what they must return are documented in frozen.py. For example, if
ppo_loss returns a dict of statistics and knows no `valid`:

    class NewMujoco(frozen.Mujoco):
        def loss(self, newlogprob, entropy, newvalue, mb, clip_coef, **flags):
            mb = {name: tensor for name, tensor in mb.items() if name != "valid"}
            args = self.args(**flags)
            return self.script.ppo_loss(newlogprob, entropy, newvalue, mb, clip_coef, args)

Where names, order or layout of parameters change, override `get` and `set`, so that they take and
return the record's (fill.py has channels_last for a linear layer behind convolutions). A case or
an output that has no meaning any more goes into SKIPPED, with the reason.
"""

import ppg_procgen
import ppo_atari
import ppo_continuous_mujoco
import ppo_lstm
import ppo_multidiscrete
import ppo_procgen
from records import frozen

ADAPTERS = {
    "ppo_continuous_mujoco": frozen.Mujoco(ppo_continuous_mujoco),
    "ppo_atari": frozen.Atari(ppo_atari),
    "ppo_lstm": frozen.Lstm(ppo_lstm),
    "ppo_multidiscrete": frozen.MultiDiscrete(ppo_multidiscrete),
    "ppo_procgen": frozen.Procgen(ppo_procgen),
    "ppg_procgen": frozen.Ppg(ppg_procgen),
}

# (script, case) or (script, case, output) -> why it is not compared
SKIPPED: dict[tuple, str] = {}
