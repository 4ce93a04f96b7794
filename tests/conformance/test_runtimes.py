"""Every suite of the kit on jail, bubblewrap and fake, as whoever runs the tests."""

from __future__ import annotations

from ringfence.conformance.test_runtime import *  # noqa: F403
