"""`penstock tasks`: coding tasks from local repositories, made, checked and shown."""
