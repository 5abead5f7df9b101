"""The version of gracekit; the package's metadata has it from here."""

# Not asked of the installed package: that takes 20 ms of each `gracekit --version`.
VERSION = "0.1.0"
