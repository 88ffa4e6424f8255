"""OpenRLHF's module `batch_inference`: `rlhf generate` or `rlhf score` with OpenRLHF's flags."""

import sys

from rlhf_cli.openrlhf import main

if __name__ == "__main__":
    sys.exit(main("batch_inference"))
