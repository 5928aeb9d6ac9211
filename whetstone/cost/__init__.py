"""What a configuration costs before it runs: bytes and seconds by arithmetic, without weights."""
