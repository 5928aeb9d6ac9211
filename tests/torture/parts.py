"""The parts of a campaign, by name."""

from tests.torture import answers, corpora, disk, kills, leaks, programs
from tests.torture.trial import Part

PARTS: dict[str, Part] = {
    part.name: part
    for part in (kills.PART, disk.PART, programs.PART, answers.PART, *corpora.PARTS, leaks.PART)
}
