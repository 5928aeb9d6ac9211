"""Programs that nobody vouches for, run so that they can harm nothing: see `pool.py` for how they get in,
`keeper.py` for where they live. Light on purpose: the keeper imports it too.
"""
