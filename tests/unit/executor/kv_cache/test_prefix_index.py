"""Hash chains of blocks, and the index that is searched with them."""

import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.kv_cache.prefix_index import (
    CHOICE_SIZE,
    BlockChain,
    BlockKey,
    PrefixIndex,
    block_digest,
    holds,
    is_root,
    is_state,
    root_digest,
    salted_root,
    state_key,
    state_keys,
)


def test_a_chain_grows_with_its_tokens_and_equals_one_built_at_once() -> None:
    tokens = array("i", [1, 2, 3])
    chain = BlockChain(tokens, 4, root_digest("m"))
    assert len(chain) == 0
    for token in range(4, 14):
        tokens.append(token)
        chain.grow()
    whole = BlockChain(array("i", range(1, 14)), 4, root_digest("m"))
    assert len(chain) == len(whole) == 3
    assert [chain.key(block) for block in range(3)] == [whole.key(block) for block in range(3)]
    assert chain.key(1).parent == chain.key(0).digest


def test_a_digest_covers_the_namespace_and_everything_before() -> None:
    def last(tokens: list[int], namespace: str = "m") -> bytes:
        return BlockChain(array("i", tokens), 2, root_digest(namespace)).key(1).digest

    digests = {last([1, 2, 3, 4]), last([0, 2, 3, 4]), last([1, 2, 3, 5]), last([1, 2, 3, 4], "other")}
    assert len(digests) == 4


@given(st.lists(st.integers(0, 9), min_size=2, max_size=12), st.lists(st.text(), unique=True, min_size=2))
def test_chains_of_different_salts_have_no_digest_in_common(tokens: list[int], salts: list[str]) -> None:
    def digests(salt: str) -> set[bytes]:
        chain = BlockChain(array("i", tokens), 2, salted_root(root_digest("m"), salt))
        return {chain.digest(block) for block in range(len(chain))}

    found = [digests(salt) for salt in salts]
    assert found == [digests(salt) for salt in salts]
    assert len(set().union(*found)) == sum(len(each) for each in found)


@given(st.text(), st.text(min_size=1))
def test_where_a_chain_begins_can_be_told_without_its_salt(salt: str, other: str) -> None:
    root = root_digest("m")
    assert is_root(salted_root(root, salt), root)
    assert not is_root(salted_root(root, salt), root_digest(f"m{other}"))
    chain = BlockChain(array("i", range(8)), 2, salted_root(root, salt))
    assert not any(is_root(chain.digest(block), root) for block in range(4))
    index = PrefixIndex()
    for block in range(4):
        index.put(block, chain.key(block))
    assert index.chains([3], root) == [0, 1, 2, 3]
    assert index.chains([3], root_digest(f"m{other}")) == []
    index.remove(1)
    assert index.chains([3, 0], root) == [0]


def test_without_a_salt_the_root_is_the_namespaces() -> None:
    assert salted_root(root_digest("m"), "") == root_digest("m")


def test_digests_are_the_same_in_another_process() -> None:
    code = (
        "from services.executor.kv_cache.prefix_index import block_digest, root_digest;"
        "print(block_digest(root_digest('m'), bytes(64)).hex())"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == block_digest(root_digest("m"), bytes(64)).hex()


def test_a_hash_alone_is_not_believed() -> None:
    index = PrefixIndex()
    key = BlockKey(b"digest", b"parent", b"tokens")
    assert index.put(3, key)
    assert index.find(key) == 3
    assert index.find(key._replace(tokens=b"others")) is None
    assert index.find(key._replace(parent=b"others")) is None
    assert index.find(key._replace(digest=b"others")) is None


def test_a_digest_names_one_block() -> None:
    index = PrefixIndex()
    key = BlockKey(b"digest", b"parent", b"tokens")
    assert index.put(1, key)
    assert not index.put(2, key)
    with pytest.raises(ValueError, match="already"):
        index.put(1, key._replace(digest=b"new"))
    assert 1 in index
    assert 2 not in index
    index.check()
    index.remove(1)
    assert len(index) == 0
    assert index.find(key) is None
    assert index.put(2, key)


def test_a_snapshot_follows_the_block_that_it_is_behind() -> None:
    chain = BlockChain(array("i", range(8)), 4, root_digest("m"))
    keys = [key for block in range(2) for key in state_keys(chain.digest(block), 3)]
    assert len({key.digest for key in keys}) == 6
    index = PrefixIndex()
    for block, key in enumerate([chain.key(0), chain.key(1), *keys]):
        index.put(block, key)
    assert index.snapshots == 2
    assert index.chains([7], root_digest("m")) == [0, 1, 7]
    assert all(is_state(key.tokens) for key in keys)
    assert is_state(state_key(b"", 12345).tokens)
    wrong = (b"", b"state:", b"state:x", b"state:-1", b"state:1234567890", b"State:1", chain.key(0).tokens)
    assert not any(is_state(tokens) for tokens in wrong)


def test_what_ends_below_the_threshold_is_shared_and_nothing_behind() -> None:
    """Blocks of 4: the choice counts from position 10, in the third block."""
    tokens, root = array("i", range(20)), root_digest("m")
    dense = BlockChain(tokens, 4, root)
    one, other = (BlockChain(tokens, 4, root, (10, bytes([salt]) * CHOICE_SIZE)) for salt in (1, 2))
    for block in range(5):
        keys = {chain.key(block) for chain in (dense, one, other)}
        assert len(keys) == len({key.digest for key in keys}) == (1 if block < 2 else 3)
        assert all(holds(key.tokens, 4) for key in keys)
    assert BlockChain(tokens, 4, root, (8, bytes(16))).key(1) == dense.key(1)
    assert BlockChain(tokens, 4, root, (7, bytes(16))).key(1) != dense.key(1)
    index = PrefixIndex()
    for block in range(5):
        index.put(block, one.key(block))
    assert index.chains([4], root) == [0, 1, 2, 3, 4]
    assert index.find(dense.key(2)) is None
    assert not holds(dense.key(0).tokens + bytes(23), 4)
    assert not holds(dense.key(0).tokens[:-1], 4)
