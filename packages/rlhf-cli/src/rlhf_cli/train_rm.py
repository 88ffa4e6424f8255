"""OpenRLHF's module `train_rm`: `rlhf rm` with OpenRLHF's flags."""

from rlhf_cli.openrlhf.modules import run

if __name__ == "__main__":
    run("train_rm")
