"""The order of an epoch: every row once, the same for any number of processes, another one each epoch."""

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from accel_yolo.data.order import (
    EpochSampler,
    ValBatchSampler,
    batch_shapes,
    complete,
    epoch_order,
    generator,
    multi_scale_size,
    rank_slice,
)
from accel_yolo.structures import SampleKey

SIZES = np.array([[480, 640], [640, 480], [640, 640], [320, 640], [640, 320], [500, 640], [640, 500]])

# Any change of these changes every run that people want to repeat.
STORED_ORDERS = [
    [4, 2, 6, 7, 1, 0, 5, 3],
    [6, 4, 3, 5, 7, 0, 2, 1],
    [3, 1, 6, 2, 7, 0, 5, 4],
]


def sampler(num_rows=7, **settings):
    sizes = np.resize(SIZES, (num_rows, 2))
    return EpochSampler(sizes, **{"batch_size": 4, "seed": 3, "image_size": 640, "stride": 32, **settings})


def test_an_epoch_shows_each_row_once_and_completes_the_last_batch_from_its_start():
    keys = list(sampler())
    assert [key.place for key in keys] == list(range(8))
    assert sorted(key.index for key in keys[:7]) == list(range(7))
    assert keys[7].index == keys[0].index


def test_a_set_smaller_than_a_batch_still_fills_it():
    keys = list(sampler(num_rows=3, batch_size=8))
    assert [key.index for key in keys] == [*[key.index for key in keys[:3]] * 2, *[key.index for key in keys[:2]]]
    assert len({key.place for key in keys}) == 8


def test_the_order_is_a_stored_function_of_seed_and_epoch():
    assert epoch_order(0, 0, 8).tolist() == STORED_ORDERS[0]
    assert epoch_order(0, 1, 8).tolist() == STORED_ORDERS[1]
    assert epoch_order(1, 0, 8).tolist() == STORED_ORDERS[2]


def test_every_permutation_is_equally_likely():
    counts = np.zeros((4, 4))
    for epoch in range(2000):
        counts[epoch_order(0, epoch, 4), np.arange(4)] += 1
    assert np.abs(counts / 2000 - 0.25).max() < 0.04


def test_draws_differ_by_place_epoch_and_stream_but_not_by_index():
    first = generator(0, SampleKey(1, 2, 3)).random()
    assert generator(0, SampleKey(1, 2, 99)).random() == first
    others = [
        generator(0, SampleKey(1, 3, 3)),
        generator(0, SampleKey(2, 2, 3)),
        generator(1, SampleKey(1, 2, 3)),
        generator(0, SampleKey(1, 2, 3), 1),
    ]
    assert len({first, *(rng.random() for rng in others)}) == 5


@pytest.mark.parametrize("world", [1, 2, 4])
def test_accelerates_slices_of_a_batch_are_the_batch_at_any_world_size(world):
    batches = list(BatchSampler(sampler(), 4, drop_last=True))
    shards = [
        list(
            BatchSamplerShard(
                BatchSampler(sampler(), 4, drop_last=True), world, rank, split_batches=True, even_batches=False
            )
        )
        for rank in range(world)
    ]
    assert [[key for shard in parts for key in shard] for parts in zip(*shards, strict=True)] == batches


def test_resuming_sees_the_remaining_samples_once_and_the_next_epoch_is_whole():
    resumed = sampler()
    resumed.resume_at(5, 4)
    resumed.set_epoch(5)
    whole = sampler()
    whole.set_epoch(5)
    assert len(resumed) == 4
    assert list(resumed) == list(whole)[4:]
    resumed.set_epoch(6)
    assert len(resumed) == len(list(resumed)) == 8


@pytest.mark.parametrize("seen", [3, -4, 12])
def test_resuming_inside_a_batch_or_beyond_the_epoch_is_refused(seen):
    with pytest.raises(ValueError, match="cannot resume"):
        sampler().resume_at(0, seen)


def test_rectangular_batches_are_sorted_and_carry_the_size_of_their_batch():
    keys = list(sampler(rect=True))
    ratios = [SIZES[key.index][0] / SIZES[key.index][1] for key in keys[:7]]
    assert ratios == sorted(ratios)
    assert {key.input_size for key in keys[:4]} == {(640, 640)}
    assert [key.index for key in sampler(rect=True)] == [key.index for key in keys]
    # The last batch is completed with the widest image, so it must be square again.
    assert keys[7].index == keys[0].index and keys[7].input_size == (640, 640)


def test_a_sampler_has_no_attribute_that_accelerate_would_synchronise():
    assert not hasattr(sampler(), "generator")


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("rect", [True, False])
def test_validation_shows_each_row_once_over_all_ranks(world, rect):
    ranks = [
        ValBatchSampler(SIZES, 3, rank=rank, world=world, image_size=640, stride=32, rect=rect) for rank in range(world)
    ]
    keys = [key for sampler_of_rank in ranks for batch in sampler_of_rank for key in batch]
    assert sorted(key.index for key in keys) == list(range(7))
    assert sorted(key.place for key in keys) == list(range(7))
    assert all(len(sampler_of_rank) == len(list(sampler_of_rank)) for sampler_of_rank in ranks)


def test_the_shape_of_a_validation_batch_does_not_depend_on_the_world_size():
    def shapes(world):
        ranks = [ValBatchSampler(SIZES, 3, rank=rank, world=world, image_size=640, stride=32) for rank in range(world)]
        return {key.place: (key.index, key.input_size) for one in ranks for batch in one for key in batch}

    assert shapes(1) == shapes(2) == shapes(5)
    assert shapes(1)[0][1] == (544, 672)


def test_square_validation_keeps_table_order_and_the_image_size():
    keys = [key for batch in ValBatchSampler(SIZES, 3, image_size=640, stride=32, rect=False) for key in batch]
    assert [key.index for key in keys] == list(range(7))
    assert {key.input_size for key in keys} == {(640, 640)}


def test_an_empty_split_has_no_batches():
    assert list(ValBatchSampler(np.zeros((0, 2)), 3, image_size=640, stride=32)) == []


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_slices_are_contiguous_complete_and_even(world):
    batch = list(range(7))
    parts = [rank_slice(batch, rank, world) for rank in range(world)]
    assert [item for part in parts for item in part] == batch
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_multi_scale_sizes_are_multiples_of_the_stride_between_half_and_one_and_a_half():
    sizes = {multi_scale_size(0, step, 640, 32) for step in range(2000)}
    assert sizes == set(range(320, 961, 32))
    assert multi_scale_size(0, 7, 640, 32) == multi_scale_size(0, 7, 640, 32)


def test_completing_whole_batches_adds_nothing():
    assert complete(np.arange(8), 4).tolist() == list(range(8))


def test_a_tall_batch_is_narrow():
    shapes = batch_shapes(np.array([1.5, 2.0]), batch_size=2, image_size=640, stride=32, pad=0.0)
    assert shapes.tolist() == [[640, 448]]
