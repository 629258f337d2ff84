"""The rule of thumb, and the share that follows from a peak."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweepack.memory import cap
from sweepack.sizing.rule import rule_of_thumb, share_for, static_and_sample, whole

GIB = 2**30


@pytest.mark.parametrize("unit", [1, GIB])
def test_the_worked_example_is_computed(unit):
    guess = rule_of_thumb(48 * unit, 3, 4.0 * unit, 0.04 * unit, fill=0.85)
    assert guess.available / unit == pytest.approx(13.6)
    assert (guess.largest, guess.start, guess.reason) == (240, 192, None)


def test_decimal_fractions_lose_no_whole_number():
    # 0.29 * 100 is 28.999999999999996.
    assert rule_of_thumb(100, 1, 0, 1, fill=1, start=0.29).start == 29
    assert [whole(0.1 * 3 * 10), whole(2.9999), whole(1.1 * 1.1 * 100)] == [3, 2, 121]


def test_what_does_not_fit_is_an_answer_and_no_negative_number():
    guess = rule_of_thumb(16, 4, 4.0, 0.04)
    assert guess.largest is None and guess.start is None and "does not fit" in (guess.reason or "")
    # Beside what is static there is room, but not for one sample.
    assert "does not fit" in (rule_of_thumb(10, 1, 8.0, 1.0, fill=0.85).reason or "")
    assert rule_of_thumb(10, 1, 7.0, 1.0, fill=0.85).start == 1


@pytest.mark.parametrize("sample", [0, -0.5])
def test_a_peak_that_does_not_grow_has_no_largest_batch(sample):
    guess = rule_of_thumb(16, 1, 4.0, sample)
    assert guess.largest is None and "does not grow" in (guess.reason or "")


@given(
    device=st.floats(1, 1e12),
    cells=st.integers(1, 64),
    static=st.floats(0, 1e12),
    sample=st.floats(-1e9, 1e9, allow_subnormal=False),
    fill=st.floats(0.01, 1),
)
def test_the_rule_never_answers_with_less_than_one(device, cells, static, sample, fill):
    guess = rule_of_thumb(device, cells, static, sample, fill)
    assert (guess.largest is None) == (guess.start is None) == (guess.reason is not None)
    if guess.largest is not None and guess.start is not None:
        assert 1 <= guess.start <= guess.largest
        assert static + guess.largest * sample <= guess.available * (1 + 1e-9) + 1e-9 * sample


def test_static_and_sample_are_those_between_the_two_largest():
    # At the small ones the optimiser's step is the peak, which no sample adds to.
    assert static_and_sample({8: 100, 16: 100, 32: 164, 64: 292}) == (36, 4)
    assert static_and_sample({8: 100}) is None
    assert static_and_sample({8: 100, 16: 100}) == (100, 0)


def test_shares_are_rounded_up_so_that_a_whole_number_fits():
    # (80 - 1) / (5 * 1.1 + 0.5) = 13.17, and 1000 // 13 thousandths hold that much; of 80 - 2 they don't.
    share = share_for(5 * GIB, 80 * GIB, GIB, GIB // 2, 0.1, 0.4)
    assert (share.share, share.cells, share.limited_by, share.trouble) == (1000 // 13, 13, "memory", None)
    assert share.need == pytest.approx(6 / 80)
    assert share_for(5 * GIB, 80 * GIB, 2 * GIB, GIB // 2, 0.1, 0.4).cells == 12


def test_what_needs_much_of_a_device_has_it_to_itself_unless_told():
    large = (30 * GIB, 80 * GIB, GIB, GIB, 0.1)
    assert (share_for(*large, 0.4).share, share_for(*large, 0.4).limited_by) == (1000, "alone")
    assert (share_for(*large, 0.5).share, share_for(*large, 0.5).cells) == (500, 2)
    more = share_for(60 * GIB, 80 * GIB, GIB, GIB, 0.1, 1.0)
    assert (more.share, more.cells, more.limited_by) == (1000, 1, "memory")


def test_a_cell_that_has_run_alone_is_not_refused_for_its_margin():
    assert share_for(79 * GIB, 80 * GIB, GIB, GIB // 2, 0.1, 0.4).share == 1000
    none = share_for(80 * GIB, 80 * GIB, GIB, GIB // 2, 0.1, 0.4)
    assert (none.share, none.cells) == (None, 0) and "does not fit" in (none.trouble or "")


@given(
    total=st.integers(GIB, 200 * GIB),
    peak=st.integers(1, 200 * GIB),
    reserve=st.integers(0, 2 * GIB),
    overhead=st.integers(0, 2 * GIB),
    margin=st.floats(0, 2),
    alone_above=st.floats(0.01, 1),
)
def test_the_cap_of_a_share_holds_peak_and_margin(total, peak, reserve, overhead, margin, alone_above):
    found = share_for(peak, total, reserve, overhead, margin, alone_above)
    if found.share is None:
        assert found.trouble and peak + overhead > total
        return
    assert found.cells * found.share <= 1000 and found.share == 1000 // found.cells
    need = peak * (1 + margin) + overhead
    if found.share < 1000:
        assert cap(found.share, total, reserve, overhead) >= peak * (1 + margin)
        assert found.cells * need + reserve <= total
        assert need <= alone_above * total + 1
        # One more would not fit: as an equal share, or at all.
        more = 1000 // (found.cells + 1)
        assert more == 0 or (total - reserve) * more // 1000 < need + 1
