"""OpenRLHF's module `lora_combiner`: `rlhf lora_combiner` with OpenRLHF's flags."""

import sys

from rlhf_cli.openrlhf import main

if __name__ == "__main__":
    sys.exit(main("lora_combiner"))
