import torch

from verl.weights.shard import Shard, checksum


def test_checksum_depends_on_bytes_names_and_places_not_on_order() -> None:
    a, b = Shard.whole("a", torch.arange(4.0)), Shard("b", (4, 2), (2, 0), torch.ones(2, 2))
    assert checksum([a, b]) == checksum([b, a])
    assert checksum([a]) != checksum([Shard.whole("a", torch.arange(4.0) + 1e-7)])
    assert checksum([b]) != checksum([Shard("b", (4, 2), (0, 0), torch.ones(2, 2))])
    assert a.is_whole and not b.is_whole
