"""The configuration of `ppo`."""

from collections.abc import Collection

from pydantic import BaseModel, ConfigDict, Field

from rlhf_cli.config.algorithm import AlgorithmSection
from rlhf_cli.config.checks import check_ppo
from rlhf_cli.config.data import PromptSection
from rlhf_cli.config.model import PpoModelSection
from rlhf_cli.config.output import PpoOutputSection
from rlhf_cli.config.placement import EngineSection, PlacementSection
from rlhf_cli.config.reward import RewardSection
from rlhf_cli.config.rollout import EvaluationSection, RolloutSection
from rlhf_cli.config.training import PpoTrainingSection


class PpoConfig(BaseModel):
    """Everything `ppo` is told."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: PpoModelSection = Field(default_factory=PpoModelSection)
    data: PromptSection = Field(default_factory=PromptSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    training: PpoTrainingSection = Field(default_factory=PpoTrainingSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    placement: PlacementSection = Field(default_factory=PlacementSection)
    engine: EngineSection = Field(default_factory=EngineSection)
    output: PpoOutputSection = Field(default_factory=PpoOutputSection)

    def check(self, given: Collection[str]) -> list[str]:
        """Check what concerns several fields; see `rlhf_cli.config.checks.check_ppo`."""
        return check_ppo(self, given)
