"""OpenRLHF's module `batch_inference`: `rlhf generate` or `rlhf score` with OpenRLHF's flags."""

from rlhf_cli.openrlhf.modules import run

if __name__ == "__main__":
    run("batch_inference")
