"""The conformance kit: what every runtime must do, as tests that driver authors run on their own driver.

Belongs here: a pytest plugin, the suites (importable classes), and the committed tables of what each
runtime must be able to do. Does not belong here: attacks on walls (those are the project's security
tests), and anything that only one runtime of ours needs.

From another package, with the driver registered under the entry-point group ``ringfence.runtimes``::

    pytest --pyargs ringfence.conformance.test_runtime --ringfence-runtime NAME
"""
