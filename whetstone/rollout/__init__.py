"""Problems to scored groups of completions: the collector, and which groups each step gets."""
