"""What several kinds of tests share. Import as ``support.leaks`` (``tests/`` is on the path)."""
