"""OpenRLHF's module `train_kto`: `rlhf kto` with OpenRLHF's flags."""

from rlhf_cli.openrlhf.modules import run

if __name__ == "__main__":
    run("train_kto")
