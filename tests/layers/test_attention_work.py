"""Tests the number of pairs that an attention multiplies, against its mask and against the block tables of splash."""

import dataclasses

import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from pretrainax.layers.attention import BACKENDS, Mask
from pretrainax.layers.attention_work import unskipped_pairs
from tests.support.attending import USUAL

MASKS = [(True, None), (False, None), (True, 7), (False, 8), (True, 1000), (False, 1000), (True, 1)]


def spec(length, causal, window, **other):
    return dataclasses.replace(USUAL, query_length=length, key_length=length, causal=causal, window=window, **other)


def work(name, *args, **other):
    return BACKENDS[name].work(spec(*args, **other))


@pytest.mark.parametrize("causal, window", MASKS)
@pytest.mark.parametrize("tile", [(1, 1), (4, 8), (8, 4), (16, 16)])
def test_pairs_are_those_of_the_tiles_of_which_anything_is_seen(causal, window, tile):
    length = 42  # No tile size divides this length.
    seen = np.asarray(Mask(causal, window=window).materialize(length, length)[0, 0])
    expected = 0
    for top in range(0, length, tile[0]):
        for left in range(0, length, tile[1]):
            part = seen[top : top + tile[0], left : left + tile[1]]
            expected += part.size if part.any() else 0
    assert unskipped_pairs(spec(length, causal, window), tile).tolist() == [expected]


@pytest.mark.parametrize("lengths", [(40, 72), (72, 40)])
@pytest.mark.parametrize("name", BACKENDS)
def test_what_a_decoder_reads_of_an_encoder_is_seen_by_all(name, lengths):
    cross = dataclasses.replace(spec(0, False, None), query_length=lengths[0], key_length=lengths[1])
    assert BACKENDS[name].work(cross).pairs.tolist() == [40 * 72]


@pytest.mark.parametrize("causal, window", [(True, None), (True, 600), (False, 128), (False, None)])
def test_splash_skips_the_blocks_that_its_own_tables_skip(causal, window):
    length = 2048
    if window is not None:
        mask = masks.LocalMask((length, length), window_size=Mask(causal, window=window).reach, offset=0)
    else:
        mask = (masks.CausalMask if causal else masks.FullMask)((length, length))
    sizes = splash.BlockSizes(block_q=512, block_kv=512)
    info = splash.make_splash_mha(
        masks.MultiHeadMask([mask]), block_sizes=sizes, head_shards=1, q_seq_shards=1
    ).fwd_mask_info
    blocks = (length // 512) ** 2 if info.block_mask is None else np.count_nonzero(info.block_mask)
    assert work("tpu_splash", length, causal, window).pairs.tolist() == [blocks * 512**2]


def test_flash_skips_the_blocks_above_the_diagonal():
    run = sum(flash.below_or_on_diag(row, 512, column, 512) for row in range(4) for column in range(4))
    assert work("tpu_flash", 2048, True, None).pairs.tolist() == [run * 512**2] == [10 * 512**2]


def test_a_short_row_is_one_tile_and_its_padding_no_pair():
    assert work("tpu_splash", 200, True, None).pairs.tolist() == [200**2]


@pytest.mark.parametrize("causal, window", MASKS)
def test_xla_multiplies_what_it_masks(causal, window):
    assert work("xla", 64, causal, window).pairs.tolist() == [64**2]
    assert work("xla", 64, causal, window, sequence=4).pairs.tolist() == [16 * 64] * 4


def test_cudnn_multiplies_what_the_mask_leaves_and_all_where_a_prefix_is_a_mask_of_its_own():
    assert work("cudnn", 64, True, None).pairs.tolist() == [64 * 65 / 2]
    assert work("cudnn", 64, True, 8).pairs.tolist() == [8 * 64 - 28]
    assert work("cudnn", 64, True, 8, has_prefix=True).pairs.tolist() == [64**2]


def test_the_last_part_of_a_causal_row_has_the_most_pairs():
    parts = work("tpu_splash", 4096, True, None, sequence=4).pairs
    assert (parts / 512**2).tolist() == [3, 7, 11, 15]  # numbers of tiles, out of 8 × 8
    assert parts.sum() == work("tpu_splash", 4096, True, None).pairs.sum()


def test_a_backward_makes_again_what_it_has_not_kept():
    again = {name: work(name, 512, True, None).recomputed for name in BACKENDS}
    assert again == {"xla": 0, "cudnn": 1, "tiled": 3, "tpu_flash": 3, "tpu_splash": 3}
    assert work("xla", 512, True, None, sequence=2).recomputed == 1  # ring attention
    # The gradient of the bias computes logits and weights once more.
    assert work("tiled", 512, True, None, bias="shared").recomputed == 5
