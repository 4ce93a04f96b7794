"""The SDK without ``await``. Written by scripts/sdk_blocking.py, all but ``base``."""
