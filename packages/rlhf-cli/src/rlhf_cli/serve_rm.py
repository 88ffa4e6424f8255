"""OpenRLHF's module `serve_rm`: `rlhf serve_rm` with OpenRLHF's flags."""

from rlhf_cli.openrlhf.modules import run

if __name__ == "__main__":
    run("serve_rm")
