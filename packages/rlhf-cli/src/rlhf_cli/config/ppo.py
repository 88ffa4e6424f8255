"""The configuration of `ppo`."""

from collections.abc import Collection

from rlhf_cli.config.algorithm import AlgorithmSection
from rlhf_cli.config.base import Config
from rlhf_cli.config.checks import check_ppo
from rlhf_cli.config.data import PromptSection
from rlhf_cli.config.model import PpoModelSection
from rlhf_cli.config.output import PpoOutputSection
from rlhf_cli.config.placement import EngineSection, PlacementSection
from rlhf_cli.config.reward import RewardSection
from rlhf_cli.config.rollout import EvaluationSection, RolloutSection
from rlhf_cli.config.training import PpoTrainingSection


class PpoConfig(Config):
    """Everything `ppo` is told."""

    model: PpoModelSection = PpoModelSection()
    data: PromptSection = PromptSection()
    reward: RewardSection = RewardSection()
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    training: PpoTrainingSection = PpoTrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    placement: PlacementSection = PlacementSection()
    engine: EngineSection = EngineSection()
    output: PpoOutputSection = PpoOutputSection()

    def check(self, given: Collection[str]) -> list[str]:
        """Check what concerns several fields; see `rlhf_cli.config.checks.check_ppo`."""
        return check_ppo(self, given)
