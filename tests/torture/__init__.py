"""The campaign: kills, faults, bad input and hostile text against real processes, counted in one table.

    python -m tests.torture [--minutes N] [--seed S] [--only kills,configs] [--resume]

`campaign.py` plans and runs trials, `forks.py` starts runs, one module for each part. docs/torture.md holds
the table of the last whole campaign.
"""
