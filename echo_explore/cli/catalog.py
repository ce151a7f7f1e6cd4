"""`echo-explore clusters | models | spaces | stacks`: list, show with sources, write a template."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from echo_explore.core import SpecError, write_atomic
from echo_explore.core.home import list_data_files
from echo_explore.specs import load_cluster, load_model, load_space, load_stack, locate
from echo_explore.specs.template import template

Kind = Literal["clusters", "models", "spaces", "stacks"]
KINDS: tuple[Kind, ...] = ("clusters", "models", "spaces", "stacks")


def command_for(kind: Kind) -> Callable[..., int]:
    """The command that lists files of this kind."""

    def command(
        show: Annotated[str | None, typer.Option("--show", help="Print this one, with its sources.")] = None,
        new: Annotated[Path | None, typer.Option("--new", help="Write a commented template here.")] = None,
    ) -> int:
        if show is not None and new is not None:
            raise SpecError("new", str(new), "cannot be given with --show", "give one of them")
        if show is not None:
            print(_checked_text(kind, show), end="")
        elif new is not None:
            _write_template(kind, new)
        else:
            for name in list_data_files(kind):
                print(f"{name:24s} {_summary(kind, name)}")
        return 0

    return command


def _checked_text(kind: Kind, name: str) -> str:
    path = locate(kind, name)
    _load(kind, name)
    return f"# {path}\n{path.read_text(encoding='utf-8')}"


def _load(kind: Kind, name: str) -> object:
    loaders: dict[str, Callable[[str], object]] = {
        "clusters": load_cluster,
        "models": load_model,
        "spaces": load_space,
        "stacks": load_stack,
    }
    return loaders[kind](name)


def _summary(kind: Kind, name: str) -> str:
    if kind == "clusters":
        cluster = load_cluster(name)
        nics = f"{cluster.node.num_nics} x {cluster.node.nic_bandwidth_bytes_per_s * 8 / 1e9:.0f} Gbit/s"
        return f"{cluster.node.num_gpus} x {cluster.device.name} a node, {nics}, up to {cluster.max_gpus:,} GPUs"
    if kind == "models":
        model = load_model(name)
        return f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads"
    if kind == "spaces":
        space = load_space(name)
        return f"{space.model} on {space.cluster}, {', '.join(map(str, space.cluster_size.num_gpus))} GPUs"
    return load_stack(name).description


def _write_template(kind: Kind, path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise SpecError("new", str(path), "its folder does not exist", "make the folder first")
    try:
        write_atomic(path, template(kind).encode(), overwrite=False)
    except FileExistsError:
        raise SpecError("new", str(path), "exists, and nothing is overwritten", "give another file") from None
    except OSError as error:
        raise SpecError("new", str(path), f"cannot be written: {error.strerror}", "give a folder of yours") from None
    print(path.absolute())
