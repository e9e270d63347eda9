"""`coowned aliases`."""

import json
import stat

import polars as pl

from coowned.cli.main import run


def test_proposals_are_written_and_taken(tmp_path, capsys):
    data, output = tmp_path / "mail.csv", tmp_path / "aliases.csv"
    data.write_text("id,to,text\n1,bob.stone@work.org,x\n2,bob.stone@home.org,y\n3,ann@x.org,z\n")
    options = [str(data), "--users", "to", "--example-id", "id"]
    assert run(["aliases", *options, "-o", str(output)]) == 0
    said = capsys.readouterr().out
    assert "1 key of 3 may belong to a person who has another key." in said
    assert "a missed merge breaks privacy, a wrong one costs only data" in said
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert pl.read_csv(output).columns[:3] == ["key", "user", "score"]
    assert run(["inspect", *options, "--aliases", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_users"] == 2
    assert run(["aliases", *options, "-o", str(output)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert run(["aliases", *options, "-o", str(output), "--overwrite", "--json", "--threshold", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["proposals"] == 1
