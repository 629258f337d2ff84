"""The search for the largest batch, on simulated memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_memory import GIB, MIB, SimulatedMemory
from sweepack.sizing.search import search


def found(memory, *, largest_batch=4096, start=0.8, guess=None):
    return search(memory, memory.cap, largest_batch=largest_batch, start=start, guess=guess)


def test_the_worked_example_is_found_by_measuring():
    # 4 GiB static, 0.04 GiB a sample, under a cap of 13.6 GiB: 240 fit, 192 are what cells get.
    memory = SimulatedMemory(cap=round(13.62 * GIB), static=4 * GIB, sample=0.04 * GIB)
    answer = found(memory, guess=192)
    assert (answer.largest, answer.batch, answer.limited_by, answer.trouble) == (240, 192, "memory", None)
    assert {240, 192} <= set(memory.asked) and answer.peak == memory.peak(192)
    assert answer.sample == pytest.approx(0.04 * GIB, rel=0.02) and answer.static == pytest.approx(4 * GIB, rel=0.02)
    # Doubled to 256; the line's 240, and what shows that it is right; the batch for cells.
    assert memory.asked == [64, 128, 256, 240, 248, 192]


def test_any_first_guess_leads_to_the_same():
    for guess in (None, 1, 3, 100, 10**9):
        answer = found(SimulatedMemory(cap=10 * GIB), guess=guess)
        assert 880 <= (answer.largest or 0) <= 920, guess


def test_small_batches_are_found_to_the_last_one():
    answer = found(SimulatedMemory(cap=10 * GIB, static=GIB, sample=0.7 * GIB))
    assert (answer.largest, answer.batch) == (12, 9)


def test_batch_1_that_is_out_of_memory_does_not_fit():
    answer = found(SimulatedMemory(cap=GIB, static=2 * GIB))
    assert (answer.batch, answer.largest, answer.peak, answer.limited_by) == (None, None, None, "memory")
    assert answer.trouble == "does not fit: batch 1 needs more than its 1 GiB"
    measured = found(SimulatedMemory(cap=GIB, static=2 * GIB, enforced=False))
    assert measured.trouble == "does not fit: batch 1 takes 2.01 GiB, more than its 1 GiB"


def test_a_task_that_fails_is_told_with_its_error_after_a_few_tries():
    memory = SimulatedMemory(fails=dict.fromkeys(range(1, 5000), "ValueError: no such file"))
    answer = found(memory, guess=1000)
    assert answer.batch is None and answer.limited_by == "error"
    assert answer.trouble == "the task fails at batch 1: ValueError: no such file"
    assert len(memory.asked) == 3


def test_batch_normalisation_may_fail_at_1():
    fails = {1: "ValueError: expected more than 1 value per channel"}
    assert found(SimulatedMemory(cap=GIB, static=0.5 * GIB, sample=0.2 * GIB, fails=fails)).largest == 2
    none = found(SimulatedMemory(cap=GIB, static=0.5 * GIB, sample=0.4 * GIB, fails=fails))
    assert none.limited_by == "memory" and "does not fit: batch 2" in (none.trouble or "")
    assert "more than 1 value" in (none.trouble or "")


def test_a_batch_that_fails_for_another_reason_is_an_upper_end_and_told():
    answer = found(SimulatedMemory(fails=dict.fromkeys(range(600, 5000), "RuntimeError: int overflow")))
    assert 580 <= (answer.largest or 0) < 600 and answer.limited_by == "error"
    assert any("int overflow" in remark for remark in answer.remarks)
    # The first guess fails, smaller ones don't.
    assert 560 <= (found(SimulatedMemory(fails=dict.fromkeys(range(600, 5000), "!")), guess=3000).largest or 0) < 600


def test_the_largest_batch_of_the_settings_is_measured_and_not_passed():
    memory = SimulatedMemory()
    answer = found(memory, largest_batch=100)
    assert (answer.largest, answer.batch, answer.limited_by) == (100, 80, "largest_batch")
    assert max(memory.asked) == 100
    assert found(SimulatedMemory(), largest_batch=1).batch == 1


@pytest.mark.parametrize("samples", [1, 2, 3, 15, 16, 17, 100, 128, 1797])
@pytest.mark.parametrize("guess", [None, 2, 100, 5000])
def test_no_more_samples_than_there_are(samples, guess):
    answer = found(SimulatedMemory(data=samples), guess=guess)
    assert (answer.largest, answer.limited_by, answer.trouble) == (samples, "data", None)
    assert answer.batch == max(1, math.floor(0.8 * samples + 1e-9))


def test_data_that_ends_above_what_fits_limits_nothing():
    answer = found(SimulatedMemory(cap=GIB, static=0, sample=10 * MIB, data=5000), guess=20_000)
    assert answer.limited_by == "memory" and 90 <= (answer.largest or 0) <= 102


@pytest.mark.parametrize("fixed", [2, 3, 16, 32, 64, 128, 10_000])
@pytest.mark.parametrize("guess", [None, 128])
def test_a_task_that_ignores_its_batch_is_told_by_name(fixed, guess):
    answer = found(SimulatedMemory(ignores=fixed, sample=0.1 * MIB), guess=guess)
    assert answer.batch is None and answer.limited_by == "error"
    assert "`cell.batch`" in (answer.trouble or "") and f"saw {fixed} samples" in (answer.trouble or "")


def test_what_looks_like_samples_and_is_the_length_of_sequences_is_not_believed():
    class Sequences(SimulatedMemory):
        def rows(self, batch):
            return batch

        def __call__(self, batch):
            return replace(super().__call__(batch), rows=self.length)

    for length in (1, 8, 16, 100, 5000):
        memory = Sequences(cap=10 * GIB)
        memory.length = length
        answer = found(memory)
        assert answer.trouble is None and 880 <= (answer.largest or 0) <= 920, length


def test_without_rows_a_peak_that_does_not_grow_is_remarked_on():
    answer = found(SimulatedMemory(ignores=64, tells_rows=False))
    assert answer.batch and any("`cell.batch`" in remark for remark in answer.remarks)


def test_a_peak_that_the_batch_hardly_changes_is_no_trouble():
    answer = found(SimulatedMemory(cap=10 * GIB, step=8 * GIB, static=GIB, sample=0.1 * MIB))
    assert (answer.largest, answer.batch, answer.trouble) == (4096, 3276, None)


def test_where_rows_are_not_known_the_batch_is_believed():
    assert 880 <= (found(SimulatedMemory(cap=10 * GIB, tells_rows=False)).largest or 0) <= 920


def test_steps_that_see_two_views_of_each_sample_are_no_limit():
    class Views(SimulatedMemory):
        def rows(self, batch):
            return 2 * super().rows(batch)

    assert found(Views(data=500, sample=MIB)).largest == 500
    assert 430 <= (found(Views(cap=10 * GIB)).largest or 0) <= 460


def test_a_smaller_batch_that_needs_more_gives_the_conservative_answer_and_a_remark():
    # 512 fits. 409, of which cells would get the numbers, does not.
    memory = SimulatedMemory(cap=8 * GIB, jumps={400: 4 * GIB, 450: -4 * GIB})
    answer = found(memory, guess=1024, largest_batch=512)
    assert 512 in memory.asked
    assert answer.batch and answer.batch < 409 and memory.peak(answer.batch) <= 8 * GIB
    assert (answer.largest or 0) < 409 and any("409 does not fit" in remark for remark in answer.remarks)


def test_a_batch_that_fails_below_others_is_not_passed_over():
    answer = found(SimulatedMemory(fails={409: "ValueError"}), guess=1024, largest_batch=512)
    assert (answer.largest or 0) < 409 and answer.batch and answer.batch < 409


def test_where_the_line_is_right_one_more_measurement_shows_it():
    memory = SimulatedMemory(cap=10 * GIB)
    largest = found(memory, guess=600).largest or 0
    assert memory.asked == [256, 512, 1024, largest, largest + 8, math.floor(0.8 * largest)]


def test_a_dip_that_fits_is_only_remarked_on():
    answer = found(SimulatedMemory(cap=40 * GIB, jumps={8: 2 * GIB, 32: -2 * GIB}))
    assert answer.batch and any("batch 16 takes more" in remark for remark in answer.remarks)
    assert found(SimulatedMemory(cap=40 * GIB, noise=0.02)).remarks == []


memories = st.builds(
    SimulatedMemory,
    cap=st.one_of(st.none(), st.integers(MIB, 80 * GIB)),
    static=st.floats(0, 20 * GIB),
    sample=st.floats(0, GIB),
    curve=st.floats(0, MIB),
    step=st.floats(0, 20 * GIB),
    jumps=st.dictionaries(st.integers(1, 4096), st.floats(-2 * GIB, 4 * GIB), max_size=4),
    noise=st.sampled_from([0, 0.01, 0.05, 0.3]),
    data=st.one_of(st.none(), st.integers(1, 5000)),
    ignores=st.one_of(st.none(), st.integers(1, 300)),
    tells_rows=st.booleans(),
    fails=st.dictionaries(st.one_of(st.integers(1, 8), st.integers(1, 4096)), st.just("ValueError"), max_size=5),
    enforced=st.booleans(),
    seed=st.integers(0, 9),
)


@settings(max_examples=500, deadline=None)
@given(
    memory=memories,
    largest_batch=st.integers(1, 8192),
    start=st.floats(0.01, 1),
    guess=st.one_of(st.none(), st.integers(1, 10**6)),
)
def test_the_answer_was_measured_and_fits_whatever_memory_does(memory, largest_batch, start, guess):
    answer = search(memory, memory.cap, largest_batch=largest_batch, start=start, guess=guess)
    assert len(memory.asked) <= 2 * math.log2(largest_batch) + 16
    assert max(memory.asked) <= largest_batch
    measured = {m.batch: m for m in answer.measured}
    assert list(measured) == memory.asked or set(measured) == set(memory.asked)
    if answer.batch is None:
        assert answer.trouble and answer.largest is None and answer.peak is None
        return
    assert answer.trouble is None and answer.limited_by in ("memory", "data", "largest_batch", "error")
    assert 1 <= answer.batch <= answer.largest
    for batch in (answer.batch, answer.largest):
        assert measured[batch].outcome == "measured"
        assert memory.cap is None or measured[batch].peak <= memory.cap
    assert answer.peak == measured[answer.batch].peak
    over = [b for b, m in measured.items() if m.outcome == "oom" or (memory.cap and m.peak and m.peak > memory.cap)]
    assert all(batch > answer.largest for batch in over), "one below it was measured not to fit"
    failing = [b for b, m in measured.items() if m.outcome == "failed"]
    assert not [batch for batch in failing if answer.batch < batch < answer.largest]
    larger = [b for b, m in measured.items() if b > answer.largest and m.outcome == "measured" and b not in over]
    below = answer.limited_by == "data" or any(f"batch {b}" in " ".join(answer.remarks) for b in measured)
    assert not larger or below, "a larger one fits, and nothing says why it is not the answer"


@settings(max_examples=200, deadline=None)
@given(
    cap=st.integers(2 * GIB, 40 * GIB),
    static=st.floats(0, GIB),
    sample=st.floats(MIB, 200 * MIB),
    guess=st.one_of(st.none(), st.integers(1, 10**5)),
)
def test_where_memory_is_well_behaved_the_answer_is_close(cap, static, sample, guess):
    memory = SimulatedMemory(cap=cap, static=static, sample=sample)
    largest = found(memory, guess=guess).largest
    true = next(batch - 1 for batch in range(1, 5000) if memory.peak(batch) > cap) if memory.peak(4096) > cap else 4096
    assert largest <= true and true - largest <= max(8, 0.1 * true)
