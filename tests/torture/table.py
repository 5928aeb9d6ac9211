"""The table of a campaign: tried, survived, lost; as Markdown for people and as JSON for programs."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from tests.torture.campaign import Campaign


def summarize(campaign: Campaign) -> dict[str, Any]:
    """What JSON holds; the Markdown says the same."""
    parts = []
    for part in campaign.parts:
        mine = [record for record in campaign.records if record["part"] == part.name]
        ran = [record for record in mine if not record["skipped"]]
        lost = [record for record in ran if record["losses"]]
        details: dict[str, float] = {}
        for record in ran:
            for key, value in record["details"].items():
                details[key] = details.get(key, 0) + value
        parts.append(
            {
                "part": part.name,
                "unit": part.unit,
                "summary": part.summary,
                "tried": sum(record["tried"] for record in ran),
                "trials": len(ran),
                "lost": len(lost),
                "survived": len(ran) - len(lost),
                "skipped": len(mine) - len(ran),
                "planned": sum(planned.name == part.name for planned, _ in campaign.plan),
                "details": dict(sorted(details.items())),
            }
        )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "seed": campaign.seed,
        "version": campaign.header["version"],
        "minutes": round(campaign.seconds / 60, 1),
        "machine": f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}",
        "complete": len(campaign.records) >= len(campaign.plan),
        "parts": parts,
        "losses": [
            {"trial": record["trial"], "losses": record["losses"], "reproduce": record["reproduce"]}
            for record in campaign.records
            if record["losses"]
        ],
        "skipped": {record["trial"]: record["skipped"] for record in campaign.records if record["skipped"]},
    }


def markdown(summary: dict[str, Any], command: str) -> str:
    lines = [
        "# The campaign",
        "",
        "Lab notes: what was tried against real processes to make a run lose something, and what came of it.",
        f"Written by the campaign itself on {summary['date']}: `{command}`, seed {summary['seed']},",
        f"{summary['minutes']:.0f} minutes on {summary['machine']}; code {summary['version']}"
        + ("." if summary["complete"] else " (a slice: not all that was planned).")
        + " `tests/torture/` holds the code.",
        "",
        "| What | Unit | Tried | Trials | Survived | Lost |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for part in summary["parts"]:
        lines.append(
            f"| {part['part']}: {part['summary']} | {part['unit']} | {part['tried']} | {part['trials']} | "
            f"{part['survived']} | {part['lost']} |"
        )
    for part in summary["parts"]:
        if part["details"]:
            told = ", ".join(f"{key} {value:g}" for key, value in part["details"].items())
            lines += ["", f"**{part['part']}** in detail: {told}."]
    skipped: dict[str, int] = {}
    for reason in summary["skipped"].values():
        skipped[reason] = skipped.get(reason, 0) + 1
    if skipped:
        lines += ["", "Not tried on this machine:", ""]
        lines += [f"- {count} trials: {reason}" for reason, count in skipped.items()]
    if summary["losses"]:
        lines += ["", "## Lost", ""]
        for loss in summary["losses"]:
            first = " ".join(loss["losses"][0].split())
            lines += [f"- `{loss['trial']}`: {_plain(first)[:300]}", f"  (`{loss['reproduce']}`)"]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Of what a failure said nothing may be markup."""
    return "".join("'" if one in "`<>|[]*_" else one for one in text if one.isprintable())


def write(campaign: Campaign, command: str, docs: Path | None) -> dict[str, Any]:
    """The table into the campaign's folder, and into the docs where that was asked for."""
    summary = summarize(campaign)
    text = markdown(summary, command)
    (campaign.folder / "table.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (campaign.folder / "table.md").write_text(text, encoding="utf-8")
    if docs is not None:
        docs.write_text(text, encoding="utf-8")
    return summary
