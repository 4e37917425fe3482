"""An MLflow store: a server, a SQLite file or a folder `mlruns`. Its errors are single lines."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from alma.errors import UserError, hint, require_extra

_SETTINGS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",  # recent versions open a folder only so
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # its default, 7, takes minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",  # seconds
}
"""Environment of MLflow, where the user has set none."""
_SQLITE = "sqlite:///"
_PAGE = 1000
DEFAULT_EXPERIMENT = "alma"


def connected(uri: str, user: str, creates: bool = False) -> Any:
    """The MlflowClient of a store; an empty `uri` is that of MLFLOW_TRACKING_URI.

    user        the flag that needs it, for errors
    creates     whether a SQLite file or a folder may be made

    UserError: MLflow is not installed, no URI is given, or a local store does not exist.
    """
    require_extra("mlflow", user)
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        raise UserError(
            f"{user}: which store? Give --tracking-uri, such as http://localhost:5000 or "
            "sqlite:///mlflow.db, or set MLFLOW_TRACKING_URI"
        )
    path = _path_of(uri)
    if path and not path.exists() and not creates:
        raise UserError(f"no MLflow store at {uri}: {path} does not exist")
    if path and not uri.startswith(_SQLITE) and path.is_file():
        raise UserError(f"{uri} is a file: give sqlite:///{uri}, or the folder mlruns")
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic", "urllib3"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.CRITICAL)  # MLflow sets it when imported
    with one_line_errors(uri):
        return MlflowClient(uri)


def _path_of(uri: str) -> Path | None:
    """The file or folder of a local store; None of a server or another database."""
    if uri.startswith(_SQLITE):
        return Path(uri.removeprefix(_SQLITE).partition("?")[0])
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(uri) if not parts.scheme else None


def folder_of_files(uri: str) -> str | None:
    """The URI of the folder for the files of a new experiment; None: as the store has it.

    A SQLite file is a store without a folder; MLflow would take one where the process runs.
    """
    if not uri.startswith(_SQLITE):
        return None
    path = _path_of(uri)
    assert path
    return (path.absolute().parent / "mlruns").as_uri()


@contextmanager
def one_line_errors(uri: str) -> Iterator[None]:
    """Turn errors of MLflow and of the store below it into a UserError."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise UserError(f"MLflow at {uri}: {_first_line(error)}") from error
    except ImportError as error:
        raise UserError(f"MLflow at {uri} needs {error.name}: install it beside mlflow") from error
    except Exception as error:
        # SQLAlchemy is MLflow's concern: it may be missing, so its classes are not named here
        if type(error).__module__.partition(".")[0] not in ("sqlalchemy", "sqlite3", "requests"):
            raise
        raise UserError(f"MLflow at {uri}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def experiment_named(client: Any, name: str) -> Any:
    """An experiment by name or id. UserError: there is none, and which there are."""
    experiments = all_pages(client.search_experiments)
    for experiment in experiments:
        if name in (experiment.name, experiment.experiment_id):
            return experiment
    names = [experiment.name for experiment in experiments]
    if not names:
        raise UserError(f"--mlflow {name}: the store has no experiments")
    raise UserError(f"--mlflow {name}: no such experiment; {hint(name, names)}")


def all_pages(search: Any, *arguments: Any, **options: Any) -> list[Any]:
    """All results of a search of MLflow, which gives them in pages."""
    results: list[Any] = []
    token = None
    while True:
        page = search(*arguments, max_results=_PAGE, page_token=token, **options)
        results += page
        token = page.token
        if not token:
            return results
