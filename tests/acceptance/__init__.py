"""The command line, the README and the demo as a user meets them."""
