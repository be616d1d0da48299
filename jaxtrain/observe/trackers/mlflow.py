"""MLflow: the server that MLFLOW_TRACKING_URI names, or a database in WORKDIR/mlflow.

It cannot take a number back, and keeps one that comes twice; so the last steps that it has are metrics themselves.
"""

import logging
import os
import time

from jaxtrain.observe.trackers.tracker import IMPORTING, NOTHING, Position, Tracker

_RUN = "jaxtrain.run"  # the tag by which a run is found again
_STATUS = {"finished": "FINISHED", "failed": "FAILED"}


class Service(Tracker):
    """Logs many lines in one request."""

    imports = "mlflow.tracking"

    def begin(self, run, since) -> Position:
        """Find the run by its tag, or create it."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # Tracking tries again, and knows what is lacking
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # otherwise a warning for each of these
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # it may have a password in it
        with IMPORTING:
            from mlflow import MlflowClient
            from mlflow.entities import Param, RunTag

        folder = run.workdir.absolute() / "mlflow"
        folder.mkdir(exist_ok=True)
        own = "MLFLOW_TRACKING_URI" not in os.environ
        client = self._client = MlflowClient(f"sqlite:///{folder}/mlflow.db" if own else None)
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project
        experiment = client.get_experiment_by_name(project)
        place = folder.joinpath("artifacts").as_uri() if own else None
        number = experiment.experiment_id if experiment else client.create_experiment(project, place)
        found = client.search_runs([number], f"tags.`{_RUN}` = '{run.id}'")
        one = found[0] if found else client.create_run(number, tags={_RUN: run.id}, run_name=run.name)
        self._id, known = one.info.run_id, one.data.params
        client.update_run(self._id, "RUNNING")
        params = {f"{section}.{key}": str(value)[:6000] for section, keys in run.config.items()
                  for key, value in keys.items()}
        new = [Param(key, value) for key, value in params.items() if key not in known]
        for at in range(0, len(new), 100):  # it takes no more at a time
            client.log_batch(self._id, params=new[at:at + 100])
        tags = {f"run.{key}": str(value)[:5000] for key, value in run.run.items()}
        tags |= {f"changed.{key}": value for key, value in params.items() if known.get(key, value) != value}
        client.log_batch(self._id, tags=[RunTag(key, value) for key, value in tags.items()])
        last = one.data.metrics
        return max((int(last["step"]), False) if "step" in last else NOTHING,
                   (int(last["eval_step"]), True) if "eval_step" in last else NOTHING)

    def log(self, lines):
        """Log lines, each in one transaction with the number of its step."""
        from mlflow.entities import Metric

        now, batch = int(time.time() * 1000), []
        for line in lines:
            step = "eval_step" if "eval_loss" in line else "step"
            named = {step if key == "step" else key: value for key, value in line.items()}
            metrics = [Metric(key, float(value), now, line["step"]) for key, value in named.items()]
            if len(batch) + len(metrics) > 1000:  # it takes no more at a time
                self._client.log_batch(self._id, metrics=batch)
                batch = []
            batch += metrics
        self._client.log_batch(self._id, metrics=batch)

    def text(self, step, name, text):
        """Store a text as an artifact."""
        self._client.log_text(self._id, text, f"{name}/{step}.md")

    def histogram(self, step, name, counts, edges):
        """Store a histogram as an artifact, since MLflow shows none."""
        self._client.log_dict(self._id, {"counts": counts.tolist(), "edges": edges.tolist()}, f"{name}/{step}.json")

    def artifact(self, step, uri, about):
        """Store what the checkpoint says of itself, and where it is."""
        self._client.log_dict(self._id, {**about, "step": step, "uri": uri}, f"checkpoints/{step}.json")
        self._client.set_tag(self._id, "checkpoint", uri)

    def finish(self, status):
        """Say how the run ended; one that was stopped is killed, as MLflow calls it."""
        self._client.set_tag(self._id, "status", status)
        self._client.set_terminated(self._id, _STATUS.get(status, "KILLED"))
