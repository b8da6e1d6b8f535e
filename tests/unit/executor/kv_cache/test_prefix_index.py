"""Hash chains of blocks, and the index that is searched with them."""

import subprocess
import sys
from array import array

import pytest

from services.executor.kv_cache.prefix_index import (
    BlockChain,
    BlockKey,
    PrefixIndex,
    block_digest,
    root_digest,
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
