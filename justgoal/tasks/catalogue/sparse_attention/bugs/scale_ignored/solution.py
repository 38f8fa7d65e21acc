"""Always scales by 1 / sqrt(192)."""

from common import attend


def run(q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale):
    return attend(q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, 192**-0.5)
