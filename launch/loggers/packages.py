"""A logger for each tracking package that `telemetry.loggers` may name.

A package is imported when its logger is created.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from launch.loggers.events import (
    AlertEvent,
    MetricsEvent,
    PicturesEvent,
    RolloutTable,
    RunEvent,
    Scalar,
)


class Logger(ABC):
    """Logs one run with one tracking package. Any exception of a method ends the logger."""

    @abstractmethod
    def __init__(self, run: RunEvent) -> None:
        """Begin the run, or continue the run whose id is in `run.folder`."""

    @abstractmethod
    def metrics(self, event: MetricsEvent) -> None: ...

    @abstractmethod
    def pictures(self, event: PicturesEvent) -> None: ...

    @abstractmethod
    def table(self, step: int, name: str, table: RolloutTable) -> None: ...

    @abstractmethod
    def alert(self, event: AlertEvent) -> None: ...

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Wait until everything is written or sent, and end the run in the package.

        `failed`: the run counts as failed there.
        """


class _RunId:
    """The file with the id that the package gave the run. A resumed run is logged under this id."""

    def __init__(self, run: RunEvent) -> None:
        self._file = run.folder / f"{run.logger}.id"

    def read(self) -> str | None:
        return self._file.read_text().strip() if self._file.exists() else None

    def write(self, value: str) -> None:
        self._file.write_text(f"{value}\n")


class TensorBoardLogger(Logger):
    """Logs to TensorBoard event files in `RUN/loggers/tensorboard`.

    If a run is resumed, the logged values of the steps that it repeats are discarded.
    """

    def __init__(self, run: RunEvent) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=run.first_step)
        rows = [(key, json.dumps(value)) for key, value in run.flat_config.items()]
        self._writer.add_text("config", _markdown(("key", "value"), rows), run.first_step)

    def metrics(self, event: MetricsEvent) -> None:
        numbers, texts = _by_type(event.values)
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, event.step)
        for name, text in texts.items():
            self._writer.add_text(name, text, event.step)
        self._writer.flush()

    def pictures(self, event: PicturesEvent) -> None:
        import numpy as np
        from PIL import Image

        for index, picture in enumerate(event.pictures):
            with Image.open(picture.path) as image:
                pixels = np.asarray(image.convert("RGB"))
            self._writer.add_image(f"{event.name}/{index}", pixels, event.step, dataformats="HWC")
        rows = [(index, picture.caption) for index, picture in enumerate(event.pictures)]
        text = _markdown(("picture", "of"), rows)
        self._writer.add_text(f"{event.name}/captions", text, event.step)
        self._writer.flush()

    def table(self, step: int, name: str, table: RolloutTable) -> None:
        self._writer.add_text(name, _markdown(table.columns, table.rows), step)
        self._writer.flush()

    def alert(self, event: AlertEvent) -> None:
        self._writer.add_text(f"doctor/{event.title}", event.text, event.step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class TrackioLogger(Logger):
    """Logs to trackio, by default in trackio's own folder (`TRACKIO_DIR`).

    `trackio show` shows the run. trackio identifies a run by its name, so the name ends in random
    letters.
    """

    def __init__(self, run: RunEvent) -> None:
        import trackio

        run_id = _RunId(run)
        known = run_id.read()
        name = known or f"{run.name}-{secrets.token_hex(3)}"
        self._run = trackio.init(
            project=run.project,
            name=name,
            config=dict(run.config),
            resume="never" if known is None else "allow",
            embed=False,
        )
        run_id.write(name)

    def metrics(self, event: MetricsEvent) -> None:
        self._run.log(dict(event.values), step=event.step)

    def pictures(self, event: PicturesEvent) -> None:
        import trackio

        images = {
            f"{event.name}/{index}": trackio.Image(picture.path, caption=picture.caption)
            for index, picture in enumerate(event.pictures)
        }
        self._run.log(images, step=event.step)

    def table(self, step: int, name: str, table: RolloutTable) -> None:
        import trackio

        rows = [list(row) for row in table.rows]
        self._run.log({name: trackio.Table(columns=list(table.columns), data=rows)}, step=step)

    def alert(self, event: AlertEvent) -> None:
        import trackio

        trackio.alert(title=event.title, text=event.text)

    def close(self, *, failed: bool) -> None:
        self._run.finish()


class WandbLogger(Logger):
    """Logs to Weights & Biases, or with `WANDB_MODE=offline` to files in `RUN/loggers/wandb`.

    If a resumed run repeats a step, wandb keeps the values that were logged first.
    """

    def __init__(self, run: RunEvent) -> None:
        import wandb

        run_id = _RunId(run)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run_id.read(),
            resume="allow",
            dir=run.folder,
            config=dict(run.config),
            allow_val_change=True,
            # Otherwise it captures this process's output, which goes to a file already.
            settings=wandb.Settings(console="off"),
        )
        run_id.write(self._run.id)

    def metrics(self, event: MetricsEvent) -> None:
        self._run.log(dict(event.values), step=event.step)

    def pictures(self, event: PicturesEvent) -> None:
        import wandb

        images = [
            wandb.Image(str(picture.path), caption=picture.caption) for picture in event.pictures
        ]
        self._run.log({event.name: images}, step=event.step)

    def table(self, step: int, name: str, table: RolloutTable) -> None:
        import wandb

        rows = [list(row) for row in table.rows]
        self._run.log({name: wandb.Table(columns=list(table.columns), data=rows)}, step=step)

    def alert(self, event: AlertEvent) -> None:
        self._run.alert(title=event.title, text=event.text)

    def close(self, *, failed: bool) -> None:
        import wandb

        self._run.finish(exit_code=int(failed))
        wandb.teardown()


class MlflowLogger(Logger):
    """Logs to MLflow, at `MLFLOW_TRACKING_URI`.

    MLflow's parameters cannot be changed, so they have the values of the first start. The artifact
    `config.json` has the values of the last start.
    """

    _PARAMETERS_PER_CALL = 100
    """Maximum number of parameters per call of MLflow's REST API."""

    def __init__(self, run: RunEvent) -> None:
        import mlflow

        self._mlflow = mlflow
        run_id = _RunId(run)
        known = run_id.read()
        mlflow.set_experiment(run.project)
        started = mlflow.start_run(run_id=known, run_name=None if known else run.name)
        run_id.write(started.info.run_id)
        if known is None:
            flat = [(_mlflow_name(key), value) for key, value in run.flat_config.items()]
            for start in range(0, len(flat), self._PARAMETERS_PER_CALL):
                mlflow.log_params(dict(flat[start : start + self._PARAMETERS_PER_CALL]))
        mlflow.log_dict(dict(run.config), "config.json")

    def metrics(self, event: MetricsEvent) -> None:
        numbers, texts = _by_type(event.values)
        named = {_mlflow_name(name): number for name, number in numbers.items()}
        self._mlflow.log_metrics(named, step=event.step)
        if texts:
            self._mlflow.set_tags({_mlflow_name(name): text for name, text in texts.items()})

    def pictures(self, event: PicturesEvent) -> None:
        from PIL import Image

        for index, picture in enumerate(event.pictures):
            with Image.open(picture.path) as image:
                self._mlflow.log_image(
                    image, key=f"{event.name}/{index}", step=event.step, synchronous=True
                )
        captions = {str(index): picture.caption for index, picture in enumerate(event.pictures)}
        self._mlflow.log_dict(captions, f"{event.name}/captions_step_{event.step:06d}.json")

    def table(self, step: int, name: str, table: RolloutTable) -> None:
        columns = zip(*table.rows, strict=True)
        data = {column: list(values) for column, values in zip(table.columns, columns, strict=True)}
        self._mlflow.log_table(data, f"{name}/step_{step:06d}.json")

    def alert(self, event: AlertEvent) -> None:
        self._mlflow.set_tag(f"doctor/{event.title}", event.text)

    def close(self, *, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


LOGGERS: Mapping[str, type[Logger]] = {
    "tensorboard": TensorBoardLogger,
    "trackio": TrackioLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}


def _by_type(values: Mapping[str, Scalar]) -> tuple[dict[str, float], dict[str, str]]:
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
    return numbers, texts


def _mlflow_name(name: str) -> str:
    """Replace characters that MLflow rejects in names, such as the @ of `val/f1@0.75`."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[Scalar]]) -> str:
    """Return a table as Markdown; line breaks in cells are kept."""

    def line(cells: Sequence[Scalar]) -> str:
        escaped = (re.sub(r"([\\|`*_<])", r"\\\1", str(cell)) for cell in cells)
        return f"| {' | '.join(escaped)} |".replace("\n", "<br>")

    return "\n".join([line(columns), "|---" * len(columns) + "|", *map(line, rows)])
