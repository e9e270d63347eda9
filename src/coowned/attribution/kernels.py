"""The compiled inner loops of attribution, nothing else. Every loop releases the interpreter lock."""

import numba
import numpy as np

_njit = numba.njit(cache=True, nogil=True)

# The round constants of SHA-256 (FIPS 180-4, section 4.2.2): the first 32 bits of the fractional
# parts of the cube roots of the first 64 primes.
_ROUND_CONSTANTS = np.array(
    [
        0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0x923F82A4, 0xAB1C5ED5,
        0xD807AA98, 0x12835B01, 0x243185BE, 0x550C7DC3, 0x72BE5D74, 0x80DEB1FE, 0x9BDC06A7, 0xC19BF174,
        0xE49B69C1, 0xEFBE4786, 0x0FC19DC6, 0x240CA1CC, 0x2DE92C6F, 0x4A7484AA, 0x5CB0A9DC, 0x76F988DA,
        0x983E5152, 0xA831C66D, 0xB00327C8, 0xBF597FC7, 0xC6E00BF3, 0xD5A79147, 0x06CA6351, 0x14292967,
        0x27B70A85, 0x2E1B2138, 0x4D2C6DFC, 0x53380D13, 0x650A7354, 0x766A0ABB, 0x81C2C92E, 0x92722C85,
        0xA2BFE8A1, 0xA81A664B, 0xC24B8B70, 0xC76C51A3, 0xD192E819, 0xD6990624, 0xF40E3585, 0x106AA070,
        0x19A4C116, 0x1E376C08, 0x2748774C, 0x34B0BCB5, 0x391C0CB3, 0x4ED8AA4A, 0x5B9CCA4F, 0x682E6FF3,
        0x748F82EE, 0x78A5636F, 0x84C87814, 0x8CC70208, 0x90BEFFFA, 0xA4506CEB, 0xBEF9A3F7, 0xC67178F2,
    ],
    dtype=np.uint32,
)  # fmt: skip
_INITIAL_STATE = np.array(
    [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19], dtype=np.uint32
)


@numba.njit(cache=True, nogil=True, inline="always")
def _rotate(x, n):
    return np.uint32((x >> np.uint32(n)) | (x << np.uint32(32 - n)))


@_njit
def sha256_add(message, length, words, state, lanes):
    """Adds SHA-256 of message[:length] to lanes, four 64-bit sums modulo 2^64.

    message (>= length + 72,) uint8 is padded in place; words (64,) and state (8,) uint32 are scratch.
    """
    padded = ((length + 8) // 64 + 1) * 64
    message[length] = 0x80
    for i in range(length + 1, padded - 8):
        message[i] = 0
    bits = np.uint64(length) * np.uint64(8)
    for i in range(8):
        message[padded - 1 - i] = np.uint8((bits >> np.uint64(8 * i)) & np.uint64(0xFF))
    for i in range(8):
        state[i] = _INITIAL_STATE[i]
    for block in range(0, padded, 64):
        for i in range(16):
            at = block + 4 * i
            words[i] = np.uint32(
                (np.uint32(message[at]) << np.uint32(24))
                | (np.uint32(message[at + 1]) << np.uint32(16))
                | (np.uint32(message[at + 2]) << np.uint32(8))
                | np.uint32(message[at + 3])
            )
        for i in range(16, 64):
            w15 = words[i - 15]
            w2 = words[i - 2]
            s0 = _rotate(w15, 7) ^ _rotate(w15, 18) ^ np.uint32(w15 >> np.uint32(3))
            s1 = _rotate(w2, 17) ^ _rotate(w2, 19) ^ np.uint32(w2 >> np.uint32(10))
            words[i] = np.uint32(np.uint32(words[i - 16] + s0) + np.uint32(words[i - 7] + s1))
        a, b, c, d = state[0], state[1], state[2], state[3]
        e, f, g, h = state[4], state[5], state[6], state[7]
        for i in range(64):
            s1 = _rotate(e, 6) ^ _rotate(e, 11) ^ _rotate(e, 25)
            choose = (e & f) ^ (np.uint32(~e) & g)
            t1 = np.uint32(np.uint32(np.uint32(h + s1) + np.uint32(choose + _ROUND_CONSTANTS[i])) + words[i])
            s0 = _rotate(a, 2) ^ _rotate(a, 13) ^ _rotate(a, 22)
            majority = (a & b) ^ (a & c) ^ (b & c)
            t2 = np.uint32(s0 + majority)
            h, g, f = g, f, e
            e = np.uint32(d + t1)
            d, c, b = c, b, a
            a = np.uint32(t1 + t2)
        state[0] = np.uint32(state[0] + a)
        state[1] = np.uint32(state[1] + b)
        state[2] = np.uint32(state[2] + c)
        state[3] = np.uint32(state[3] + d)
        state[4] = np.uint32(state[4] + e)
        state[5] = np.uint32(state[5] + f)
        state[6] = np.uint32(state[6] + g)
        state[7] = np.uint32(state[7] + h)
    for i in range(4):
        lanes[i] += (np.uint64(state[2 * i]) << np.uint64(32)) | np.uint64(state[2 * i + 1])


@_njit
def _put_decimal(message, at, value):
    """Writes a whole number >= 0 in decimal digits; returns the position after it."""
    digits = 1
    rest = value
    while rest >= 10:
        rest //= 10
        digits += 1
    for i in range(digits):
        message[at + digits - 1 - i] = np.uint8(48 + value % 10)
        value //= 10
    return at + digits


@_njit
def _put_bytes(message, at, data, begin, end):
    for i in range(begin, end):
        message[at + i - begin] = data[i]
    return at + (end - begin)


@_njit
def hash_rows(prefix, numbers, id_offsets, id_data, rows, begin, end, longest):
    """Sums SHA-256 of "prefix + n1:n2:... + id" over entries begin..end.

    numbers (entries, columns) int64; rows (entries,): which id; returns lanes (4,) uint64.
    """
    lanes = np.zeros(4, np.uint64)
    message = np.empty(longest + 160, np.uint8)
    words = np.empty(64, np.uint32)
    state = np.empty(8, np.uint32)
    for entry in range(begin, end):
        at = _put_bytes(message, 0, prefix, 0, prefix.shape[0])
        for column in range(numbers.shape[1]):
            at = _put_decimal(message, at, numbers[entry, column])
            message[at] = 58  # ":"
            at += 1
        row = rows[entry]
        at = _put_bytes(message, at, id_data, id_offsets[row], id_offsets[row + 1])
        sha256_add(message, at, words, state, lanes)
    return lanes


@_njit
def hash_pairs(prefix, indptr, users, id_offsets, id_data, key_offsets, key_data, begin, end, longest):
    """Sums SHA-256 of "prefix + length of id in bytes : id + key" over the pairs of examples begin..end."""
    lanes = np.zeros(4, np.uint64)
    message = np.empty(longest + 160, np.uint8)
    words = np.empty(64, np.uint32)
    state = np.empty(8, np.uint32)
    for example in range(begin, end):
        id_begin, id_end = id_offsets[example], id_offsets[example + 1]
        for pair in range(indptr[example], indptr[example + 1]):
            at = _put_bytes(message, 0, prefix, 0, prefix.shape[0])
            at = _put_decimal(message, at, id_end - id_begin)
            message[at] = 58  # ":"
            at = _put_bytes(message, at + 1, id_data, id_begin, id_end)
            user = users[pair]
            at = _put_bytes(message, at, key_data, key_offsets[user], key_offsets[user + 1])
            sha256_add(message, at, words, state, lanes)
    return lanes


@_njit
def rows_are_increasing(indptr, users, num_users):
    """0: every row strictly increasing and in range; 1: some row is not increasing; 2: a user out of range."""
    verdict = 0
    for row in range(indptr.shape[0] - 1):
        previous = np.int64(-1)
        for i in range(indptr[row], indptr[row + 1]):
            user = np.int64(users[i])
            if user < 0 or user >= num_users:
                return 2
            if user <= previous:
                verdict = 1
            previous = user
    return verdict


@_njit
def sort_and_collapse_rows(indptr, users):
    """Sorts every row in place and drops repeats; returns the new (rows + 1,) indptr and the kept (pairs,) users."""
    kept = 0
    new_indptr = np.zeros(indptr.shape[0], np.int64)
    for row in range(indptr.shape[0] - 1):
        begin, end = indptr[row], indptr[row + 1]
        if end - begin > 16:
            users[begin:end] = np.sort(users[begin:end])
        else:
            for i in range(begin + 1, end):
                user = users[i]
                j = i - 1
                while j >= begin and users[j] > user:
                    users[j + 1] = users[j]
                    j -= 1
                users[j + 1] = user
        last = np.int64(-1)
        for i in range(begin, end):
            user = users[i]
            if np.int64(user) != last:
                users[kept] = user
                kept += 1
                last = np.int64(user)
        new_indptr[row + 1] = kept
    return new_indptr, users[:kept]


@_njit
def group_pairs(key, value, num_keys, grouped):
    """Counting sort of pairs by key, stable: returns (num_keys + 1,) indptr and fills grouped (pairs,) with values."""
    indptr = np.zeros(num_keys + 1, np.int64)
    for i in range(key.shape[0]):
        indptr[key[i] + 1] += 1
    for k in range(num_keys):
        indptr[k + 1] += indptr[k]
    next_slot = indptr[:-1].copy()
    for i in range(key.shape[0]):
        k = key[i]
        grouped[next_slot[k]] = value[i]
        next_slot[k] += 1
    return indptr


@_njit
def transpose(indptr, users, num_users, examples):
    """Pairs grouped by user: returns (num_users + 1,) indptr and fills examples (pairs,), increasing for each user."""
    user_indptr = np.zeros(num_users + 1, np.int64)
    for i in range(users.shape[0]):
        user_indptr[users[i] + 1] += 1
    for u in range(num_users):
        user_indptr[u + 1] += user_indptr[u]
    next_slot = user_indptr[:-1].copy()
    for example in range(indptr.shape[0] - 1):
        for i in range(indptr[example], indptr[example + 1]):
            u = users[i]
            examples[next_slot[u]] = example
            next_slot[u] += 1
    return user_indptr


@_njit
def take_rows(indptr, users, rows, new_indptr, taken):
    """Copies the chosen rows, end to end, into taken (pairs,); new_indptr (rows + 1,) is given."""
    for r in range(rows.shape[0]):
        begin = indptr[rows[r]]
        at = new_indptr[r]
        for i in range(new_indptr[r + 1] - at):
            taken[at + i] = users[begin + i]


@_njit
def connected_components(indptr, users, num_users):
    """Union-find over users that share an example: (num_users,) int64 smallest user of each user's component."""
    parent = np.arange(num_users)
    for example in range(indptr.shape[0] - 1):
        begin, end = indptr[example], indptr[example + 1]
        for i in range(begin + 1, end):
            a, b = np.int64(users[begin]), np.int64(users[i])
            while parent[a] != a:
                parent[a] = parent[parent[a]]
                a = parent[a]
            while parent[b] != b:
                parent[b] = parent[parent[b]]
                b = parent[b]
            if a < b:
                parent[b] = a
            elif b < a:
                parent[a] = b
    for u in range(num_users):
        root = u
        while parent[root] != root:
            root = parent[root]
        parent[u] = root
    return parent
