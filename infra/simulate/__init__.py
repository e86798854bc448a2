"""`penstock simulate`: real actors over modeled hosts and links, at sizes no test machine has."""
