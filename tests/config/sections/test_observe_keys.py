"""The keys of what shows a run: what is refused, and why."""

import pytest

from jaxtrain.config.load import load_config
from jaxtrain.errors import UserError
from tests.tiny import ROOT

PUSHED = "keeps the last values of a process that has died, and so hides the failures that count"


@pytest.mark.parametrize(("keys", "told"), [
    ({"prometheus_port": 70000}, "observe.prometheus_port: 70,000 is above the limit; give 65,535 or less"),
    ({"prometheus_port": -1}, "observe.prometheus_port: -1 is negative; give 0 or more"),
    ({"prometheus_host": "0.0.0.0"}, "observe.prometheus_host: it is read with observe.prometheus_port only"),
    ({"prometheus_port": 9400, "prometheus_host": "http://gateway:9091"}, PUSHED),
    ({"prometheus_textfile": "http://user:password@gateway:9091"}, PUSHED),
    ({"pushgateway": "http://gateway:9091"}, PUSHED),
    ({"prometheus_pushgateway": "http://gateway:9091"}, PUSHED),
    ({"push_gateway": "gateway"}, PUSHED),
    ({"trackers": "prometheus"}, "set observe.prometheus_port"),
    ({"trackers": "pushgateway"}, PUSHED),
    ({"prometheus_prot": "9400"}, "did you mean 'prometheus_port'"),
])
def test_what_is_refused(keys, told):
    with pytest.raises(UserError) as error:
        load_config(f"{ROOT}/configs/gpt.py:tiny", {f"observe.{key}": value for key, value in keys.items()})
    assert told in str(error.value) and "password" not in str(error.value) and "\n" not in str(error.value)


def test_what_is_taken():
    keys = {"prometheus_port": 9400, "prometheus_host": "::1", "prometheus_textfile": "/var/lib/node"}
    config = load_config(f"{ROOT}/configs/gpt.py:tiny", {f"observe.{key}": value for key, value in keys.items()})
    assert {key: getattr(config.observe, key) for key in keys} == keys
