"""Export of a run's model with its guarantee, and nothing that the guarantee does not cover."""

import json
import os
from pathlib import Path

from coowned.certificate import ContributionCertificate
from coowned.errors import InputError
from coowned.files import whole_files
from coowned.runs.records import COVERED
from coowned.runs.stored_run import MODEL_FILES, StoredRun

FILES = ("model.safetensors", "guarantee.json", "certificate.json")
RELEASED_CERTIFICATE_FORMAT = "coowned-released-certificate-2"
_LEFT_OUT = ("copies_per_user", "of_examples")


def export_model(run_folder: str | os.PathLike[str], output: str | os.PathLike[str]) -> list[str]:
    """Creates `output` with the model, its guarantee and certificate, and a README that explains them.

    The certificate is exported without counts of users by copies and without the group of each example. What it still
    contains are statistics of the graph, which a fixed-graph guarantee does not hide; the README says so, and which of
    them the statement contains.

    Guarantees:
      - Nothing but these files is written, and none of metrics, evaluations, S or keys.
        (test_only_what_is_covered)
      - The figures of a covered evaluation are exported with it.   (test_covered_figures_are_exported)
      - The exported certificate has no counts of users by copies, nor the group of any example.
        (test_counts_of_users_stay, test_groups_of_examples_stay)
      - Files that the model needs are exported as the run recorded them.   (test_changed_code_is_refused)
      - A run that has not ended or has no guarantee is refused, unless its data are public.   (test_refused_exports)
      - A model of another run is refused, and one whose own statement is not the guarantee's.
        (test_foreign_model_is_refused, test_claim_plan_and_model_must_agree)
      - The Python code of its README runs in the folder as it stands.   (test_code_of_the_readme_runs)
      - The folder appears whole or not at all.   (test_export_is_whole_or_none)

    Returns:
      The names of the files.
    """
    run = StoredRun.open(run_folder)
    if not run.claims and not run.public:
        raise InputError(
            f"{run.path}: no guarantee ({run.reason}), so the model may reveal its training examples; train with a "
            "guarantee, or with public = true if the data are public"
        )
    folder = Path(output)
    if folder.exists():
        raise InputError(f"{folder}: already exists; choose a new folder")
    covered = (COVERED,) if run.covered is not None else ()
    files = {name: (run.path / name).read_bytes() for name in (*FILES, *covered)} | run.model_files()
    with whole_files(folder) as (temporary,):
        temporary.mkdir()
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        (temporary / "certificate.json").write_text(released_certificate(run.certificate), encoding="utf-8")
        (temporary / "README.md").write_text(readme(run), encoding="utf-8")
    return [*files, "README.md"]


def released_certificate(certificate: ContributionCertificate) -> str:
    """Returns a certificate's JSON without the group of each example and without counts of users by copies."""
    stored = json.loads(certificate.to_json())
    counts = {name: value for name, value in stored.items() if name not in (*_LEFT_OUT, "format", "checksum")}
    if counts["groups"] is not None:
        counts["groups"] = {name: value for name, value in counts["groups"].items() if name not in _LEFT_OUT}
    if "tiers" in counts:  # nor what tells of few people: a digest of a short list, which can be guessed, and counts
        private = (*_LEFT_OUT, "digest", "num_examples_opted_out", "num_unknown_keys")
        counts["tiers"] = {name: value for name, value in counts["tiers"].items() if name not in private}
    return json.dumps({"format": RELEASED_CERTIFICATE_FORMAT, **counts}, indent=2) + "\n"


def readme(run: StoredRun) -> str:
    lines = ["# A model and its privacy guarantee", "", f"In short: {run.headline}.", "", run.statement(), ""]
    if run.covered is not None:
        lines += ["## How good it is", "", f"Covered by the guarantee: {run.covered}.", ""]
    lines += ["## How to use it", "", run.config(run.path).model.from_run(run.path).usage()]
    lines += ["## Files", "", "- `model.safetensors`: the parameters; the statement is in its metadata too."]
    if run.claims:
        lines.append("- `guarantee.json`: the claim, machine-readable; a modified file is refused.")
    else:
        lines.append("- `guarantee.json`: says that there is no guarantee, because the data were declared public.")
    lines += [
        "- `certificate.json`: the recount of the training set on which the claim is based.",
        *(
            ["- `covered.json`: the noisy counts of the covered evaluation, and figures from them."]
            if run.covered
            else []
        ),
        *(f"- `{name}`: {MODEL_FILES[name]}" for name in run.model_files()),
        "",
        "`guarantee.json` and `certificate.json` contain graph statistics (numbers of examples and users, digests, "
        "column names), without "
        "the number of users by copies. A fixed-graph guarantee does not hide them: publish them only if the graph "
        "may be known, or share them only with those who check the claim. The statement contains those that the claim "
        "rests on: the size of the training set, how many users and copies are not protected, and the digests.",
        "",
    ]
    return "\n".join(lines)
