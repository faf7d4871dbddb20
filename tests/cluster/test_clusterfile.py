"""Cluster files: written and read back, refused by field."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenly.cluster.clusterfile import Cluster, Link, read_cluster, write_cluster
from evenly.errors import UserError

CLUSTER = Cluster(1, 2, "cpu", "gloo", {("all_reduce", 2): Link(8.1e-5, 4.2e-10), ("send", 2): Link(0.0, 1 / 3)})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_cluster(tmp_path / "c.toml", CLUSTER)
    assert read_cluster(tmp_path / "c.toml") == CLUSTER
    assert CLUSTER.links["all_reduce", 2].seconds(1e6) == pytest.approx(8.1e-5 + 4.2e-4)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("nodes = 1", "nodes = 0", "nodes is 0"),
        ("devices = 2", "devices = true", "devices is True"),
        ('kind = "cpu"', "kind = 3", "kind is 3"),
        ("alpha_s = 8.1e-05", "alpha_s = -1", "links.all_reduce.2.alpha_s is -1"),
        ("alpha_s = 8.1e-05", "alpha_s = inf", "links.all_reduce.2.alpha_s is inf"),
        ("[links.all_reduce.2]", "[links.all_reduce.two]", "a number of ranks"),
        ("[links.all_reduce.2]", "[links.all_reduce]", "a number of ranks"),
        ("nodes = 1", "nodes =", "Invalid value"),
    ],
)
def test_a_file_that_is_no_cluster_is_refused_by_field(tmp_path: Path, old: str, new: str, words: str) -> None:
    write_cluster(tmp_path / "c.toml", CLUSTER)
    text = (tmp_path / "c.toml").read_text()
    assert old in text
    (tmp_path / "c.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match="read the cluster") as caught:
        read_cluster(tmp_path / "c.toml")
    assert words in str(caught.value)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="evenly bench comm"):
        read_cluster(tmp_path / "missing.toml")
    with pytest.raises(UserError, match="save the cluster"):
        write_cluster(tmp_path / "no" / "c.toml", CLUSTER)
