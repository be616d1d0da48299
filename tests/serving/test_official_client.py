"""The package tinker against a server that the command started: a training loop, sampling, and a restart between."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import jaxtrain as jt
from tests.serving import tiny_model
from tests.serving.test_training_calls import ADAM, batch, datums, trained_run
from tests.tiny import ROOT, devices

pytestmark = pytest.mark.slow
STEPS = 10


@pytest.fixture(scope="module")
def tinker():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", "tml-of-this-test-alone-1234")
        patch.setenv("TINKER_TELEMETRY", "0")
        yield pytest.importorskip("tinker")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("served") / "model")


@contextlib.contextmanager
def serving(folder, output, *flags):
    """Start the command; yield its address and, at the end, send SIGTERM, at which it ends without an error."""
    command = [sys.executable, "-m", "jaxtrain", "serve-training", f"{folder}", f"--output={output}",
               f"--name={tiny_model.NAME}", "--config.mesh.data=1", *flags]
    one_device = {**os.environ, "PYTHONPATH": f"{ROOT}", "XLA_FLAGS": "", "JAXTRAIN_CACHE": f"{output}-cache"}
    with subprocess.Popen(command, env=one_device, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline()
            assert line.startswith("TINKER_BASE_URL=http://127.0.0.1:"), server.stderr.read()
            yield line.strip().partition("=")[2]
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0, server.stderr.read()
        finally:
            server.kill()


def data(tinker, step):
    return [tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs={
        name: values.astype({"f": np.float32, "i": np.int64}[values.dtype.kind]) for name, values in inputs.items()})
        for tokens, inputs in datums(step)]


def test_the_client_trains_as_jaxtrain_does_and_samples(tinker, folder, tmp_path, cache):
    """The losses that a run writes to metrics.jsonl, over a restart of the server; then a sampler of what it made."""
    with devices(1):
        jt.train(trained_run(folder, STEPS), tmp_path / "run")
    wanted = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    keys = tmp_path / "keys"
    keys.write_text("tml-of-this-test-alone-1234\n")
    keys.chmod(0o600)
    adam, found = tinker.AdamParams(**ADAM), []
    with serving(folder, tmp_path / "saved", f"--keys={keys}") as url:
        client = tinker.ServiceClient(base_url=url)
        assert [one.model_name for one in tinker.RestClient(base_url=url).get_server_capabilities().result(
            ).supported_models] == [tiny_model.NAME]
        model = client.create_lora_training_client(base_model=tiny_model.NAME, rank=4, seed=3).result()
        assert (model.get_info().lora_rank, model.get_info().model_data.tokenizer_id) == (4, f"{folder}")
        for step in range(STEPS // 2):
            loss, done = model.forward_backward(data(tinker, step), "cross_entropy"), model.optim_step(adam)
            found.append(loss.result().metrics["loss:sum"])
            done.result()
        path = model.save_state("half-way").result().path
        model.forward_backward(data(tinker, 99), "cross_entropy").result()  # is lost, for it was not saved
    with serving(folder, tmp_path / "saved", f"--keys={keys}") as url:
        client = tinker.ServiceClient(base_url=url)
        model = client.create_training_client_from_state_with_optimizer(path).result()
        calls = [(model.forward_backward(data(tinker, step), "cross_entropy"), model.optim_step(adam))
                 for step in range(STEPS // 2, STEPS)]  # sent before any is answered
        found += [loss.result().metrics["loss:sum"] for loss, _ in calls]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        assert found[-1] < found[0]
        sampler = model.save_weights_and_get_sampling_client().result()
        prompt, how = tinker.ModelInput.from_ints([72, 105]), tinker.SamplingParams(max_tokens=5, seed=1)
        sampled = sampler.sample(prompt, 3, how, include_prompt_logprobs=True).result()
        again = sampler.sample(prompt, 3, how).result()
        assert [one.tokens for one in sampled.sequences] == [one.tokens for one in again.sequences]
        assert all(len(one.tokens) == len(one.logprobs) for one in sampled.sequences)
        assert sampled.prompt_logprobs == sampler.compute_logprobs(prompt).result()
        with pytest.raises(tinker.RequestFailedError, match="there is no loss 'hinge'"):
            model.forward_backward(data(tinker, 0), "hinge").result()
        before = model.forward(data(tinker, 0), "cross_entropy").result()
        assert sum(len(one["logprobs"].data) for one in before.loss_fn_outputs) == batch(0)["tokens"].size
        with pytest.raises(tinker.AuthenticationError, match="no key in the request that this server knows"):
            tinker.ServiceClient(base_url=url, api_key="tml-unknown").create_lora_training_client(tiny_model.NAME)


def test_a_loss_of_ones_own_is_computed_by_the_client(tinker, folder, tmp_path):
    pytest.importorskip("torch")
    with devices(1), tiny_model.served(folder, tmp_path) as server:
        client = tinker.ServiceClient(base_url=server.url)
        made = [client.create_lora_training_client(base_model=tiny_model.NAME, rank=4, seed=3).result()
                for _ in range(2)]
        given = data(tinker, 0)

        def loss(data, logprobs):
            weights = [one.loss_fn_inputs["weights"].to_torch() for one in data]
            return -sum((weight * logp).sum() for weight, logp in zip(weights, logprobs, strict=True)), {}

        own, built_in = made[0].forward_backward_custom(given, loss), made[1].forward_backward(given, "cross_entropy")
        np.testing.assert_allclose(own.result().metrics["loss:sum"], built_in.result().metrics["loss:sum"], rtol=1e-5)
        norms = [one.optim_step(tinker.AdamParams()).result().metrics["grad_norm"] for one in made]
        np.testing.assert_allclose(*norms, rtol=1e-5)
