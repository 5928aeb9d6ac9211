"""`whet compare`: a grid of variants and seeds, a table and a plot of them."""
