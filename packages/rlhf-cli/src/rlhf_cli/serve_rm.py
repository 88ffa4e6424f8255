"""OpenRLHF's module `serve_rm`: `rlhf serve_rm` with OpenRLHF's flags."""

import sys

from rlhf_cli.openrlhf import main

if __name__ == "__main__":
    sys.exit(main("serve_rm"))
