"""OpenRLHF's module `train_prm`: `rlhf prm` with OpenRLHF's flags."""

from rlhf_cli.openrlhf.modules import run

if __name__ == "__main__":
    run("train_prm")
