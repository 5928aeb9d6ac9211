"""A campaign of trials that hold, lose, raise, hang and are skipped: what the tests of the campaign run."""

import sys
import time
from pathlib import Path

from tests.torture import table
from tests.torture.campaign import Campaign
from tests.torture.trial import Outcome, Part, Setting


def run(name: str, setting: Setting) -> Outcome:
    (setting.folder / "trace").write_text(name)
    with (setting.shared.parent / "traces").open("a") as file:
        file.write(f"{name}\n")
    if name == "raises":
        raise RuntimeError("no")
    if name == "hangs":
        time.sleep(60)
    losses = ["something was lost"] if name == "loses" else []
    return Outcome(tried=3, losses=losses, skipped="no root" if name == "skips" else "")


PART = Part(
    name="toy",
    unit="things",
    summary="nothing real",
    names=lambda seed: ["holds", "loses", "raises", "hangs", "skips", "holds-too"],
    run=run,
    limit_s=3.0,
)

if __name__ == "__main__":
    campaign = Campaign(Path(sys.argv[1]), [PART], int(sys.argv[2]), jobs=2, resume="resume" in sys.argv)
    campaign.run(None)
    table.write(campaign, "python -m tests.torture.toy", None)
