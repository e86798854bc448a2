"""Harbor's task format, both ways: reading folders, strangers' ones included, and writing them."""
