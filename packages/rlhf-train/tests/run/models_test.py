"""The models of a run: what is refused when they are loaded."""

import pytest

from rlhf_data.errors import ConfigError
from rlhf_models.testing import tiny_model_dir
from rlhf_train.run import models
from rlhf_train.specs import ModelSpec


@pytest.mark.parametrize("kind", ["actor", "reward", "critic"])
def test_model_that_could_not_be_saved_is_refused_before_it_is_trained(kind, tmp_path, monkeypatch):
    """As one from a hub name, whose files no dry run has read."""
    spec = ModelSpec(path=str(tiny_model_dir(tmp_path)), dtype="float32")
    models.load_model(kind, spec)
    name = "load_actor" if kind == "actor" else "load_critic"
    load = getattr(models, name)

    def load_misfit(*words, **options):
        model = load(*words, **options)
        model.model.config.intermediate_size += 2
        return model

    monkeypatch.setattr(models, name, load_misfit)
    with pytest.raises(ConfigError, match="could not be saved so that transformers loads it"):
        models.load_model(kind, spec)
