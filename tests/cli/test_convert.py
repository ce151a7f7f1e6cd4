"""`echo-explore convert`: formats by their endings, refusals in one line."""

from pathlib import Path

import numpy as np
import pytest

from echo_explore.cli.graph_files import writer_of
from echo_explore.core import SpecError
from echo_explore.graph import load_graph, load_rank_trace, save_chakra, save_graph, save_rank_trace
from echo_explore.graph.chakra_messages import Node, NodeType
from echo_explore.graph.rank_trace import facts_of
from tests.cli.support import Cli
from tests.graph.test_chakra import peers, written
from tests.graph.test_storage import graph, same


def test_native_to_chakra_and_back(cli: Cli) -> None:
    save_graph(cli.folder / "a.npz", graph(30))
    for given, wanted in (("a.npz", "b.et"), ("b.et", "c.npz")):
        done = cli("convert", given, "--out", wanted)
        assert (done.code, done.err) == (0, "")
        assert f"{cli.folder / wanted}: {graph(30).num_ops} rows" in done.out
    assert same(load_graph(cli.folder / "c.npz"), graph(30))


def test_groups_and_peers_survive(cli: Cli) -> None:
    save_rank_trace(cli.folder / "a.npz", peers())
    for given, wanted in (("a.npz", "b.et"), ("b.et", "c.npz")):
        assert cli("convert", given, "--out", wanted).code == 0
    assert facts_of(load_rank_trace(cli.folder / "c.npz")) == facts_of(peers())


def test_collectives_without_ranks_are_not_priced(cli: Cli) -> None:
    node = Node(number=0, name="send", kind=NodeType.COMM_SEND, attrs={"comm_src": 1, "comm_dst": 5})
    gather = Node(number=1, name="all", kind=NodeType.COMM_COLL, attrs={"comm_type": 2, "comm_size": 8})
    written(cli.folder / "theirs.1.et", node, gather)
    refusal = cli.refuses("predict", "--graph", "theirs.1.et", "--cluster", "h100-ndr")
    assert "graph = '1 collectives': do not say which ranks they join" in refusal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.et", "--out", "x.npz"], "file = 'gone.et': does not exist"),
        (["cut.et", "--out", "x.npz"], "is a Chakra trace that breaks after 31 nodes: byte "),
        (["json.et", "--out", "x.npz"], "is JSON, no Chakra trace (byte 0)"),
        (["cut.json", "--out", "x.npz"], "is no JSON trace: "),
        (["cut.npz", "--out", "x.et"], "is damaged (cut off after 500 bytes"),
        (["theirs.npz", "--out", "x.et"], "is no trace or graph of Echo Explore (it holds no array "),
        (["text.npz", "--out", "x.et"], "is no trace or graph of Echo Explore (it is no .npz); fix: give a file"),
        (["zip.et", "--out", "x.npz"], "is a zip or NumPy archive, no Chakra trace (byte 0)"),
        (["other.json", "--out", "x.npz"], "traceEvents = '(missing)': must be a list"),
        (["observer.json", "--out", "x.npz"], "breaks at entry 0 of nodes (mm): KeyError 'attrs'"),
        (["a.csv", "--out", "x.npz"], "must end in .npz, .et, .json or .json.gz"),
        (["cut.et", "--out", "x.csv"], "must end in .npz (native) or .et (Chakra)"),
        (["whole.et", "--out", "cut.et"], "exists, and nothing is overwritten"),
    ],
)
def test_refusals(cli: Cli, arguments: list[str], message: str) -> None:
    save_chakra(cli.folder / "whole.et", graph(30))
    (cli.folder / "cut.et").write_bytes((cli.folder / "whole.et").read_bytes()[:-5])
    (cli.folder / "json.et").write_text('{"traceEvents": []}')
    save_graph(cli.folder / "whole.npz", graph(30))
    (cli.folder / "cut.npz").write_bytes((cli.folder / "whole.npz").read_bytes()[:500])
    np.savez(cli.folder / "theirs.npz", weights=np.zeros(3))
    (cli.folder / "text.npz").write_text("weights")
    (cli.folder / "zip.et").write_bytes((cli.folder / "whole.npz").read_bytes())
    (cli.folder / "other.json").write_text('{"steps": []}')
    (cli.folder / "observer.json").write_text('{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"name": "mm"}]}')
    (cli.folder / "cut.json").write_text('{"traceEvents": [')
    assert message in cli.refuses("convert", *arguments)


@pytest.mark.parametrize("name", ["x.npz", "x.et"])
def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path, name: str) -> None:
    """Two commands with one --out: both saw no file, the second is refused."""
    out = tmp_path / name
    write = writer_of(out)
    write(out, graph(30))
    before = out.read_bytes()
    with pytest.raises(SpecError, match="exists, and nothing is overwritten"):
        write(out, graph(31))
    assert out.read_bytes() == before
