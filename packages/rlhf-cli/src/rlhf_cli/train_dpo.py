"""OpenRLHF's module `train_dpo`: `rlhf dpo` with OpenRLHF's flags."""

import sys

from rlhf_cli.openrlhf import main

if __name__ == "__main__":
    sys.exit(main("train_dpo"))
