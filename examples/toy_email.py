"""The README's tour as a script: five e-mails, from who wrote to whom to a guarantee.

python examples/toy_email.py
"""

import coowned as co
from coowned.synthetic.toy_emails import five_emails


def main() -> None:
    examples = co.from_table(five_emails(), users="users", example_id="example_id")
    graph = examples.graph
    for key, held in zip(examples.user_keys.to_pylist(), graph.examples_per_user, strict=True):
        print(f"{key} is part of {held} e-mails")

    selection = co.Greedy(contribution_bound=2).select(graph, seed=0)
    certificate = co.certify(graph, selection)
    chosen = ", ".join(co.take(examples, selection)["example_id"].to_pylist())
    print(f"chosen: {chosen}; a recount finds nobody in more than {certificate.contribution_bound}")

    mechanism = co.PoissonSampling.from_certificate(certificate, batch_size=1, iterations=10)
    print(co.guarantee(certificate, mechanism, epsilon=2.0, delta=1e-6, adjacency="zero-out").statement())


if __name__ == "__main__":
    main()
