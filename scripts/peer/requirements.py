"""Prints what a wheel requires, extras and one package left out: requirements.py WHEEL PACKAGE."""

import email
import re
import sys
import zipfile

path, package = sys.argv[1:]
with zipfile.ZipFile(path) as wheel:
    metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    fields = email.message_from_bytes(wheel.read(metadata))
for requirement in fields.get_all("Requires-Dist", []):
    name = re.match(r"[\w.-]+", requirement)[0]
    if name != package and "extra ==" not in requirement:
        print(requirement)
