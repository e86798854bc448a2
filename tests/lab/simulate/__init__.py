"""Real actors over modeled hosts and links, at sizes that no test machine has."""
