"""`whet watch`: a page on localhost that shows runs while they run. It reads run folders only."""
