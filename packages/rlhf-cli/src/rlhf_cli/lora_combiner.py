"""OpenRLHF's module `lora_combiner`: `rlhf lora_combiner` with OpenRLHF's flags."""

from rlhf_cli.openrlhf.modules import run

if __name__ == "__main__":
    run("lora_combiner")
