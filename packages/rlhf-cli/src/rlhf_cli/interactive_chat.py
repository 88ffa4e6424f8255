"""OpenRLHF's module `interactive_chat`: `rlhf chat` with OpenRLHF's flags."""

import sys

from rlhf_cli.openrlhf import main

if __name__ == "__main__":
    sys.exit(main("interactive_chat"))
