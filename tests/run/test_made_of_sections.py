"""A part is made of the sections of a config that it names, and of no others."""

from types import SimpleNamespace

import pytest

from jaxtrain.config.load import make_config
from jaxtrain.config.schema import Config, TrainConfig
from jaxtrain.errors import UserError
from jaxtrain.run.made_of_sections import made_objective, with_sections

CONFIG = make_config({}, {"train.steps": 7})


def test_it_gets_the_sections_that_it_names():
    def part(first, /, second=2, *, train: TrainConfig, share=0.5):
        return first, second, train, share

    assert with_sections(part, CONFIG, "x") == ("x", 2, CONFIG.train, 0.5)


def test_a_section_of_another_package_has_a_name_too():
    config = Config(plug_ins={"lookahead": (given := SimpleNamespace(every=5))})
    assert with_sections(lambda *, lookahead: lookahead, config) is given


def test_a_section_that_no_config_has_is_one_sentence():
    with pytest.raises(UserError, match=r"^trian: .*<lambda> asks for this section, and a config has none of that "
                                        "name; did you mean 'train'"):
        with_sections(lambda *, trian: trian, CONFIG)


def test_an_objective_of_the_user_may_take_the_whole_config():
    assert made_objective(lambda c, model: (c, model), CONFIG, "model") == (CONFIG, "model")
    assert made_objective(lambda model, *, train: (train, model), CONFIG, "model") == (CONFIG.train, "model")
