"""Algorithm 4 of the paper in plain Python, line by line: what `GreedyMinSeparation` is measured against."""


def plain_min_separation(walk, users_of, *, batch_size, iterations, min_separation):
    """The batches of Algorithm 4, or None where a whole pass adds nothing.

    Args:
      walk: example indices, fewest users first.
      users_of: for each example index, the list of its users.
    """
    last_batch = {}  # of each user
    chosen = []
    since_added = 0
    place = 0
    while len(chosen) < iterations * batch_size:
        example = walk[place]
        place = place + 1 if place + 1 < len(walk) else 0
        batch = len(chosen) // batch_size
        for user in users_of[example]:
            if user in last_batch and batch - last_batch[user] < min_separation:
                since_added += 1
                break
        else:
            for user in users_of[example]:
                last_batch[user] = batch
            chosen.append(example)
            since_added = 0
        if since_added == len(walk):
            return None
    return [chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size)]
