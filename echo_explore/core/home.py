"""Where state lies: ECHO_EXPLORE_HOME (traces/, studies/, calibrations/) and the folder of shipped data."""

import os
import tempfile
from pathlib import Path
from typing import Literal

from echo_explore.core.errors import SpecError

Kind = Literal["traces", "studies", "calibrations", "clusters", "models", "spaces", "stacks", "native", "kernels"]
_PACKAGE = Path(__file__).resolve().parent.parent


def home() -> Path:
    """The absolute state folder; it may not exist yet."""
    given = os.environ.get("ECHO_EXPLORE_HOME")
    return Path(given).expanduser().resolve() if given else Path.home() / ".local/share/echo-explore"


def state_folder(kind: Kind) -> Path:
    """The folder `kind` under `home()`, made if needed.

    Raises:
        SpecError: it cannot be written, or it lies in the throw-away copy that a Ray job runs in.
    """
    path = home() / kind
    refuse_job_copy(path, field="ECHO_EXPLORE_HOME")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise SpecError(
            "ECHO_EXPLORE_HOME",
            str(home()),
            f"must be writable ({error.strerror or error})",
            "set it to a folder of yours",
        ) from error
    return path


def refuse_job_copy(path: Path, *, field: str) -> None:
    """Refuse a path inside the copy of the working folder that Ray deletes after a job.

    Raises:
        SpecError: `path` lies under `runtime_resources/working_dir_files`.
    """
    if "runtime_resources" in path.parts and "working_dir_files" in path.parts:
        raise SpecError(
            field,
            str(path),
            "lies in the copy of the working folder that Ray deletes after the job",
            "give an absolute path",
        )


def data_folders(kind: Literal["clusters", "models", "spaces", "stacks", "calibrations"]) -> list[Path]:
    """Folders searched for a file of this kind, first match wins: the user's, then the shipped ones."""
    top = {"clusters": "clusters", "spaces": "search_spaces"}.get(kind)
    shipped = [_PACKAGE / "_shipped" / (top or kind)]
    if top is not None:  # a checkout keeps these two beside the package, the wheel carries them inside
        shipped.append(_PACKAGE.parent / top)
    return [home() / kind, *shipped]


def find_data_file(kind: Literal["clusters", "models", "spaces", "stacks", "calibrations"], name: str) -> Path | None:
    """The TOML file `name` of this kind, or None."""
    for folder in data_folders(kind):
        path = folder / f"{name}.toml"
        if path.is_file():
            return path
    return None


def list_data_files(kind: Literal["clusters", "models", "spaces", "stacks", "calibrations"]) -> dict[str, Path]:
    """Name to path of every TOML file of this kind; the user's own shadow shipped ones."""
    found: dict[str, Path] = {}
    for folder in reversed(data_folders(kind)):
        if folder.is_dir():
            found |= {path.stem: path for path in sorted(folder.glob("*.toml"))}
    return dict(sorted(found.items()))
