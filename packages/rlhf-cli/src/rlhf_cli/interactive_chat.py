"""OpenRLHF's module `interactive_chat`: `rlhf chat` with OpenRLHF's flags."""

from rlhf_cli.openrlhf.modules import run

if __name__ == "__main__":
    run("interactive_chat")
