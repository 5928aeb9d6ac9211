"""Not SGLang: a package of its name that starts our own small server (tests/support/protocol_server.py).

It speaks SGLang's documented HTTP interface and samples from a real model. On the path of tests that start
servers.
"""
