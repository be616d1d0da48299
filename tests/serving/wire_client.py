"""The client's side of the API, spoken with urllib: requests as the package tinker sends them."""

import json
import urllib.error
import urllib.request

import numpy as np

from jaxtrain.serving import wire

KINDS = {"f": wire.FLOAT32, "i": wire.INT64}


class Failed(Exception):
    """An answer with an error: of HTTP, or of the call itself with status 200."""

    def __init__(self, status, sentence):
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


class Client:
    """A session of one client."""

    def __init__(self, url, key="tml-anything", **headers):
        self.url, self.headers = f"{url}/api/v1/", {"X-API-Key": key, **headers}
        self.session, self.models, self.samplers = None, 0, 0

    def send(self, path, body=None, *, method=None, kind="application/json"):
        """Send a request; return what the answer says."""
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, {**self.headers, "Content-Type": kind},
                                         method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                found = answer.read()
                return json.loads(found) if answer.headers["Content-Type"] == "application/json" else found
        except urllib.error.HTTPError as error:
            found = error.read()
            raise Failed(error.code, json.loads(found)["error"] if found else "") from None

    def wait(self, call):
        """Return the answer of a call."""
        while True:
            found = self.send("retrieve_future", {"request_id": call["request_id"], "allow_metadata_only": True})
            if isinstance(found, bytes):
                return found
            if "error" in found:
                raise Failed(200, found["error"])
            if found.get("type") != "try_again":
                return found

    def begin(self):
        """Begin a session, if there is none."""
        if self.session is None:
            self.session = self.send("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0",
                                                        "type": "create_session"})["session_id"]
        return self.session

    def model(self, base, rank=4, seed=3, **lora):
        """Make a model in training."""
        body = {"session_id": self.begin(), "model_seq_id": self.models, "base_model": base, "type": "create_model",
                "optimizer_config": {"type": "adamw"}, "lora_config": {"rank": rank, "seed": seed, **lora}}
        self.models += 1
        return Model(self, self.wait(self.send("create_model", body))["model_id"])

    def restored(self, path, optimizer=True):
        """Make a model of a saved state."""
        body = {"session_id": self.begin(), "model_seq_id": self.models, "path": path, "optimizer": optimizer}
        self.models += 1
        return Model(self, self.wait(self.send("load_weights", body))["model_id"])

    def sampler(self, **of):
        """Make a sampler of a base_model or a model_path."""
        self.samplers += 1
        found = self.send("create_sampling_session", {"session_id": self.begin(),
                                                      "sampling_session_seq_id": 1000 + self.samplers, **of})
        return Sampler(self, found["sampling_session_id"])


class Model:
    """A model in training."""

    def __init__(self, client, id):
        self.client, self.id, self.number = client, id, 0

    def next(self):
        self.number += 1
        return {"model_id": self.id, "seq_id": self.number}

    def submit(self, datums, loss="cross_entropy", forward=False, number=None, **settings):
        """Send a call of forward_backward; return what it is to be asked for."""
        number = self.next()["seq_id"] if number is None else number
        return self.client.send("forward_backward", request(self.id, number, datums, loss, forward, settings),
                                kind=wire.TYPE)

    def forward_backward(self, datums, loss="cross_entropy", forward=False, **settings):
        """Return the summed loss, and the log-probabilities of each datum."""
        return output(self.client.wait(self.submit(datums, loss, forward, **settings)))

    def optim_step(self, **adam):
        return self.client.wait(self.client.send("optim_step", self.next() | {"adam_params": adam}))["metrics"]

    def save(self, name, path="save_weights", **more):
        return self.client.wait(self.client.send(path, self.next() | {"path": name, **more}))["path"]

    def load(self, path, optimizer=True):
        return self.client.wait(self.client.send("load_weights", self.next() | {"path": path, "optimizer": optimizer}))

    def sampler(self):
        self.client.samplers += 1
        found = self.client.wait(self.client.send("save_weights_for_sampler", self.next() | {
            "sampling_session_seq_id": self.client.samplers}))
        return Sampler(self.client, found["sampling_session_id"])


class Sampler:
    """Adapters that sequences are generated with."""

    def __init__(self, client, id):
        self.client, self.id, self.number = client, id, -1

    def submit(self, prompt, count=1, prompt_logprobs=False, last=None, **params):
        self.number += 1
        return self.client.send("asample", {
            "sampling_session_id": self.id, "seq_id": self.number, "num_samples": count, "sampling_params": params,
            "prompt": {"chunks": [{"tokens": list(prompt), "type": "encoded_text"}]},
            "prompt_logprobs": prompt_logprobs, "prompt_logprobs_last_n": last})

    def sample(self, prompt, count=1, **how):
        """Return sequences, each as (why it ended, tokens, log-probabilities), and the prompt's log-probabilities."""
        found = wire.message_of("SampleResponse")()
        found.ParseFromString(self.client.wait(self.submit(prompt, count, **how)))
        return [(one.stop_reason, np.frombuffer(one.tokens, "<i4").tolist(), np.frombuffer(one.logprobs, "<f4"))
                for one in found.sequences], np.frombuffer(found.prompt_logprobs, "<f4")


def datum(tokens, **inputs):
    """Return a datum with these inputs, each a list or an array of numbers."""
    return np.asarray(tokens, np.int32), {name: np.asarray(value) for name, value in inputs.items()}


def request(model, number, datums, loss, forward, settings):
    """Return a request of forward_backward as bytes."""
    made = wire.message_of("ForwardBackwardRequest")(model_id=model, seq_id=number, loss_fn=loss, forward_only=forward)
    for name, value in settings.items():
        made.loss_fn_config.add(key=name, value=value)
        made.loss_fn_config_v2.add(key=name).value.number = value
    for tokens, inputs in datums:
        one = made.data.add()
        one.model_input.add().encoded_text.tokens = tokens.tobytes()
        for name, values in inputs.items():
            values = values.astype({"f": np.float32, "i": np.int64}[values.dtype.kind])
            tensor = one.loss_fn_inputs.add(key=name).value
            tensor.dense, tensor.dtype = values.tobytes(), KINDS[values.dtype.kind]
            tensor.shape.extend(values.shape)
    return made.SerializeToString()


def output(content):
    """Return what an answer of forward_backward says: the loss, and log-probabilities by datum."""
    found = wire.message_of("ForwardBackwardOutput")()
    found.ParseFromString(content)
    record, = found.loss_fn_outputs
    field, = record.fields
    offsets = np.frombuffer(field.value.offsets, "<i8") // 4
    whole = np.frombuffer(field.value.data, "<f4")
    assert field.key == "logprobs" and record.num_datums == len(offsets) - 1
    return {one.key: one.value for one in found.metrics}["loss:sum"], np.split(whole, offsets[1:-1])
