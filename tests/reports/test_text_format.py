"""Helpers that format lists and shares."""

from flexengine.reports.text_format import largest_first, number_ranges, percent, positions_by_value


def test_runs_of_numbers_become_ranges():
    assert number_ranges([0, 1, 2, 5, 7, 8, 9]) == "0-2, 5, 7-9"
    assert number_ranges([]) == ""


def test_positions_are_grouped_in_order_of_first_appearance():
    found = positions_by_value("abacb")
    assert list(found.items()) == [("a", [0, 2]), ("b", [1, 4]), ("c", [3])]


def test_shares_are_whole_percentages():
    assert [percent(share) for share in (0.0, 0.914, 1.0)] == ["0%", "91%", "100%"]


def test_the_largest_category_comes_first():
    assert largest_first({"a": 1, "b": 3, "c": 2}) == [("b", 3), ("c", 2), ("a", 1)]
