"""OpenRLHF's module `train_ppo_ray`: `rlhf ppo` with OpenRLHF's flags."""

from rlhf_cli.openrlhf.modules import run

if __name__ == "__main__":
    run("train_ppo_ray")
