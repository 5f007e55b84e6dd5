"""Orders, halves and held-out pictures are fixed for ever: runs, trainings and published numbers depend on them."""

from __future__ import annotations

from pathlib import Path

from classlens.data.divide import half_of, hold_out, shuffled

FILES = [Path(f"{number}.jpg") for number in range(11)]


def test_the_order_is_that_of_the_hashes_of_seed_and_name() -> None:
    assert [path.stem for path in shuffled(FILES, 0)] == ["2", "8", "9", "10", "3", "1", "5", "0", "4", "7", "6"]
    assert shuffled(reversed(FILES), 0) == shuffled(FILES, 0)
    assert shuffled(FILES, 1) != shuffled(FILES, 0)


def test_every_fifth_is_held_out() -> None:
    learnt, held_out = hold_out(FILES, 0)
    assert set(held_out) == set(shuffled(FILES, 0)[::5])
    assert len(held_out) == 3
    assert learnt == [path for path in FILES if path not in held_out]
    assert held_out == sorted(held_out, key=FILES.index)


def test_halves_are_a_bit_of_the_name() -> None:
    assert "".join(half_of(path.name) for path in FILES) == "BAAAABAAAAB"
    assert half_of("n01440764/3.jpg") == half_of("elsewhere/3.jpg") == half_of("3.jpg")
