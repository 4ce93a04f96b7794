"""What packages a template has, read from its layers without mounting or running anything.

Belongs here: finding the records of package managers, the document (CycloneDX). Does not: judging packages,
which is a scanner's work (``ringfence.cli.template_scan`` runs one if it is configured).
"""
