"""One module for each command: `whet X` is `commands/X`."""
