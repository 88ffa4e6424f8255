"""OpenRLHF's module `train_ppo`: `rlhf ppo` with OpenRLHF's flags."""

import sys

from rlhf_cli.openrlhf import main

if __name__ == "__main__":
    sys.exit(main("train_ppo"))
