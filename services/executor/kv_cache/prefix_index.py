"""Which KV blocks hold which tokens, so that a prompt's known beginning is not computed again.

A full block is named by a chain of hashes: its digest covers its own tokens and the digest of the
block before it, hence the whole prefix. Digests are the same in every process (BLAKE2b, RFC 7693),
so that two services can speak of the same prefix.

      root ──▶ digest 0 ──▶ digest 1 ──▶ digest 2          digest i = H(digest i-1, tokens of block i)
               tokens 0..15 tokens 16..31 tokens 32..47
                                 ├─▶ "state:0"             a snapshot of the recurrent state behind block 1, in as many
                                 └─▶ "state:1"             blocks as it takes
"""

from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

_DIGEST_SIZE = 16
_SALT_SIZE = 32
# Bytes of what a block follows: a digest, or a root without salt and adapter; a root with one.
PARENT_SIZES = (_DIGEST_SIZE, _DIGEST_SIZE + _SALT_SIZE)


def root_digest(namespace: str) -> bytes:
    """Where a chain begins. Different namespaces (models, say) never share a block."""
    return blake2b(namespace.encode(), digest_size=_DIGEST_SIZE).digest()


def salted_root(root: bytes, salt: str, adapter: str = "") -> bytes:
    """Where chains with `salt`, computed with the LoRA adapter of that digest (hexadecimal), begin. They share no
    block with those of any other salt or adapter. `root` itself without both.

    It is longer than any digest, and begins with `root`: every ring can tell whether a chain is whole (`is_root`)
    without knowing salts and adapters.
    """
    if not salt and not adapter:
        return root
    return root + blake2b(salt.encode(), digest_size=_SALT_SIZE, key=bytes.fromhex(adapter)).digest()


def is_root(parent: bytes, root: bytes) -> bool:
    """Whether `parent` is where chains begin: `root`, or a root with a salt or an adapter made of it."""
    return parent == root or (len(parent) == len(root) + _SALT_SIZE and parent.startswith(root))


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """Digest (16 bytes) of a full block: `parent` is the digest before it, `tokens` its int32 tokens."""
    return blake2b(parent + tokens, digest_size=_DIGEST_SIZE).digest()


class BlockKey(NamedTuple):
    digest: bytes
    parent: bytes
    tokens: bytes


_STATE = b"state:"
_MOST_DIGITS = 9
_CHOICE = b"sparse:"
CHOICE_SIZE = 16  # bytes of what names a choice of sparse attention (`core/sparse_attention.py`)


def with_choice(tokens: bytes, salt: bytes) -> bytes:
    """The tokens of the first block whose keys and values are other ones because of the choice named by `salt`
    (`CHOICE_SIZE` bytes): its digest, and so those of all blocks behind it, are no other choice's."""
    return tokens + _CHOICE + salt


def holds(tokens: bytes, block_size: int) -> bool:
    """Whether `tokens` can be those of a key: of a block of so many tokens, with a choice or without, or of a
    snapshot."""
    sizes = (4 * block_size, 4 * block_size + len(_CHOICE) + CHOICE_SIZE)
    if len(tokens) == sizes[1]:
        return tokens[sizes[0] :].startswith(_CHOICE)
    return len(tokens) == sizes[0] or is_state(tokens)


def state_key(parent: bytes, part: int) -> BlockKey:
    """What the `part`-th (from 0) of the blocks holds that a snapshot of recurrent state is kept in: of the state
    behind the block with the digest `parent`."""
    tokens = b"%b%d" % (_STATE, part)
    return BlockKey(block_digest(parent, tokens), parent, tokens)


def state_keys(parent: bytes, parts: int) -> Iterator[BlockKey]:
    return (state_key(parent, part) for part in range(parts))


def is_state(tokens: bytes) -> bool:
    """Whether they are those of a key of `state_keys`."""
    part = tokens.removeprefix(_STATE)
    return part != tokens and len(part) <= _MOST_DIGITS and part.isdigit()


class BlockChain:
    """The digests of a sequence's full blocks. Every token is hashed once, as blocks fill."""

    def __init__(
        self, tokens: "array[int]", block_size: int, root: bytes, choice: tuple[int, bytes] | None = None
    ) -> None:
        """`tokens` (int32) is the sequence's own array: the chain follows it as it grows. `choice`: (first position
        that is computed after a choice of sparse attention, what names it); None: there is none."""
        self._tokens = tokens
        self._chosen_from = -1 if choice is None else choice[0] // block_size
        self._salt = b"" if choice is None else choice[1]
        self._block_size = block_size
        self._digests = [root]
        self.grow()

    def grow(self) -> None:
        """Takes up the blocks that have become full."""
        digests = self._digests
        for block in range(len(digests) - 1, len(self._tokens) // self._block_size):
            digests.append(block_digest(digests[-1], self._tokens_of(block)))

    def key(self, block: int) -> BlockKey:
        """What the sequence's `block`-th block (from 0) holds once it is full."""
        return BlockKey(self._digests[block + 1], self._digests[block], self._tokens_of(block))

    def digest(self, block: int) -> bytes:
        """What names the sequence's `block`-th block (from 0) once it is full."""
        return self._digests[block + 1]

    def __len__(self) -> int:
        """Full blocks that have been hashed."""
        return len(self._digests) - 1

    def _tokens_of(self, block: int) -> bytes:
        tokens = self._tokens[block * self._block_size : (block + 1) * self._block_size].tobytes()
        return with_choice(tokens, self._salt) if block == self._chosen_from else tokens


class PrefixIndex:
    """Full blocks by digest. One per ring: block ids mean nothing elsewhere.

    Invariant: `_blocks` and `_keys` are inverse to each other; a digest names one block at most.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self.blocks = self._keys.keys()  # those that are in it

    def find(self, key: BlockKey) -> int | None:
        """The block that holds `key`. The tokens are compared: a hash alone is not believed."""
        block = self._blocks.get(key.digest)
        return block if block is not None and self._keys[block] == key else None

    def knows(self, digest: bytes) -> bool:
        """Whether `find` may find it: a look without the tokens."""
        return digest in self._blocks

    def key(self, block: int) -> BlockKey:
        return self._keys[block]

    def chains(self, blocks: Iterable[int], root: bytes) -> list[int]:
        """`blocks`, which are in the index, and all that their beginnings consist of, beginnings first; without
        those whose beginning is not there as far as `root`, or one with a salt made of it."""
        placed: dict[int, None] = {}
        for block in blocks:
            path: list[int] = []
            at: int | None = block
            while at is not None and at not in placed:
                path.append(at)
                parent = self._keys[at].parent
                if is_root(parent, root):
                    break
                at = self._blocks.get(parent)
            if at is not None:
                placed.update(dict.fromkeys(reversed(path)))
        return list(placed)

    def put(self, block: int, key: BlockKey) -> bool:
        """Makes `block` findable; False when another block holds the same tokens already."""
        self.hold(block, key)
        return block in self._keys

    def hold(self, block: int, key: BlockKey) -> int:
        """Makes `block` findable, or finds the block that holds `key` already: returns the one that does from now on.
        It cannot be found where its digest is that of other tokens."""
        if block in self._keys:
            raise ValueError(f"block {block} is in the prefix index already")
        known = self._blocks.setdefault(key.digest, block)
        if known != block:
            return known if self._keys[known] == key else block
        self._keys[block] = key
        return block

    def remove(self, block: int) -> BlockKey:
        """Forgets `block`, whose id may be written again; returns what it held."""
        key = self._keys.pop(block)
        del self._blocks[key.digest]
        return key

    @property
    def snapshots(self) -> int:
        """Snapshots of recurrent state that are here, at least their first blocks."""
        first = state_key(b"", 0).tokens
        return sum(1 for key in self._keys.values() if key.tokens == first)

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def check(self) -> None:
        """Raises AssertionError where the invariant does not hold."""
        assert len(self._blocks) == len(self._keys), "two blocks share a digest"
        for digest, block in self._blocks.items():
            assert self._keys[block].digest == digest, f"block {block} is filed under a foreign digest"
