"""The conformance suites on our own runtimes, as root and as a normal user."""
