"""What a run says at its end."""

from whetstone.report.results import failed_scores


def test_answers_that_could_not_be_scored_are_counted_at_the_end():
    rows = [{"scoring_failures": 0.0}, {"scoring_failures": 2.0}, {}, {"scoring_failures": 1.0}]
    (line,) = failed_scores(rows)
    assert "3 answers in 2 steps" in line
    assert failed_scores(rows[:1]) == []
