"""Digests of generated graphs, for golden values."""

import hashlib


def content_hash(graph):
    return hashlib.sha256(graph.indptr.astype("<i8").tobytes() + graph.users.astype("<i8").tobytes()).hexdigest()
